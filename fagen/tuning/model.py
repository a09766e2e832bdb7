"""problem, shape, config, device -> microseconds, predicted without running anything.

A thread block's tile is a path: start, then one step per block of keys, each of which waits for
its products, softmax and loads in turn. Tiles that share a multiprocessor also share its pipes:
tensor cores, special-function unit, issue slots, shared memory, L2. Path and pipes overlap to a
degree: together they take a p-norm, between the longest of them (p = infinity) and their sum
(p = 1). Tiles add up to waves. What counts is the order of the configs, not the microsecond.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fagen.device import RESERVED_SMEM_PER_BLOCK, Device
from fagen.kernels.config import (
    ELEMENT_BYTES,
    SCHEDULERS,
    WARP,
    WARPGROUP,
    AnyConfig,
    Sm80Forward,
    Sm90Forward,
    round_up,
)
from fagen.problem import Problem, Shape
from fagen.run.launch import Lengths, heads_per_group

if TYPE_CHECKING:
    from fagen.build.compile import Resources

# ---- constants ----
# "fit": to configs of forward_sm90 that were measured on an H200. Most weight have 1080 of guided
# searches in bf16, at sequences of 512, 2048 and 8192. Less have every second of the 516 of a
# complete table in bf16, and of 1071 in fp16 that range widely: those kernels are older, and their
# warpgroups skipped no step. tests/test_model.py reads them, and what the fit has not seen.
# "older fit": to guided searches, table and wide range alike, of the kernel before; fitting them
# again gained nothing. Cycles are those of an SM.

# What the hardware does.
SUSTAINED_CLOCK = 0.95  # of the boost clock, in measurements with pauses between the launches
SMEM_BYTES_PER_CLOCK = 128  # 32 banks of 4 bytes
L2_BYTES_PER_CLOCK = 64  # an SM's port to the L2
ISSUE_PER_CLOCK = 128  # lanes: four schedulers of a warp each
WGMMA_ROWS, WGMMA_DEPTH = 64, 16  # of one wgmma instruction; its columns vary
MMA_SYNC_FLOPS = 4096  # one warp-wide m16n8k16
LDMATRIX_BYTES = 512  # one warp-wide ldmatrix.x4
LOAD_CYCLES = 910.0  # latency of a TMA load from L2: older fit
NARROW_SWIZZLE = 1.33  # operand reads under the 64-byte swizzle, of those under the 128-byte: fit
LAUNCH_US = 2.0

# What the instructions of the kernels cost.
ISSUE_PER_SCORE = 6.08  # scale, exp2, maximum, sum, half a conversion: fit, 4.5 by counting
SLOTS_LOST = 0.84  # for each used, with one computing warp per scheduler; with n, an n-th: fit
ISSUE_PER_MASKED_SCORE = 7.0  # index, comparison and select, in a loop of its own: fit
ISSUE_PER_POLYNOMIAL = 6.8  # instead of exp2: fit, 9 by counting
ISSUE_CYCLES = 143.0  # of a warpgroup's step, however few its keys: fit
RESCALE_LATENCY = 4.2  # of rescaling O, in its issue cycles: it sits between two products; fit
LAZY_CYCLES = 555.0  # vote and branch instead, which the compiler moves nothing across: fit
P_STORE_PER_KEY = 3.25  # 64 rows of P to shared memory, and a barrier: older fit
COLLISION = 0.27  # softmax that meets each other warpgroup's if nobody orders them: fit
COLLISION_OVERLAPPED = 0.26  # and if turns do, but each has products under its own softmax: fit

# A tile and a grid.
TILE_CYCLES = 2950.0  # starting a block, first loads: older fit
TILE_CYCLES_PER_ELEMENT = 0.176  # of O, to finish and to store it: fit
# Share of TILE_CYCLES that is left where the next tile's loads run early, by buffers for Q: older
# fit. With two, its first product runs early as well: fit.
PERSISTENT_TILE = {1: 0.53, 2: -0.2}
STATIC_TILE_KEYS = 250.0  # a tile beside its keys, in keys, if dealt out: older fit
PERSISTENT_CLUSTERS = 0.07  # time lost by several per SM, which wait for others: older fit
TAIL_FULL = 0.92  # share of the last wave's idle time that is really lost: fit

BARRIER_CYCLES = 40.0  # __syncthreads of a block, beside the wait for its copies
# Exponents p of the overlap: fit.
NORM = {"forward_sm90": 3.06, "forward_sm80": 2.8}
NORM_OVERLAP = 0.59  # the `overlap` axis
# Device memory beside everything else, by `head_grouping`: the first wave waits for it, and longer
# if it begins with the keys of many heads: older fit of False, fit of True.
NORM_MEMORY = {False: 2.06, True: 1.71}

# Registers.
REGISTERS_BESIDE = 28  # beside the accumulators, as NVRTC 13.0 compiles forward_sm90
COMFORTABLE_REGISTERS = 28  # free beside the accumulators; with 16 to 23 each of 294 was bad
NO_REGISTERS_LEFT = 0.3  # time lost when none are
SPILL_BYTES_DOUBLE = 600.0  # bytes of spills that double the time: 192 cost a third
SERIALISED = 1.4  # time lost when the compiler serialises wgmma


# ---- what a grid consists of ----


class Steps(NamedTuple):
    """The work of one head.

    A step that only part of a tile computes or masks counts as that part.

    Attributes:
        tiles: how many.
        total: steps of all tiles, for whose blocks of keys they load and wait.
        longest: steps of the longest tile.
        seen: steps of all tiles that compute: the others are masked as a whole.
        masked: those of them that hold a mask's edge.
    """

    tiles: int
    total: int
    longest: int
    seen: float
    masked: float


@lru_cache(maxsize=4096)
def steps_of_head(
    shape: Shape, causal: bool, block_m: int, block_n: int, rows: int | None = None
) -> Steps:
    """Counts the blocks of keys that the tiles of one head visit.

    Args:
        rows: how many of a tile's rows decide together which keys to compute and which of those
            need a mask; None for all.
    """
    tiles = -(-shape.seqlen_q // block_m)
    last_block = -(-shape.seqlen_k // block_n)
    ragged = shape.seqlen_k % block_n != 0
    if not causal:
        total = tiles * last_block
        return Steps(tiles, total, last_block, total, tiles * ragged)
    offset = shape.seqlen_k - shape.seqlen_q
    rows = rows or block_m
    total = longest = 0
    seen = masked = 0.0
    for first_row in range(0, shape.seqlen_q, block_m):
        visited = 0
        for first in range(first_row, first_row + block_m, rows):
            if first >= shape.seqlen_q:
                break
            last = min(first + rows, shape.seqlen_q) - 1
            computed = max(0, -(-min(shape.seqlen_k, last + 1 + offset) // block_n))
            whole = max(0, first + 1 + offset) // block_n
            seen += computed * rows / block_m
            masked += max(0, computed - whole) * rows / block_m
            visited = computed
        total += visited
        longest = max(longest, visited)
    return Steps(tiles, total, longest, seen, masked)


@lru_cache(maxsize=1024)
def grouped_heads(problem: Problem, shape: Shape) -> int:
    """Query heads whose tiles `head_grouping` interleaves."""
    return heads_per_group(problem, Lengths(**shape.model_dump()))


@lru_cache(maxsize=4096)
def static_imbalance(
    problem: Problem, shape: Shape, block_m: int, slots: int, grouped: bool
) -> float:
    """Work of the busiest block of a persistent causal grid, over the mean: each wave of tiles is
    dealt out whatever their lengths, in the order of templates/schedule.cuh, and backwards every
    other time if heads are not grouped.
    """
    heads = shape.batch * shape.heads_q
    tiles = -(-shape.seqlen_q // block_m)
    index = np.arange(tiles * heads)
    rank = index % tiles  # 0 is the head's longest tile
    if grouped:
        together = grouped_heads(problem, shape)
        group, within = np.divmod(index, tiles * together)
        rank = within // np.minimum(together, heads - group * together)
    rows = np.minimum((tiles - rank) * block_m, shape.seqlen_q)
    keys = np.clip(rows + shape.seqlen_k - shape.seqlen_q, 0, shape.seqlen_k) + STATIC_TILE_KEYS
    wave, block = np.divmod(index, slots)
    if not grouped:
        block = np.where(wave % 2, slots - 1 - block, block)
    work = np.bincount(block, weights=keys, minlength=slots)
    return float(work.max() / work.mean())


def resident_blocks(
    config: AnyConfig, problem: Problem, device: Device, resources: Resources | None = None
) -> int:
    """Thread blocks that share an SM: what shared memory, registers and threads leave room for."""
    arch = device.arch
    smem = config.smem_bytes(problem) + RESERVED_SMEM_PER_BLOCK
    threads = config.threads
    registers = config.register_cap(arch.registers_per_sm)
    if resources is not None:
        registers = resources.registers
    elif isinstance(config, Sm80Forward) or config.producer_registers == 0:
        # Otherwise setmaxnreg makes the compiler allot the whole cap.
        needed = config.accumulator_registers(problem) + REGISTERS_BESIDE
        registers = min(registers, needed)
    warps = -(-threads // WARP)
    warps_by_registers = arch.registers_per_sm // (round_up(registers, 8) * WARP)
    fit = min(
        arch.smem_per_sm // smem,
        warps_by_registers // SCHEDULERS * SCHEDULERS // warps,
        arch.threads_per_sm // threads,
        arch.blocks_per_sm,
    )
    if config.is_persistent:
        fit = min(fit, config.min_blocks_per_sm)  # no more are launched
    return max(fit, 1)


def start_cycles(config: AnyConfig, problem: Problem, residents: int) -> float:
    """What a tile costs beside its steps.

    Args:
        residents: blocks on the SM; with several, a second Q has less left to fill.
    """
    share = 1.0
    if isinstance(config, Sm90Forward) and config.persistent:
        one, share = PERSISTENT_TILE[1], PERSISTENT_TILE[config.q_stages]
        share = one + (share - one) / residents
    output = TILE_CYCLES_PER_ELEMENT * config.block_m * problem.head_dim
    return max(0.0, share * TILE_CYCLES + output) + slice_cycles(config, problem)


# ---- one step of one block: cycles of each pipe if it did nothing else ----


def computing_groups(config: AnyConfig) -> float:
    """Warpgroups that compute; warps of mma.sync in fours."""
    if isinstance(config, Sm90Forward):
        return float(config.consumer_warpgroups)
    return config.warps * WARP / WARPGROUP


def swizzle_factor(config: AnyConfig) -> float:
    """How much longer operand reads take under a swizzle that is not the 128-byte one."""
    narrow = isinstance(config, Sm90Forward) and config.chunk < 64
    return NARROW_SWIZZLE if narrow else 1.0


def wgmma_cycles(columns: int, a_in_smem: bool, swizzle: float, device: Device) -> float:
    """One wgmma: its multiplications, or its operands from shared memory, whichever is longer."""
    flops = 2 * WGMMA_ROWS * columns * WGMMA_DEPTH
    operands = (columns + WGMMA_ROWS * a_in_smem) * WGMMA_DEPTH * ELEMENT_BYTES
    return max(flops / device.arch.mma_flops, swizzle * operands / SMEM_BYTES_PER_CLOCK)


def product_cycles(config: AnyConfig, problem: Problem, device: Device) -> tuple[float, float]:
    """S = Q K^T over the padded head dim, and O += P V."""
    padded = config.head_dim_padded(problem)
    if isinstance(config, Sm80Forward):
        scores = 2 * config.block_m * config.block_n / device.arch.mma_sync_flops
        return scores * padded, scores * problem.head_dim
    groups, swizzle = config.consumer_warpgroups, swizzle_factor(config)
    qk = wgmma_cycles(config.block_n, True, swizzle, device)
    pv = wgmma_cycles(problem.head_dim, config.p_in_smem, swizzle, device)
    return groups * padded / WGMMA_DEPTH * qk, groups * config.block_n / WGMMA_DEPTH * pv


def exp2_cycles(config: AnyConfig, device: Device) -> float:
    """Exponentials on the special-function unit."""
    share = 1 - 1 / config.exp2_fma_every if config.exp2_fma_every else 1.0
    return share * config.block_m * config.block_n / device.arch.exp2_rate


def issue_cycles(config: AnyConfig, problem: Problem, masked_share: float) -> float:
    """Instructions per lane and score, those of mma.sync and ldmatrix included."""
    scores = config.block_m * config.block_n
    per_score = ISSUE_PER_SCORE + masked_share * ISSUE_PER_MASKED_SCORE
    if config.exp2_fma_every:
        per_score += ISSUE_PER_POLYNOMIAL / config.exp2_fma_every
    cycles = scores * per_score / ISSUE_PER_CLOCK
    if isinstance(config, Sm80Forward):
        products = 4 * scores * problem.head_dim / MMA_SYNC_FLOPS
        loads = smem_read_bytes(config, problem) / LDMATRIX_BYTES
        cycles += (products + loads) * WARP / ISSUE_PER_CLOCK
    return cycles


def rescale_cycles(config: AnyConfig, problem: Problem) -> float:
    """Multiplying O by the change of the row maximum."""
    return 0.0 if config.lazy_rescale else config.block_m * problem.head_dim / ISSUE_PER_CLOCK


def smem_read_bytes(config: AnyConfig, problem: Problem) -> float:
    """Operands: each warpgroup (each warp, for mma.sync) reads all of K and V by itself."""
    row = config.head_dim_padded(problem) * ELEMENT_BYTES
    keys = 2 * config.block_n * row
    q = config.block_m * row
    if isinstance(config, Sm90Forward):
        p = config.block_m * config.block_n * ELEMENT_BYTES if config.p_in_smem else 0
        return config.consumer_warpgroups * keys + q + 2 * p
    return config.warps * keys + (0 if config.q_in_registers else q)


def fill_bytes(config: AnyConfig, problem: Problem) -> float:
    """Bytes of K and V that a step loads."""
    return 2 * config.block_n * config.head_dim_padded(problem) * ELEMENT_BYTES


def smem_cycles(config: AnyConfig, problem: Problem, seen: float) -> float:
    """Operand reads, of the share `seen` of steps that compute, and K and V being written."""
    reads = seen * swizzle_factor(config) * smem_read_bytes(config, problem)
    return (reads + fill_bytes(config, problem)) / SMEM_BYTES_PER_CLOCK


def register_factor(
    config: AnyConfig, problem: Problem, device: Device, resources: Resources | None
) -> float:
    """Time lost to spills: reported by the compiler, or feared where it was not asked."""
    if resources is not None:
        serialised = resources.why_bad() is not None and not resources.spill_bytes
        return (SERIALISED if serialised else 1.0) + resources.spill_bytes / SPILL_BYTES_DOUBLE
    cap = config.computing_registers(device.arch.registers_per_sm)
    free = cap - config.accumulator_registers(problem)
    missing = max(COMFORTABLE_REGISTERS - free, 0) / COMFORTABLE_REGISTERS
    return 1.0 + NO_REGISTERS_LEFT * missing


def slice_cycles(config: AnyConfig, problem: Problem) -> float:
    """Barriers between the slices of K, in each step with one stage, else in a tile's first."""
    if isinstance(config, Sm90Forward):  # its consumers wait without meeting
        return 0.0
    slices = config.head_dim_padded(problem) // config.block_k
    return BARRIER_CYCLES * (slices - 1)


