"""The template forward_sm90: TMA, wgmma and warp specialisation, for Hopper.

After FlashAttention-3 (Shah et al. 2024).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fagen.device import ARCHITECTURES, Architecture, Device
from fagen.kernels import forward
from fagen.kernels.forward import ForwardConfig
from fagen.kernels.plan import Launch, Plan, Strides, TensorMap
from fagen.kernels.template import (
    WARP,
    WARPGROUP,
    WARPGROUP_ROWS,
    Cost,
    Rule,
    round_up,
    smem_rule,
    symbol,
    threads_rule,
)
from fagen.problem import WIDE_ALIGNMENT, Problem, Shape

if TYPE_CHECKING:
    from fagen.build.compiled import Resources

NAME = "forward_sm90"
OP = "forward"
ARCHS = ("sm90",)
AXES_VERSION = 1
HOST = forward.HOST
REACH_OF_SIZE = forward.REACH_OF_SIZE
REACH_OF_CHOICE = forward.REACH_OF_CHOICE | {
    "overlap": 1.0,
    "p_in_smem": 8.0,
    "persistent": 8.0,
    "producer_registers": 16.0,
}

NARROWEST_SPAN = 32  # columns that a swizzle spans
BARRIER_BYTES = 8
WORK_BYTES = 16  # which tile's Q a buffer holds
SMEM_ALIGNMENT = 1024  # what the 128-byte swizzle needs of a tile's base
MAX_CONSUMER_REGISTERS = 240  # of setmaxnreg, with a producer that keeps 24
WGMMA_OVERHEAD_REGISTERS = 26  # beside its operands; ptxas names the sum when it refuses (C7602)
SWIZZLES = {32: 2, 64: 3}  # CUtensorMapSwizzle by columns of a chunk


class Sm90Forward(ForwardConfig):
    """A config of templates/forward_sm90.cu.j2.

    Attributes:
        producer_registers: 0 for a producer of one warp and no register shift; otherwise the
            producer is a warpgroup that keeps this many registers per thread (setmaxnreg) and
            leaves the rest to the consumers.
        cluster: thread blocks that share a tile and load K and V for each other: each loads a part
            and multicasts it to all.
        ping_pong: consumer warpgroups take turns, one's softmax under another's products
            (FlashAttention-3, section 3.1).
        overlap: within a warpgroup, the softmax of one block runs under the second product of the
            one before (FlashAttention-3, section 3.2).
        persistent: as many thread blocks as fit the GPU, each looping over tiles.
        dynamic_tiles: a persistent block draws its next tile from a counter in device memory,
            instead of taking tiles at a fixed distance.
        q_stages: buffers for Q, through which O leaves; with two, the next tile's Q arrives while
            this tile's O is still there. For a persistent grid.
        p_in_smem: P goes through shared memory to the second product, not through registers.
    """

    template: Literal["forward_sm90"] = "forward_sm90"
    producer_registers: int = Field(default=24, ge=0, le=232, multiple_of=8)
    cluster: int = Field(default=1, ge=1, le=2)
    ping_pong: bool = True
    overlap: bool = True
    persistent: bool = False
    dynamic_tiles: bool = False
    q_stages: int = Field(default=1, ge=1, le=2)
    p_in_smem: bool = False

    @property
    def blocks_per_tile(self) -> int:
        return self.cluster

    @property
    def is_persistent(self) -> bool:
        return self.persistent

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute: one for each 64 rows, wgmma's M."""
        return self.block_m // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        producer = WARPGROUP if self.producer_registers else WARP
        return self.consumer_warpgroups * WARPGROUP + producer

    def consumer_registers(self, registers_per_sm: int) -> int:
        """Registers of a consumer thread: the block's pool less the producer's, by setmaxnreg's
        rule that all warpgroups together hold no more than they did at entry.
        """
        cap = self.register_cap(registers_per_sm)
        if self.producer_registers == 0:
            return cap
        warpgroups = self.consumer_warpgroups
        pool = cap * (warpgroups + 1) - self.producer_registers
        return min(pool // warpgroups // 8 * 8, MAX_CONSUMER_REGISTERS)

    def computing_registers(self, registers_per_sm: int) -> int:
        return self.consumer_registers(registers_per_sm)

    def smem_bytes(self, problem: Problem) -> int:
        q, ring = self.tile_bytes(problem)
        p = 0
        if self.p_in_smem:
            p = self.block_m * round_up(self.block_n, 64) * problem.element.bytes
        slices = self.head_dim_padded(problem) // self.block_k
        # Each stage of Q: full per slice, empty. Of K and V: K full per slice, K empty, V full,
        # V empty.
        barriers = self.q_stages * (slices + 1) + self.stages * (slices + 3)
        size = self.q_stages * q + ring + p + round_up(barriers * BARRIER_BYTES, WORK_BYTES)
        return round_up(size + self.q_stages * WORK_BYTES, SMEM_ALIGNMENT)

    def qk_steps(self, problem: Problem) -> int:
        """Steps of Q K^T, 16 columns each, in one statement: as many as divide both the head dim
        and a slice into whole statements.
        """
        return math.gcd(round_up(problem.head_dim, 16), self.block_k) // 16

    def accumulator_registers(self, problem: Problem) -> int:
        both = self.overlap and not self.p_in_smem  # S of one block beside P of the last
        return problem.head_dim // 2 + self.block_n // 2 + (self.block_n // 4 if both else 0)


Config = Sm90Forward


def why_not(problem: Problem, arch: Architecture) -> str | None:
    if problem.alignment >= WIDE_ALIGNMENT:
        return None
    return f"TMA needs bases and strides that are multiples of {WIDE_ALIGNMENT} bytes"


# ---- the space ----


def axes(problem: Problem) -> dict[str, tuple[Any, ...]]:
    return {
        "block_m": (64, 128, 192),
        "block_n": tuple(range(16, 257, 16)),
        "stages": (1, 2, 3, 4),
        "producer_registers": (0, 24, 32, 40, 56),
        "min_blocks_per_sm": (1, 2, 3, 4),
        "p_in_smem": (False, True),
        "overlap": (True, False),
        "ping_pong": (True, False),
        "persistent": (False, True),
        "cluster": (1, 2),
        "dynamic_tiles": (False, True),
        "q_stages": (1, 2),
        **forward.shared_axes(problem, NARROWEST_SPAN),
    }


def _padding(c: Any, p: Problem, d: Device) -> str | None:
    return forward.padding_problem(c.block_k, p.head_dim, NARROWEST_SPAN)


def _rows(c: Any, p: Problem, d: Device) -> str | None:
    if c.block_m % WARPGROUP_ROWS or c.block_m > 192:
        return f"block_m={c.block_m} is not 64, 128 or 192: a consumer warpgroup takes 64 rows"
    return None


def _turns(c: Any, p: Problem, d: Device) -> str | None:
    if c.ping_pong and c.block_m < 128:
        return "ping_pong needs two consumer warpgroups: block_m of at least 128"
    return None


def _q_stages(c: Any, p: Problem, d: Device) -> str | None:
    if c.q_stages > 1 and not c.persistent:
        return "q_stages=2 needs persistent: a block that computes one tile loads one Q"
    return None


def _dynamic(c: Any, p: Problem, d: Device) -> str | None:
    if c.dynamic_tiles and c.cluster > 1:
        return "dynamic_tiles needs cluster=1: the blocks of a cluster would draw different tiles"
    if c.dynamic_tiles and not c.persistent:
        return "dynamic_tiles needs persistent: a block that computes one tile draws no other"
    return None


def _register_pool(c: Any, p: Problem, d: Device) -> str | None:
    """setmaxnreg: multiples of 8 from 24, dec at most and inc at least the count at entry."""
    if c.producer_registers == 0:
        return None
    cap = c.register_cap(d.arch.registers_per_sm)
    consumer = c.consumer_registers(d.arch.registers_per_sm)
    if c.producer_registers < 24:
        return f"setmaxnreg takes at least 24 registers, not {c.producer_registers}"
    if c.producer_registers > cap:
        return f"the producer cannot give up to {c.producer_registers}: it enters with {cap}"
    if consumer < cap:
        return f"the consumers cannot take {consumer} registers: they enter with {cap}"
    return None


def _wgmma(c: Any, p: Problem, d: Device) -> str | None:
    """ptxas allots for entry, before setmaxnreg, and refuses a wgmma whose operands do not fit."""
    cap = c.register_cap(d.arch.registers_per_sm)
    p_operands = 0 if c.p_in_smem else 4
    need = max(c.block_n // 2, p.head_dim // 2 + p_operands) + WGMMA_OVERHEAD_REGISTERS
    if need > cap:
        return f"one wgmma needs {need} registers at entry, and a thread enters with {cap}"
    return None


_THREADS = ("block_m", "producer_registers", "min_blocks_per_sm")
_SMEM = (
    "block_m", "block_n", "block_k", "stages", "q_stages", "min_blocks_per_sm", "p_in_smem",
)  # fmt: skip
RULES = (
    Rule(("block_k",), _padding),
    Rule(("block_m",), _rows),
    Rule(("block_m", "ping_pong"), _turns),
    Rule(_THREADS, threads_rule),
    Rule(_THREADS, _register_pool),
    Rule((*_THREADS, "block_n", "p_in_smem"), _wgmma),
    Rule((*_THREADS, "block_n", "overlap", "p_in_smem"), forward.accumulators_rule),
    Rule(("persistent", "q_stages"), _q_stages),
    Rule(("persistent", "dynamic_tiles", "cluster"), _dynamic),
    Rule(_SMEM, smem_rule),
)


def default(problem: Problem) -> Sm90Forward:
    d = problem.head_dim
    block_n = 128 if d <= 128 else 80 if d > 192 else 112
    block_k = round_up(d, 64) if d % 64 == 0 or d > 32 else 32
    return Sm90Forward(block_m=128, block_n=block_n, block_k=block_k, stages=2)


_SMALL_BLOCK: dict[str, Any] = {"block_m": 64, "producer_registers": 0, "ping_pong": False}
_THREE_WARPGROUPS: dict[str, Any] = {"block_m": 192, "producer_registers": 32}
_TWO_QS: dict[str, Any] = {"persistent": True, "q_stages": 2, "head_grouping": False}
_CLUSTER: dict[str, Any] = {"cluster": 2, "producer_registers": 40}
_DRAWN_TILES: dict[str, Any] = {"persistent": True, "q_stages": 2, "dynamic_tiles": True}
# (head dims up to, axes beside the default's): tiles of FlashAttention-3, from its tile_size.h, and
# the small blocks, several to an SM, that beat them on short sequences (benchmarks/README.md).
_KNOWN: tuple[tuple[int, dict[str, Any]], ...] = (
    (64, _THREE_WARPGROUPS | {"block_n": 128}),
    (64, _THREE_WARPGROUPS | {"block_n": 128} | _TWO_QS),
    (64, _THREE_WARPGROUPS | {"block_n": 128} | _DRAWN_TILES),
    (64, _THREE_WARPGROUPS | {"block_n": 192, "p_in_smem": True}),
    (64, _SMALL_BLOCK | {"block_n": 80, "min_blocks_per_sm": 3}),
    (96, _THREE_WARPGROUPS | {"block_n": 144, "p_in_smem": True}),
    (96, _THREE_WARPGROUPS | {"block_n": 128, "p_in_smem": True}),
    (128, {"block_n": 128}),
    (128, {"block_n": 128, "head_grouping": False}),
    (128, {"block_n": 128} | _TWO_QS),
    (128, {"block_n": 160} | _DRAWN_TILES),
    (128, {"block_n": 128} | _DRAWN_TILES | {"head_grouping": False}),
    (128, {"block_n": 176}),
    (128, {"block_n": 176} | _CLUSTER),
    (128, {"block_n": 128} | _CLUSTER | _TWO_QS),
    (128, _SMALL_BLOCK | {"block_n": 64, "min_blocks_per_sm": 2}),
    (192, {"block_n": 112}),
    (192, {"block_n": 112, "ping_pong": False}),
    (256, {"block_n": 80, "lazy_rescale": True}),
    (256, {"block_n": 80, "lazy_rescale": True} | _CLUSTER),
    (256, {"block_n": 80, "lazy_rescale": True, "ping_pong": False}),
    (256, {"block_n": 64, "lazy_rescale": True, "persistent": True}),
)


def seeds(problem: Problem) -> list[dict[str, Any]]:
    return forward.seeds_for(problem, _KNOWN, NARROWEST_SPAN)


# ---- text and launch ----


def entries(problem: Problem) -> tuple[str, ...]:
    return (symbol(problem),)


def constants(problem: Problem, config: Sm90Forward) -> dict[str, Any]:
    from fagen.build.wgmma import wgmma

    qk_steps = config.qk_steps(problem)
    return forward.constants(problem, config) | {
        "consumer_warpgroups": config.consumer_warpgroups,
        "consumer_registers": config.consumer_registers(ARCHITECTURES[ARCHS[0]].registers_per_sm),
        "ptx_type": problem.element.ptx,
        "qk_steps": qk_steps,
        "wgmmas": [
            wgmma("wgmma_qk", config.block_n, qk_steps, a_in_registers=False, b_transposed=False),
            wgmma(
                "wgmma_pv",
                problem.head_dim,
                config.block_n // 16,
                a_in_registers=not config.p_in_smem,
                b_transposed=True,
            ),
        ],
    }


def default_scalars(problem: Problem) -> tuple[float, ...]:
    return forward.default_scalars(problem)


def plan(
    problem: Problem,
    config: Sm90Forward,
    shape: Shape,
    strides: tuple[Strides, ...],
    device: Device,
) -> Plan:
    tiles = forward.tile_count(config, shape)
    if tiles == 0:
        return Plan()
    grid = tiles * config.cluster
    if config.persistent:
        resident = device.sm_count * config.min_blocks_per_sm
        grid = min(grid, resident // config.cluster * config.cluster)
    launch = Launch(
        entry=symbol(problem),
        grid=grid,
        threads=config.threads,
        smem_bytes=config.smem_bytes(problem),
        layout=forward.PARAMS,
        params=forward.pack_params(problem, shape, strides, tiles),
        maps=tensor_maps(problem, config, shape, strides),
        draws_tiles=config.dynamic_tiles,
    )
    return Plan((launch,))


def tensor_maps(
    problem: Problem, config: Sm90Forward, shape: Shape, strides: tuple[Strides, ...]
) -> tuple[tuple[str, TensorMap | None], ...]:
    """The maps of Q, K, V and O, each of (head_dim, seqlen, heads, batch); TMA moves boxes of
    `config.chunk` columns.
    """
    share = config.block_n // config.cluster  # of the keys, that each block of a cluster loads
    box_rows = {"q": config.block_m, "k": share, "v": share, "o": WARPGROUP_ROWS}

    def tensor_map(sizes: tuple[int, ...], stride: Strides, rows: int) -> TensorMap:
        batch, seqlen, heads, head_dim = sizes
        dims = (head_dim, seqlen, heads, batch)
        batch_stride, row_stride, head_stride = stride
        # The stride of a dimension of size 1 may be anything: TMA wants a multiple of 16 bytes.
        legal = (
            s if size > 1 else head_dim
            for size, s in zip(dims[1:], (row_stride, head_stride, batch_stride), strict=True)
        )
        return TensorMap(
            dtype=problem.element.tensor_map_code,
            dims=dims,
            byte_strides=tuple(s * problem.element.bytes for s in legal),
            box=(config.chunk, rows, 1, 1),
            swizzle=SWIZZLES[config.chunk],
        )

    return tuple(
        (
            operand.name,
            tensor_map(sizes, stride, box_rows[operand.name]) if all(sizes) else None,
        )
        for operand, stride in zip(problem.operation.strided, strides, strict=True)
        for sizes in (operand.sizes(problem, shape),)
    )


def tensor_flops(arch: Architecture) -> int:
    return arch.mma_flops


def cost(
    problem: Problem,
    shape: Shape,
    config: Sm90Forward,
    device: Device,
    resources: Resources | None,
) -> Cost:
    from fagen.kernels import forward_sm90_cost

    return forward_sm90_cost.cost(problem, shape, config, device, resources)
