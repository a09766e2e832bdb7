"""problem, shape, config, device -> microseconds, predicted without running anything.

Each thread block walks over its keys in steps. A step keeps four pipes of the multiprocessor
busy: tensor cores, softmax (special-function unit and issue slots), shared memory and L2. How
well tensor cores and softmax overlap depends on how many warps or warpgroups take turns. Steps
add up to tiles, tiles to waves. What counts is the order of the configs, not the microsecond.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from fagen import config as arithmetic
from fagen.config import ELEMENT_BYTES, SCHEDULERS, WARP, WARPGROUP, Sm90Forward
from fagen.device import RESERVED_SMEM_PER_BLOCK, Device
from fagen.problem import Problem, Shape
from fagen.space import AnyConfig

if TYPE_CHECKING:
    from fagen.compile import Resources

# ---- constants ----
# "fit" is a fit to a plain Hopper kernel on an H200 (tests/test_model.py has its times), and to
# FlashAttention-2 there (356 TFLOP/s at head dim 128, 304 at 64) for mma.sync.

SUSTAINED_CLOCK = 0.85  # of the boost clock, under tensor load: the H200 is limited by its power
SMEM_BYTES_PER_CLOCK = 128  # per SM: 32 banks of 4 bytes
L2_BYTES_PER_CLOCK = 40  # per SM: 64x64 tiles at 530 TFLOP/s read 8.3 TB/s on an H200
ISSUE_PER_CLOCK = 128  # lanes: four schedulers of a warp each
ISSUE_PER_SCORE = 4.5  # scale and subtract, exp2, maximum, sum, half a conversion
ISSUE_PER_MASKED_SCORE = 2.0  # comparison and select
ISSUE_PER_POLYNOMIAL = 20.0  # instead of exp2: moving a quarter there lost 5 to 15 %
MMA_SYNC_FLOPS = 4096  # one warp-wide m16n8k16
LDMATRIX_BYTES = 512  # one warp-wide ldmatrix.x4
PIPES_BESIDE = 0.5  # what the less busy of special-function unit and issue slots adds: fit
RESCALE_SERIAL = 0.5  # share of the rescaling of O that nothing hides: fit
STEP_CYCLES = 80.0  # barriers, loop and the maximum's shuffles, per step: fit
SLICE_CYCLES = 15.0  # one more barrier and issue per slice of block_k: guess
LOAD_CYCLES = 1000.0  # latency of a load from L2, TMA included: fit
TILE_CYCLES = 5000.0  # filling and draining a tile with one block per SM: fit to 1k against 4k
TILE_BYTES_PER_CLOCK = 64  # loading Q and storing O
PERSISTENT_TILE = 0.75  # share of it that is left where the next tile's loads run early: fit
HIDDEN_BY_RESIDENTS = 1.5  # b blocks per SM hide each other's filling by b to this power: fit
OVERLAP_NONE = {"forward_sm90": 1.15, "forward_sm80": 1.0}  # exponent, see `_together`: fit
OVERLAP_OF_STREAM = 0.2  # for each further warp or warpgroup that takes turns
OVERLAP_MOST_STREAMS = 3
OVERLAP_WITHIN = 0.2  # the `overlap` axis
OVERLAP_PING_PONG = 0.1
TAIL_GROUPED, TAIL_HEAD_AFTER_HEAD, TAIL_PERSISTENT = 0.15, 0.5, 1.0  # causal imbalance: fit
COMFORTABLE_REGISTERS = 28  # free beside the accumulators; with 12 a kernel spilled: fit
NO_REGISTERS_LEFT = 0.6  # time lost when none are
SPILL_BYTES_DOUBLE = 600.0  # bytes of spills that double the time: 192 cost a third
SERIALISED = 1.4  # time lost when the compiler serialises wgmma
LAUNCH_US = 2.0


class Steps(NamedTuple):
    """The work of one head: tiles, their steps, and how many of those hold a mask's edge."""

    tiles: int
    total: int
    longest: int
    masked: int


