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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fagen.build.render import NUMBER
from fagen.judge.cupy_device import helper_kernel, on_device
from fagen.problem import Dtype, Problem

if TYPE_CHECKING:
    from fagen.run.launch import TensorView

Float64 = NDArray[np.float64]
Variant = Literal["exact", "low_precision", "float32_softmax"]

NUMPY_DTYPE: dict[Dtype, np.dtype[Any]] = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
EPSILON: dict[Dtype, float] = {"fp16": 2.0**-10, "bf16": 2.0**-7}  # of a float at 1
REFERENCE_THREADS = 256  # kThreads of templates/tools/reference_forward.cu.j2


@dataclass(frozen=True)
class References:
    """What a kernel's output is compared with; rows go through batch, head and query, in this
    order, or are those that were asked for.

    Attributes:
        rows: (rows,) int64: (batch * heads_q + head) * seqlen_q + query of each row.
        out: (rows, head_dim), exact.
        lse: (rows,), natural logarithm; -inf for a row without keys.
        low_precision, float32_softmax: (rows, head_dim), the variants.
    """

    rows: NDArray[np.int64]
    out: Float64
    lse: Float64
    low_precision: Float64
    float32_softmax: Float64


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

    visible = np.full(seqlen_q, seqlen_k)  # keys that each query sees
    if causal:
        visible = np.clip(np.arange(seqlen_q) + 1 + seqlen_k - seqlen_q, 0, seqlen_k)
    if queries is not None:
        q, visible = q[:, queries], visible[queries]
    sees = visible > 0
    hidden = np.arange(seqlen_k) >= visible[sees, None]

    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((batch, heads_q, visible.size), -np.inf)

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
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> References:
    """All that `verify.judge` wants, in NumPy; the arguments are those of `attention`."""
    variants: tuple[Variant, ...] = ("exact", "low_precision", "float32_softmax")
    (out, lse), (low, _), (soft, _) = (
        _attention(q, k, v, causal, softmax_scale, variant) for variant in variants
    )
    return References(
        np.arange(lse.size, dtype=np.int64), by_row(out), lse.ravel(), by_row(low), by_row(soft)
    )


def by_row(tensor: NDArray[Any]) -> NDArray[Any]:
    """(batch, seqlen, heads, head_dim) as (batch * heads * seqlen, head_dim)."""
    batch, seqlen, heads, head_dim = tensor.shape
    return tensor.transpose(0, 2, 1, 3).reshape(batch * heads * seqlen, head_dim)


def attention_on_device(
    problem: Problem,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    *,
    softmax_scale: float | None = None,
    rows: NDArray[np.int64] | None = None,
    device_index: int = 0,
) -> References:
    """`references` by a kernel of our own, of tensors in device memory.

    Args:
        rows: which rows, as `References.rows`; all of them if None.

    Raises:
        CudaError: if a CUDA call failed, perhaps because an earlier kernel did.
    """
    import cupy

    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_kv, _ = k.shape
    if rows is None:
        rows = np.arange(batch * heads_q * seqlen_q, dtype=np.int64)
    if rows.size == 0:
        empty = np.zeros((0, head_dim))
        return References(rows, empty, np.zeros(0), empty, empty)
    with on_device(device_index):
        kernel = helper_kernel(
            "reference_forward",
            "tools/reference_forward.cu",
            device_index,
            **NUMBER[problem.dtype],
        )
        out = cupy.empty((3, rows.size, head_dim), np.float64)
        lse = cupy.empty(rows.size, np.float64)
        strides = cupy.asarray(np.array([q.strides, k.strides, v.strides], np.int64))
        rows_there = cupy.asarray(rows)
        arguments = (
            *(np.uint64(view.pointer) for view in (q, k, v)),
            strides,
            rows_there,
            out,
            lse,
            np.float64(1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale),
            *(np.int32(n) for n in (heads_q, heads_kv, seqlen_q, seqlen_k, head_dim)),
            np.int32(problem.causal),
        )
        kernel((rows.size, 3), (REFERENCE_THREADS,), arguments)
        exact, low, soft = out.get()
        return References(rows, exact, lse.get(), low, soft)
