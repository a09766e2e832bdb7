"""The template forward_sm80: mma.sync, ldmatrix and cp.async, for Ampere and everything later.

After FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fagen.device import ARCHITECTURES, Architecture, Device
from fagen.kernels import forward, forward_cost
from fagen.kernels.cost import (
    ISSUE_PER_CLOCK,
    L2_BYTES_PER_CLOCK,
    SLOTS_LOST,
    SMEM_BYTES_PER_CLOCK,
    Step,
    Steps,
    register_factor,
    resident_blocks,
)
from fagen.kernels.forward import ForwardConfig
from fagen.kernels.plan import Launch, Plan, Strides
from fagen.kernels.template import (
    WARP,
    WARPGROUP,
    Cost,
    Rule,
    round_up,
    smem_rule,
    symbol,
    threads_rule,
)
from fagen.problem import Problem, Shape

if TYPE_CHECKING:
    from fagen.build.compiled import Resources

NAME = "forward_sm80"
OP = "forward"
ARCHS = tuple(ARCHITECTURES)
AXES_VERSION = 1
HOST = forward.HOST
REACH_OF_SIZE = forward.REACH_OF_SIZE | {"warps": 8.0}
REACH_OF_CHOICE = forward.REACH_OF_CHOICE

NARROWEST_SPAN = 16  # columns that a swizzle spans


class Sm80Forward(ForwardConfig):
    """A config of templates/forward_sm80.cu.j2.

    Attributes:
        warps: warps per thread block; the rows of the block are split among them.
        q_in_registers: keep Q's fragments in registers for the whole loop (its shared memory is
            then reused by the K and V rings) instead of loading them again in each step.
    """

    template: Literal["forward_sm80"] = "forward_sm80"
    warps: int = Field(default=4, ge=1, le=16)
    q_in_registers: bool = False

    @property
    def threads(self) -> int:
        return self.warps * WARP

    def smem_bytes(self, problem: Problem) -> int:
        q, ring = self.tile_bytes(problem)
        # Q's fragments are in registers before the rings fill: they may share their place.
        return max(q, ring) if self.q_in_registers else q + ring

    def accumulator_registers(self, problem: Problem) -> int:
        row_tiles = max(self.block_m // (16 * self.warps), 1)
        q = self.head_dim_padded(problem) // 4 if self.q_in_registers else 0
        return row_tiles * (problem.head_dim // 2 + self.block_n // 2 + q)


Config = Sm80Forward


def why_not(problem: Problem, arch: Architecture) -> str | None:
    return None


# ---- the space ----


def axes(problem: Problem) -> dict[str, tuple[Any, ...]]:
    return {
        "block_m": (16, 32, 64, 128, 192, 256),
        "block_n": (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256),
        "warps": (1, 2, 4, 8),
        "stages": (1, 2, 3, 4),
        "min_blocks_per_sm": (1, 2, 3, 4),
        "q_in_registers": (False, True),
        **forward.shared_axes(problem, NARROWEST_SPAN),
    }


def _padding(c: Any, p: Problem, d: Device) -> str | None:
    return forward.padding_problem(c.block_k, p.head_dim, NARROWEST_SPAN)


def _rows(c: Any, p: Problem, d: Device) -> str | None:
    if c.block_m % (16 * c.warps):
        return f"block_m={c.block_m} does not split into 16-row tiles for {c.warps} warps"
    return None


_REGISTERS = ("block_m", "block_n", "block_k", "warps", "min_blocks_per_sm", "q_in_registers")
RULES = (
    Rule(("block_k",), _padding),
    Rule(("block_m", "warps"), _rows),
    Rule(("warps", "min_blocks_per_sm"), threads_rule),
    Rule(_REGISTERS, forward.accumulators_rule),
    Rule((*_REGISTERS, "stages"), smem_rule),
)


def default(problem: Problem) -> Sm80Forward:
    d = problem.head_dim
    block_m, block_n = (128, 64) if d <= 128 else (64, 32)
    return Sm80Forward(block_m=block_m, block_n=block_n, block_k=round_up(d, 16), warps=4, stages=1)


# (head dims up to, axes beside the default's): tiles of FlashAttention-2, from its
# flash_fwd_launch_template.h, and what was found beside them.
_KNOWN: tuple[tuple[int, dict[str, Any]], ...] = (
    (64, {"block_m": 128, "block_n": 128, "warps": 4}),
    (64, {"block_m": 128, "block_n": 112, "warps": 4}),
    (64, {"block_m": 128, "block_n": 64, "warps": 4, "min_blocks_per_sm": 2}),
    (96, {"block_m": 128, "block_n": 64, "warps": 4}),
    (128, {"block_m": 128, "block_n": 64, "warps": 4}),
    (128, {"block_m": 128, "block_n": 32, "warps": 4, "min_blocks_per_sm": 2}),
    (128, {"block_m": 128, "block_n": 128, "warps": 8, "q_in_registers": True}),
    (192, {"block_m": 128, "block_n": 96, "warps": 8, "stages": 2, "q_in_registers": True}),
    (256, {"block_m": 128, "block_n": 64, "warps": 8}),
    (256, {"block_m": 64, "block_n": 64, "warps": 4}),
)


def seeds(problem: Problem) -> list[dict[str, Any]]:
    return forward.seeds_for(problem, _KNOWN, NARROWEST_SPAN)


# ---- text and launch ----


def entries(problem: Problem) -> tuple[str, ...]:
    return (symbol(problem),)


def constants(problem: Problem, config: Sm80Forward) -> dict[str, Any]:
    return forward.constants(problem, config)


def default_scalars(problem: Problem) -> tuple[float, ...]:
    return forward.default_scalars(problem)


def plan(
    problem: Problem,
    config: Sm80Forward,
    shape: Shape,
    strides: tuple[Strides, ...],
    device: Device,
) -> Plan:
    tiles = forward.tile_count(config, shape)
    if tiles == 0:
        return Plan()
    launch = Launch(
        entry=symbol(problem),
        grid=tiles,
        threads=config.threads,
        smem_bytes=config.smem_bytes(problem),
        layout=forward.PARAMS,
        params=forward.pack_params(problem, shape, strides, tiles),
    )
    return Plan((launch,))


def tensor_flops(arch: Architecture) -> int:
    return arch.mma_sync_flops


# ---- what the static model adds up ----

MMA_SYNC_FLOPS = 4096  # one warp-wide m16n8k16
LDMATRIX_BYTES = 512  # one warp-wide ldmatrix.x4
BARRIER_CYCLES = 40.0  # __syncthreads of a block, beside the wait for its copies
NORM = 2.8  # exponent of the overlap: fit


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
    groups = config.threads / WARPGROUP  # warps count in fours
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
