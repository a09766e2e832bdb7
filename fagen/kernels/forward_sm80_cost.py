"""What the mma.sync forward costs, for the static model; see `cost`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fagen.device import Device
from fagen.kernels import forward_cost
from fagen.kernels.cost import (
    ISSUE_PER_CLOCK,
    L2_BYTES_PER_CLOCK,
    SLOTS_LOST,
    SMEM_BYTES_PER_CLOCK,
    Cost,
    Step,
    Steps,
    register_factor,
    resident_blocks,
)
from fagen.kernels.forward_sm80 import Sm80Forward
from fagen.kernels.template import WARP
from fagen.problem import Problem, Shape

if TYPE_CHECKING:
    from fagen.build.compiled import Resources

MMA_SYNC_FLOPS = 4096  # one warp-wide m16n8k16
LDMATRIX_BYTES = 512  # one warp-wide ldmatrix.x4
BARRIER_CYCLES = 40.0  # __syncthreads of a block, beside the wait for its copies
NORM = 2.8  # exponent of the overlap: fit
THREADS_OF_A_GROUP = 128  # warps count in fours, as if they were warpgroups


def cost(
    problem: Problem,
    shape: Shape,
    config: Sm80Forward,
    device: Device,
    resources: Resources | None,
) -> Cost:
    head = forward_cost.steps(shape, problem, config, None)
    if forward_cost.nothing_to_do(shape, head):
        return Cost(0.0, 1.0)
    registers = forward_cost.expected_registers(config, problem, device)
    if resources is not None:
        registers = resources.registers
    fit = resident_blocks(config, problem, device, registers)
    tiles = head.tiles * shape.batch * shape.heads_q
    slices = config.head_dim_padded(problem) // config.block_k
    barriers = BARRIER_CYCLES * (slices - 1)  # in each step with one stage, else in the first
    return forward_cost.total(
        problem,
        shape,
        config,
        device,
        head,
        _step(problem, config, device, head, barriers, resources),
        start=forward_cost.TILE_CYCLES + forward_cost.output_cycles(config, problem) + barriers,
        residents=min(fit, -(-tiles // device.sm_count)),
    )


def _step(
    problem: Problem,
    config: Sm80Forward,
    device: Device,
    head: Steps,
    barriers: float,
    resources: Resources | None,
) -> Step:
    """What a step costs, in the mean over those of `head`."""
    groups = config.threads / THREADS_OF_A_GROUP
    padded = config.head_dim_padded(problem)
    per_column = 2 * config.block_m * config.block_n / device.arch.mma_sync_flops
    products = per_column * (padded + problem.head_dim)  # S = Q K^T, and O += P V
    fill = forward_cost.fill_bytes(config, problem)
    # Each warp reads all of K and V by itself.
    q = 0 if config.q_in_registers else config.block_m * padded * problem.element.bytes
    reads = config.warps * fill + q

    multiplications = 4 * config.block_m * config.block_n * problem.head_dim / MMA_SYNC_FLOPS
    instructions = multiplications + reads / LDMATRIX_BYTES
    issue = forward_cost.issue_cycles(config, head.masked / head.seen)
    issue += instructions * WARP / ISSUE_PER_CLOCK
    exp2 = forward_cost.exp2_cycles(config, device)
    softmax = max(exp2, (1 + SLOTS_LOST) * issue) / groups
    latency = forward_cost.rescale_latency(config, problem, groups)
    if config.stages == 1:
        latency += barriers
    rescale = forward_cost.rescale_cycles(config, problem)
    seen = head.seen / head.total
    free = forward_cost.free_registers(config, problem, device)
    return Step(
        tensor=seen * products,
        exp2=seen * exp2,
        issue=seen * (issue + rescale + groups * forward_cost.ISSUE_CYCLES),
        smem=(seen * reads + fill) / SMEM_BYTES_PER_CLOCK,
        l2=fill / L2_BYTES_PER_CLOCK,
        path=latency + products / groups + softmax,
        # K's place is free before the softmax.
        stages_ahead=config.stages - 1 + 1 / groups,
        norm=NORM,
        factor=register_factor(free, resources),
        groups=groups,
    )
