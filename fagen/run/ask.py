"""Arrays -> the question that a call asks: problem, shape, strides.

The one way from tensors to a `Problem`: `attention`, `explain`, `record` and whatever calls them
get the same answer. All checks of a call's tensors are here, by the operands of the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fagen.dtypes import BY_ARRAY_NAME, Dtype
from fagen.errors import ArgumentError, UnsupportedError
from fagen.kernels.forward import MAX_TMA_STRIDE
from fagen.kernels.plan import Strides
from fagen.operation import Operand, Operation
from fagen.problem import (
    DTYPE_NAMES,
    HEAD_DIM_MULTIPLE,
    MAX_HEAD_DIM,
    WIDE_ALIGNMENT,
    Problem,
    Shape,
)
from fagen.run.arrays import Framework, Geometry, cupy_framework, framework_of, to_cupy

Layout = Literal["bshd", "bhsd"]
LAYOUTS = ("bshd", "bhsd")
CALLED = {"o": "out"}  # what a caller calls an operand, where it is another name


class Tensor(NamedTuple):
    """A tensor that fits its operand.

    Attributes:
        operand: what it is.
        shape: in the operand's order of dimensions.
        strides: of all dimensions but the last, in elements.
        dtype: its element type.
        device_index: the CUDA device that holds it.
    """

    operand: Operand
    shape: tuple[int, ...]
    strides: Strides
    dtype: Dtype
    device_index: int

    @property
    def name(self) -> str:
        """What the caller calls it."""
        return CALLED.get(self.operand.name, self.operand.name)

    def size_of(self, dim: str) -> int:
        """How many elements one of its dimensions has."""
        return self.shape[self.operand.dims.index(dim)]

    def __str__(self) -> str:
        dims = (
            f"{_word(dim)} {size}" for dim, size in zip(self.operand.dims, self.shape, strict=True)
        )
        return f"{self.name} is ({', '.join(dims)})"


class Question(NamedTuple):
    """What a call asks.

    Attributes:
        problem, shape: for dispatch.
        strides: of the strided operands that were given, in order.
        device_index: the CUDA device that holds the tensors.
    """

    problem: Problem
    shape: Shape
    strides: tuple[Strides, ...]
    device_index: int


def _word(dim: str) -> str:
    """A dimension without the operand that it is of: "seqlen" for "seqlen_q"."""
    return dim.removesuffix("_q").removesuffix("_kv").removesuffix("_k")


def read(array: Any, name: str) -> tuple[Framework, int, Geometry]:
    """Whose array it is, its address and its geometry; it may be of any framework.

    Raises:
        ArgumentError: if it is not an array, or lies in host memory.
    """
    framework = framework_of(type(array))
    if framework is None:
        array, framework = to_cupy(array, name), cupy_framework()
    pointer, geometry = framework.read(array)
    return framework, pointer, geometry


def ask(
    operation: Operation,
    arrays: Sequence[tuple[Framework, Geometry]],
    *,
    causal: bool,
    layout: str,
    aligned: bool = True,
) -> Question:
    """The question of a call.

    Args:
        arrays: framework and geometry of each strided operand, in order; the last ones, which
            are written, may be missing.
        causal: the mask.
        layout: the order of their dimensions.
        aligned: whether all addresses are multiples of 16 bytes.

    Raises:
        ArgumentError: in one line, if a tensor is not fit for its operand, or does not fit the
            others.
        UnsupportedError: for a head dim that is not covered.
    """
    if layout not in LAYOUTS:
        allowed = " and ".join(map(repr, LAYOUTS))
        raise ArgumentError(f"layout is {layout!r}: allowed are {allowed}")
    tensors = [
        tensor(operand, framework, geometry, layout)
        for operand, (framework, geometry) in zip(operation.strided, arrays, strict=False)
    ]
    first = tensors[0]
    for place, other in enumerate(tensors):
        _require_fit(tensors[:place], other)
    sizes = {
        dim: size
        for each in tensors
        for dim, size in zip(each.operand.dims, each.shape, strict=True)
    }
    heads_q, heads_kv = sizes["heads_q"], sizes["heads_kv"]
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        raise ArgumentError(
            f"q has {heads_q} heads and k has {heads_kv}: q's have to be a multiple of k's "
            "(is the layout right?)"
        )
    problem = Problem.model_validate(
        {
            "op": operation.name,
            "dtype": first.dtype.name,
            "head_dim": sizes["head_dim"],
            "causal": bool(causal),
            "alignment": alignment(tensors) if aligned else 2,
        }
    )
    shape = Shape(**{dim: size for dim, size in sizes.items() if dim in Shape.model_fields})
    return Question(problem, shape, tuple(each.strides for each in tensors), first.device_index)


def tensor(operand: Operand, framework: Framework, geometry: Geometry, layout: str) -> Tensor:
    """Checks what `Framework.read` said of one array.

    Raises:
        ArgumentError: if it is not a fp16 or bf16 array on a CUDA device with the operand's
            dimensions, the last of them contiguous.
        UnsupportedError: if the head dim is not covered.
    """
    name = CALLED.get(operand.name, operand.name)
    shape, strides, array_dtype, device_index = framework.facts(geometry)
    if device_index is None:
        raise ArgumentError(f"{name} is not on a CUDA device: move it there first")
    order = _order(operand, layout)
    if len(shape) != len(order):
        dims = ", ".join(_word(operand.dims[order.index(place)]) for place in range(len(order)))
        raise ArgumentError(
            f"{name} has {len(shape)} dimensions: allowed are {len(order)}, ({dims})"
        )
    dtype = BY_ARRAY_NAME.get(array_dtype)
    if dtype is None or dtype.name not in DTYPE_NAMES:
        raise ArgumentError(
            f"{name} is {array_dtype}: allowed are fp16 (float16) and bf16 (bfloat16)"
        )
    head_dim = shape[-1]
    if operand.dims[-1] == "head_dim" and (
        head_dim % HEAD_DIM_MULTIPLE or not 0 < head_dim <= MAX_HEAD_DIM
    ):
        raise UnsupportedError(
            f"{name} has head_dim {head_dim}: allowed are multiples of {HEAD_DIM_MULTIPLE} from "
            f"{HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM}"
        )
    if strides[-1] != 1:
        raise ArgumentError(
            f"{name} has stride {strides[-1]} in its last dimension, which has to be contiguous: "
            f"pass {framework.contiguous.format(name)}"
        )
    return Tensor(
        operand,
        tuple(shape[place] for place in order),
        tuple(strides[place] for place in order[:-1]),
        dtype,
        device_index,
    )


def _order(operand: Operand, layout: str) -> tuple[int, ...]:
    """Where each dimension of an operand stands in an array of that layout."""
    places = list(range(len(operand.dims)))
    if layout == "bhsd" and len(places) == 4:
        places[1], places[2] = 2, 1
    return tuple(places)


def _require_fit(before: Sequence[Tensor], other: Tensor) -> None:
    """An ArgumentError if a tensor does not fit those before it."""
    for earlier in before:
        if other.device_index != earlier.device_index:
            raise ArgumentError(
                f"{earlier.name} is on device {earlier.device_index} and {other.name} on device "
                f"{other.device_index}: all tensors have to be on one device"
            )
        if other.dtype != earlier.dtype:
            raise ArgumentError(
                f"{earlier.name} is {earlier.dtype.name} and {other.name} is {other.dtype.name}: "
                "all tensors have to be of one dtype"
            )
    # The one that is most like it first: v has to be like k.
    for earlier in sorted(before, key=lambda each: each.operand.dims != other.operand.dims):
        shared = [dim for dim in earlier.operand.dims if dim in other.operand.dims]
        if all(earlier.size_of(dim) == other.size_of(dim) for dim in shared):
            continue
        equal = "the shapes have"
        if len(shared) < len(other.operand.dims):
            equal = f"{' and '.join(map(_word, shared))} have"
        raise ArgumentError(f"{earlier} and {other}: {equal} to be equal")
    if other.operand.role != "in" and any(
        stride == 0 and size > 1 for stride, size in zip(other.strides, other.shape, strict=False)
    ):
        raise ArgumentError(f"{other.name} is an expanded tensor: its elements have to be distinct")


def alignment(tensors: Sequence[Tensor]) -> Literal[2, 16]:
    """Bytes that all strides are a multiple of: 16 if wide loads can take them.

    Strides of dimensions of size 1 do not count. Negative ones, and those beyond what a tensor
    map can say, are left to narrow loads.
    """
    for each in tensors:
        for stride, size in zip(each.strides, each.shape, strict=False):
            byte_stride = stride * each.dtype.bytes
            if size > 1 and (byte_stride % WIDE_ALIGNMENT or not 0 <= byte_stride < MAX_TMA_STRIDE):
                return 2
    return 16
