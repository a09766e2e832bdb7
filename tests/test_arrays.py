"""Other people's arrays, as their frameworks give them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_driver import BFLOAT16, FLOAT32, FakeTensor, fake_torch, forget_frameworks

from fagen.errors import ArgumentError, UnsupportedError
from fagen.operation import FORWARD
from fagen.run import arrays, ask


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    module = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    forget_frameworks()
    yield module
    forget_frameworks()


def test_gradients_are_refused_unless_grad_mode_is_off(torch: SimpleNamespace) -> None:
    tensor = FakeTensor((2, 8, 4, 64), requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"torch\.no_grad\(\)"):
        ask.read(tensor, "q")
    torch.grad = False
    framework, _, geometry = ask.read(tensor, "q")
    assert framework.facts(geometry).dtype == "bfloat16"


def test_memory_is_made_on_the_device_of_an_array() -> None:
    array = FakeTensor((2, 8, 4, 64))
    framework = arrays.framework_of(FakeTensor)
    assert framework is not None
    made = framework.empty((3, 5), "float32", array)
    assert (made.shape, made.dtype, made.device) == ((3, 5), FLOAT32, array.device)
    like = framework.empty_like(array)
    assert (like.shape, like.dtype, like.device) == (array.shape, BFLOAT16, array.device)


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
    tensor = ask.tensor(FORWARD.operand("q"), cupy, geometry, "bshd")
    assert (tensor.dtype.name, tensor.strides) == ("fp16", (51200, -512, 64))


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
