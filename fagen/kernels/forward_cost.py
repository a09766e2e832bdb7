"""What a step of the forward pass costs, as far as both templates agree; see `cost`."""

from __future__ import annotations

from functools import lru_cache

from fagen.device import Device
from fagen.kernels import cost, forward
from fagen.kernels.cost import ISSUE_PER_CLOCK, Grid, Step, Steps
from fagen.kernels.forward import ForwardConfig
from fagen.kernels.template import Cost
from fagen.problem import Problem, Shape

# What the instructions of the kernels cost.
ISSUE_PER_SCORE = 6.08  # scale, exp2, maximum, sum, half a conversion: fit, 4.5 by counting
ISSUE_PER_MASKED_SCORE = 7.0  # index, comparison and select, in a loop of its own: fit
ISSUE_PER_POLYNOMIAL = 6.8  # instead of exp2: fit, 9 by counting
ISSUE_CYCLES = 143.0  # of a warpgroup's step, however few its keys: fit
RESCALE_LATENCY = 4.2  # of rescaling O, in its issue cycles: it sits between two products; fit
LAZY_CYCLES = 555.0  # vote and branch instead, which the compiler moves nothing across: fit

# A tile.
TILE_CYCLES = 2950.0  # starting a block, first loads: older fit
TILE_CYCLES_PER_ELEMENT = 0.176  # of O, to finish and to store it: fit

REGISTERS_BESIDE = 28  # beside the accumulators, as NVRTC 13.0 compiles the Hopper forward
# Exponent of the overlap with device memory, by `head_grouping`: the first wave waits for it, and
# longer if it begins with the keys of many heads: older fit of False, fit of True.
NORM_MEMORY = {False: 2.06, True: 1.71}


@lru_cache(maxsize=1024)
def grouped_heads(problem: Problem, shape: Shape) -> int:
    """Query heads whose tiles `head_grouping` interleaves."""
    return forward.heads_per_group(problem, shape)


def exp2_cycles(config: ForwardConfig, device: Device) -> float:
    """Exponentials on the special-function unit."""
    share = 1 - 1 / config.exp2_fma_every if config.exp2_fma_every else 1.0
    return share * config.block_m * config.block_n / device.arch.exp2_rate


def issue_cycles(config: ForwardConfig, masked_share: float) -> float:
    """Instructions of the softmax, per lane and score."""
    per_score = ISSUE_PER_SCORE + masked_share * ISSUE_PER_MASKED_SCORE
    if config.exp2_fma_every:
        per_score += ISSUE_PER_POLYNOMIAL / config.exp2_fma_every
    return config.block_m * config.block_n * per_score / ISSUE_PER_CLOCK


def rescale_cycles(config: ForwardConfig, problem: Problem) -> float:
    """Multiplying O by the change of the row maximum."""
    return 0.0 if config.lazy_rescale else config.block_m * problem.head_dim / ISSUE_PER_CLOCK


def rescale_latency(config: ForwardConfig, problem: Problem, groups: float) -> float:
    """What rescaling adds to the path of a step."""
    if config.lazy_rescale:
        return LAZY_CYCLES
    return RESCALE_LATENCY * rescale_cycles(config, problem) / groups


def fill_bytes(config: ForwardConfig, problem: Problem) -> float:
    """Bytes of K and V that a step loads."""
    return 2 * config.block_n * config.head_dim_padded(problem) * problem.element.bytes


def output_cycles(config: ForwardConfig, problem: Problem) -> float:
    """Finishing and storing O."""
    return TILE_CYCLES_PER_ELEMENT * config.block_m * problem.head_dim


def free_registers(config: ForwardConfig, problem: Problem, device: Device) -> int:
    """Registers of a computing thread beside its accumulators."""
    cap = config.computing_registers(device.arch.registers_per_sm)
    return cap - config.accumulator_registers(problem)


def expected_registers(config: ForwardConfig, problem: Problem, device: Device) -> int:
    """What the compiler will allot to a kernel whose threads all keep their registers."""
    needed = config.accumulator_registers(problem) + REGISTERS_BESIDE
    return min(config.register_cap(device.arch.registers_per_sm), needed)


def steps(shape: Shape, problem: Problem, config: ForwardConfig, rows: int | None) -> Steps:
    """The steps of one head. `rows`: see `cost.steps_of_head`."""
    return cost.steps_of_head(shape, problem.mask, config.tile_rows, config.block_n, rows)


def total(
    problem: Problem,
    shape: Shape,
    config: ForwardConfig,
    device: Device,
    head: Steps,
    step: Step,
    *,
    start: float,
    residents: int,
    draws_tiles: bool = False,
) -> Cost:
    """The cost of a grid of these steps."""
    grid = Grid(
        head=head,
        copies=shape.batch * shape.heads_q * config.blocks_per_tile,
        residents=residents,
        cluster=config.blocks_per_tile,
        tile_rows=config.tile_rows,
        persistent=config.is_persistent,
        draws_tiles=draws_tiles,
        heads_together=grouped_heads(problem, shape) if config.head_grouping else 0,
    )
    cycles = cost.grid_cycles(problem, shape, device, grid, step, start)
    return Cost(cycles, NORM_MEMORY[config.head_grouping])


def nothing_to_do(shape: Shape, head: Steps) -> bool:
    """Whether no step is made."""
    return head.total * shape.batch * shape.heads_q == 0
