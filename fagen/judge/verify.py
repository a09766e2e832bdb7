"""A loaded kernel -> a verdict: is it right?

`judge` is the rule, on plain arrays: the error may be twice that of the low-precision variant of
the maths (the rule of FlashAttention's own tests), its mean square 1.5 times that of the roundings
no fused kernel can avoid, the logsumexp is near exact, and rows without keys are exactly 0 and
-inf. `verify` adds what only memory can show: every tensor is a slice of a larger buffer full of
NaN, which must neither leak in nor be written, and nor must the inputs; outputs hold NaN before
each launch, so that nothing stale passes; two launches agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fagen.judge import measure, reference
from fagen.judge.cupy_device import on_device
from fagen.judge.reference import EPSILON, NUMPY_DTYPE, Float64, References, by_row, round_to
from fagen.kernels.config import AnyConfig
from fagen.problem import Dtype, Problem, Shape

if TYPE_CHECKING:
    from fagen.run.launch import LoadedKernel, TensorView

MAX_ERROR_FACTOR = 2.0
MAX_RMS_RATIO = 1.5
RMS_ELEMENTS = 4096  # the ratio over fewer says too little alone: such shapes are pooled
LSE_ABSOLUTE, LSE_RELATIVE = 1e-3, 1e-6

POISON = np.uint16(0xFFFF)  # a NaN in fp16 and bf16 and, twice, in float32; no kernel computes it
POISON_32 = np.uint32(0xFFFFFFFF)
POISON_BYTE = 0xFF
GUARD = 512  # poisoned elements before and after a tensor
PAD_ROWS = 32  # poisoned rows after each sequence
SAMPLED_ROWS = 64


class Verdict(BaseModel):
    """Whether a kernel's output is right, and how near it came to the limits.

    Attributes:
        ok: whether every rule holds.
        reason: the broken rule, with numbers; empty if there is none.
        stray: whether it wrote where it must not: nothing in the device's memory can be trusted
            any more.
        max_error: largest |out - reference|; allowed_error: its limit.
        rms_ratio: the RMS error over that of the unavoidable roundings; 0 if there is no element.
        lse_error: largest |lse - reference|.
        shape: where it was, the shape nearest to its limit if all is well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ok: bool
    reason: str = ""
    stray: bool = False
    max_error: float = 0.0
    allowed_error: float = 0.0
    rms_ratio: float = 0.0
    lse_error: float = 0.0
    shape: Shape | None = None

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Expected:
    """What `judge` compares with, and the limits that follow from the low-precision variants.

    Attributes:
        shape: what the rows are of.
        rows, out, lse: of `References`.
        allowed_error: of any element.
        row_rms: of each row's exact output; errors are taken relative to it, so that rows of few
            keys, whose outputs are large, do not decide alone.
        rms: the relative RMS error that is unavoidable, over the rows that see a key.
        elements: of those rows.
    """

    shape: Shape
    rows: NDArray[np.int64]
    out: Float64
    lse: Float64
    allowed_error: float
    row_rms: Float64
    rms: float
    elements: int


def expect(references: References, dtype: Dtype, shape: Shape) -> Expected:
    """The limits for outputs of that dtype."""
    rounding = NUMPY_DTYPE[dtype]
    out = references.out
    rounded = round_to(out, rounding)
    noise = round_to(round_to(rounded + 0.3, rounding) - 0.3, rounding) - rounded
    low_error = _largest(references.low_precision - out)
    sees = references.lse > -np.inf
    row_rms = np.sqrt(np.mean(np.square(out), axis=1))
    row_rms[row_rms == 0] = 1.0  # no key, or V is 0: the error counts as it is
    soft_error = ((references.float32_softmax - out) / row_rms[:, None])[sees]
    # Where O happens to be exact (one key) the baseline would be 0: at least what rounding O
    # costs on average.
    return Expected(
        shape,
        references.rows,
        out,
        references.lse,
        allowed_error=MAX_ERROR_FACTOR * low_error + 2 * _largest(noise),
        row_rms=row_rms,
        rms=max(_rms(soft_error), 0.2 * EPSILON[dtype]),
        elements=soft_error.size,
    )


