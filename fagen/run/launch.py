"""A compiled kernel, tensors -> one asynchronous launch.

`LoadedKernel` is a kernel that the driver holds; its `plan` is all that a call with given lengths
and strides needs, made once. A repeated call re-points the plan's tensor maps, writes five
pointers and launches. The driver copies arguments at the launch, so a plan may be used again as
soon as `Plan.launch` returns; but ctypes gives up the GIL, so no two threads share one.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from fagen.build.compile import Compiled, Resources
from fagen.errors import ArgumentError, UnsupportedError
from fagen.kernels.config import ELEMENT_BYTES, AnyConfig, Sm90Forward
from fagen.kernels.params import FORWARD_PARAMS
from fagen.problem import Problem
from fagen.run import driver
from fagen.run.counters import tile_counter

Strides = tuple[int, int, int]  # batch, row, head, in elements; the head dim is contiguous

PLANS_PER_THREAD = 256  # about 3 KB each
GROUP_BYTES = 32 << 20  # K and V of the heads that run side by side should fit so much of the L2
MAX_TILES = (1 << 31) - 1  # a tile index is an int, as is a grid's x
MAX_SEQLEN = (1 << 30) - 1  # the sum of two lengths is an int
MAX_SCALE = 1e30
MIN_SCALE_LOG2 = 2.0**-100  # stands for 0: masked scores must stay -inf, not become 0 * -inf

PARAMS = struct.Struct(FORWARD_PARAMS.format)
POINTERS = struct.Struct("<5Q")
SCALE = struct.Struct("<f")
SCALE_OFFSET = FORWARD_PARAMS.offsets["scale_log2"]

# cuda.h: CUtensorMapDataType, CUtensorMapSwizzle by columns of a chunk, CUtensorMapL2promotion
MAP_BYTES = 128
MAP_DTYPE = {"fp16": 6, "bf16": 9}
MAP_SWIZZLE = {32: 2, 64: 3}
MAP_L2_PROMOTION_256 = 3
MAP_O_ROWS = 64  # each consumer warpgroup stores its own rows


class TensorView(NamedTuple):
    """A tensor in device memory.

    Attributes:
        pointer: its address.
        shape: (batch, seqlen, heads, head_dim).
        strides: of batch, row and head, in elements.
    """

    pointer: int
    shape: tuple[int, int, int, int]
    strides: Strides

    @classmethod
    def contiguous(cls, pointer: int, shape: tuple[int, int, int, int]) -> TensorView:
        """A tensor without gaps."""
        _, seqlen, heads, head_dim = shape
        row = heads * head_dim
        return cls(pointer, shape, (seqlen * row, row, head_dim))


class Lengths(NamedTuple):
    """The run-time lengths of a call, plain and hashable in no time; see `problem.Shape`."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int


class QKVO(NamedTuple):
    """The strides of the four tensors."""

    q: Strides
    k: Strides
    v: Strides
    o: Strides


def scale_log2(softmax_scale: float) -> float:
    """What the kernels multiply scores by: softmax_scale * log2(e), above 0.

    Raises:
        ArgumentError: for a negative scale, NaN or infinity.
    """
    if not 0 <= softmax_scale <= MAX_SCALE:
        raise ArgumentError(
            f"softmax_scale is {softmax_scale}: allowed are 0 to {MAX_SCALE:g} "
            "(None for 1/sqrt(head_dim))"
        )
    return max(softmax_scale * math.log2(math.e), MIN_SCALE_LOG2)


