"""Compiled kernels and tensors -> launches on a stream.

An `Executor` holds the kernels of one config in the driver. Its `prepare` turns a `Plan` (values)
into a `Prepared` one, which has all that calls with these lengths and strides share, laid out for
the driver: a repeated call re-points the tensor maps, writes the addresses and launches. The driver
copies arguments at the launch, so it may be used again as soon as `Prepared.launch` returns; but
ctypes gives up the GIL, so no two threads share one.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from fagen.build.compiled import Compiled, Resources
from fagen.kernels.plan import Launch, Plan, Strides
from fagen.kernels.registry import template_of
from fagen.kernels.template import Config, round_up
from fagen.problem import Problem, Shape
from fagen.run import driver
from fagen.run.counters import tile_counter

PLANS_PER_THREAD = 256  # about 3 KB each
BUFFER_ALIGNMENT = 256  # bytes, of each buffer of a workspace

# cuda.h: CUtensorMap, CUtensorMapL2promotion
MAP_BYTES = 128
MAP_L2_PROMOTION_256 = 3

Addresses = tuple[int, ...]


class TensorView(NamedTuple):
    """A tensor in device memory.

    Attributes:
        pointer: its address.
        shape: elements of each dimension.
        strides: of all dimensions but the last, in elements; the last is contiguous.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: Strides

    @classmethod
    def contiguous(cls, pointer: int, shape: tuple[int, ...]) -> TensorView:
        """A tensor without gaps."""
        strides = tuple(itertools.accumulate(shape[:0:-1], int.__mul__))
        return cls(pointer, shape, strides[::-1])


class Executor:
    """The kernels of one config, loaded for every device of their architecture.

    Attributes:
        compiled: the cubin, its source and its resources.
        problem, config: what they answer, and how.
    """

    def __init__(self, compiled: Compiled, problem: Problem, config: Config) -> None:
        self.compiled = compiled
        self.problem = problem
        self.config = config
        self._template = template_of(config)
        library = driver.load_library(compiled.cubin)
        self._kernels = {entry: driver.get_kernel(library, entry) for entry in compiled.entries}
        self._ready: set[tuple[str, int]] = set()  # entries and devices
        self._thread = threading.local()

    @property
    def resources(self) -> Resources:
        """Registers, spills, stack and shared memory, as the compiler reported them."""
        return self.compiled.resources

    def prepare(self, shape: Shape, strides: tuple[Strides, ...], device_index: int) -> Prepared:
        """All that calls with these lengths and strides share. For one thread at a time.

        Args:
            strides: those of `Operation.strided`, in this order.

        Raises:
            UnsupportedError: if one call cannot be so large.
            CudaError: if the driver refuses.
        """
        device = driver.query_device(device_index)
        plan = self._template.plan(self.problem, self.config, shape, strides, device)
        for launch in plan.launches:
            if (launch.entry, device_index) not in self._ready:  # twice by two threads: no harm
                kernel = self._kernels[launch.entry]
                driver.prepare_kernel(kernel, launch.smem_bytes, device_index)
                self._ready.add((launch.entry, device_index))
        operands = [operand.name for operand in self.problem.operation.operands]
        return Prepared(plan, self._kernels, operands, device_index)

    def launch(
        self,
        shape: Shape,
        operands: Mapping[str, TensorView | None],
        scalars: tuple[float, ...],
        *,
        device_index: int,
        stream: int,
        workspace: int = 0,
    ) -> None:
        """Queues the kernels on a stream; does not wait, allocate or synchronise.

        Shapes, dtypes and alignment are the caller's duty.

        Args:
            operands: the tensors by name; one that is optional may be missing or None.
            scalars: those of the operation, as the kernels take them.
            stream: the CUstream as an integer; 0 is the default stream.
            workspace: the address of `Prepared.workspace_bytes` of device memory.

        Raises:
            UnsupportedError, CudaError: as `prepare` does.
        """
        operation = self.problem.operation
        views = [operands.get(operand.name) for operand in operation.operands]
        strides = tuple(operands[operand.name].strides for operand in operation.strided)  # type: ignore[union-attr]
        addresses = tuple(0 if view is None else view.pointer for view in views)
        prepared = self._kept(shape, strides, device_index)
        prepared.launch(addresses, scalars, stream, workspace)

    def workspace_bytes(self, shape: Shape, strides: tuple[Strides, ...], device_index: int) -> int:
        """Device memory that a launch with these lengths and strides needs."""
        return self._kept(shape, strides, device_index).workspace_bytes

    @property
    def _kept(self) -> Callable[..., Prepared]:
        """`prepare`, which this thread does once for each geometry."""
        try:
            prepare: Callable[..., Prepared] = self._thread.prepare
        except AttributeError:
            prepare = self._thread.prepare = lru_cache(PLANS_PER_THREAD)(self.prepare)
        return prepare


