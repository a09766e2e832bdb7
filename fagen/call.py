"""The way of a call: tensors -> question -> config -> kernel -> launch.

A repeated call costs about 10 us of Python and driver arguments, then the driver's launch: each
thread remembers what it prepared for each geometry (shapes, strides, dtype, device) that it has
met, and a new call only brings its addresses. A new geometry of a known bucket prepares another
launch of the same kernel; a new bucket asks `dispatch`, and may compile.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, NamedTuple

from fagen.build.compile import compile_kernel
from fagen.device import Architecture
from fagen.errors import ArgumentError
from fagen.kernels.forward import scale_log2
from fagen.kernels.template import Config
from fagen.operation import FORWARD
from fagen.problem import Problem
from fagen.records import calls, store
from fagen.records.dispatch import choose
from fagen.run import arrays, driver
from fagen.run.arrays import Framework, Geometry, framework_of
from fagen.run.ask import Layout, Question, ask
from fagen.run.executor import PLANS_PER_THREAD, Executor, Prepared

_thread = threading.local()  # .plans: this thread's cache of _plan
_kernels: dict[tuple[Problem, Config, str], Executor] = {}
_kernels_lock = threading.Lock()  # NVRTC compiles one text at a time in any case


def attend(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    layout: Layout,
    out: Any,
    fixed: Config | Executor | None,
) -> Any:
    """`fagen.attention`, with the config or the kernel itself fixed by the caller, if any."""
    kind = type(q)
    framework = framework_of(kind)
    if framework is None:
        return _attend_foreign(q, k, v, out, return_lse, causal, softmax_scale, layout, fixed)
    if type(k) is not kind or type(v) is not kind or (out is not None and type(out) is not kind):
        _require_one_framework(framework, q, k, v, out)
    read = framework.read
    q_pointer, q_geometry = read(q)
    k_pointer, k_geometry = read(k)
    v_pointer, v_geometry = read(v)
    o = framework.empty_like(q) if out is None else out
    o_pointer, o_geometry = read(o)
    try:
        plans = _thread.plans
    except AttributeError:
        plans = _thread.plans = lru_cache(PLANS_PER_THREAD)(_plan)
    prepared, default_scale, lse_shape, device_index, asked = plans(
        framework,
        q_geometry,
        k_geometry,
        v_geometry,
        o_geometry,
        causal,
        layout,
        (q_pointer | k_pointer | v_pointer | o_pointer) % 16 == 0,
        fixed,
        store.generation,
    )
    if out is not None and o_pointer and o_pointer in (q_pointer, k_pointer, v_pointer):
        raise ArgumentError("out is q, k or v itself: it has to be memory of its own")
    lse = framework.empty(lse_shape, "float32", q) if return_lse else None
    workspace = 0
    if prepared.workspace_bytes:
        memory = framework.empty((prepared.workspace_bytes,), "uint8", q)
        workspace = read(memory)[0]
    prepared.launch(
        (q_pointer, k_pointer, v_pointer, o_pointer, read(lse)[0] if return_lse else 0),
        default_scale if softmax_scale is None else (scale_log2(softmax_scale),),
        framework.stream(device_index),
        workspace,
    )
    if calls.active:
        calls.count(asked)
    return (o, lse) if return_lse else o


def _require_one_framework(framework: Framework, q: Any, *others: Any) -> None:
    """An ArgumentError if an array is not of q's framework."""
    for array in others:
        if array is not None and framework_of(type(array)) is not framework:
            raise ArgumentError(
                f"q is of type {type(q).__name__} and another array is of type "
                f"{type(array).__name__}: all arrays have to be of one framework"
            )


def _attend_foreign(q: Any, k: Any, v: Any, out: Any, return_lse: bool, *options: Any) -> Any:
    """The same for arrays that are neither torch's nor CuPy's, by way of CuPy."""
    causal, softmax_scale, layout, fixed = options
    o, lse = attend(
        arrays.to_cupy(q, "q"),
        arrays.to_cupy(k, "k"),
        arrays.to_cupy(v, "v"),
        causal,
        softmax_scale,
        True,
        layout,
        None if out is None else arrays.to_cupy(out, "out"),
        fixed,
    )
    o = arrays.from_cupy(o, q) if out is None else out
    return (o, arrays.from_cupy(lse, q)) if return_lse else o


class _Planned(NamedTuple):
    """What calls of one geometry share.

    Attributes:
        prepared: the launches.
        default_scale: the kernel's scalars where the caller gives no softmax_scale.
        lse_shape: (batch, heads_q, seqlen_q).
        device_index: where the tensors are.
        asked: what `fagen.record` counts them under.
    """

    prepared: Prepared
    default_scale: tuple[float]
    lse_shape: tuple[int, ...]
    device_index: int
    asked: calls.Asked


def _plan(
    framework: Framework,
    q: Geometry,
    k: Geometry,
    v: Geometry,
    o: Geometry,
    causal: bool,
    layout: Layout,
    aligned: bool,
    fixed: Config | Executor | None,
    generation: int,
) -> _Planned:
    """Checks a geometry, finds its kernel and prepares its launch. For this thread only.

    `generation` is there for the cache: a kernel is looked for anew when there are new records.
    """
    question = ask(
        FORWARD,
        [(framework, geometry) for geometry in (q, k, v, o)],
        causal=causal,
        layout=layout,
        aligned=aligned,
    )
    problem, shape, strides, device_index = question
    kernel = (
        _fitting(fixed, problem, device_index)
        if isinstance(fixed, Executor)
        else _chosen(question, fixed)
    )
    return _Planned(
        prepared=kernel.prepare(shape, strides, device_index),
        default_scale=(scale_log2(problem.head_dim**-0.5),),
        lse_shape=FORWARD.operand("lse").sizes(problem, shape),
        device_index=device_index,
        asked=(problem, shape),
    )


def _chosen(question: Question, config: Config | None) -> Executor:
    """The kernel of the config that dispatch chooses, or of the caller's own."""
    device = driver.query_device(question.device_index)
    choice = choose(question.problem, question.shape, device, config=config)
    return loaded(question.problem, choice.config, device.arch)


def _fitting(kernel: Executor, problem: Problem, device_index: int) -> Executor:
    """The caller's kernel, if it can answer the problem on that device."""
    arch = driver.query_device(device_index).arch
    if kernel.compiled.arch != arch.name:
        raise ArgumentError(
            f"this kernel is for {kernel.compiled.arch} and the tensors are on {arch.name}"
        )
    ours = kernel.problem
    if ours.model_copy(update={"alignment": problem.alignment}) != problem:
        raise ArgumentError(f"this kernel is for {ours} and the call is {problem}")
    if ours.alignment > problem.alignment:
        raise ArgumentError(
            f"this kernel needs addresses and strides that are multiples of {ours.alignment} "
            "bytes: fagen.attention takes any"
        )
    return kernel


def loaded(problem: Problem, config: Config, arch: Architecture) -> Executor:
    """A kernel, compiled and loaded once in the life of the process."""
    key = (problem, config, arch.name)
    with _kernels_lock:
        kernel = _kernels.get(key)
        if kernel is None:
            kernel = Executor(compile_kernel(problem, config, arch), problem, config)
            _kernels[key] = kernel
    return kernel