# ---- a step, a tile, a kernel ----


class Step(NamedTuple):
    """What one step of a block costs, in cycles.

    Attributes:
        tensor, exp2, issue, smem, l2: of each pipe.
        path: from a step of a warpgroup to its next, if nobody else is there.
        stages_ahead: steps between asking for K and V and needing them.
        norm: the exponent p of the overlap.
        factor: by which registers that do not suffice lengthen it.
        groups: warpgroups that compute.
    """

    tensor: float
    exp2: float
    issue: float
    smem: float
    l2: float
    path: float
    stages_ahead: float
    norm: float
    factor: float
    groups: float


def step_of(
    problem: Problem,
    config: AnyConfig,
    device: Device,
    head: Steps,
    resources: Resources | None,
) -> Step:
    """What a step costs, in the mean over those of `head`."""
    groups = computing_groups(config)
    qk, pv = product_cycles(config, problem, device)
    exp2 = exp2_cycles(config, device)
    issue = issue_cycles(config, problem, head.masked / head.seen)
    rescale = rescale_cycles(config, problem)

    alone = (1 + SLOTS_LOST) * issue
    softmax = max(exp2, alone) / groups
    latency = LAZY_CYCLES if config.lazy_rescale else RESCALE_LATENCY * rescale / groups
    norm = NORM[config.template]
    stages_ahead = config.stages - 1.0
    if config.stages == 1:
        latency += slice_cycles(config, problem)
    if isinstance(config, Sm90Forward):
        if not config.ping_pong:
            softmax *= 1 + COLLISION * (groups - 1)
        elif config.overlap:
            softmax *= 1 + COLLISION_OVERLAPPED * (groups - 1)
        if config.p_in_smem:
            latency += P_STORE_PER_KEY * config.block_n
    if isinstance(config, Sm90Forward) and config.overlap:
        norm += NORM_OVERLAP
        products = qk / groups + max(pv / groups, softmax)
    else:
        # K's place is free before the softmax; the last of the groups that take turns decides.
        stages_ahead += 1 / groups
        products = (qk + pv) / groups + softmax
    # Steps that a warpgroup skips leave the pipes to the others. The path is that of the warpgroup
    # whose rows see the most.
    seen = head.seen / head.total
    return Step(
        tensor=seen * (qk + pv),
        exp2=seen * exp2,
        issue=seen * (issue + rescale + groups * ISSUE_CYCLES),
        smem=smem_cycles(config, problem, seen),
        l2=fill_bytes(config, problem) / config.blocks_per_tile / L2_BYTES_PER_CLOCK,
        path=latency + products,
        stages_ahead=stages_ahead,
        norm=norm,
        factor=register_factor(config, problem, device, resources),
        groups=groups,
    )


