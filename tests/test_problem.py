"""What is counted in a shape, and how shapes are classed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from pydantic import ValidationError

from fagen.dtypes import BY_ARRAY_NAME, DTYPES
from fagen.mask import Mask
from fagen.operation import FORWARD, OPERATIONS, Operand, Operation
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
        assert Mask(causal=False).pairs(queries, keys) == len(below)
        assert Mask(causal=True).pairs(queries, keys) == sum(below)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_sees_the_keys_that_one_can_count(causal: bool) -> None:
    mask = Mask(causal)
    for queries, keys in itertools.product(range(7), repeat=2):
        for i in range(queries):
            seen = [j for j in range(keys) if not causal or j <= i + keys - queries]
            begin, end = mask.visible(i, queries, keys)
            assert list(range(begin, end)) == seen
        begins, ends = mask.visible(np.arange(queries), queries, keys)
        rows = [mask.visible(i, queries, keys) for i in range(queries)]
        assert list(zip(begins.tolist(), ends.tolist(), strict=True)) == rows
        assert int((ends - begins).sum()) == mask.pairs(queries, keys)


def test_masks_are_named() -> None:
    assert [str(Mask(causal)) for causal in (False, True)] == ["full", "causal"]
    assert Problem(dtype="bf16", head_dim=64, causal=True).mask == Mask(causal=True)


@pytest.mark.parametrize(
    ("name", "bytes_", "tensor_map"), [("fp16", 2, 6), ("bf16", 2, 9), ("fp32", 4, 7)]
)
def test_the_table_of_dtypes_is_right(name: str, bytes_: int, tensor_map: int) -> None:
    from cuda.bindings.driver import CUtensorMapDataType

    dtype = DTYPES[name]
    assert (dtype.name, dtype.bytes, dtype.numpy.itemsize) == (name, bytes_, bytes_)
    assert dtype.numpy.name == dtype.array_name
    assert BY_ARRAY_NAME[dtype.array_name] is dtype
    one = np.ones(1, dtype.numpy)
    next_one = (one.view(f"u{bytes_}") + 1).view(dtype.numpy)
    assert dtype.epsilon == float(next_one[0]) - 1
    code = getattr(CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.tensor_map}")
    assert int(code) == dtype.tensor_map_code == tensor_map


def test_problems_know_their_operation_and_element_type() -> None:
    assert set(DTYPE_NAMES) <= set(DTYPES)
    problem = Problem(dtype="fp16", head_dim=64)
    assert (problem.operation, problem.element) == (FORWARD, DTYPES["fp16"])
    with pytest.raises(ValidationError, match="the operation has to be one of forward"):
        Problem(op="backward", dtype="fp16", head_dim=64)


def test_operands_have_sizes() -> None:
    problem = Problem(dtype="bf16", head_dim=64)
    asked = shape(100, 300, batch=2)
    sizes = {operand.name: operand.sizes(problem, asked) for operand in FORWARD.operands}
    assert sizes == {
        "q": (2, 100, 4, 64),
        "k": (2, 300, 2, 64),
        "v": (2, 300, 2, 64),
        "o": (2, 100, 4, 64),
        "lse": (2, 4, 100),
    }
    for operand in FORWARD.operands:
        assert operand.elements(problem, asked) == math.prod(sizes[operand.name])
        assert FORWARD.operand(operand.name) is operand
    assert [operand.name for operand in FORWARD.strided] == ["q", "k", "v", "o"]
    assert [operand.name for operand in FORWARD.operands if operand.role == "out"] == ["o", "lse"]


def test_an_operand_that_is_read_and_written_moves_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    dims = ("batch", "seqlen_q", "head_dim")
    operands = (
        Operand("x", "in", dims),
        Operand("state", "inout", dims, "fp32"),
        Operand("extra", "out", dims, optional=True),
    )
    monkeypatch.setitem(OPERATIONS, "scan", Operation("scan", operands, products=3))
    problem = Problem(op="scan", dtype="bf16", head_dim=64)
    asked = shape(100, 300, batch=2)
    assert asked.bytes(problem) == 2 * 100 * 64 * (2 + 2 * 4)
    assert asked.flops(problem) == 3 * 2 * 64 * (100 * 300) * 2 * 4


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


def test_names_of_problems_are_as_records_and_studies_have_them() -> None:
    problem = Problem(dtype="bf16", head_dim=128, causal=True)
    assert problem.name == str(problem) == "forward_bf16_d128_causal"
    narrow = Problem(dtype="fp16", head_dim=40, alignment=2)
    assert narrow.name == "forward_fp16_d40_full_narrow"


def test_problems_that_differ_in_head_dim_are_further_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OPERATIONS, "other", FORWARD._replace(name="other"))
    base = Problem(dtype="bf16", head_dim=64)
    others = [
        base,
        Problem(dtype="fp16", head_dim=64),
        Problem(dtype="bf16", head_dim=64, causal=True),
        Problem(dtype="fp16", head_dim=64, causal=True),
        Problem(dtype="bf16", head_dim=72),
        Problem(dtype="bf16", head_dim=128),
        Problem(dtype="fp16", head_dim=256, causal=True),
        Problem(op="other", dtype="bf16", head_dim=64),
    ]
    distances = [base.distance(other) for other in others]
    assert distances[0] == 0
    assert distances[-1] == math.inf
    assert distances == sorted(set(distances))
    assert [other.distance(base) for other in others] == pytest.approx(distances)
    assert base.distance(others[5]) == 1


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
