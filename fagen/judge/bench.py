"""One GPU as judging and timing see it: CuPy on it, its errors, our own helper kernels.

Cold code only. Nothing here needs more than CuPy's light form: no cuBLAS, no cuRAND, and no
kernel of CuPy's own, whose first use would compile for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from fagen.build.compile import compile_source
from fagen.build.render import fold
from fagen.errors import CudaError, DeviceError
from fagen.kernels.registry import template_of
from fagen.problem import Shape
from fagen.run.driver import query_device

if TYPE_CHECKING:
    from fagen.run.executor import Executor, TensorView


class Bench:
    """A GPU to judge and time on. `bench_of` makes one for each.

    Attributes:
        index: its number, as CUDA counts.
        device: the card.

    Raises:
        ArgumentError, DeviceError, UnsupportedError: as `driver.query_device`.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = query_device(index)
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._workspace: Any = None  # for every launch, as large as the largest wanted

    @contextmanager
    def use(self) -> Iterator[None]:
        """Runs CuPy on this GPU, turning its errors into fagen's.

        Raises:
            CudaError: a CUDA call failed, perhaps because an earlier kernel did: after an illegal
                address (code 700) nothing works any more in this process.
            DeviceError: the device's memory is full.
        """
        import cupy

        try:
            with cupy.cuda.Device(self.index):
                yield
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            raise CudaError(f"CUDA failed on device {self.index}: {error}", error.status) from error
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise DeviceError(
                f"device {self.index} has too little free memory: {error}. Take a smaller batch "
                "or length"
            ) from error

    def kernel(self, name: str, file: str, **values: str) -> Any:
        """The kernel `name` of a file under templates/, compiled and loaded once.

        Called as `kernel(grid, block, arguments)`, within `use`.
        """
        import cupy

        key = (file, name, *values.items())
        if key not in self._modules:
            module = cupy.cuda.Module()
            module.load(compile_source(fold(file, **values), self.device.arch, name).cubin)
            self._modules[key] = module
        return self._modules[key].get_function(name)

    def launch(
        self,
        kernel: Executor,
        shape: Shape,
        operands: Mapping[str, TensorView | None],
        stream: int,
    ) -> None:
        """Queues a kernel with its default scalars, and a workspace where it wants one."""
        import cupy

        strides = tuple(operands[o.name].strides for o in kernel.problem.operation.strided)  # type: ignore[union-attr]
        size = kernel.workspace_bytes(shape, strides, self.index)
        workspace = 0
        if size:
            if self._workspace is None or self._workspace.nbytes < size:
                with self.use():
                    cupy.cuda.runtime.deviceSynchronize()  # the smaller one may be in use
                    self._workspace = cupy.empty(size, "uint8")
            workspace = int(self._workspace.data.ptr)
        scalars = template_of(kernel.config).default_scalars(kernel.problem)
        kernel.launch(
            shape, operands, scalars, device_index=self.index, stream=stream, workspace=workspace
        )


bench_of = cache(Bench)