def tile_cycles(step: Step, steps: float, start: float, blocks: int) -> float:
    """Cycles until each of the blocks on an SM has walked through a tile.

    Args:
        steps: of the tile.
        start: cycles before the first step and after the last.
        blocks: how many share the SM.
    """
    p = step.norm
    issue = step.issue * (1 + SLOTS_LOST / (blocks * step.groups))
    busy = (step.tensor, step.exp2, issue, step.smem, step.l2)
    pipes = math.pow(blocks, p) * sum([math.pow(cycles, p) for cycles in busy])
    period = math.pow(pipes + math.pow(step.path, p), 1 / p)
    exposed = max(0.0, LOAD_CYCLES + step.l2 - step.stages_ahead * period)
    path = step.path + exposed / blocks**2  # other blocks fill a block's waits
    return start + steps * step.factor * math.pow(pipes + math.pow(path, p), 1 / p)


def kernel_cycles(
    problem: Problem, shape: Shape, config: AnyConfig, device: Device, resources: Resources | None
) -> float:
    """The kernel's cycles, with its last wave or uneven tiles; 0 if it has nothing to do."""
    # The blocks of a cluster all walk as far as its last row sees.
    rows = WGMMA_ROWS if isinstance(config, Sm90Forward) else None
    head = steps_of_head(shape, problem.causal, config.tile_rows, config.block_n, rows)
    cluster = config.blocks_per_tile
    heads = shape.batch * shape.heads_q * cluster
    tiles = head.tiles * heads
    if head.total * heads == 0:
        return 0.0
    residents = resident_blocks(config, problem, device, resources)
    residents = min(residents, -(-tiles // device.sm_count))
    slots = device.sm_count * residents
    persistent = config.is_persistent
    start = start_cycles(config, problem, residents)
    step = step_of(problem, config, device, head, resources)
    if persistent and cluster > 1 and residents > 1:
        step = step._replace(factor=step.factor + PERSISTENT_CLUSTERS)

    def tile(steps: float, blocks: int) -> float:
        return tile_cycles(step, steps, start, blocks)

    mean_steps = head.total / head.tiles
    mean = tile(mean_steps, residents)
    even = tiles * mean / slots
    if not problem.causal:
        waves, rest = divmod(tiles, slots)
        left = -(-rest // device.sm_count)  # blocks per SM in the last wave
        whole_waves = waves * mean + (tile(mean_steps, left) if left else 0.0)
        return even + (1.0 if persistent else TAIL_FULL) * max(0.0, whole_waves - even)
    if persistent and not config.draws_tiles:
        grouped = config.head_grouping
        return even * static_imbalance(problem, shape, config.tile_rows, slots // cluster, grouped)
    # A group of heads starts with its longest tiles: its short ones fill the end.
    longest = tile(head.longest, residents)
    sticking_out = 0.0 if config.head_grouping else longest - mean
    return max(longest, even + sticking_out)


def memory_us(problem: Problem, shape: Shape, device: Device) -> float:
    """Reading Q, K and V and writing O once, in microseconds."""
    return shape.bytes(problem) / device.memory_gbps * 1e-3


def predict(
    problem: Problem,
    shape: Shape,
    config: AnyConfig,
    device: Device,
    resources: Resources | None = None,
) -> float:
    """The predicted time of a config in microseconds.

    Args:
        resources: what the compiler reported, if it was asked.
    """
    cycles = kernel_cycles(problem, shape, config, device, resources)
    if cycles == 0:
        return LAUNCH_US
    p = NORM_MEMORY[config.head_grouping]
    computing = math.pow(cycles / (SUSTAINED_CLOCK * device.clock_mhz), p)
    memory = math.pow(memory_us(problem, shape, device), p)
    return LAUNCH_US + math.pow(computing + memory, 1 / p)
