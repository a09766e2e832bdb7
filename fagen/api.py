"""attention, load, explain and tune: what `import fagen` offers.

A repeated call costs about 10 us of Python and driver arguments, then the driver's launch: each
thread remembers a `Plan` for each geometry (shapes, strides, dtype, device) that it has met, and
a new call only brings its pointers. A new geometry of a known bucket makes another plan of the
same kernel; a new bucket asks `dispatch`, and may compile.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fagen.build.compile import Resources, compile_kernel
from fagen.build.render import kernel_name
from fagen.device import Architecture, Device, architecture
from fagen.errors import ArgumentError
from fagen.kernels.config import AnyConfig, as_argument_error, parse_config
from fagen.problem import Bucket, Dtype, Problem, Shape
from fagen.records import recorder
from fagen.records.dispatch import Choice, choose
from fagen.records.store import on_save
from fagen.run import arrays, driver
from fagen.run.arrays import Framework, Geometry, Layout, framework_of
from fagen.run.launch import PLANS_PER_THREAD, QKVO, Lengths, LoadedKernel, Plan, scale_log2
from fagen.tuning.options import TuneOptions, takes_tune_options

if TYPE_CHECKING:
    from fagen.tuning.events import OnEvent
    from fagen.tuning.tasks import Task
    from fagen.tuning.tuner import TuneResult
    from fagen.tuning.worker import Worker

_thread = threading.local()  # .plans: this thread's cache of _plan
_kernels: dict[tuple[Problem, AnyConfig, str], LoadedKernel] = {}
_kernels_lock = threading.Lock()  # NVRTC compiles one text at a time in any case


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    out: Any = None,
    config: AnyConfig | Mapping[str, Any] | None = None,
) -> Any:
    """softmax(q k^T * softmax_scale) v, by the fastest kernel that fagen knows for the call.

    Queued on the caller's current stream; does not wait. Arrays are torch tensors, CuPy arrays,
    or others with DLPack or `__cuda_array_interface__`; the result is of q's framework.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16 or bf16, on a CUDA device; head_dim is a
            multiple of 8 from 8 to 256 and contiguous, other strides are free.
        k, v: (batch, seqlen_k, heads_kv, head_dim), like q; heads_q is a multiple of heads_kv.
        causal: query i sees keys up to i + seqlen_k - seqlen_q (bottom-right).
        softmax_scale: 1/sqrt(head_dim) if None.
        return_lse: also return the logsumexp of the scaled scores: natural logarithm, float32,
            (batch, heads_q, seqlen_q); -inf for a query that sees no key, whose output is 0.
        layout: "bshd" as above, or "bhsd": (batch, heads, seqlen, head_dim) for q, k, v and out.
        out: where the output goes, of q's shape and dtype; must not overlap q, k or v.
        config: a config, or its fields, to use instead of the tuned one.

    Returns:
        The output, or (output, lse).

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for a problem outside what fagen covers, gradients among them.
        ConfigError: for a `config` that is illegal here; the message is the broken rule.
        DeviceError: without a usable GPU, or if the driver refuses.
    """
    fixed = None if config is None else _parsed(config)
    return _attend(q, k, v, causal, softmax_scale, return_lse, layout, out, fixed)


@takes_tune_options
def tune(
    tasks: Sequence[Task] | None = None,
    *,
    dtype: Dtype | Sequence[Dtype] | None = None,
    head_dim: int | Sequence[int] | None = None,
    causal: bool | Sequence[bool] | None = None,
    seqlen: int | Sequence[int] | None = None,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    arch: str | Architecture | None = None,
    on_event: OnEvent = lambda event: None,
    workers: Sequence[Worker] = (),
    **options: Any,
) -> TuneResult:
    """Searches the fastest config of each problem, verifies it, times it and saves it.

    What `fagen tune` does. It starts processes, which import the script that calls it: guard the
    call with `if __name__ == "__main__":`.

    Args:
        tasks: problems and their shapes, as of `fagen.tuning.tasks`; if None, those that the next
            arguments name.
        dtype, head_dim, causal, seqlen: one value or several; what is None is the standard list.
        batch, heads, kv_heads: those of `fagen.problem.standard_shape` if None.
        arch: such as "sm90"; that of the device if None.
        on_event: called with each `TaskStarted`, `TrialDone`, ...; where it raises
            KeyboardInterrupt over a `TrialDone`, the search ends as after Ctrl-C: the best so far
            is saved.
        workers: that evaluate, instead of one for each of `devices`.
        options: the fields of `fagen.tuning.options.TuneOptions`, which says what they mean.

    Raises:
        ArgumentError: for a value that is not allowed.
        DeviceError: without a device, if `arch` is None: what is tuned for is not known.
    """
    from fagen.tuning import tuner
    from fagen.tuning.tasks import standard_tasks

    named = {"dtypes": dtype, "head_dims": head_dim, "causal": causal, "seqlens": seqlen}
    chosen: dict[str, Any] = {
        name: [value] if isinstance(value, str | int) else list(value)
        for name, value in named.items()
        if value is not None
    }
    for name, values in chosen.items():
        kind = str if name == "dtypes" else int
        if not values or not all(isinstance(value, kind) for value in values):
            raise ArgumentError(f"{name} {values!r}: give one {kind.__name__}, or several")
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads}
    chosen |= {name: size for name, size in sizes.items() if size is not None}
    if tasks is None:
        with as_argument_error():
            tasks = standard_tasks(**chosen)
    elif chosen:
        raise ArgumentError("give tasks, or what names them (dtype, head_dim, ...), not both")
    if arch is not None and not isinstance(arch, Architecture):
        arch = architecture(str(arch))
    chosen_options = TuneOptions.of(arch=arch, **options)
    return tuner.tune(tasks, chosen_options, on_event=on_event, workers=workers)


class Kernel:
    """One tuned kernel, to look at and to call.

    Attributes:
        config: the point of the template's space that it is.
        source, cubin: its CUDA text and what NVRTC made of it.
        resources: registers, spills, stack and shared memory.
        explanation: where the config comes from.
    """

    def __init__(self, kernel: LoadedKernel, explanation: Explanation) -> None:
        self._kernel = kernel
        self.explanation = explanation
        self.config = kernel.config
        self.source = kernel.compiled.source
        self.cubin = kernel.compiled.cubin
        self.resources = kernel.resources

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool | None = None,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        layout: Layout = "bshd",
        out: Any = None,
    ) -> Any:
        """`attention` by this kernel, for any lengths of its problem.

        Raises:
            ArgumentError: also for tensors that this kernel is not for.
        """
        causal = self._kernel.problem.causal if causal is None else causal
        return _attend(q, k, v, causal, softmax_scale, return_lse, layout, out, self._kernel)

    def __repr__(self) -> str:
        return f"<fagen.Kernel {self._kernel.problem}: {self.config}>"


@dataclass(frozen=True)
class Explanation:
    """Which kernel answers a call, and why that one. `print` it.

    Attributes:
        problem, bucket, device: the question.
        config: the answer.
        tier: 1 to 6, in the order in which `dispatch` looks.
        reason: one sentence.
        kernel_name: the symbol in the cubin.
        resources: what the compiler says that the kernel takes.
        stale: whether the config gives another text than the one that was tuned (the template has
            changed, or the config was edited).
        text: all of it in a few lines; what `print` shows.
    """

    problem: Problem
    bucket: Bucket
    device: Device
    config: AnyConfig
    tier: int
    reason: str
    kernel_name: str
    resources: Resources
    stale: bool
    text: str

    @classmethod
    def of(cls, choice: Choice, shape: Shape) -> Explanation:
        """Explains a choice; compiles its kernel if the cache does not have it."""
        resources = compile_kernel(choice.problem, choice.config, choice.device.arch).resources
        takes = (
            f"{resources.registers} registers per thread, {resources.spill_bytes} bytes of spills"
        )
        name = kernel_name(choice.problem)
        lines = [f"{'kernel':8} {name}", f"{'bucket':8} {shape.bucket()}", f"{'takes':8} {takes}"]
        return cls(
            problem=choice.problem,
            bucket=shape.bucket(),
            device=choice.device,
            config=choice.config,
            tier=int(choice.tier),
            reason=choice.reason,
            kernel_name=name,
            resources=resources,
            stale=choice.stale,
            text="\n".join([choice.describe(), *lines]),
        )

    def __str__(self) -> str:
        return self.text


def load(
    *,
    dtype: str,
    head_dim: int,
    causal: bool = False,
    seqlen_q: int,
    seqlen_k: int,
    batch: int,
    heads: int,
    heads_kv: int | None = None,
    device: int | None = None,
    config: AnyConfig | Mapping[str, Any] | None = None,
) -> Kernel:
    """The kernel that `attention` would use for a call like this, compiled and loaded.

    Args:
        dtype: "fp16" or "bf16".
        heads, heads_kv: heads of q and of k and v (as many if None).
        device: index of the CUDA device; the current one if None.
        config: a config, or its fields, to use instead of the tuned one.

    Raises:
        ArgumentError, ConfigError, DeviceError: as `attention`.
    """
    with as_argument_error():
        problem = Problem.model_validate({"dtype": dtype, "head_dim": head_dim, "causal": causal})
        shape = Shape(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads,
            heads_kv=heads if heads_kv is None else heads_kv,
        )
    card = driver.query_device(driver.current_device() if device is None else device)
    choice = choose(problem, shape, card, config=None if config is None else _parsed(config))
    kernel = _loaded(problem, choice.config, card.arch)
    return Kernel(kernel, Explanation.of(choice, shape))


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    out: Any = None,
    config: AnyConfig | Mapping[str, Any] | None = None,
) -> Explanation:
    """Which kernel `attention` uses for the same arguments, and why; launches nothing.

    Raises:
        ArgumentError, ConfigError, DeviceError: as `attention`.
    """
    if softmax_scale is not None:
        scale_log2(softmax_scale)
    operands = [
        arrays.adopt(array, layout, name) for name, array in zip("qkv", (q, k, v), strict=True)
    ]
    if out is not None:
        operands.append(arrays.adopt(out, layout, "out"))
    lengths = arrays.lengths_of(*operands)
    first = operands[0]
    problem = Problem(
        dtype=first.dtype,
        head_dim=first.view.shape[3],
        causal=bool(causal),
        alignment=arrays.alignment(*operands),
    )
    shape = Shape(**lengths._asdict())
    card = driver.query_device(first.device_index)
    choice = choose(problem, shape, card, config=None if config is None else _parsed(config))
    return Explanation.of(choice, shape)


def _parsed(config: AnyConfig | Mapping[str, Any]) -> AnyConfig:
    return parse_config(dict(config)) if isinstance(config, Mapping) else config


def _attend(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    layout: Layout,
    out: Any,
    fixed: AnyConfig | LoadedKernel | None,
) -> Any:
    """`attention`, with the config or the kernel itself fixed by the caller, if any."""
    framework = framework_of(type(q))
    if framework is None:
        return _attend_foreign(q, k, v, causal, softmax_scale, return_lse, layout, out, fixed)
    for array in (k, v) if out is None else (k, v, out):
        if framework_of(type(array)) is not framework:
            raise ArgumentError(
                f"q is of type {type(q).__name__} and another array is of type "
                f"{type(array).__name__}: all arrays have to be of one framework"
            )
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
    plan, default_scale, lse_shape, device_index, question = plans(
        framework,
        q_geometry,
        k_geometry,
        v_geometry,
        o_geometry,
        causal,
        layout,
        (q_pointer | k_pointer | v_pointer | o_pointer) % 16 == 0,
        fixed,
    )
    if out is not None and o_pointer and o_pointer in (q_pointer, k_pointer, v_pointer):
        raise ArgumentError("out is q, k or v itself: it has to be memory of its own")
    lse = framework.empty_float32(lse_shape, q) if return_lse else None
    plan.launch(
        q_pointer,
        k_pointer,
        v_pointer,
        o_pointer,
        read(lse)[0] if return_lse else 0,
        default_scale if softmax_scale is None else scale_log2(softmax_scale),
        framework.stream(device_index),
    )
    if recorder.active:
        recorder.count(question)
    return (o, lse) if return_lse else o


def _attend_foreign(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    layout: Layout,
    out: Any,
    fixed: AnyConfig | LoadedKernel | None,
) -> Any:
    """The same for arrays that are neither torch's nor CuPy's, by way of CuPy."""
    o, lse = _attend(
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


class _Call(NamedTuple):
    """What calls of one geometry share.

    Attributes:
        plan: the launch.
        default_scale: `scale_log2` of 1/sqrt(head_dim).
        lse_shape: (batch, heads_q, seqlen_q).
        device_index: where the tensors are.
        question: what `fagen.record` counts them under.
    """

    plan: Plan
    default_scale: float
    lse_shape: tuple[int, int, int]
    device_index: int
    question: recorder.Question


def _forget_plans() -> None:
    """Of all threads, since there are new records to ask."""
    global _thread  # noqa: PLW0603
    _thread = threading.local()


on_save.append(_forget_plans)


def _plan(
    framework: Framework,
    q: Geometry,
    k: Geometry,
    v: Geometry,
    o: Geometry,
    causal: bool,
    layout: Layout,
    pointers_aligned: bool,
    fixed: AnyConfig | LoadedKernel | None,
) -> _Call:
    """Checks a geometry, finds its kernel and plans its launch. For this thread only."""
    operands = [
        arrays.operand(name, framework, 0, geometry, layout)
        for name, geometry in zip(("q", "k", "v", "out"), (q, k, v, o), strict=True)
    ]
    lengths = arrays.lengths_of(*operands)
    device_index = operands[0].device_index
    head_dim = operands[0].view.shape[3]
    problem = Problem(
        dtype=operands[0].dtype,
        head_dim=head_dim,
        causal=bool(causal),
        alignment=arrays.alignment(*operands) if pointers_aligned else 2,
    )
    kernel = (
        _fitting(fixed, problem, device_index)
        if isinstance(fixed, LoadedKernel)
        else _chosen(problem, lengths, device_index, fixed)
    )
    strides = QKVO(*(operand.view.strides for operand in operands))
    return _Call(
        plan=kernel.plan(lengths, strides, device_index),
        default_scale=scale_log2(head_dim**-0.5),
        lse_shape=(lengths.batch, lengths.heads_q, lengths.seqlen_q),
        device_index=device_index,
        question=recorder.question(problem, lengths),
    )


def _chosen(
    problem: Problem, lengths: Lengths, device_index: int, config: AnyConfig | None
) -> LoadedKernel:
    """The kernel of the config that dispatch chooses, or of the caller's own."""
    device = driver.query_device(device_index)
    choice = choose(problem, Shape(**lengths._asdict()), device, config=config)
    return _loaded(problem, choice.config, device.arch)


def _fitting(kernel: LoadedKernel, problem: Problem, device_index: int) -> LoadedKernel:
    """The caller's kernel, if it can answer the problem on that device."""
    arch = driver.query_device(device_index).arch
    if kernel.compiled.arch != arch.name:
        raise ArgumentError(
            f"this kernel is for {kernel.compiled.arch} and the tensors are on {arch.name}"
        )
    ours = kernel.problem
    fields = ("dtype", "head_dim", "causal")
    if any(getattr(ours, field) != getattr(problem, field) for field in fields):
        raise ArgumentError(f"this kernel is for {ours} and the call is {problem}")
    if ours.alignment > problem.alignment:
        raise ArgumentError(
            f"this kernel needs addresses and strides that are multiples of {ours.alignment} "
            "bytes: fagen.attention takes any"
        )
    return kernel


def _loaded(problem: Problem, config: AnyConfig, arch: Architecture) -> LoadedKernel:
    """A kernel, compiled and loaded once in the life of the process."""
    key = (problem, config, arch.name)
    with _kernels_lock:
        kernel = _kernels.get(key)
        if kernel is None:
            kernel = LoadedKernel(compile_kernel(problem, config, arch), problem, config)
            _kernels[key] = kernel
    return kernel