def _largest(x: Float64) -> float:
    return float(np.abs(x).max(initial=0.0))


def _rms(x: Float64) -> float:
    return math.sqrt(float(np.mean(np.square(x)))) if x.size else 0.0


def judge(
    out: NDArray[Any], lse: NDArray[np.float32], expected: Expected, *, where: str = ""
) -> Verdict:
    """The verdict on one output.

    Args:
        out: (rows, head_dim) in the problem's dtype, rows as in `References`.
        lse: (rows,).
        where: said in the reason, beside the shape.
    """
    sees = expected.lse > -np.inf
    error = out.astype(np.float64)
    error -= expected.out
    squares = np.einsum("rd,rd->r", error, error) / np.square(expected.row_rms)
    largest = np.abs(error, out=error).max(axis=1)  # of each row; NaN where it holds one
    exact_lse = np.where(sees, expected.lse, 0.0)
    lse_error = np.abs(np.where(sees, lse.astype(np.float64) - exact_lse, 0.0))
    max_error, max_lse_error = _largest(largest), _largest(lse_error)
    rms_ratio = 0.0
    if expected.elements:
        rms_ratio = math.sqrt(squares[sees].sum() / expected.elements) / expected.rms
    numbers: dict[str, Any] = {
        "max_error": max_error,
        "allowed_error": expected.allowed_error,
        "rms_ratio": rms_ratio,
        "lse_error": max_lse_error,
        "shape": expected.shape,
    }
    # What is wrong, and in which rows.
    rules = (
        ("output was not written", (out.view(np.uint16) == POISON).any(axis=1)),
        ("logsumexp was not written", lse.view(np.uint32) == POISON_32),
        ("output is NaN or infinite", ~np.isfinite(largest)),
        ("output of a row without keys is not 0", ~sees & (largest != 0)),
        ("logsumexp of a row without keys is not -inf", ~sees & (lse != -np.inf)),
        ("logsumexp is NaN or infinite", sees & ~np.isfinite(lse)),
        (
            f"output is off by {max_error:.2e}, allowed is {expected.allowed_error:.2e}",
            ~(largest <= expected.allowed_error),
        ),
        (
            f"logsumexp is off by {max_lse_error:.2e}",
            lse_error > LSE_ABSOLUTE + LSE_RELATIVE * np.abs(exact_lse),
        ),
    )
    for rule, bad_rows in rules:
        if bad_rows.any():
            described = f"{rule}, {_describe(bad_rows, expected)}"
            return _refused(described, expected.shape, where, numbers)
    if expected.elements >= RMS_ELEMENTS and rms_ratio > MAX_RMS_RATIO:
        return _refused(_rms_rule(rms_ratio), expected.shape, where, numbers)
    return Verdict(ok=True, **numbers)


def _rms_rule(ratio: float) -> str:
    return (
        f"RMS error is {ratio:.2f} times the unavoidable one "
        f"(P and O rounded), {MAX_RMS_RATIO} times is allowed"
    )


def _refused(rule: str, shape: Shape, where: str, numbers: dict[str, Any]) -> Verdict:
    return Verdict(ok=False, reason=f"{rule}; {shape}{where}", **numbers)


def _describe(bad_rows: NDArray[np.bool_], expected: Expected) -> str:
    """How many rows, and which is the first."""
    shape = expected.shape
    first = int(expected.rows[np.argmax(bad_rows)])
    head, row = divmod(first, shape.seqlen_q)
    batch, head = divmod(head, shape.heads_q)
    return (
        f"{int(bad_rows.sum())} of {bad_rows.size} rows, "
        f"the first being batch {batch}, head {head}, query {row}"
    )


# ---- inputs and outputs with poison around them ----


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


