"""A kernel -> a verdict: is it right?

`fagen.judge.rule` judges the numbers of each output. Here comes what only memory can show: every
tensor is a slice of a larger buffer full of NaN, which must neither leak in nor be written, and
nor must the inputs; outputs hold NaN before each launch, so that nothing stale passes; two
launches agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fagen.dtypes import DTYPES
from fagen.judge import rule
from fagen.judge.bench import Bench
from fagen.judge.inputs import (
    POISON_BYTE,
    Slab,
    random_inputs,
    slab_of,
    timing_tensors,
)
from fagen.judge.reference import ON_DEVICE, References
from fagen.judge.rule import Expected, OutputErrors, expect, judge, rms_rule, rows_of
from fagen.kernels.template import Config
from fagen.problem import Problem, Shape

if TYPE_CHECKING:
    from fagen.run.executor import Executor, TensorView

SAMPLED_ROWS = 64


class Verdict(BaseModel):
    """Whether a kernel's outputs are right.

    Attributes:
        ok: whether every rule holds.
        reason: the broken rule, with numbers; empty if there is none.
        stray: whether it wrote where it must not: nothing in the device's memory can be trusted
            any more.
        outputs: the errors of each output, by name.
        shape: where that was; if all is well, the shape nearest to its limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ok: bool
    reason: str = ""
    stray: bool = False
    outputs: dict[str, OutputErrors] = {}
    shape: Shape | None = None

    def __bool__(self) -> bool:
        return self.ok


# ---- small shapes, with poison around every tensor ----


@dataclass(frozen=True)
class Case:
    """A shape to verify on.

    Attributes:
        drift: whether keys grow along the sequence, in every other head backwards, so that row
            maxima keep rising whichever way a kernel walks: rescaling must then happen, and lazy
            rescaling too.
    """

    shape: Shape
    drift: bool = False


def cases(config: Config) -> list[Case]:
    """Shapes with tails on both sides of the config's blocks, the quickest first.

    Those that depend on the config depend on one length of it, so that configs share them.
    """
    m, n = config.steps

    def case(
        batch: int, seqlen_q: int, seqlen_k: int, heads: tuple[int, int], drift: bool = False
    ) -> Case:
        shape = Shape(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads[0],
            heads_kv=heads[1],
        )
        return Case(shape, drift)

    alone, grouped = (2, 2), (4, 1)
    chosen = [
        case(1, 80, n - 1, alone),
        case(2, 80, n + 1, grouped),
        case(2, 80, 9 * n + 5, grouped, drift=True),  # twice round any ring of stages
        case(1, m - 1, 150, grouped),
        case(1, m + 1, 150, alone),
        case(2, 2 * m + 1, 333, grouped),
        case(2, 1, 300, grouped),  # decoding
        case(2, 70, 0, alone),  # no key
        case(2, 300, 70, grouped),  # causal: rows without keys
        case(1, 700, 800, grouped),
    ]
    if config.is_persistent:  # more tiles than blocks run at once
        chosen.append(case(20, 3, 130, (40, 10)))
    return chosen


@dataclass(frozen=True)
class Prepared:
    """A case on a device, ready for any kernel of the problem.

    Attributes:
        shape: the case's.
        views: where every operand is.
        slabs, buffers: the memory around each, and the CuPy arrays that hold it.
        uploaded: what the buffers of inputs held at first.
        expected: what each output has to be.
    """

    shape: Shape
    views: Mapping[str, TensorView]
    slabs: Mapping[str, Slab]
    buffers: Mapping[str, Any]
    uploaded: Mapping[str, NDArray[Any]]
    expected: Mapping[str, Expected]


