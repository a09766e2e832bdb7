"""Other people's arrays -> addresses, shapes and strides; their frameworks' memory and streams.

torch and CuPy are met through a `Framework` that reads an array in half a microsecond. Anything
else with DLPack or `__cuda_array_interface__` is adopted as a CuPy array, without a copy. Nothing
here imports torch: a torch tensor exists only where torch is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

from fagen.errors import ArgumentError, MissingDependencyError, UnsupportedError

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

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """A contiguous array on the device of `like`; `dtype` is NumPy's name."""

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

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=like.device)


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
        return self.empty(array.shape, array.dtype, array)

    def empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        with self._cupy.cuda.Device(like.data.device_id):
            return self._cupy.empty(shape, dtype)

    def stream(self, device_index: int) -> int:
        return cast(int, self._cupy.cuda.get_current_stream(device_index).ptr)


# One instance of each, so that `is` tells frameworks apart.
_torch = cache(Torch)
cupy_framework = cache(CuPy)


def _framework_of(kind: type) -> Framework | None:
    """The framework of an array type; None for one that `to_cupy` has to adopt."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and issubclass(kind, torch.Tensor):
        return cast(Framework, _torch())
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return cupy_framework()
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
    cupy_framework()  # says what to install
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
