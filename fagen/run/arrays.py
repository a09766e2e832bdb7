"""Other people's arrays -> addresses, shapes and strides; their frameworks' memory and streams.

torch and CuPy are met through a `Framework` that reads an array in half a microsecond. Anything
else with DLPack or `__cuda_array_interface__` is adopted as a CuPy array, without a copy. Nothing
here imports torch: a torch tensor exists only where torch is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, cast

from fagen.errors import ArgumentError, MissingDependencyError, UnsupportedError
from fagen.kernels.config import ELEMENT_BYTES
from fagen.problem import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, WIDE_ALIGNMENT, Dtype
from fagen.run.launch import Lengths, TensorView

Layout = Literal["bshd", "bhsd"]
# Positions of batch, seqlen, heads and head_dim.
LAYOUTS: dict[str, tuple[int, int, int, int]] = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}
DTYPES: dict[str, Dtype] = {"float16": "fp16", "bfloat16": "bf16"}
MAX_TMA_STRIDE = 1 << 40  # bytes, exclusive
DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged

# (shape, strides, dtype, device) as the framework gives them: hashable, cheap, not yet checked.
Geometry = tuple[Any, Any, Any, Any]


class Facts(NamedTuple):
    """A geometry in plain words.

    Attributes:
        shape, strides: in the array's own order, strides in elements.
        dtype: NumPy's name of the element type.
        device_index: the CUDA device, None for host memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device_index: int | None


class Framework(Protocol):
    """What fagen needs of an array library."""

    contiguous: str  # the call that makes an array contiguous, for error messages

    def read(self, array: Any) -> tuple[int, Geometry]:
        """The address of an array and its geometry. On the hot path."""

    def facts(self, geometry: Geometry) -> Facts:
        """A geometry in plain words."""

    def empty_like(self, array: Any) -> Any:
        """An array of the same shape, dtype, device and order of dimensions."""

    def empty_float32(self, shape: tuple[int, ...], like: Any) -> Any:
        """A contiguous float32 array on the device of `like`."""

    def stream(self, device_index: int) -> int:
        """The CUstream that the caller's work on a device is queued on."""


class Torch:
    """torch.Tensor."""

    contiguous = "{}.contiguous()"

    def __init__(self) -> None:
        torch = self._torch = sys.modules["torch"]
        self._is_grad_enabled = torch.is_grad_enabled
        self.empty_like = torch.empty_like
        # 0.1 us, where torch.cuda.current_stream() takes 4.4; absent where torch has no CUDA
        self.stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def read(self, array: Any) -> tuple[int, Geometry]:
        if array.requires_grad and self._is_grad_enabled():
            raise UnsupportedError(
                "gradients are not supported yet: call fagen under torch.no_grad(), "
                "or pass tensors that are detached"
            )
        return array.data_ptr(), (array.shape, array.stride(), array.dtype, array.device)

    def facts(self, geometry: Geometry) -> Facts:
        shape, strides, dtype, device = geometry
        index = device.index if device.type == "cuda" else None
        return Facts(tuple(shape), strides, str(dtype).removeprefix("torch."), index)

    def empty_float32(self, shape: tuple[int, ...], like: Any) -> Any:
        return self._torch.empty(shape, dtype=self._torch.float32, device=like.device)