@lru_cache(maxsize=4096)
def steps_of_head(shape: Shape, causal: bool, block_m: int, block_n: int) -> Steps:
    """Counts the blocks of keys that the tiles of one head visit."""
    tiles = -(-shape.seqlen_q // block_m)
    last_block = -(-shape.seqlen_k // block_n)
    ragged = shape.seqlen_k % block_n != 0
    if not causal:
        return Steps(tiles, tiles * last_block, last_block, tiles * ragged)
    offset = shape.seqlen_k - shape.seqlen_q
    total = longest = masked = 0
    for first_row in range(0, shape.seqlen_q, block_m):
        last_row = min(first_row + block_m, shape.seqlen_q) - 1
        visited = max(0, -(-min(shape.seqlen_k, last_row + 1 + offset) // block_n))
        whole = max(0, first_row + 1 + offset) // block_n
        total += visited
        masked += max(0, visited - whole)
        longest = max(longest, visited)
    return Steps(tiles, total, longest, masked)


def resident_blocks(
    config: AnyConfig, problem: Problem, device: Device, resources: Resources | None = None
) -> int:
    """Thread blocks that share an SM: what shared memory, registers and threads leave room for."""
    arch = device.arch
    smem = arithmetic.smem_bytes(config, problem) + RESERVED_SMEM_PER_BLOCK
    threads = arithmetic.threads(config)
    registers = (
        resources.registers if resources else arithmetic.register_cap(config, arch.registers_per_sm)
    )
    warps = -(-threads // WARP)
    warps_by_registers = arch.registers_per_sm // (arithmetic.round_up(registers, 8) * WARP)
    fit = min(
        arch.smem_per_sm // smem,
        warps_by_registers // SCHEDULERS * SCHEDULERS // warps,
        arch.threads_per_sm // threads,
        arch.blocks_per_sm,
    )
    return max(fit, 1)


# ---- one step of one block, in cycles of an SM that does nothing else ----


def tensor_cycles(config: AnyConfig, problem: Problem, device: Device) -> float:
    """S = Q K^T over the padded head dim, then O += P V."""
    columns = arithmetic.head_dim_padded(config, problem) + problem.head_dim
    rate = (
        device.arch.mma_flops if config.template == "forward_sm90" else device.arch.mma_sync_flops
    )
    return 2 * config.block_m * config.block_n * columns / rate


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
    if config.template == "forward_sm80":
        products = 4 * scores * problem.head_dim / MMA_SYNC_FLOPS
        loads = smem_read_bytes(config, problem) / LDMATRIX_BYTES
        cycles += (products + loads) * WARP / ISSUE_PER_CLOCK
    return cycles


def rescale_cycles(config: AnyConfig, problem: Problem) -> float:
    """Multiplying O by the change of the row maximum, which the next product waits for."""
    if config.lazy_rescale:
        return 0.0
    return config.block_m * problem.head_dim / ISSUE_PER_CLOCK


def smem_read_bytes(config: AnyConfig, problem: Problem) -> float:
    """Operands: each warpgroup (each warp, for mma.sync) reads all of K and V by itself."""
    row = arithmetic.head_dim_padded(config, problem) * ELEMENT_BYTES
    keys = 2 * config.block_n * row
    q = config.block_m * row
    if isinstance(config, Sm90Forward):
        p = config.block_m * config.block_n * ELEMENT_BYTES if config.p_in_smem else 0
        return arithmetic.consumer_warpgroups(config) * keys + q + 2 * p
    return config.warps * keys + (0 if config.q_in_registers else q)


def smem_cycles(config: AnyConfig, problem: Problem) -> float:
    """Operand reads, and K and V being written."""
    filled = fill_bytes(config, problem)
    return (smem_read_bytes(config, problem) + filled) / SMEM_BYTES_PER_CLOCK


def fill_bytes(config: AnyConfig, problem: Problem) -> float:
    """Bytes of K and V that a step loads."""
    return 2 * config.block_n * arithmetic.head_dim_padded(config, problem) * ELEMENT_BYTES


def _together(a: float, b: float, exponent: float) -> float:
    """Time of two kinds of work: their sum at exponent 1, the longer one at infinity."""
    return float((a**exponent + b**exponent) ** (1 / exponent))


def overlap_exponent(config: AnyConfig, residents: int) -> float:
    """How well tensor cores and softmax run beside each other."""
    if isinstance(config, Sm90Forward):
        streams = float(arithmetic.consumer_warpgroups(config) * residents)
    else:
        streams = config.warps * WARP / WARPGROUP * residents
    exponent = OVERLAP_NONE[config.template]
    exponent += OVERLAP_OF_STREAM * (min(max(streams, 1.0), OVERLAP_MOST_STREAMS) - 1)
    if isinstance(config, Sm90Forward):
        exponent += OVERLAP_WITHIN * config.overlap + OVERLAP_PING_PONG * config.ping_pong
    return exponent


def register_factor(
    config: AnyConfig, problem: Problem, device: Device, resources: Resources | None
) -> float:
    """Time lost to spills: reported by the compiler, or feared where it was not asked."""
    if resources is not None:
        serialised = resources.why_bad() is not None and not resources.spill_bytes
        return (SERIALISED if serialised else 1.0) + resources.spill_bytes / SPILL_BYTES_DOUBLE
    cap = (
        arithmetic.consumer_registers(config, device.arch.registers_per_sm)
        if isinstance(config, Sm90Forward)
        else arithmetic.register_cap(config, device.arch.registers_per_sm)
    )
    free = cap - arithmetic.accumulator_registers(config, problem)
    missing = max(COMFORTABLE_REGISTERS - free, 0) / COMFORTABLE_REGISTERS
    return 1.0 + NO_REGISTERS_LEFT * missing


# ---- the kernel ----


def explain_prediction(
    problem: Problem,
    shape: Shape,
    config: AnyConfig,
    device: Device,
    resources: Resources | None = None,
) -> dict[str, float]:
    """What the prediction is made of, in microseconds.

    "tensor", "exp2", "issue", "shared memory", "l2" and "memory" are what each pipe would take
    alone; "steps" is the main loop with their overlap, "tiles" the filling and draining of tiles,
    "waves" what the last wave or the longest tiles cost, "total" the kernel.
    """
    head = steps_of_head(shape, problem.causal, config.block_m, config.block_n)
    heads = shape.batch * shape.heads_q
    if head.total * heads == 0:
        return {"launch": LAUNCH_US, "total": LAUNCH_US}
    masked_share = head.masked / head.total
    residents = resident_blocks(config, problem, device, resources)
    residents = min(residents, max(1, -(-head.tiles * heads // device.sm_count)))

    tensor = tensor_cycles(config, problem, device)
    exp2 = exp2_cycles(config, device)
    issue = issue_cycles(config, problem, masked_share)
    rescale = rescale_cycles(config, problem)
    smem = smem_cycles(config, problem)
    l2 = fill_bytes(config, problem) / L2_BYTES_PER_CLOCK
    slices = arithmetic.head_dim_padded(config, problem) // config.block_k
    factor = register_factor(config, problem, device, resources)

    def step_cycles(blocks: int) -> float:
        """One step of each of the blocks on an SM."""
        busy = issue + rescale
        softmax = max(exp2, busy) + PIPES_BESIDE * min(exp2, busy)
        both = _together(blocks * tensor, blocks * softmax, overlap_exponent(config, blocks))
        busiest = max(both, blocks * smem, blocks * l2)
        serial = STEP_CYCLES + SLICE_CYCLES * slices + RESCALE_SERIAL * rescale
        hidden = (config.stages - 0.5) * busiest
        exposed = max(0.0, LOAD_CYCLES + blocks * l2 - hidden) / blocks
        return factor * busiest + serial + exposed

    q_and_o = 2 * config.block_m * problem.head_dim * ELEMENT_BYTES

    def tile_cycles(blocks: int) -> float:
        cycles = TILE_CYCLES + q_and_o / TILE_BYTES_PER_CLOCK
        if isinstance(config, Sm90Forward) and config.persistent:
            cycles *= PERSISTENT_TILE
        return cycles * float(blocks ** (1 - HIDDEN_BY_RESIDENTS))

    tiles = head.tiles * heads
    slots = device.sm_count * residents
    step, tile = step_cycles(residents), tile_cycles(residents)
    even = (head.total * heads * step + tiles * tile) / slots
    longest = head.longest * step + tile
    if problem.causal:
        mean = head.total / head.tiles * step + tile
        share = TAIL_GROUPED if config.head_grouping else TAIL_HEAD_AFTER_HEAD
        if isinstance(config, Sm90Forward) and config.persistent:
            share = TAIL_PERSISTENT
        cycles = max(longest, even + share * (longest - mean))
    else:
        waves, rest = divmod(tiles, slots)
        left = -(-rest // device.sm_count)  # blocks per SM in the last wave
        last = head.longest * step_cycles(left) + tile_cycles(left) if left else 0.0
        cycles = waves * longest + last

    clock = SUSTAINED_CLOCK * device.clock_mhz  # cycles per microsecond
    memory = shape.bytes(problem) / device.memory_gbps * 1e-3
    per_step = head.total * heads / device.sm_count / clock
    return {
        "tensor": tensor * per_step,
        "exp2": exp2 * per_step,
        "issue": (issue + rescale) * per_step,
        "shared memory": smem * per_step,
        "l2": l2 * per_step,
        "memory": memory,
        "steps": step / residents * per_step,
        "tiles": tile * tiles / slots / clock,
        "waves": (cycles - even) / clock,
        "launch": LAUNCH_US,
        "total": _together(cycles / clock, memory, 3.0) + LAUNCH_US,
    }


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
    total = explain_prediction(problem, shape, config, device, resources)["total"]
    return total if math.isfinite(total) else float("inf")