def cases(config: AnyConfig) -> list[Case]:
    """Shapes with tails on both sides of the config's blocks, the quickest first.

    Those that depend on the config depend on one length of it, so that configs share them.
    """
    m, n = config.block_m, config.block_n

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
    if getattr(config, "persistent", False):  # more tiles than blocks run at once
        chosen.append(case(20, 3, 130, (40, 10)))
    return chosen


@dataclass(frozen=True)
class _Slab:
    """A (batch, seqlen, heads, head_dim) tensor in a flat buffer, with poison between its rows,
    after its sequences and around the whole. Narrow ones are aligned to 2 bytes only.
    """

    dims: tuple[int, int, int, int]
    narrow: bool

    @property
    def lead(self) -> int:
        return GUARD + (1 if self.narrow else 0)

    @property
    def row(self) -> int:
        return self.dims[2] * self.dims[3] + (1 if self.narrow else 8)

    @property
    def size(self) -> int:
        return self.lead + self.dims[0] * (self.dims[1] + PAD_ROWS) * self.row + GUARD

    def rows_of(self, flat: NDArray[Any]) -> NDArray[Any]:
        """(batch, seqlen, heads * head_dim): a view of the tensor in a flat array."""
        batch, seqlen, heads, head_dim = self.dims
        body = flat[self.lead : flat.size - GUARD].reshape(batch, seqlen + PAD_ROWS, self.row)
        return body[:, :seqlen, : heads * head_dim]

    def view(self, buffer: Any) -> TensorView:
        """The tensor in a CuPy buffer of `size` uint16."""
        from fagen.run.launch import TensorView

        strides = ((self.dims[1] + PAD_ROWS) * self.row, self.row, self.dims[3])
        return TensorView(int(buffer.data.ptr) + 2 * self.lead, self.dims, strides)

    def around(self, values: NDArray[Any]) -> NDArray[np.uint16]:
        """A flat array that holds `values`, (batch, seqlen, heads, head_dim)."""
        flat = np.full(self.size, POISON)
        rows = self.rows_of(flat)
        rows[...] = values.view(np.uint16).reshape(rows.shape)
        return flat

    def is_alone(self, flat: NDArray[Any]) -> bool:
        """Whether all but the tensor is poison."""
        rest = flat.copy()
        self.rows_of(rest)[...] = POISON
        return bool((rest == POISON).all())


@dataclass(frozen=True)
class _Bench:
    """A case on a device, ready for any kernel of the problem."""

    q: TensorView
    k: TensorView
    v: TensorView
    o_slab: _Slab
    o_buffer: Any
    lse_buffer: Any  # float32 (GUARD + rows + GUARD)
    expected: Expected
    inputs: tuple[Any, ...]  # what q, k and v point into
    uploaded: tuple[NDArray[np.uint16], ...]  # what they hold