class CuPy:
    """cupy.ndarray."""

    contiguous = "cupy.ascontiguousarray({})"

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise MissingDependencyError(
                f"CuPy is needed for arrays that are not torch tensors ({error}): "
                'install it with `pip install "fagen[cuda13]"` (or cuda12)'
            ) from None
        self._cupy = cupy

    def read(self, array: Any) -> tuple[int, Geometry]:
        memory = array.data
        return memory.ptr, (array.shape, array.strides, array.dtype, memory.device_id)

    def facts(self, geometry: Geometry) -> Facts:
        shape, strides, dtype, device_index = geometry
        return Facts(shape, tuple(s // dtype.itemsize for s in strides), dtype.name, device_index)

    def empty_like(self, array: Any) -> Any:
        # Not cupy.empty_like: of a broadcast array, it makes the repeated dimension innermost.
        return self._empty(array.shape, array.dtype, array)

    def empty_float32(self, shape: tuple[int, ...], like: Any) -> Any:
        return self._empty(shape, "float32", like)

    def _empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        with self._cupy.cuda.Device(like.data.device_id):
            return self._cupy.empty(shape, dtype)

    def stream(self, device_index: int) -> int:
        return cast(int, self._cupy.cuda.get_current_stream(device_index).ptr)


# One instance of each, so that `is` tells frameworks apart.
_torch = cache(Torch)
_cupy = cache(CuPy)


def _framework_of(kind: type) -> Framework | None:
    """The framework of an array type; None for one that `to_cupy` has to adopt."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and issubclass(kind, torch.Tensor):
        return cast(Framework, _torch())
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return _cupy()
    return None


framework_of: Callable[[type], Framework | None] = cache(_framework_of)


def to_cupy(array: Any, name: str) -> Any:
    """A CuPy array of the same memory.

    Raises:
        ArgumentError: if it is no array, or lies in host memory.
        MissingDependencyError: without CuPy.
    """
    if hasattr(array, "__dlpack_device__"):
        if array.__dlpack_device__()[0] not in DLPACK_CUDA:
            raise ArgumentError(
                f"{name} is in host memory: allowed are arrays on a CUDA device, such as those of "
                "cupy.asarray"
            )
        return _taken_by("from_dlpack", array, name)
    if hasattr(array, "__cuda_array_interface__"):
        return _taken_by("asarray", array, name)
    raise ArgumentError(
        f"{name} is of type {type(array).__name__}: allowed are torch tensors, CuPy arrays and "
        "other arrays with DLPack or __cuda_array_interface__, on a CUDA device"
    )


def _taken_by(function: str, array: Any, name: str) -> Any:
    _cupy()  # says what to install
    import cupy

    try:
        return getattr(cupy, function)(array)
    except Exception as error:  # of any type: another package made the array
        raise ArgumentError(
            f"{name}, of type {type(array).__name__}, is refused by cupy.{function}: {error}"
        ) from error


def from_cupy(result: Any, like: Any) -> Any:
    """A CuPy array as one of `like`'s framework, if that can take it; the same memory."""
    namespace = getattr(like, "__array_namespace__", None)
    return namespace().from_dlpack(result) if namespace else result


class Operand(NamedTuple):
    """A tensor that fagen can work on.

    Attributes:
        view: its address, shape and strides, in the order batch, seqlen, heads, head_dim.
        dtype: "fp16" or "bf16".
        device_index: the CUDA device that holds it.
        framework: whose array it is.
    """

    view: TensorView
    dtype: Dtype
    device_index: int
    framework: Framework


def adopt(array: Any, layout: str, name: str = "array") -> Operand:
    """Checks an array of any framework.

    Raises:
        ArgumentError: if it is not a 4-D fp16 or bf16 array on a CUDA device, with a contiguous
            last dimension.
        UnsupportedError: if the head dim is not covered.
    """
    framework = framework_of(type(array))
    if framework is None:
        array, framework = to_cupy(array, name), _cupy()
    pointer, geometry = framework.read(array)
    return operand(name, framework, pointer, geometry, layout)


def operand(
    name: str, framework: Framework, pointer: int, geometry: Geometry, layout: str
) -> Operand:
    """Checks what `framework.read` said; see `adopt`."""
    if layout not in LAYOUTS:
        allowed = " and ".join(map(repr, LAYOUTS))
        raise ArgumentError(f"layout is {layout!r}: allowed are {allowed}")
    shape, strides, dtype, device_index = framework.facts(geometry)
    if device_index is None:
        raise ArgumentError(f"{name} is not on a CUDA device: move it there first")
    if len(shape) != 4:
        order = "(batch, seqlen, heads, head_dim)"
        if layout == "bhsd":
            order = "(batch, heads, seqlen, head_dim)"
        raise ArgumentError(f"{name} has {len(shape)} dimensions: allowed are 4, {order}")
    if dtype not in DTYPES:
        raise ArgumentError(f"{name} is {dtype}: allowed are fp16 (float16) and bf16 (bfloat16)")
    head_dim = shape[3]
    if head_dim % HEAD_DIM_MULTIPLE or not 0 < head_dim <= MAX_HEAD_DIM:
        raise UnsupportedError(
            f"{name} has head_dim {head_dim}: allowed are multiples of {HEAD_DIM_MULTIPLE} from "
            f"{HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM}"
        )
    if strides[3] != 1:
        raise ArgumentError(
            f"{name} has stride {strides[3]} in its last dimension, which has to be contiguous: "
            f"pass {framework.contiguous.format(name)}"
        )
    batch, seqlen, heads, _ = LAYOUTS[layout]
    view = TensorView(
        pointer,
        (shape[batch], shape[seqlen], shape[heads], head_dim),
        (strides[batch], strides[seqlen], strides[heads]),
    )
    return Operand(view, DTYPES[dtype], device_index, framework)


def lengths_of(q: Operand, k: Operand, v: Operand, out: Operand | None = None) -> Lengths:
    """The lengths of a call, once its tensors fit each other.

    Raises:
        ArgumentError: in one line, if they do not.
    """
    others = [("k", k), ("v", v)] + ([("out", out)] if out else [])
    for name, other in others:
        if other.device_index != q.device_index:
            raise ArgumentError(
                f"q is on device {q.device_index} and {name} on device {other.device_index}: "
                "all tensors have to be on one device"
            )
        if other.dtype != q.dtype:
            raise ArgumentError(
                f"q is {q.dtype} and {name} is {other.dtype}: all tensors have to be of one dtype"
            )
    batch, seqlen_q, heads_q, head_dim = q.view.shape
    k_batch, seqlen_k, heads_kv, k_head_dim = k.view.shape
    if v.view.shape != k.view.shape:
        raise ArgumentError(f"{_shape('k', k)} and {_shape('v', v)}: the shapes have to be equal")
    if (k_batch, k_head_dim) != (batch, head_dim):
        raise ArgumentError(
            f"{_shape('q', q)} and {_shape('k', k)}: batch and head_dim have to be equal"
        )
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        raise ArgumentError(
            f"q has {heads_q} heads and k has {heads_kv}: q's have to be a multiple of k's "
            "(is the layout right?)"
        )
    if out:
        if out.view.shape != q.view.shape:
            raise ArgumentError(
                f"{_shape('q', q)} and {_shape('out', out)}: the shapes have to be equal"
            )
        if any(s == 0 for s, n in zip(out.view.strides, out.view.shape, strict=False) if n > 1):
            raise ArgumentError("out is an expanded tensor: its elements have to be distinct")
    return Lengths(batch, seqlen_q, seqlen_k, heads_q, heads_kv)


def _shape(name: str, tensor: Operand) -> str:
    batch, seqlen, heads, head_dim = tensor.view.shape
    return f"{name} is (batch {batch}, seqlen {seqlen}, heads {heads}, head_dim {head_dim})"


def alignment(*operands: Operand) -> Literal[2, 16]:
    """Bytes that all addresses and strides are a multiple of: 16 if wide loads can take them.

    Strides of dimensions of size 1 do not count. Negative ones, and those beyond what a tensor
    map can say, are left to narrow loads.
    """
    for view, *_ in operands:
        if view.pointer % WIDE_ALIGNMENT:
            return 2
        for stride, size in zip(view.strides, view.shape, strict=False):
            byte_stride = stride * ELEMENT_BYTES
            if size > 1 and (byte_stride % WIDE_ALIGNMENT or not 0 <= byte_stride < MAX_TMA_STRIDE):
                return 2
    return 16
