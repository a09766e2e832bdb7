"""Cycles of a kernel that walks tiles of rows over blocks of keys, predicted without running it.

A thread block's tile is a path: start, then one step per block of keys, each of which waits for
its products, softmax and loads in turn. Tiles that share a multiprocessor also share its pipes:
tensor cores, special-function unit, issue slots, shared memory, L2. Path and pipes overlap to a
degree: together they take a p-norm, between the longest of them (p = infinity) and their sum
(p = 1). Tiles add up to waves. What counts is the order of the configs, not the microsecond.

A template's module says what a step costs; `fagen.tuning.model` adds launch and memory.

Constants called "fit" were fitted to configs of the Hopper forward that were measured on an H200.
Most weight have 1080 of guided searches in bf16, at sequences of 512, 2048 and 8192. Less have
every second of the 516 of a complete table in bf16, and of 1071 in fp16 that range widely: those
kernels are older, and their warpgroups skipped no step. tests/test_model.py reads them, and what
the fit has not seen. "older fit": to guided searches, table and wide range alike, of the kernel
before; fitting them again gained nothing. Cycles are those of an SM.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from fagen.device import RESERVED_SMEM_PER_BLOCK, Device
from fagen.kernels.template import SCHEDULERS, WARP, Config, round_up
from fagen.mask import Mask
from fagen.problem import Problem, Shape

if TYPE_CHECKING:
    from fagen.build.compiled import Resources

# What the hardware does.
SMEM_BYTES_PER_CLOCK = 128  # 32 banks of 4 bytes
L2_BYTES_PER_CLOCK = 64  # an SM's port to the L2
ISSUE_PER_CLOCK = 128  # lanes: four schedulers of a warp each
LOAD_CYCLES = 910.0  # latency of a TMA load from L2: older fit

# Of issue slots that a warp uses, this share again is lost while it is alone on its scheduler;
# with n warps an n-th of that: fit.
SLOTS_LOST = 0.84
STATIC_TILE_KEYS = 250.0  # a tile beside its keys, in keys, if dealt out: older fit
PERSISTENT_CLUSTERS = 0.07  # time lost by several per SM, which wait for others: older fit
TAIL_FULL = 0.92  # share of the last wave's idle time that is really lost: fit

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
    shape: Shape, mask: Mask, tile_rows: int, block_n: int, rows: int | None = None
) -> Steps:
    """Counts the blocks of keys that the tiles of one head visit.

    Args:
        rows: how many of a tile's rows decide together which keys to compute and which of those
            need a mask; None for all.
    """
    tiles = -(-shape.seqlen_q // tile_rows)
    if not mask.causal:  # all tiles are alike
        last_block = -(-shape.seqlen_k // block_n)
        total = tiles * last_block
        return Steps(tiles, total, last_block, total, tiles * (shape.seqlen_k % block_n != 0))
    rows = rows or tile_rows
    total = longest = 0
    seen = masked = 0.0
    for first_row in range(0, shape.seqlen_q, tile_rows):
        visited = 0
        for first in range(first_row, first_row + tile_rows, rows):
            if first >= shape.seqlen_q:
                break
            last = min(first + rows, shape.seqlen_q) - 1
            computed = -(-mask.visible(last, shape.seqlen_q, shape.seqlen_k)[1] // block_n)
            whole = mask.visible(first, shape.seqlen_q, shape.seqlen_k)[1] // block_n
            seen += computed * rows / tile_rows
            masked += (computed - whole) * rows / tile_rows
            visited = computed
        total += visited
        longest = max(longest, visited)
    return Steps(tiles, total, longest, seen, masked)


@lru_cache(maxsize=4096)
def static_imbalance(
    problem: Problem, shape: Shape, tile_rows: int, slots: int, heads_together: int
) -> float:
    """Work of the busiest block of a persistent causal grid, over the mean.

    Each wave of tiles is dealt out whatever their lengths, in the order of
    templates/schedule.cuh, and backwards every other time if heads are not grouped.

    Args:
        heads_together: heads whose tiles are interleaved; 0 if heads follow each other.
    """
    import numpy as np

    heads = shape.batch * shape.heads_q
    tiles = -(-shape.seqlen_q // tile_rows)
    index = np.arange(tiles * heads)
    rank = index % tiles  # 0 is the head's longest tile
    if heads_together:
        group, within = np.divmod(index, tiles * heads_together)
        rank = within // np.minimum(heads_together, heads - group * heads_together)
    last_row = np.minimum((tiles - rank) * tile_rows, shape.seqlen_q) - 1
    _, visible = problem.mask.visible(last_row, shape.seqlen_q, shape.seqlen_k)
    keys = visible + STATIC_TILE_KEYS
    wave, block = np.divmod(index, slots)
    if not heads_together:
        block = np.where(wave % 2, slots - 1 - block, block)
    work = np.bincount(block, weights=keys, minlength=slots)
    return float(work.max() / work.mean())


def resident_blocks(config: Config, problem: Problem, device: Device, registers: int) -> int:
    """Thread blocks that share an SM: what shared memory, registers and threads leave room for.

    Args:
        registers: per thread, as the compiler allots them.
    """
    arch = device.arch
    smem = config.smem_bytes(problem) + RESERVED_SMEM_PER_BLOCK
    threads = config.threads
    warps = -(-threads // WARP)
    warps_by_registers = arch.registers_per_sm // (round_up(registers, 8) * WARP)
    fit = min(
        arch.smem_per_sm // smem,
        warps_by_registers // SCHEDULERS * SCHEDULERS // warps,
        arch.threads_per_sm // threads,
        arch.blocks_per_sm,
    )
    return max(fit, 1)


def register_factor(free: int, resources: Resources | None) -> float:
    """Time lost to spills: reported by the compiler, or feared where it was not asked.

    Args:
        free: registers of a computing thread beside its accumulators.
    """
    if resources is not None:
        serialised = resources.why_bad() is not None and not resources.spill_bytes
        return (SERIALISED if serialised else 1.0) + resources.spill_bytes / SPILL_BYTES_DOUBLE
    missing = max(COMFORTABLE_REGISTERS - free, 0) / COMFORTABLE_REGISTERS
    return 1.0 + NO_REGISTERS_LEFT * missing


# ---- a step, a tile, a grid ----


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


class Grid(NamedTuple):
    """How tiles reach the blocks.

    Attributes:
        head: the steps of one head.
        copies: heads of all sequences, times the blocks of a cluster.
        residents: blocks that share an SM.
        cluster: blocks of a cluster.
        tile_rows: rows of a tile.
        persistent: whether blocks loop over tiles; draws_tiles: and draw the next one.
        heads_together: heads whose tiles are interleaved; 0 if heads follow each other.
    """

    head: Steps
    copies: int
    residents: int
    cluster: int
    tile_rows: int
    persistent: bool
    draws_tiles: bool
    heads_together: int


def grid_cycles(
    problem: Problem, shape: Shape, device: Device, grid: Grid, step: Step, start: float
) -> float:
    """The cycles of a grid, with its last wave or uneven tiles."""
    head, residents = grid.head, grid.residents
    tiles = head.tiles * grid.copies
    slots = device.sm_count * residents
    if grid.persistent and grid.cluster > 1 and residents > 1:
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
        return even + (1.0 if grid.persistent else TAIL_FULL) * max(0.0, whole_waves - even)
    if grid.persistent and not grid.draws_tiles:
        clusters = slots // grid.cluster
        return even * static_imbalance(
            problem, shape, grid.tile_rows, clusters, grid.heads_together
        )
    # A group of heads starts with its longest tiles: its short ones fill the end.
    longest = tile(head.longest, residents)
    sticking_out = 0.0 if grid.heads_together else longest - mean
    return max(longest, even + sticking_out)