class Prepared:
    """A plan, laid out for the driver.

    Not safe to share between threads, and made for them not to: see the module.

    Attributes:
        empty: whether there is nothing to launch.
        workspace_bytes: device memory that each call brings, 0 for most kernels.
    """

    __slots__ = (
        "_buffers", "_context", "_context_found", "_context_out", "_device_index", "_get_context",
        "_launches", "_queue", "_zeroed", "empty", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self, plan: Plan, kernels: Mapping[str, int], operands: Sequence[str], device_index: int
    ) -> None:
        names = [*operands, *(buffer.name for buffer in plan.workspace)]
        self.empty = not plan.launches
        self._launches = [
            _PreparedLaunch(launch, kernels[launch.entry], names, device_index)
            for launch in plan.launches
        ]
        sizes = [round_up(buffer.bytes, BUFFER_ALIGNMENT) for buffer in plan.workspace]
        self._buffers = tuple(itertools.accumulate([0, *sizes]))[: len(sizes)]  # offsets
        self.workspace_bytes = sum(sizes)
        self._zeroed = [
            (offset, buffer.bytes)
            for offset, buffer in zip(self._buffers, plan.workspace, strict=True)
            if buffer.zeroed
        ]
        self._device_index = device_index
        self._context = driver.primary_context(device_index)
        self._get_context: Callable[..., int] = driver.hot_calls().get_context
        self._context_found = ctypes.c_void_p()
        self._context_out = ctypes.c_void_p(ctypes.addressof(self._context_found))
        # Most plans are one launch, which then is queued without a detour.
        alone = len(self._launches) == 1 and not plan.workspace
        self._queue = self._launches[0].queue if alone else self._queue_all

    def launch(
        self, addresses: Addresses, scalars: tuple[float, ...], stream: int, workspace: int = 0
    ) -> None:
        """Queues the work; see `Executor.launch`.

        Args:
            addresses: of all operands of the operation, in its order; 0 for one that is missing.
        """
        if self.empty:
            return
        self._get_context(self._context_out)
        if self._context_found.value == self._context:
            self._queue(addresses, scalars, stream, workspace)
        else:  # another device is current, or this thread has used none yet
            with driver.use_device(self._device_index):
                self._queue(addresses, scalars, stream, workspace)

    def _queue_all(
        self, addresses: Addresses, scalars: tuple[float, ...], stream: int, workspace: int
    ) -> None:
        addresses += tuple(workspace + offset for offset in self._buffers)
        for offset, size in self._zeroed:
            set_memory = driver.hot_calls().set_memory
            driver.check_status(set_memory(workspace + offset, 0, size, stream))
        for launch in self._launches:
            launch.queue(addresses, scalars, stream, workspace)


