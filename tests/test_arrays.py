"""What arrays fagen takes, and the line that it answers others with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_driver import BFLOAT16, FLOAT16, FLOAT32, FakeTensor, Parcel, fake_torch

from fagen.errors import ArgumentError, UnsupportedError
from fagen.run import arrays
from fagen.run.launch import Lengths


def forget_frameworks() -> None:
    caches: tuple[Any, ...] = (arrays._torch, arrays.framework_of)
    for cached in caches:
        cached.cache_clear()


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    module = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    forget_frameworks()
    yield module
    forget_frameworks()


def test_a_tensor_is_read_without_a_copy() -> None:
    tensor = FakeTensor((2, 300, 4, 64), FLOAT16, pointer=4096)
    operand = arrays.adopt(tensor, "bshd")
    assert operand.view == (4096, (2, 300, 4, 64), (300 * 4 * 64, 4 * 64, 64))
    assert (operand.dtype, operand.device_index) == ("fp16", 0)


def test_layout_bhsd_only_permutes() -> None:
    operand = arrays.adopt(FakeTensor((2, 4, 300, 64), pointer=4096), "bhsd")
    assert operand.view == (4096, (2, 300, 4, 64), (4 * 300 * 64, 64, 300 * 64))


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
        arrays.adopt(tensor, "bshd", "q")
    assert "\n" not in str(caught.value)


def test_head_dims_outside_the_range_are_unsupported_not_malformed() -> None:
    with pytest.raises(UnsupportedError):
        arrays.adopt(FakeTensor((2, 8, 4, 12)), "bshd")


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ArgumentError, match="layout is 'sbhd': allowed are 'bshd' and 'bhsd'"):
        arrays.adopt(FakeTensor((2, 8, 4, 64)), "sbhd")


def test_gradients_are_refused_unless_grad_mode_is_off(torch: SimpleNamespace) -> None:
    tensor = FakeTensor((2, 8, 4, 64), requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"torch\.no_grad\(\)"):
        arrays.adopt(tensor, "bshd")
    torch.grad = False
    assert arrays.adopt(tensor, "bshd").dtype == "bf16"


def operands(*shapes: tuple[int, ...], **last: Any) -> list[arrays.Operand]:
    tensors = [FakeTensor(shape) for shape in shapes[:-1]] + [FakeTensor(shapes[-1], **last)]
    return [arrays.adopt(tensor, "bshd") for tensor in tensors]


Q, K = (2, 100, 8, 64), (2, 300, 4, 64)


def test_lengths_of_tensors_that_fit() -> None:
    assert arrays.lengths_of(*operands(Q, K, K, Q)) == Lengths(2, 100, 300, 8, 4)
    assert arrays.lengths_of(*operands((2, 0, 8, 64), K, K)).seqlen_q == 0
    assert arrays.lengths_of(*operands(Q, (2, 0, 4, 64), (2, 0, 4, 64))).seqlen_k == 0


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
        arrays.lengths_of(*operands(*shapes, **last))


@pytest.mark.parametrize(
    ("tensor", "bytes_"),
    [
        (FakeTensor(Q, pointer=4096), 16),
        (FakeTensor(Q, pointer=4096 + 2), 2),
        (FakeTensor(Q, pointer=4096 + 8), 2),
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
    fine = arrays.adopt(FakeTensor(Q), "bshd")
    odd = arrays.adopt(tensor, "bshd")
    assert arrays.alignment(fine, odd, fine) == bytes_


class FakeCupyArray:
    """What `CuPy.read` reads of a cupy.ndarray: strides are in bytes there."""

    shape = (2, 100, 8, 64)
    strides = (102400, -1024, 128, 2)
    dtype = np.dtype("float16")
    data = SimpleNamespace(ptr=8192, device_id=1)


def test_cupy_strides_are_bytes() -> None:
    cupy = object.__new__(arrays.CuPy)  # without importing CuPy
    pointer, geometry = cupy.read(FakeCupyArray())
    facts = cupy.facts(geometry)
    assert pointer == 8192
    assert facts == ((2, 100, 8, 64), (51200, -512, 64, 1), "float16", 1)
    assert arrays.operand("q", cupy, pointer, geometry, "bshd").dtype == "fp16"


def test_a_result_goes_back_to_the_framework_that_asks_for_it() -> None:
    class Theirs:
        def __array_namespace__(self) -> Any:
            return SimpleNamespace(from_dlpack=lambda array: ("theirs", array))

    assert arrays.from_cupy("result", Theirs()) == ("theirs", "result")
    assert arrays.from_cupy("result", object()) == "result"


def test_what_cupy_refuses_is_named() -> None:
    class Torn:
        __cuda_array_interface__ = "torn"

    with pytest.raises(ArgumentError, match="q, of type Torn, is refused by"):
        arrays.to_cupy(Torn(), "q")