def prepare(bench: Bench, problem: Problem, case: Case) -> Prepared:
    """Inputs, places for outputs, and the references."""
    import cupy

    operation, shape = problem.operation, case.shape
    inputs = random_inputs(problem, shape, drift=case.drift)
    slabs = {o.name: slab_of(o, problem, shape) for o in operation.operands}
    uploaded = {name: slabs[name].around(values) for name, values in inputs.items()}
    with bench.use():
        buffers = {
            name: cupy.asarray(uploaded.get(name, slab.poison())) for name, slab in slabs.items()
        }
        views = {name: slab.view(buffers[name]) for name, slab in slabs.items()}
        references = ON_DEVICE[problem.op](bench, problem, shape, views, None)
    return Prepared(shape, views, slabs, buffers, uploaded, _expected(references, problem))


def _expected(references: References, problem: Problem) -> dict[str, Expected]:
    return {
        name: expect(problem.operation.operand(name), reference, problem)
        for name, reference in references.items()
    }


# Made once for all configs of a problem: about two per length of a block's rows and keys.
_prepared = lru_cache(maxsize=96)(prepare)


def verify(kernel: Executor, bench: Bench, *, shapes: Iterable[Shape] | None = None) -> Verdict:
    """Whether the kernel is right on small shapes, each with its own traps.

    Args:
        shapes: instead of those that `cases` chooses for the kernel's config.

    Raises:
        CudaError: if a CUDA call failed; after an illegal address no later call works.
    """
    chosen = cases(kernel.config) if shapes is None else [Case(shape) for shape in shapes]
    make = _prepared if shapes is None else prepare  # those of any size are not kept
    worst, nearest = Verdict(ok=True), 0.0
    squares: dict[str, float] = {}
    elements: dict[str, int] = {}
    for case in chosen:
        prepared = make(bench, kernel.problem, case)
        verdict = verify_one(kernel, bench, prepared)
        if not verdict.ok:
            return verdict
        for name, errors in verdict.outputs.items():
            count = prepared.expected[name].elements
            squares[name] = squares.get(name, 0.0) + errors.rms_ratio**2 * count
            elements[name] = elements.get(name, 0) + count
        near = max((errors.nearness for errors in verdict.outputs.values()), default=0.0)
        if near > nearest:
            worst, nearest = verdict, near
    pooled = {name: math.sqrt(squares[name] / max(elements[name], 1)) for name in squares}
    outputs = {
        name: errors.model_copy(update={"rms_ratio": pooled[name]})
        for name, errors in worst.outputs.items()
    }
    for name, ratio in pooled.items():
        if ratio > rule.MAX_RMS_RATIO:
            reason = f"{rms_rule(rule.word(name), ratio)}; over all shapes"
            return worst.model_copy(update={"ok": False, "reason": reason, "outputs": outputs})
    return worst.model_copy(update={"outputs": outputs})


def verify_one(kernel: Executor, bench: Bench, prepared: Prepared) -> Verdict:
    """The verdict on one case."""
    with bench.use():
        first, again = (run_poisoned(kernel, bench, prepared) for _ in range(2))
        inputs = {name: prepared.buffers[name].get() for name in prepared.uploaded}
    operation, shape = kernel.problem.operation, prepared.shape
    outputs: dict[str, OutputErrors] = {}
    broken = ""
    for name, expected in prepared.expected.items():
        dtype = DTYPES[expected.operand.dtype or kernel.problem.dtype].numpy
        tensor = prepared.slabs[name].tensor(first[name]).view(dtype)
        values = rows_of(tensor, expected.operand, expected.reference.row_dims)
        judged = judge(values, expected, shape)
        outputs[name] = judged.errors
        broken = broken or judged.broken
    strays = [
        f"wrote outside of the {rule.word(name)}"
        for name, flat in first.items()
        if not prepared.slabs[name].is_alone(flat)
    ]
    read_only = [o.name for o in operation.operands if o.role == "in"]
    if not all(np.array_equal(inputs[name], prepared.uploaded[name]) for name in read_only):
        strays.append("wrote to its inputs")
    if not broken and not all(np.array_equal(first[name], again[name]) for name in first):
        broken = "two runs differ"
    reason = (strays or [broken])[0]
    return Verdict(
        ok=not reason,
        reason=f"{reason}; {shape}" if reason else "",
        stray=bool(strays),
        outputs=outputs,
        shape=shape,
    )


