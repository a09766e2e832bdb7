"""What tensors fagen takes, and the line that it answers others with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_driver import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FakeTensor,
    Parcel,
    fake_torch,
    forget_frameworks,
)

from fagen.errors import ArgumentError, UnsupportedError
from fagen.operation import FORWARD
from fagen.problem import Problem, Shape
from fagen.run import ask as asking
from fagen.run.ask import Question, Tensor, ask


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    module = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    forget_frameworks()
    yield module
    forget_frameworks()


def fit(array: Any, layout: str = "bshd", name: str = "q") -> Tensor:
    """An array as an operand of the forward pass."""
    framework, _, geometry = asking.read(array, name)
    return asking.tensor(FORWARD.operand(name), framework, geometry, layout)


def question(
    *arrays: FakeTensor, causal: bool = False, layout: str = "bshd", aligned: bool = True
) -> Question:
    """What a call with these for q, k, v and out asks."""
    read = [asking.read(array, name) for array, name in zip(arrays, "qkvo", strict=False)]
    known = [(framework, geometry) for framework, _, geometry in read]
    return ask(FORWARD, known, causal=causal, layout=layout, aligned=aligned)


def test_a_tensor_is_read_without_a_copy() -> None:
    array = FakeTensor((2, 300, 4, 64), FLOAT16, pointer=4096)
    assert asking.read(array, "q")[1] == 4096
    tensor = fit(array)
    assert tensor.shape == (2, 300, 4, 64)
    assert tensor.strides == (300 * 4 * 64, 4 * 64, 64)
    assert (tensor.dtype.name, tensor.device_index) == ("fp16", 0)


def test_layout_bhsd_only_permutes() -> None:
    tensor = fit(FakeTensor((2, 4, 300, 64), pointer=4096), "bhsd")
    assert tensor.shape == (2, 300, 4, 64)
    assert tensor.strides == (4 * 300 * 64, 64, 300 * 64)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (FakeTensor((2, 8, 4, 64), device=Parcel("cpu", None)), "q is not on a CUDA device"),
        (FakeTensor((8, 4, 64)), r"q has 3 dimensions: allowed are 4, \(batch, seqlen, heads"),
        (FakeTensor((2, 8, 4, 64), FLOAT32), r"q is float32: allowed are fp16.* and bf16"),
        (FakeTensor((2, 8, 4, 12)), "q has head_dim 12: allowed are multiples of 8 from 8 to 256"),
        (FakeTensor((2, 8, 4, 512)), "q has head_dim 512"),
        (FakeTensor((2, 8, 4, 0)), "q has head_dim 0"),
        (FakeTensor((2, 8, 4, 64), strides=(1, 2, 3, 99)), r"stride 99 .* pass q\.contiguous\(\)"),
        ([1, 2], "q is of type list: allowed are torch tensors, CuPy arrays"),
        (np.zeros((2, 8, 4, 64), np.float16), "q is in host memory"),
    ],
)
def test_what_is_not_allowed_is_said_in_one_line(tensor: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        fit(tensor)
    assert "\n" not in str(caught.value)


def test_dimensions_are_named_in_the_order_of_the_layout() -> None:
    for layout, order in (("bshd", "batch, seqlen, heads"), ("bhsd", "batch, heads, seqlen")):
        with pytest.raises(ArgumentError, match=rf"allowed are 4, \({order}, head_dim\)$"):
            fit(FakeTensor((8, 4, 64)), layout, "k")


def test_head_dims_outside_the_range_are_unsupported_not_malformed() -> None:
    with pytest.raises(UnsupportedError):
        fit(FakeTensor((2, 8, 4, 12)))


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ArgumentError, match="layout is 'sbhd': allowed are 'bshd' and 'bhsd'"):
        question(*(FakeTensor((2, 8, 4, 64)),) * 3, layout="sbhd")


Q, K = (2, 100, 8, 64), (2, 300, 4, 64)


def test_what_is_asked_of_tensors_that_fit() -> None:
    q, k = FakeTensor(Q), FakeTensor(K)
    shape = Shape(batch=2, seqlen_q=100, seqlen_k=300, heads_q=8, heads_kv=4)
    strides = ((100 * 512, 512, 64), (300 * 256, 256, 64), (300 * 256, 256, 64))
    problem = Problem(dtype="bf16", head_dim=64, causal=True)
    assert question(q, k, k, causal=True) == (problem, shape, strides, 0)
    assert question(q, k, k, q) == (
        problem.model_copy(update={"causal": False}),
        shape,
        (*strides, strides[0]),
        0,
    )
    assert question(FakeTensor((2, 0, 8, 64)), k, k).shape.seqlen_q == 0
    assert question(q, *(FakeTensor((2, 0, 4, 64)),) * 2).shape.seqlen_k == 0


@pytest.mark.parametrize(
    ("shapes", "last", "message"),
    [
        ((Q, K, (2, 301, 4, 64)), {}, "k is .*300.* and v is .*301.*: the shapes have to be equal"),
        ((Q, (3, 300, 4, 64), (3, 300, 4, 64)), {}, "batch and head_dim have to be equal"),
        ((Q, (2, 300, 4, 32), (2, 300, 4, 32)), {}, "batch and head_dim have to be equal"),
        ((Q, (2, 300, 3, 64), (2, 300, 3, 64)), {}, "q has 8 heads and k has 3"),
        ((Q, (2, 300, 0, 64), (2, 300, 0, 64)), {}, "q has 8 heads and k has 0"),
        ((Q, K, K), {"dtype": FLOAT16}, "q is bf16 and v is fp16"),
        ((Q, K, K), {"device": Parcel("cuda", 1)}, "q is on device 0 and v on device 1"),
        ((Q, K, K, (2, 100, 4, 64)), {}, "out is .*heads 4.*: the shapes have to be equal"),
        ((Q, K, K, Q), {"dtype": FLOAT16}, "q is bf16 and out is fp16"),
        ((Q, K, K, Q), {"strides": (0, 512, 64, 1)}, "out is an expanded tensor"),
    ],
)
def test_tensors_that_do_not_fit(
    shapes: tuple[tuple[int, ...], ...], last: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        question(*map(FakeTensor, shapes[:-1]), FakeTensor(shapes[-1], **last))


@pytest.mark.parametrize(
    ("tensor", "bytes_"),
    [
        (FakeTensor(Q), 16),
        (FakeTensor((2, 100, 8, 72), BFLOAT16), 16),
        (FakeTensor(Q, strides=(51200, 516, 64, 1)), 2),  # rows of 1032 bytes: no multiple of 16
        (FakeTensor((1, 100, 8, 64), strides=(3, 512, 64, 1)), 16),  # one batch: any stride
        (FakeTensor(Q, strides=(0, 512, 64, 1)), 16),  # expanded
        (FakeTensor(Q, strides=(51200, -512, 64, 1)), 2),  # reversed
        (FakeTensor(Q, strides=(1 << 39, 512, 64, 1)), 2),  # 2**40 bytes
        (FakeTensor(Q, strides=((1 << 39) - 8, 512, 64, 1)), 16),
    ],
)
def test_alignment(tensor: FakeTensor, bytes_: int) -> None:
    fine = FakeTensor(tensor.shape)
    for place in range(4):
        tensors = [fine, fine, fine, fine]
        tensors[place] = tensor
        if place == 3 and 0 in tensor.stride():
            continue  # what is written is not expanded
        assert question(*tensors).problem.alignment == bytes_
        assert question(*tensors, aligned=False).problem.alignment == 2
