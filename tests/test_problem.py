"""What is counted in a shape, and how shapes are classed."""

from __future__ import annotations

import itertools
import math

import pytest
from pydantic import ValidationError

from fagen.problem import DTYPE_NAMES, Bucket, Problem, Shape, standard_shape


def shape(
    seqlen_q: int, seqlen_k: int, *, batch: int = 1, heads_q: int = 4, heads_kv: int = 2
) -> Shape:
    return Shape(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, heads_kv=heads_kv
    )


def test_visible_pairs_are_those_that_one_can_count() -> None:
    for queries, keys in itertools.product(range(7), repeat=2):
        below = [j <= i + keys - queries for i in range(queries) for j in range(keys)]
        assert shape(queries, keys).visible_pairs(causal=False) == len(below)
        assert shape(queries, keys).visible_pairs(causal=True) == sum(below)


def test_flops_and_bytes() -> None:
    full, causal = (Problem(dtype="bf16", head_dim=64, causal=causal) for causal in (False, True))
    asked = shape(100, 300, batch=2)
    assert asked.flops(full) == 2 * 4 * (2 * 100 * 64 * 300) * 2  # two products of 2*m*n*k
    assert asked.flops(causal) == 4 * 64 * (100 * 200 + 100 * 101 // 2) * 2 * 4
    assert asked.tflops(full, time_us=100.0) == pytest.approx(asked.flops(full) / 1e-4 / 1e12)
    q_and_o, k_and_v = 2 * (2 * 100 * 4 * 64), 2 * (2 * 300 * 2 * 64)
    assert asked.bytes(full) == 2 * (q_and_o + k_and_v)


def test_buckets_round_to_the_nearest_power_of_two_in_the_logarithm() -> None:
    for length in range(1, 3000):
        bucket = shape(length, length).bucket()
        assert bucket.seqlen_q == bucket.seqlen_k == 2 ** round(math.log2(length))
    assert shape(0, 0, batch=0).bucket() == Bucket(group=2, seqlen_q=0, seqlen_k=0, batch_heads=0)
    assert shape(5, 5, batch=3, heads_q=12, heads_kv=3).bucket().batch_heads == 8
    assert shape(5, 5, heads_q=12, heads_kv=3).bucket().group == 4
    assert shape(5, 5, heads_q=0, heads_kv=0).bucket().group == 1


def test_buckets_of_unlike_lengths_are_further_apart() -> None:
    base = shape(1024, 1024, batch=8).bucket()
    others = [
        shape(1024, 1024, batch=8),
        shape(1024, 1024, batch=8, heads_q=2),
        shape(1024, 1024, batch=16),
        shape(2048, 1024, batch=8),
        shape(2048, 2048, batch=8),
        shape(0, 2048, batch=8),
    ]
    distances = [base.distance(other.bucket()) for other in others]
    assert distances[0] == 0
    assert distances == sorted(set(distances))
    assert all(other.bucket().distance(base) == base.distance(other.bucket()) for other in others)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(6, 4), (4, 0), (2, 4)])
def test_heads_that_make_no_groups_are_refused(heads_q: int, heads_kv: int) -> None:
    with pytest.raises(ValidationError, match="has to be a multiple of heads_kv"):
        shape(1, 1, heads_q=heads_q, heads_kv=heads_kv)


@pytest.mark.parametrize("head_dim", [0, 4, 12, 264])
def test_head_dims_outside_of_what_is_covered_are_refused(head_dim: int) -> None:
    with pytest.raises(ValidationError, match="head_dim"):
        Problem(dtype="bf16", head_dim=head_dim)


def test_names_tell_problems_apart() -> None:
    problems = [
        Problem(dtype=dtype, head_dim=head_dim, causal=causal, alignment=alignment)
        for dtype in DTYPE_NAMES
        for head_dim in (64, 128)
        for causal in (False, True)
        for alignment in (2, 16)
    ]
    assert len({problem.name for problem in problems}) == len(problems)
    assert all(problem.name.isidentifier() for problem in problems)


def test_the_standard_shape_fills_up_what_is_left_out() -> None:
    for head_dim, seqlen in itertools.product((64, 128, 256), (512, 16384)):
        filled = standard_shape(head_dim, seqlen, seqlen)
        assert filled.batch * filled.seqlen_q == 16384
        assert filled.heads_q * head_dim == filled.heads_kv * head_dim == 2048
    assert standard_shape(256, 0, 7).batch == 16384
    assert standard_shape(256, 1 << 20, 7, heads=3).batch == 1
    assert standard_shape(64, 5, 7, batch=2, heads=6, heads_kv=3) == shape(
        5, 7, batch=2, heads_q=6, heads_kv=3
    )