def random_inputs(
    dtype: Dtype, head_dim: int, shape: Shape, *, drift: bool = False
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Random normal Q, K, V (batch, seqlen, heads, head_dim), the same for the same arguments.

    Args:
        drift: multiply keys by 4 at one end of the sequence down to 1/4 at the other.
    """
    rng = np.random.default_rng(list(shape.model_dump().values()))

    def normal(seqlen: int, heads: int) -> NDArray[np.float32]:
        return rng.standard_normal((shape.batch, seqlen, heads, head_dim), dtype=np.float32)

    q = normal(shape.seqlen_q, shape.heads_q)
    k, v = (normal(shape.seqlen_k, shape.heads_kv) for _ in range(2))
    if drift:
        growth = np.geomspace(0.25, 4.0, shape.seqlen_k, dtype=np.float32)[:, None]
        for batch, head in np.ndindex(shape.batch, shape.heads_kv):
            k[batch, :, head] *= growth if (batch + head) % 2 else growth[::-1]
    return tuple(x.astype(NUMPY_DTYPE[dtype]) for x in (q, k, v))  # type: ignore[return-value]


def _bench(problem: Problem, case: Case, device_index: int) -> _Bench:
    """Inputs, places for outputs, and the references."""
    import cupy

    shape = case.shape
    inputs = random_inputs(problem.dtype, problem.head_dim, shape, drift=case.drift)
    slabs = [_Slab(x.shape, narrow=problem.alignment == 2) for x in inputs]
    uploaded = tuple(slab.around(x) for slab, x in zip(slabs, inputs, strict=True))
    with on_device(device_index):
        buffers = tuple(cupy.asarray(flat) for flat in uploaded)
        q, k, v = (slab.view(buffer) for slab, buffer in zip(slabs, buffers, strict=True))
        references = reference.attention_on_device(problem, q, k, v, device_index=device_index)
        rows = shape.batch * shape.heads_q * shape.seqlen_q
        return _Bench(
            q=q,
            k=k,
            v=v,
            o_slab=slabs[0],
            o_buffer=cupy.empty(slabs[0].size, np.uint16),
            lse_buffer=cupy.empty(rows + 2 * GUARD, np.float32),
            expected=expect(references, problem.dtype, shape),
            inputs=buffers,
            uploaded=uploaded,
        )


# Made once for all configs of a problem: about two per length of block_m and block_n.
@lru_cache(maxsize=96)
def _cached_bench(problem: Problem, case: Case, device_index: int) -> _Bench:
    return _bench(problem, case, device_index)


# ---- the verdicts ----


def verify(
    kernel: LoadedKernel, *, shapes: Iterable[Shape] | None = None, device_index: int = 0
) -> Verdict:
    """Whether the kernel is right on small shapes, each with its own traps.

    Args:
        shapes: instead of those that `cases` chooses for the kernel's config.

    Raises:
        CudaError: if a CUDA call failed; after an illegal address no later call works.
    """
    bench_of: Callable[[Problem, Case, int], _Bench]
    if shapes is None:
        chosen, bench_of = cases(kernel.config), _cached_bench
    else:  # of any size, so not kept
        chosen, bench_of = [Case(shape) for shape in shapes], _bench
    worst, nearest = Verdict(ok=True), 0.0
    lse_error = squares = elements = 0.0
    for case in chosen:
        bench = bench_of(kernel.problem, case, device_index)
        verdict = _verify_one(kernel, bench, device_index)
        if not verdict.ok:
            return verdict
        squares += verdict.rms_ratio**2 * bench.expected.elements
        elements += bench.expected.elements
        lse_error = max(lse_error, verdict.lse_error)
        if verdict.max_error > nearest * verdict.allowed_error:
            worst, nearest = verdict, verdict.max_error / verdict.allowed_error
    rms_ratio = math.sqrt(squares / elements) if elements else 0.0
    summary: dict[str, Any] = {"rms_ratio": rms_ratio, "lse_error": lse_error}
    if rms_ratio > MAX_RMS_RATIO:
        summary |= {"ok": False, "reason": f"{_rms_rule(rms_ratio)}; over all shapes"}
    return worst.model_copy(update=summary)


def _verify_one(kernel: LoadedKernel, bench: _Bench, device_index: int) -> Verdict:
    expected, slab = bench.expected, bench.o_slab
    shape = expected.shape
    with on_device(device_index):
        (o_flat, lse_flat), (o_again, lse_again) = (
            _run_poisoned(kernel, bench, device_index) for _ in range(2)
        )
        inputs = [buffer.get() for buffer in bench.inputs]
    dtype = NUMPY_DTYPE[kernel.problem.dtype]
    out = by_row(slab.rows_of(o_flat).reshape(slab.dims)).view(dtype)
    verdict = judge(out, lse_flat[GUARD:-GUARD], expected)
    numbers = verdict.model_dump(include={"max_error", "allowed_error", "rms_ratio", "lse_error"})
    numbers["shape"] = shape
    guards = np.concatenate([lse_flat[:GUARD], lse_flat[-GUARD:]])
    strays = {
        "wrote outside of the output": not slab.is_alone(o_flat),
        "wrote outside of the logsumexp": not (guards.view(np.uint32) == POISON_32).all(),
        "wrote to its inputs": not all(map(np.array_equal, inputs, bench.uploaded)),
    }
    for rule, broken in strays.items():
        if broken:
            return _refused(rule, shape, "", numbers | {"stray": True})
    if verdict.ok and not (
        np.array_equal(o_flat, o_again)
        and np.array_equal(lse_flat.view(np.uint32), lse_again.view(np.uint32))
    ):
        return _refused("two runs differ", shape, "", numbers)
    return verdict


def _run_poisoned(
    kernel: LoadedKernel, bench: _Bench, device_index: int
) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """One launch on poisoned outputs; their whole buffers."""
    import cupy

    for buffer in (bench.o_buffer, bench.lse_buffer):
        buffer.data.memset(POISON_BYTE, buffer.nbytes)
    kernel.launch(
        bench.q,
        bench.k,
        bench.v,
        bench.o_slab.view(bench.o_buffer),
        int(bench.lse_buffer.data.ptr) + GUARD * bench.lse_buffer.itemsize,
        1 / math.sqrt(kernel.problem.head_dim),
        device_index=device_index,
        stream=cupy.cuda.get_current_stream().ptr,
    )
    return bench.o_buffer.get(), bench.lse_buffer.get()


def check_sample(
    kernel: LoadedKernel, shape: Shape, *, device_index: int = 0, rows: int = SAMPLED_ROWS
) -> Verdict:
    """Whether the kernel is right on a large shape, the one that `measure` times: some rows only.

    Args:
        rows: how many, spread over batch, heads and queries at random; the corners are among them.

    Raises:
        CudaError: if a CUDA call failed.
    """
    import cupy

    problem = kernel.problem
    at = measure.tensors(problem, shape, device_index)
    expected = _expected_sample(problem, shape, rows, device_index)
    ids = expected.rows
    o_array = at.arrays[3]
    with on_device(device_index):
        lse_array = cupy.empty(max(shape.batch * shape.heads_q * shape.seqlen_q, 1), np.float32)
        for array in (o_array, lse_array):
            array.data.memset(POISON_BYTE, array.nbytes)
        kernel.launch(
            at.q,
            at.k,
            at.v,
            at.o,
            int(lse_array.data.ptr),
            1 / math.sqrt(problem.head_dim),
            device_index=device_index,
            stream=cupy.cuda.get_current_stream().ptr,
        )
        out = np.empty((ids.size, problem.head_dim), NUMPY_DTYPE[problem.dtype])
        for i, row in enumerate(ids.tolist()):
            head, query = divmod(row, shape.seqlen_q)
            batch, head = divmod(head, shape.heads_q)
            first = at.lead + ((batch * shape.seqlen_q + query) * shape.heads_q + head) * (
                problem.head_dim
            )
            out[i] = o_array[first : first + problem.head_dim].get().view(out.dtype)
        lse = lse_array.get()[ids]
    return judge(out, lse, expected, where=f", {ids.size} rows of it")


@lru_cache(maxsize=16)
def _expected_sample(problem: Problem, shape: Shape, rows: int, device_index: int) -> Expected:
    at = measure.tensors(problem, shape, device_index)
    total = shape.batch * shape.heads_q * shape.seqlen_q
    chosen = np.random.default_rng(0).choice(total, min(rows, total), replace=False)
    corners = [0, shape.seqlen_q - 1, total - shape.seqlen_q, total - 1] if total else []
    ids = np.unique(np.concatenate([chosen, corners])).astype(np.int64)
    references = reference.attention_on_device(
        problem, at.q, at.k, at.v, rows=ids, device_index=device_index
    )
    return expect(references, problem.dtype, shape)
