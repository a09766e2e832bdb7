"""What reference, verify and measure ask of CuPy: a device, its errors, our own helper kernels.

Cold code only. Nothing here needs more than CuPy's light form: no cuBLAS, no cuRAND, and no
kernel of CuPy's own, whose first use would compile for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from fagen.build.compile import compile_source
from fagen.build.render import fold
from fagen.errors import CudaError, DeviceError
from fagen.run.driver import query_device


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """Runs CuPy on device `index`, turning its errors into fagen's.

    Raises:
        CudaError: a CUDA call failed, perhaps because an earlier kernel did: after an illegal
            address (code 700) nothing works any more in this process.
        DeviceError: the device's memory is full.
    """
    import cupy

    query_device(index)  # says in one line what is missing where there is no driver
    try:
        with cupy.cuda.Device(index):
            yield
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        raise CudaError(f"CUDA failed on device {index}: {error}", error.status) from error
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise DeviceError(
            f"device {index} has too little free memory: {error}. Take a smaller batch or length"
        ) from error


def helper_kernel(name: str, file: str, device_index: int, **values: str) -> Any:
    """The kernel `name` of a file under templates/, compiled and loaded (once) for the device.

    Called as `kernel(grid, block, arguments)`, within `on_device`.
    """
    return _module(file, device_index, tuple(values.items()), name).get_function(name)


@cache
def _module(
    file: str, device_index: int, values: tuple[tuple[str, str], ...], kernel_name: str
) -> Any:
    import cupy

    arch = query_device(device_index).arch
    module = cupy.cuda.Module()
    module.load(compile_source(fold(file, **dict(values)), arch, kernel_name).cubin)
    return module
