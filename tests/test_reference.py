"""The NumPy reference against plain loops, and the CUDA one against NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fagen.build.compile import compile_source
from fagen.build.render import NUMBER, fold
from fagen.device import architecture
from fagen.judge import reference
from fagen.judge.reference import NUMPY_DTYPE
from fagen.judge.verify import random_inputs
from fagen.problem import DTYPES, Dtype, Problem, Shape

ULP: dict[Dtype, float] = {"fp16": 2.0**-10, "bf16": 2.0**-7}  # at 1


def by_loops(
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    causal: bool,
    scale: float,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Attention as one would explain it."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    out = np.zeros(q.shape)
    lse = np.full((batch, heads_q, seqlen_q), -np.inf)
    for b in range(batch):
        for h in range(heads_q):
            for i in range(seqlen_q):
                seen = [j for j in range(seqlen_k) if not causal or j <= i + seqlen_k - seqlen_q]
                if not seen:
                    continue
                kv = h // (heads_q // heads_kv)
                scores = [
                    scale
                    * sum(float(q[b, i, h, d]) * float(k[b, j, kv, d]) for d in range(head_dim))
                    for j in seen
                ]
                lse[b, h, i] = math.log(sum(map(math.exp, scores)))
                for score, j in zip(scores, seen, strict=True):
                    out[b, i, h] += math.exp(score - lse[b, h, i]) * v[b, j, kv].astype(float)
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 7), (7, 3), (4, 1), (1, 6)])
def test_attention_equals_loops(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    shape = Shape(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=4, heads_kv=2)
    q, k, v = random_inputs("bf16", 8, shape)
    out, lse = reference.attention(q, k, v, causal=causal, softmax_scale=0.7)
    expected_out, expected_lse = by_loops(q, k, v, causal, 0.7)
    np.testing.assert_allclose(out, expected_out, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-12)
    assert np.isinf(lse).any() == (causal and seqlen_q > seqlen_k)


def test_a_few_queries_get_the_answers_that_all_of_them_get() -> None:
    q, k, v = random_inputs(
        "fp16", 8, Shape(batch=2, seqlen_q=7, seqlen_k=5, heads_q=2, heads_kv=1)
    )
    out, lse = reference.attention(q, k, v, causal=True)
    some = np.array([0, 6, 3])
    few_out, few_lse = reference.attention(
        q, k, np.concatenate([v, -v], axis=-1), causal=True, queries=some
    )
    np.testing.assert_allclose(few_out, np.concatenate([out, -out], axis=-1)[:, some], atol=1e-15)
    np.testing.assert_array_equal(few_lse, lse[:, :, some])


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_zero_lengths(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    q = np.ones((batch, seqlen_q, 2, 8), np.float16)
    k = np.ones((batch, seqlen_k, 1, 8), np.float16)
    out, lse = reference.attention(q, k, k)
    assert out.shape == q.shape
    assert lse.shape == (batch, 2, seqlen_q)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_scale_defaults_to_the_root_of_the_head_dim() -> None:
    q, k, v = (np.random.default_rng(i).standard_normal((1, 4, 1, 16)) for i in range(3))
    default, _ = reference.attention(q, k, v)
    np.testing.assert_array_equal(default, reference.attention(q, k, v, softmax_scale=0.25)[0])
    assert not np.allclose(default, reference.attention(q, k, v, softmax_scale=0.3)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_variants_err_by_about_an_ulp(dtype: Dtype) -> None:
    shape = Shape(batch=1, seqlen_q=100, seqlen_k=150, heads_q=2, heads_kv=1)
    found = reference.references(*random_inputs(dtype, 64, shape))
    ulp = ULP[dtype]
    size = math.sqrt(np.mean(found.out**2))

    def rms(out: np.ndarray[Any, Any]) -> float:
        assert (reference.round_to(out, NUMPY_DTYPE[dtype]) == out).all(), "O is not rounded"
        return math.sqrt(np.mean((out - found.out) ** 2)) / size

    soft, low = rms(found.float32_softmax), rms(found.low_precision)
    assert 0.1 * ulp < soft < 0.5 * ulp
    assert soft < low < 3 * ulp


def test_wide_inputs_are_not_rounded() -> None:
    q, k, v = (np.random.default_rng(i).standard_normal((1, 9, 2, 8)) for i in range(3))
    found = reference.references(q, k, v, causal=True)
    np.testing.assert_allclose(found.low_precision, found.out, rtol=1e-12)


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_compiles(dtype: Dtype, arch: str) -> None:
    source = fold("tools/reference_forward.cu", **NUMBER[dtype])
    resources = compile_source(source, architecture(arch), "reference_forward").resources
    assert resources.why_bad() is None
    assert resources.smem_bytes == 4 * 8 * reference.REFERENCE_THREADS


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim"), [(300, 600, 72), (70, 33, 256)])
def test_kernel_equals_numpy(
    seqlen_q: int, seqlen_k: int, head_dim: int, dtype: Dtype, causal: bool
) -> None:
    import cupy

    from fagen.run.launch import TensorView

    shape = Shape(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=4, heads_kv=2)
    inputs = random_inputs(dtype, head_dim, shape)
    arrays = [cupy.asarray(x.view(np.uint16)) for x in inputs]
    views = [TensorView.contiguous(array.data.ptr, array.shape) for array in arrays]
    problem = Problem(dtype=dtype, head_dim=head_dim, causal=causal)
    there = reference.attention_on_device(problem, *views)
    here = reference.references(*inputs, causal=causal)
    np.testing.assert_allclose(there.out, here.out, atol=1e-12)
    np.testing.assert_allclose(there.lse, here.lse, atol=1e-12)
    # A sum that is a hair off may round the other way, by an ulp; a score that does, and with
    # it P, moves a row's small elements by more than an ulp of theirs.
    ulp = ULP[dtype]
    for name in ("low_precision", "float32_softmax"):
        ours, theirs = getattr(here, name), getattr(there, name)
        assert np.mean(ours != theirs) < 0.01, name
        np.testing.assert_allclose(theirs, ours, rtol=2 * ulp, atol=ulp)

    some = np.array([0, here.rows[-1], 17], np.int64)
    sample = reference.attention_on_device(problem, *views, rows=some)
    np.testing.assert_array_equal(sample.out, there.out[some])
    np.testing.assert_array_equal(sample.lse, there.lse[some])
