"""The NumPy reference against plain loops, and the CUDA one against NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fagen.build.compile import compile_source
from fagen.build.render import fold
from fagen.device import architecture
from fagen.dtypes import DTYPES
from fagen.judge import reference
from fagen.judge.inputs import random_inputs
from fagen.problem import DTYPE_NAMES, DtypeName, Problem, Shape

ULP: dict[DtypeName, float] = {"fp16": 2.0**-10, "bf16": 2.0**-7}  # at 1


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
    q, k, v = random_inputs(Problem(dtype="bf16", head_dim=8), shape).values()
    out, lse = reference.attention(q, k, v, causal=causal, softmax_scale=0.7)
    expected_out, expected_lse = by_loops(q, k, v, causal, 0.7)
    np.testing.assert_allclose(out, expected_out, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-12)
    assert np.isinf(lse).any() == (causal and seqlen_q > seqlen_k)


def test_a_few_queries_get_the_answers_that_all_of_them_get() -> None:
    shape = Shape(batch=2, seqlen_q=7, seqlen_k=5, heads_q=2, heads_kv=1)
    q, k, v = random_inputs(Problem(dtype="fp16", head_dim=8), shape).values()
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


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_rounded_variants_err_by_about_an_ulp(dtype: DtypeName) -> None:
    shape = Shape(batch=1, seqlen_q=100, seqlen_k=150, heads_q=2, heads_kv=1)
    problem = Problem(dtype=dtype, head_dim=64)
    found = reference.references(problem, random_inputs(problem, shape))["o"]
    assert found.unavoidable is not None
    assert found.low_precision is not None
    ulp = ULP[dtype]
    size = math.sqrt(np.mean(found.exact**2))

    def rms(out: np.ndarray[Any, Any]) -> float:
        assert (reference.round_to(out, DTYPES[dtype].numpy) == out).all(), "O is not rounded"
        return math.sqrt(np.mean((out - found.exact) ** 2)) / size

    soft, low = rms(found.unavoidable), rms(found.low_precision)
    assert 0.1 * ulp < soft < 0.5 * ulp
    assert soft < low < 3 * ulp


def test_rows_of_both_outputs_count_in_one_order() -> None:
    shape = Shape(batch=2, seqlen_q=5, seqlen_k=3, heads_q=4, heads_kv=2)
    problem = Problem(dtype="bf16", head_dim=8, causal=True)
    inputs = random_inputs(problem, shape)
    out, lse = reference.attention(*inputs.values(), causal=True)
    found = reference.references(problem, inputs)
    assert [(x.low_precision is None, x.unavoidable is None) for x in found.values()] == [
        (False, False),
        (True, True),
    ]
    for each in found.values():
        assert each.row_dims == ("batch", "heads_q", "seqlen_q")
        places = [np.unravel_index(row, (2, 4, 5)) for row in each.rows]
        assert each.empty.tolist() == [query < 2 for _, _, query in places]
    for row, (batch, head, query) in enumerate(places):
        np.testing.assert_array_equal(found["o"].exact[row], out[batch, query, head])
        assert found["lse"].exact[row] == lse[batch, head, query]


def test_wide_inputs_are_not_rounded() -> None:
    q, k, v = (np.random.default_rng(i).standard_normal((1, 9, 2, 8)) for i in range(3))
    problem = Problem(dtype="bf16", head_dim=8, causal=True)
    found = reference.references(problem, {"q": q, "k": k, "v": v})["o"]
    assert found.low_precision is not None
    np.testing.assert_allclose(found.low_precision, found.exact, rtol=1e-12)


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_kernel_compiles(dtype: DtypeName, arch: str) -> None:
    element = DTYPES[dtype]
    source = fold(
        "tools/reference_forward.cu", number=element.number, number_header=element.number_header
    )
    resources = compile_source(source, architecture(arch), "reference_forward").resources
    assert resources.why_bad() is None
    assert resources.smem_bytes == 4 * 8 * reference.REFERENCE_THREADS


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim"), [(300, 600, 72), (70, 33, 256)])
def test_kernel_equals_numpy(
    seqlen_q: int, seqlen_k: int, head_dim: int, dtype: DtypeName, causal: bool
) -> None:
    import cupy

    from fagen.judge.bench import bench_of
    from fagen.run.executor import TensorView

    shape = Shape(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=4, heads_kv=2)
    problem = Problem(dtype=dtype, head_dim=head_dim, causal=causal)
    inputs = random_inputs(problem, shape)
    arrays = {name: cupy.asarray(x.view(np.uint16)) for name, x in inputs.items()}
    views = {
        name: TensorView.contiguous(array.data.ptr, array.shape) for name, array in arrays.items()
    }
    there = reference.forward_on_device(bench_of(0), problem, shape, views)
    here = reference.references(problem, inputs)
    for name in ("o", "lse"):
        assert here[name].row_dims == there[name].row_dims
        np.testing.assert_array_equal(there[name].rows, here[name].rows)
        np.testing.assert_array_equal(there[name].empty, here[name].empty)
        np.testing.assert_allclose(there[name].exact, here[name].exact, atol=1e-12)
    # A sum that is a hair off may round the other way, by an ulp; a score that does, and with
    # it P, moves a row's small elements by more than an ulp of theirs.
    ulp = ULP[dtype]
    for variant in ("low_precision", "unavoidable"):
        ours, theirs = getattr(here["o"], variant), getattr(there["o"], variant)
        assert np.mean(ours != theirs) < 0.01, variant
        np.testing.assert_allclose(theirs, ours, rtol=2 * ulp, atol=ulp)

    some = np.array([0, here["o"].rows[-1], 17], np.int64)
    sample = reference.forward_on_device(bench_of(0), problem, shape, views, some)
    for name in ("o", "lse"):
        np.testing.assert_array_equal(sample[name].rows, some)
        np.testing.assert_array_equal(sample[name].exact, there[name].exact[some])