def heads_per_group(problem: Problem, lengths: Lengths) -> int:
    """Query heads whose tiles run side by side because their K and V fit the L2 together."""
    kv_bytes = 2 * lengths.seqlen_k * problem.head_dim * ELEMENT_BYTES
    kv_heads = max(1, GROUP_BYTES // max(1, kv_bytes))
    heads = kv_heads * (lengths.heads_q // max(1, lengths.heads_kv))
    return max(1, min(heads, lengths.batch * lengths.heads_q))


def tile_count(config: AnyConfig, lengths: Lengths) -> int:
    """Tiles of `config.tile_rows` queries of one head.

    Raises:
        UnsupportedError: if there are more than a grid can have, or a sequence is too long.
    """
    longest = max(lengths.seqlen_q, lengths.seqlen_k)
    if longest > MAX_SEQLEN:
        raise UnsupportedError(f"a sequence of {longest:,}: allowed are up to {MAX_SEQLEN:,}")
    tiles = lengths.batch * lengths.heads_q * -(-lengths.seqlen_q // config.tile_rows)
    most = MAX_TILES // (config.tile_rows // config.block_m)  # a block for each part of a tile
    if tiles > most:
        raise UnsupportedError(
            f"{tiles:,} tiles of {config.tile_rows} queries: one call takes up to {most:,}; "
            "split the batch"
        )
    return tiles


class LoadedKernel:
    """A compiled kernel that the driver has loaded, for every device of its architecture.

    Attributes:
        compiled: the cubin, its source and its resources.
        problem, config: what it answers, and how.
    """

    def __init__(self, compiled: Compiled, problem: Problem, config: AnyConfig) -> None:
        self.compiled = compiled
        self.problem = problem
        self.config = config
        self._smem_bytes = config.smem_bytes(problem)
        self._kernel = driver.get_kernel(driver.load_library(compiled.cubin), compiled.kernel_name)
        self._ready_devices: set[int] = set()
        self._thread = threading.local()

    @property
    def resources(self) -> Resources:
        """Registers, spills, stack and shared memory, as the compiler reported them."""
        return self.compiled.resources

    def launch(
        self,
        q: TensorView,
        k: TensorView,
        v: TensorView,
        o: TensorView,
        lse_pointer: int,
        softmax_scale: float,
        *,
        device_index: int,
        stream: int,
    ) -> None:
        """Queues the kernel on a stream; does not wait, allocate or synchronise.

        Shapes, dtypes and alignment are the caller's duty.

        Args:
            lse_pointer: float32 (batch, heads_q, seqlen_q), contiguous; 0 if not wanted.
            stream: the CUstream as an integer; 0 is the default stream.

        Raises:
            ArgumentError: for a softmax_scale that is negative or not finite.
            UnsupportedError: for more tiles than one launch can have.
            CudaError: if the driver refuses.
        """
        try:
            plan = self._thread.plan
        except AttributeError:
            plan = self._thread.plan = lru_cache(PLANS_PER_THREAD)(self.plan)
        batch, seqlen_q, heads_q, _ = q.shape
        plan(
            Lengths(batch, seqlen_q, k.shape[1], heads_q, k.shape[2]),
            QKVO(q.strides, k.strides, v.strides, o.strides),
            device_index,
        ).launch(
            q.pointer, k.pointer, v.pointer, o.pointer, lse_pointer, scale_log2(softmax_scale),
            stream,
        )  # fmt: skip

    def plan(self, lengths: Lengths, strides: QKVO, device_index: int) -> Plan:
        """All that calls with these lengths and strides share. For one thread at a time."""
        tiles = tile_count(self.config, lengths)
        if device_index not in self._ready_devices:  # twice by two threads does no harm
            driver.prepare_kernel(self._kernel, self._smem_bytes, device_index)
            self._ready_devices.add(device_index)
        grid = tiles
        maps: tuple[TensorMap, ...] = ()
        if isinstance(config := self.config, Sm90Forward):
            grid *= config.cluster
            if config.persistent:
                resident = driver.query_device(device_index).sm_count * config.min_blocks_per_sm
                grid = min(grid, resident // config.cluster * config.cluster)
            maps = tensor_maps(self.problem, config, lengths, strides)
        params = PARAMS.pack(
            *(0,) * 5,
            *strides.q, *strides.k, *strides.v, *strides.o,
            0.0,
            lengths.batch, lengths.heads_q, lengths.heads_kv, lengths.seqlen_q, lengths.seqlen_k,
            heads_per_group(self.problem, lengths),
            tiles,
        )  # fmt: skip
        return Plan(
            self._kernel,
            grid,
            self.config.threads,
            self._smem_bytes,
            maps,
            params,
            device_index,
            draws_tiles=isinstance(self.config, Sm90Forward) and self.config.dynamic_tiles,
        )


class TensorMap(NamedTuple):
    """What a tensor map says beside its address: (head_dim, seqlen, heads, batch), 16-bit.

    Attributes:
        dtype: CUtensorMapDataType.
        dims: elements of each dimension.
        byte_strides: of seqlen, heads and batch.
        box: elements of each dimension that one copy carries.
        swizzle: CUtensorMapSwizzle.
    """

    dtype: int
    dims: tuple[int, int, int, int]
    byte_strides: tuple[int, int, int]
    box: tuple[int, int, int, int]
    swizzle: int


def tensor_maps(
    problem: Problem, config: Sm90Forward, lengths: Lengths, strides: QKVO
) -> tuple[TensorMap, ...]:
    """The maps of Q, O, K and V, in this order; without K and V if there are no keys."""
    columns = config.chunk

    def tensor_map(seqlen: int, heads: int, stride: Strides, rows: int) -> TensorMap:
        dims = (problem.head_dim, seqlen, heads, lengths.batch)
        batch, row, head = stride
        # The stride of a dimension of size 1 may be anything: TMA wants a multiple of 16 bytes.
        legal = (
            s if size > 1 else problem.head_dim
            for size, s in zip(dims[1:], (row, head, batch), strict=True)
        )
        return TensorMap(
            dtype=MAP_DTYPE[problem.dtype],
            dims=dims,
            byte_strides=tuple(s * ELEMENT_BYTES for s in legal),  # type: ignore[arg-type]
            box=(columns, rows, 1, 1),
            swizzle=MAP_SWIZZLE[columns],
        )

    queries = (
        tensor_map(lengths.seqlen_q, lengths.heads_q, strides.q, config.block_m),
        tensor_map(lengths.seqlen_q, lengths.heads_q, strides.o, MAP_O_ROWS),
    )
    if lengths.seqlen_k == 0:
        return queries
    share = config.block_n // config.cluster
    return (
        *queries,
        tensor_map(lengths.seqlen_k, lengths.heads_kv, strides.k, share),
        tensor_map(lengths.seqlen_k, lengths.heads_kv, strides.v, share),
    )


class Plan:
    """What it takes to answer one geometry: today a single launch, its arguments laid out.

    Not safe to share between threads, and made for them not to: see the module.
    """

    __slots__ = (
        "_buffer", "_config", "_config_at", "_context", "_context_found", "_context_out",
        "_counter", "_device_index", "_draws_tiles", "_encoded", "_get_context", "_kernel",
        "_launch", "_map_addresses", "_maps", "_parameters", "_params_offset",
        "_replace_address", "_scale_log2", "empty",
    )  # fmt: skip

    def __init__(
        self,
        kernel: int,
        grid: int,
        threads: int,
        smem_bytes: int,
        maps: tuple[TensorMap, ...],
        params: bytes,
        device_index: int,
        *,
        draws_tiles: bool,
    ) -> None:
        calls = driver.hot_calls()
        self._launch: Callable[..., int] = calls.launch
        self._replace_address: Callable[..., int] = calls.replace_address
        self._get_context: Callable[..., int] = calls.get_context
        self.empty = grid == 0
        self._kernel = ctypes.c_void_p(kernel)
        self._config = driver.LaunchConfig(
            grid=(grid, 1, 1), block=(threads, 1, 1), smem_bytes=smem_bytes
        )
        self._config_at = ctypes.c_void_p(ctypes.addressof(self._config))
        self._device_index = device_index
        self._context = driver.primary_context(device_index)
        self._context_found = ctypes.c_void_p()
        self._context_out = ctypes.c_void_p(ctypes.addressof(self._context_found))

        # Kernel arguments: the maps of Q, K, V and O, each 128 bytes at a multiple of 128, if the
        # kernel has maps; the parameters; the tile counter if the kernel draws tiles.
        kernel_maps = 4 if maps else 0
        self._params_offset = MAP_BYTES * kernel_maps
        size = self._params_offset + len(params)
        space = ctypes.create_string_buffer(MAP_BYTES - 1 + size)
        first = -ctypes.addressof(space) % MAP_BYTES
        self._buffer = memoryview(space).cast("B")[first : first + size]
        self._buffer[self._params_offset :] = params
        base = ctypes.addressof(space) + first
        places = [base + MAP_BYTES * i for i in range(kernel_maps + 1)]
        self._draws_tiles = draws_tiles
        self._counter = ctypes.c_void_p()
        if draws_tiles:
            places.append(ctypes.addressof(self._counter))
        self._parameters = (ctypes.c_void_p * len(places))(*places)
        self._scale_log2 = 0.0
        self._maps = maps
        # In the order of `tensor_maps`: Q, O, K, V.
        order = (0, 3, 1, 2)[: len(maps)]
        self._map_addresses = tuple(ctypes.c_void_p(places[i]) for i in order)
        self._encoded = not maps

    def launch(
        self, q: int, k: int, v: int, o: int, lse: int, scale_log2: float, stream: int
    ) -> None:
        """Queues the work for tensors at these addresses; see `LoadedKernel.launch`."""
        if self.empty:
            return
        POINTERS.pack_into(self._buffer, self._params_offset, q, k, v, o, lse)
        if scale_log2 != self._scale_log2:
            SCALE.pack_into(self._buffer, self._params_offset + SCALE_OFFSET, scale_log2)
            self._scale_log2 = scale_log2
        self._config.stream = stream
        self._get_context(self._context_out)
        if self._context_found.value == self._context:
            self._queue((q, o, k, v))
        else:  # another device is current, or this thread has used none yet
            with driver.use_device(self._device_index):
                self._queue((q, o, k, v))

    def _queue(self, addresses: tuple[int, int, int, int]) -> None:
        """Points the tensor maps at these addresses of Q, O, K and V, and launches."""
        if self._encoded:
            replace_address = self._replace_address
            for place, address in zip(self._map_addresses, addresses):  # noqa: B905
                if status := replace_address(place, address):
                    driver.check_status(status)
        else:
            self._encode(addresses)
        if self._draws_tiles:
            self._counter.value = tile_counter(self._device_index, self._config.stream or 0)
        if status := self._launch(self._config_at, self._kernel, self._parameters, None):
            driver.check_status(status)

    def _encode(self, addresses: tuple[int, int, int, int]) -> None:
        """Makes the tensor maps, pointing at these addresses of Q, O, K and V."""
        calls = driver.hot_calls()
        for place, tensor_map, address in zip(  # noqa: B905
            self._map_addresses, self._maps, addresses
        ):
            status = calls.encode_tensor_map(
                place,
                tensor_map.dtype,
                4,
                address,
                (ctypes.c_uint64 * 4)(*tensor_map.dims),
                (ctypes.c_uint64 * 3)(*tensor_map.byte_strides),
                (ctypes.c_uint32 * 4)(*tensor_map.box),
                (ctypes.c_uint32 * 4)(1, 1, 1, 1),
                0,  # not interleaved
                tensor_map.swizzle,
                MAP_L2_PROMOTION_256,
                0,  # out of bounds: zeros
            )
            driver.check_status(status)
        self._encoded = True
