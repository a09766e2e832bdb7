"""Attention in float64, slowly: what fast kernels are judged against.

Three variants of the same maths, by what is rounded to the inputs' dtype; sums are always exact:

- exact: nothing.
- low precision: every product (softmax_scale * K, Q K^T, P V) and the normalised P, as a
  framework does that knows no fused attention (FlashAttention's tests call it "pt").
- float32 softmax: P before it is normalised, and O. No fused kernel can do without these two
  roundings; next to them those of float32 sums do not show.

Once in NumPy, for machines with no GPU and as the reference's own reference, and once as a CUDA
kernel (templates/tools/reference_forward.cu.j2), which needs neither torch nor cuBLAS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fagen.judge.bench import Bench
from fagen.mask import Mask
from fagen.problem import Problem, Shape

if TYPE_CHECKING:
    from fagen.run.executor import TensorView

Float64 = NDArray[np.float64]
Variant = Literal["exact", "low_precision", "float32_softmax"]

REFERENCE_THREADS = 256  # kThreads of the CUDA reference


@dataclass(frozen=True)
class Reference:
    """What one output is compared with, row by row.

    Attributes:
        row_dims: the dimensions that a row's number counts through, the last one fastest.
        rows: (rows,) int64, the numbers.
        exact: (rows, columns).
        low_precision, unavoidable: the same with roundings, of a 16-bit output: those of a
            framework that knows no fused kernels, and those that no fused kernel can avoid. None
            of an output that has to be exact.
        empty: (rows,) whether nothing goes into a row: it then has to be exactly what it is here.
    """

    row_dims: tuple[str, ...]
    rows: NDArray[np.int64]
    exact: Float64
    low_precision: Float64 | None
    unavoidable: Float64 | None
    empty: NDArray[np.bool_]


References = Mapping[str, Reference]  # by the output's name

QUERY_ROWS = ("batch", "heads_q", "seqlen_q")


def round_to(x: Float64, dtype: np.dtype[Any]) -> Float64:
    """`x` rounded to `dtype`, as float64 again."""
    return x.astype(dtype).astype(np.float64)


def attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    queries: NDArray[np.int64] | None = None,
) -> tuple[Float64, Float64]:
    """Exact attention.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), of any floating dtype.
        k, v: (batch, seqlen_k, heads_kv, head_dim); heads_q is a multiple of heads_kv, and the
            head dim of v is free.
        causal: whether query i sees only keys up to i + seqlen_k - seqlen_q.
        softmax_scale: 1/sqrt(head_dim) if None.
        queries: places in a sequence, the only ones that are answered; all if None.

    Returns:
        The output (batch, queries, heads_q, head_dim of v) and the logsumexp (batch, heads_q,
        queries), both float64. A row without keys gives 0 and -inf.
    """
    return _attention(q, k, v, causal, softmax_scale, "exact", queries)


def _attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    causal: bool,
    softmax_scale: float | None,
    variant: Variant,
    queries: NDArray[np.int64] | None = None,
) -> tuple[Float64, Float64]:
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    dtype = np.result_type(q.dtype)
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale

    row = np.arange(seqlen_q) if queries is None else queries
    begin, end = Mask(causal).visible(row, seqlen_q, seqlen_k)
    if queries is not None:
        q = q[:, queries]
    sees = end > begin
    key = np.arange(seqlen_k)
    hidden = (key < begin[sees, None]) | (key >= end[sees, None])

    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((batch, heads_q, row.size), -np.inf)

    def rounded(x: Float64, when: bool) -> Float64:
        return round_to(x, dtype) if when else x

    low = variant == "low_precision"
    for b, h in np.ndindex(batch, heads_q):
        keys, values = (x[b, :, h * heads_kv // heads_q].astype(np.float64) for x in (k, v))
        rows = q[b, sees, h].astype(np.float64)
        if low:
            scores = round_to(rows @ round_to(scale * keys, dtype).T, dtype)
        else:
            scores = scale * (rows @ keys.T)
        scores[hidden] = -np.inf
        maximum = scores.max(axis=1, keepdims=True, initial=-np.inf)
        p = np.exp(scores - maximum)
        total = p.sum(axis=1, keepdims=True)
        if variant == "float32_softmax":
            product = round_to(p, dtype) @ values / total
        else:
            product = rounded(p / total, low) @ values
        out[b, sees, h] = rounded(product, variant != "exact")
        lse[b, h, sees] = (maximum + np.log(total))[:, 0]
    return out, lse


def references(
    problem: Problem, inputs: Mapping[str, NDArray[Any]], *, softmax_scale: float | None = None
) -> References:
    """All that `verify` compares the forward pass with, in NumPy.

    Args:
        inputs: q, k and v, as of `attention`.
    """
    variants: tuple[Variant, ...] = ("exact", "low_precision", "float32_softmax")
    q, k, v = (inputs[name] for name in "qkv")
    (out, lse), (low, _), (soft, _) = (
        _attention(q, k, v, problem.causal, softmax_scale, variant) for variant in variants
    )
    rows = np.arange(lse.size, dtype=np.int64)
    return _forward(rows, by_row(out), lse.ravel(), by_row(low), by_row(soft))


def _forward(
    rows: NDArray[np.int64], out: Float64, lse: Float64, low: Float64, soft: Float64
) -> References:
    empty = lse == -np.inf
    return {
        "o": Reference(QUERY_ROWS, rows, out, low, soft, empty),
        "lse": Reference(QUERY_ROWS, rows, lse[:, None], None, None, empty),
    }


def by_row(tensor: NDArray[Any]) -> NDArray[Any]:
    """(batch, seqlen, heads, head_dim) as (batch * heads * seqlen, head_dim)."""
    batch, seqlen, heads, head_dim = tensor.shape
    return tensor.transpose(0, 2, 1, 3).reshape(batch * heads * seqlen, head_dim)


def forward_on_device(
    bench: Bench,
    problem: Problem,
    shape: Shape,
    views: Mapping[str, TensorView],
    rows: NDArray[np.int64] | None = None,
    *,
    softmax_scale: float | None = None,
) -> References:
    """`references` by a kernel of our own, of tensors in device memory.

    Args:
        rows: which rows, as `Reference.rows`; all of them if None.

    Raises:
        CudaError: if a CUDA call failed, perhaps because an earlier kernel did.
    """
    import cupy

    q, k, v = (views[name] for name in "qkv")
    head_dim = problem.head_dim
    if rows is None:
        rows = np.arange(shape.batch * shape.heads_q * shape.seqlen_q, dtype=np.int64)
    if rows.size == 0:
        nothing = np.zeros((0, head_dim))
        return _forward(rows, nothing, np.zeros(0), nothing, nothing)
    element = problem.element
    with bench.use():
        kernel = bench.kernel(
            "reference_forward",
            "tools/reference_forward.cu",
            number=element.number,
            number_header=element.number_header,
        )
        out = cupy.empty((3, rows.size, head_dim), np.float64)
        lse = cupy.empty(rows.size, np.float64)
        strides = cupy.asarray(np.array([q.strides, k.strides, v.strides], np.int64))
        rows_there = cupy.asarray(rows)
        lengths = (shape.heads_q, shape.heads_kv, shape.seqlen_q, shape.seqlen_k, head_dim)
        arguments = (
            *(np.uint64(view.pointer) for view in (q, k, v)),
            strides,
            rows_there,
            out,
            lse,
            np.float64(1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale),
            *(np.int32(length) for length in lengths),
            np.int32(problem.causal),
        )
        kernel((rows.size, 3), (REFERENCE_THREADS,), arguments)
        exact, low, soft = out.get()
        return _forward(rows, exact, lse.get(), low, soft)


OnDevice = Callable[
    [Bench, Problem, Shape, Mapping[str, "TensorView"], "NDArray[np.int64] | None"], References
]
# By operation: what its outputs are compared with.
ON_DEVICE: dict[str, OnDevice] = {"forward": forward_on_device}
