"""The CUDA driver: everything in fagen that touches libcuda.

Cold calls go through `cuda.bindings.driver`. Those that a launch makes go through ctypes:
on an H200 machine a tensor map costs 1.85 us to encode that way against 3.5 us through the
bindings, and the bindings build an enum and a tuple for each result. Importing this module needs
no driver; the first call does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from fagen.device import KIB, Device, device_from_capability
from fagen.errors import ArgumentError, CudaError, DeviceError

MIN_DRIVER = (12, 4)  # cuFuncLoad
DEFAULT_SMEM_BYTES = 48 * KIB  # dynamic shared memory that a kernel may use without opting in
# Illegal address, launch timeout, ...: the context is lost. 701 only refuses a launch.
FATAL = frozenset(range(700, 720)) - {701}


def _no_driver(why: str) -> DeviceError:
    return DeviceError(
        f"no usable CUDA driver ({why}): install an NVIDIA driver for CUDA "
        f"{MIN_DRIVER[0]}.{MIN_DRIVER[1]} or newer"
    )


# ---- cold calls ----


def check(result: tuple[Any, ...]) -> Any:
    """What a `cuda.bindings.driver` call returned beside its CUresult: None, a value or a tuple.

    Raises:
        CudaError: with the error's name and number, if the call failed.
    """
    status, *values = result
    if int(status) != 0:
        hint = ": only a new process can use the GPU again" if int(status) in FATAL else ""
        raise CudaError(f"the CUDA driver reports {status.name} ({int(status)}){hint}", int(status))
    return None if not values else values[0] if len(values) == 1 else tuple(values)


@cache
def _cu() -> Any:
    """`cuda.bindings.driver`, the driver initialised.

    Raises:
        DeviceError: in one line, if there is no driver, no GPU, or the driver is too old.
    """
    from cuda.bindings import driver as cu

    try:
        (status,) = cu.cuInit(0)
    except RuntimeError as error:  # DynamicLibNotFoundError, or a symbol that is not there
        missing = type(error).__name__ == "DynamicLibNotFoundError"
        why = "libcuda.so.1 is not found" if missing else str(error).split(". ")[0]
        raise _no_driver(why) from None
    if int(status) != 0:
        raise _no_driver(f"cuInit reports {status.name}")
    version = check(cu.cuDriverGetVersion())
    if version < MIN_DRIVER[0] * 1000 + MIN_DRIVER[1] * 10:
        raise _no_driver(f"it is for CUDA {_dotted(version)}")
    return cu


def _dotted(version: int) -> str:
    """CUDA's 13000 as "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def driver_version() -> str:
    """The newest CUDA version that the driver knows, such as "13.0"."""
    return _dotted(check(_cu().cuDriverGetVersion()))


def device_count() -> int:
    """CUDA devices that this process sees."""
    return int(check(_cu().cuDeviceGetCount()))


@cache
def query_device(index: int) -> Device:
    """The card with that index, as the driver describes it.

    Raises:
        ArgumentError: if there is no such card.
        UnsupportedError: if fagen does not know its compute capability.
    """
    cu = _cu()
    count = device_count()
    if not 0 <= index < count:
        raise ArgumentError(f"there is no CUDA device {index}: allowed are 0 to {count - 1}")
    device = check(cu.cuDeviceGet(index))

    def attribute(name: str) -> int:
        key = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(cu.cuDeviceGetAttribute(key, device)))

    name = check(cu.cuDeviceGetName(256, device)).split(b"\0")[0].decode()
    bus_bytes = attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
    return device_from_capability(
        name,
        (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        clock_mhz=attribute("CLOCK_RATE") // 1000,
        l2_bytes=attribute("L2_CACHE_SIZE"),
        memory_gbps=2 * attribute("MEMORY_CLOCK_RATE") * bus_bytes / 1e6,  # two per clock
    )


@cache
def primary_context(index: int) -> int:
    """The handle of a device's primary context, which torch, CuPy and the CUDA runtime use."""
    cu = _cu()
    return int(check(cu.cuDevicePrimaryCtxRetain(check(cu.cuDeviceGet(index)))))


def current_device() -> int:
    """The index of the device whose context is current in this thread, 0 if there is none."""
    cu = _cu()
    return int(check(cu.cuCtxGetDevice())) if int(check(cu.cuCtxGetCurrent())) else 0


@contextmanager
def use_device(index: int) -> Iterator[None]:
    """Makes a device's primary context current in this thread for a while."""
    cu = _cu()
    check(cu.cuCtxPushCurrent(cu.CUcontext(primary_context(index))))
    try:
        yield
    finally:
        check(cu.cuCtxPopCurrent())


def load_library(cubin: bytes) -> int:
    """Loads a cubin for every device of the process; returns the CUlibrary, kept until exit."""
    with _capture_allowed():
        return int(check(_cu().cuLibraryLoadData(cubin, [], [], 0, [], [], 0)))


def get_kernel(library: int, name: str) -> int:
    """The CUkernel of that name in a loaded library."""
    cu = _cu()
    return int(check(cu.cuLibraryGetKernel(cu.CUlibrary(library), name.encode())))


def prepare_kernel(kernel: int, smem_bytes: int, device_index: int) -> None:
    """Loads a kernel onto a device and lets its blocks use so much dynamic shared memory.

    Loading here, not at the first launch, keeps that launch free of hidden synchronisation.
    """
    cu = _cu()
    handle = cu.CUkernel(kernel)
    with use_device(device_index), _capture_allowed():
        if smem_bytes > DEFAULT_SMEM_BYTES:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            device = check(cu.cuDeviceGet(device_index))
            check(cu.cuKernelSetAttribute(attribute, smem_bytes, handle, device))
        check(cu.cuFuncLoad(check(cu.cuKernelGetFunction(handle))))


def allocate_zeros(size: int) -> int:
    """Memory of the current device that is kept until exit; returns its address.

    Waits for nothing that other streams do, and may run while one captures a graph.
    """
    cu = _cu()
    with _capture_allowed():
        address = check(cu.cuMemAlloc(size))
        stream = check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        check(cu.cuMemsetD8Async(address, 0, size, stream))
        check(cu.cuStreamSynchronize(stream))
        check(cu.cuStreamDestroy(stream))
    return int(address)


@contextmanager
def _capture_allowed() -> Iterator[None]:
    """Lets this thread load code while a stream captures a CUDA graph, which forbids it else."""
    cu = _cu()
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(cu.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(before))


# ---- hot calls ----


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: a number and a value of 64 bytes at a multiple of 8."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_uint * 16),
    )