def run_poisoned(kernel: Executor, bench: Bench, prepared: Prepared) -> dict[str, NDArray[Any]]:
    """One launch on poisoned outputs; their whole buffers, by name."""
    import cupy

    written = [o.name for o in kernel.problem.operation.operands if o.role != "in"]
    for name in written:
        buffer = prepared.buffers[name]
        if name in prepared.uploaded:  # read and written
            buffer.set(prepared.uploaded[name])
        else:
            buffer.data.memset(POISON_BYTE, buffer.nbytes)
    bench.launch(kernel, prepared.shape, prepared.views, cupy.cuda.get_current_stream().ptr)
    return {name: prepared.buffers[name].get() for name in written}


# ---- a large shape, some rows of it ----


def check_sample(
    kernel: Executor, shape: Shape, bench: Bench, *, rows: int = SAMPLED_ROWS
) -> Verdict:
    """Whether the kernel is right on a large shape, the one that `measure` times: some rows only.

    Args:
        rows: how many of each output, spread at random; the corners are among them.

    Raises:
        CudaError: if a CUDA call failed.
    """
    import cupy

    problem = kernel.problem
    at = timing_tensors(bench, problem, shape)
    everything = {o.name: slab_of(o, problem, shape) for o in problem.operation.operands}
    wanted = _expected_sample(bench, problem, shape, rows)
    with bench.use():
        arrays, views = dict(at.arrays), dict(at.views)
        for name in wanted:
            if name not in arrays:  # optional outputs, which timing leaves out
                slab = everything[name]
                arrays[name] = cupy.empty(slab.size, slab.words)
                views[name] = slab.view(arrays[name])
            arrays[name].data.memset(POISON_BYTE, arrays[name].nbytes)
        bench.launch(kernel, shape, views, cupy.cuda.get_current_stream().ptr)
        outputs: dict[str, OutputErrors] = {}
        for name, expected in wanted.items():
            lead = at.lead if name in at.arrays else everything[name].lead
            values = _gather(arrays[name][lead:], expected, problem, shape)
            judged = judge(values, expected, shape)
            outputs[name] = judged.errors
            if judged.broken:
                sampled = f"{judged.broken}; {shape}, {len(values)} rows of it"
                return Verdict(ok=False, reason=sampled, outputs=outputs, shape=shape)
    return Verdict(ok=True, outputs=outputs, shape=shape)


def _gather(flat: Any, expected: Expected, problem: Problem, shape: Shape) -> NDArray[Any]:
    """The rows of a contiguous output in a flat CuPy array."""
    operand, reference = expected.operand, expected.reference
    sizes = operand.sizes(problem, shape)
    dtype = DTYPES[operand.dtype or problem.dtype].numpy
    tensor = flat[: math.prod(sizes)].reshape(sizes)
    places = np.unravel_index(reference.rows, [getattr(shape, dim) for dim in reference.row_dims])
    by_dim = dict(zip(reference.row_dims, places, strict=True))
    values = np.empty((len(reference.rows), reference.exact.shape[1]), flat.dtype)
    for number in range(len(values)):
        index = tuple(
            int(by_dim[dim][number]) if dim in by_dim else slice(None) for dim in operand.dims
        )
        values[number] = tensor[index].get().reshape(-1)
    return values.view(dtype)


@lru_cache(maxsize=16)
def _expected_sample(
    bench: Bench, problem: Problem, shape: Shape, rows: int
) -> Mapping[str, Expected]:
    at = timing_tensors(bench, problem, shape)
    total = shape.batch * shape.heads_q * shape.seqlen_q
    chosen = np.random.default_rng(0).choice(total, min(rows, total), replace=False)
    corners = [0, shape.seqlen_q - 1, total - shape.seqlen_q, total - 1] if total else []
    ids = np.unique(np.concatenate([chosen, corners])).astype(np.int64)
    return _expected(ON_DEVICE[problem.op](bench, problem, shape, at.views, ids), problem)