class _PreparedLaunch:
    """One launch of a plan, its arguments in memory of their own."""

    __slots__ = (
        "_attributes", "_buffer", "_config", "_config_at", "_counter", "_device_index",
        "_draws_tiles", "_encoded", "_kernel", "_launch", "_map_places", "_maps", "_pack_pointers",
        "_pack_scalars", "_parameters", "_params_offset", "_pick_maps", "_pick_pointers",
        "_replace_address", "_scalars", "_scalars_offset",
    )  # fmt: skip

    def __init__(
        self, launch: Launch, kernel: int, names: Sequence[str], device_index: int
    ) -> None:
        calls = driver.hot_calls()
        self._launch: Callable[..., int] = calls.launch
        self._replace_address: Callable[..., int] = calls.replace_address
        self._kernel = ctypes.c_void_p(kernel)
        self._device_index = device_index
        self._attributes = _attributes(launch)
        self._config = driver.LaunchConfig(
            grid=(launch.grid, 1, 1), block=(launch.threads, 1, 1), smem_bytes=launch.smem_bytes
        )
        if self._attributes:
            self._config.attributes = ctypes.addressof(self._attributes)
            self._config.attribute_count = len(self._attributes)
        self._config_at = ctypes.c_void_p(ctypes.addressof(self._config))

        # Kernel arguments: the maps, each 128 bytes at a multiple of 128; the parameters; the
        # address of the tile counter.
        self._params_offset = MAP_BYTES * len(launch.maps)
        size = self._params_offset + len(launch.params)
        space = ctypes.create_string_buffer(MAP_BYTES - 1 + size)
        first = -ctypes.addressof(space) % MAP_BYTES
        self._buffer = memoryview(space).cast("B")[first : first + size]
        self._buffer[self._params_offset :] = launch.params
        base = ctypes.addressof(space) + first
        places = [base + MAP_BYTES * i for i in range(len(launch.maps) + 1)]
        self._draws_tiles = launch.draws_tiles
        self._counter = ctypes.c_void_p()
        if launch.draws_tiles:
            places.append(ctypes.addressof(self._counter))
        self._parameters = (ctypes.c_void_p * len(places))(*places)

        pointers = launch.layout.of_kind("pointer")
        self._pick_pointers = None if pointers == tuple(names) else _picker(names, pointers)
        self._pack_pointers = struct.Struct(f"{len(pointers)}Q").pack_into
        scalars = launch.layout.of_kind("scalar")
        self._pack_scalars = struct.Struct(f"{len(scalars)}f").pack_into
        self._scalars: tuple[float, ...] = ()
        self._scalars_offset = self._params_offset
        if scalars:
            self._scalars_offset += launch.layout.offsets[scalars[0]]

        present = [(place, *of) for place, of in zip(places, launch.maps, strict=False)]
        self._maps = [(place, described) for place, _, described in present if described]
        self._map_places = tuple(ctypes.c_void_p(place) for place, _ in self._maps)
        self._pick_maps = _picker(names, [name for _, name, described in present if described])
        self._encoded = not self._maps

    def queue(
        self, addresses: Addresses, scalars: tuple[float, ...], stream: int, workspace: int
    ) -> None:
        """Queues the kernel on a stream of the current context.

        Args:
            addresses: of the operands, and of the buffers of the workspace, if there are any.
        """
        pick = self._pick_pointers
        pointers = addresses if pick is None else pick(addresses)
        self._pack_pointers(self._buffer, self._params_offset, *pointers)
        if scalars is not self._scalars and scalars != self._scalars:
            self._pack_scalars(self._buffer, self._scalars_offset, *scalars)
            self._scalars = scalars
        self._config.stream = stream
        if self._encoded:
            replace_address = self._replace_address
            for place, address in zip(self._map_places, self._pick_maps(addresses)):  # noqa: B905
                if status := replace_address(place, address):
                    driver.check_status(status)
        else:
            self._encode(self._pick_maps(addresses))
        if self._draws_tiles:
            self._counter.value = tile_counter(self._device_index, stream)
        if status := self._launch(self._config_at, self._kernel, self._parameters, None):
            driver.check_status(status)

    def _encode(self, addresses: Addresses) -> None:
        """Makes the tensor maps, pointing at these addresses."""
        encode = driver.hot_calls().encode_tensor_map
        for (place, described), address in zip(self._maps, addresses, strict=True):
            rank = len(described.dims)
            status = encode(
                ctypes.c_void_p(place),
                described.dtype,
                rank,
                address,
                (ctypes.c_uint64 * rank)(*described.dims),
                (ctypes.c_uint64 * (rank - 1))(*described.byte_strides),
                (ctypes.c_uint32 * rank)(*described.box),
                (ctypes.c_uint32 * rank)(*(1,) * rank),
                0,  # not interleaved
                described.swizzle,
                MAP_L2_PROMOTION_256,
                0,  # out of bounds: zeros
            )
            driver.check_status(status)
        self._encoded = True


def _picker(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Addresses], Addresses]:
    """What takes the addresses of `wanted` out of those of `names`."""
    places = [names.index(name) for name in wanted]
    if len(places) == 1:  # of which itemgetter would give no tuple
        (only,) = places
        return lambda addresses: (addresses[only],)
    return itemgetter(*places) if places else _none


def _none(addresses: Addresses) -> Addresses:
    return ()


def _attributes(launch: Launch) -> Any:
    """The CUlaunchAttributes of a launch, as a ctypes array; None if it needs none."""
    attributes = []
    if launch.cluster > 1:
        size = (ctypes.c_uint * 16)(launch.cluster, 1, 1)
        attributes.append(driver.LaunchAttribute(id=driver.CLUSTER_DIMENSION, value=size))
    if launch.dependent:
        allowed = (ctypes.c_uint * 16)(1)
        attributes.append(
            driver.LaunchAttribute(id=driver.PROGRAMMATIC_STREAM_SERIALIZATION, value=allowed)
        )
    return (driver.LaunchAttribute * len(attributes))(*attributes) if attributes else None
