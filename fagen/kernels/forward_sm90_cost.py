"""What the Hopper forward costs, for the static model; see `cost`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fagen.device import Device
from fagen.kernels import forward_cost
from fagen.kernels.cost import (
    L2_BYTES_PER_CLOCK,
    SLOTS_LOST,
    SMEM_BYTES_PER_CLOCK,
    Step,
    Steps,
    register_factor,
    resident_blocks,
)
from fagen.kernels.template import WARPGROUP_ROWS, Cost
from fagen.problem import Problem, Shape

if TYPE_CHECKING:
    from fagen.build.compiled import Resources
    from fagen.kernels.forward_sm90 import Sm90Forward

WGMMA_DEPTH = 16  # of one wgmma instruction; its columns vary
NARROW_SWIZZLE = 1.33  # operand reads under the 64-byte swizzle, of those under the 128-byte: fit
P_STORE_PER_KEY = 3.25  # 64 rows of P to shared memory, and a barrier: older fit
COLLISION = 0.27  # softmax that meets each other warpgroup's if nobody orders them: fit
COLLISION_OVERLAPPED = 0.26  # and if turns do, but each has products under its own softmax: fit
NORM, NORM_OVERLAP = 3.06, 0.59  # exponent of the overlap, and what `overlap` adds to it: fit
# Share of a tile's start that is left where the next tile's loads run early, by buffers for Q:
# older fit. With two, its first product runs early as well: fit.
PERSISTENT_TILE = {1: 0.53, 2: -0.2}


def cost(
    problem: Problem,
    shape: Shape,
    config: Sm90Forward,
    device: Device,
    resources: Resources | None,
) -> Cost:
    # The blocks of a cluster all walk as far as its last row sees.
    head = forward_cost.steps(shape, problem, config, WARPGROUP_ROWS)
    if forward_cost.nothing_to_do(shape, head):
        return Cost(0.0, 1.0)
    # With setmaxnreg the compiler allots the whole cap.
    registers = config.register_cap(device.arch.registers_per_sm)
    if resources is not None:
        registers = resources.registers
    elif config.producer_registers == 0:
        registers = forward_cost.expected_registers(config, problem, device)
    fit = resident_blocks(config, problem, device, registers)
    if config.persistent:
        fit = min(fit, config.min_blocks_per_sm)  # no more are launched
    tiles = head.tiles * shape.batch * shape.heads_q * config.cluster
    residents = min(fit, -(-tiles // device.sm_count))
    return forward_cost.total(
        problem,
        shape,
        config,
        device,
        head,
        _step(problem, config, device, head, resources),
        start=_start_cycles(config, problem, residents),
        residents=residents,
        draws_tiles=config.dynamic_tiles,
    )


def _start_cycles(config: Sm90Forward, problem: Problem, residents: int) -> float:
    """What a tile costs beside its steps; with several blocks on an SM, a second Q has less left
    to fill.
    """
    share = 1.0
    if config.persistent:
        one, share = PERSISTENT_TILE[1], PERSISTENT_TILE[config.q_stages]
        share = one + (share - one) / residents
    output = forward_cost.output_cycles(config, problem)
    return max(0.0, share * forward_cost.TILE_CYCLES + output)


def _wgmma_cycles(
    columns: int, a_in_smem: bool, swizzle: float, problem: Problem, device: Device
) -> float:
    """One wgmma: its multiplications, or its operands from shared memory, whichever is longer."""
    flops = 2 * WARPGROUP_ROWS * columns * WGMMA_DEPTH
    operands = (columns + WARPGROUP_ROWS * a_in_smem) * WGMMA_DEPTH * problem.element.bytes
    return max(flops / device.arch.mma_flops, swizzle * operands / SMEM_BYTES_PER_CLOCK)


def _step(
    problem: Problem, config: Sm90Forward, device: Device, head: Steps, resources: Resources | None
) -> Step:
    """What a step costs, in the mean over those of `head`."""
    groups = config.consumer_warpgroups
    padded = config.head_dim_padded(problem)
    swizzle = NARROW_SWIZZLE if config.chunk < 64 else 1.0
    qk = groups * padded / WGMMA_DEPTH
    qk *= _wgmma_cycles(config.block_n, True, swizzle, problem, device)
    pv = groups * config.block_n / WGMMA_DEPTH
    pv *= _wgmma_cycles(problem.head_dim, config.p_in_smem, swizzle, problem, device)

    issue = forward_cost.issue_cycles(config, head.masked / head.seen)
    exp2 = forward_cost.exp2_cycles(config, device)
    softmax = max(exp2, (1 + SLOTS_LOST) * issue) / groups
    latency = forward_cost.rescale_latency(config, problem, groups)
    if not config.ping_pong:
        softmax *= 1 + COLLISION * (groups - 1)
    elif config.overlap:
        softmax *= 1 + COLLISION_OVERLAPPED * (groups - 1)
    if config.p_in_smem:
        latency += P_STORE_PER_KEY * config.block_n
    norm, stages_ahead = NORM, config.stages - 1.0
    if config.overlap:
        norm += NORM_OVERLAP
        products = qk / groups + max(pv / groups, softmax)
    else:
        # K's place is free before the softmax; the last of the groups that take turns decides.
        stages_ahead += 1 / groups
        products = (qk + pv) / groups + softmax

    # Each warpgroup reads all of K and V by itself.
    fill = forward_cost.fill_bytes(config, problem)
    p = config.block_m * config.block_n * problem.element.bytes if config.p_in_smem else 0
    reads = groups * fill + config.block_m * padded * problem.element.bytes + 2 * p
    rescale = forward_cost.rescale_cycles(config, problem)
    # Steps that a warpgroup skips leave the pipes to the others. The path is that of the warpgroup
    # whose rows see the most.
    seen = head.seen / head.total
    free = forward_cost.free_registers(config, problem, device)
    return Step(
        tensor=seen * (qk + pv),
        exp2=seen * exp2,
        issue=seen * (issue + rescale + groups * forward_cost.ISSUE_CYCLES),
        smem=(seen * swizzle * reads + fill) / SMEM_BYTES_PER_CLOCK,
        l2=fill / config.cluster / L2_BYTES_PER_CLOCK,
        path=latency + products,
        stages_ahead=stages_ahead,
        norm=norm,
        factor=register_factor(free, resources),
        groups=groups,
    )