CLUSTER_DIMENSION = 4  # CUlaunchAttributeID; value: x, y, z
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # value: 1 to allow it


class HotCalls:
    """The calls that a launch makes. Each returns a CUresult as an int.

    Attributes:
        encode_tensor_map: cuTensorMapEncodeTiled.
        replace_address: cuTensorMapReplaceAddress(map, address), 0.36 us where encoding anew
            takes 1.85.
        launch: cuLaunchKernelEx(config, kernel, parameters, extra).
        get_context: cuCtxGetCurrent(out).
        is_capturing: cuStreamIsCapturing(stream, out).
        get_stream_id: cuStreamGetId(stream, out).
        set_memory: cuMemsetD8Async(address, byte, size, stream).
    """

    def __init__(self, path: str) -> None:
        try:
            # PyDLL keeps the GIL: for a call of half a microsecond, giving it up lets another
            # thread hold it for a whole switch interval. A launch may wait for room in the
            # stream's queue, so it does give it up.
            holding, releasing = ctypes.PyDLL(path), ctypes.CDLL(path)
            pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
            self.encode_tensor_map = _bind(
                holding.cuTensorMapEncodeTiled,
                *(pointer, unsigned, unsigned, *(pointer,) * 5, *(unsigned,) * 4),
            )
            self.replace_address = _bind(holding.cuTensorMapReplaceAddress, pointer, pointer)
            self.get_context = _bind(holding.cuCtxGetCurrent, pointer)
            self.is_capturing = _bind(holding.cuStreamIsCapturing, pointer, pointer)
            self.get_stream_id = _bind(holding.cuStreamGetId, pointer, pointer)
            self.set_memory = _bind(
                holding.cuMemsetD8Async,
                *(ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, pointer),
            )
            self.launch = _bind(releasing.cuLaunchKernelEx, *(pointer,) * 4)
        except (OSError, AttributeError) as error:
            raise _no_driver(str(error)) from None


def _bind(function: Any, *argument_types: Any) -> Callable[..., int]:
    function.argtypes = argument_types
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


@cache
def hot_calls() -> HotCalls:
    """The hot calls, bound to the driver of this machine."""
    _cu()
    return HotCalls("libcuda.so.1")


def check_status(status: int) -> None:
    """Raises a CudaError if a hot call's CUresult is no success."""
    if status != 0:
        from cuda.bindings.driver import CUresult

        check((CUresult(status),))


def is_capturing(stream: int) -> bool:
    """Whether a stream captures a CUDA graph."""
    status = ctypes.c_int()
    check_status(hot_calls().is_capturing(stream, ctypes.byref(status)))
    return status.value != 0


def stream_id(stream: int) -> int:
    """A stream's number, which no later stream of the process will have."""
    number = ctypes.c_uint64()
    check_status(hot_calls().get_stream_id(stream, ctypes.byref(number)))
    return number.value
