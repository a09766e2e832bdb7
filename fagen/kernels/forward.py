"""What the templates of the forward pass share: axes, sizes, parameters, the order of tiles."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

from pydantic import Field

from fagen.device import Device
from fagen.errors import ArgumentError, UnsupportedError
from fagen.kernels.plan import Layout, Strides
from fagen.kernels.template import MAX_REGISTERS, SCHEDULERS, WARP, Config, round_up, symbol
from fagen.problem import Problem, Shape

GROUP_BYTES = 32 << 20  # K and V of the heads that run side by side should fit so much of the L2
MAX_TILES = (1 << 31) - 1  # a tile index is an int, as is a grid's x
MAX_SEQLEN = (1 << 30) - 1  # the sum of two lengths is an int
MAX_SCALE = 1e30
MIN_SCALE_LOG2 = 2.0**-100  # stands for 0: masked scores must stay -inf, not become 0 * -inf

# For addresses and softmax state. With fewer, all of 294 kernels spilled or had wgmma serialised.
SPARE_REGISTERS = 24

MAX_TMA_STRIDE = 1 << 40  # bytes, exclusive

# What the emitted host text names, beside the kernel's constants.
HOST = {
    "group_bytes": GROUP_BYTES,
    "max_seqlen": MAX_SEQLEN,
    "max_tiles": MAX_TILES,
    "max_scale": MAX_SCALE,
    "min_scale_log2": MIN_SCALE_LOG2,
    "max_stride_bytes": MAX_TMA_STRIDE,
}

PARAMS = Layout(
    "ForwardParams",
    (
        ("q", "pointer"),
        ("k", "pointer"),
        ("v", "pointer"),
        ("o", "pointer"),
        ("lse", "pointer"),
        ("q_strides", "strides"),
        ("k_strides", "strides"),
        ("v_strides", "strides"),
        ("o_strides", "strides"),
        ("scale_log2", "scalar"),
        ("batch", "int"),
        ("heads_q", "int"),
        ("heads_kv", "int"),
        ("seqlen_q", "int"),
        ("seqlen_k", "int"),
        ("heads_per_group", "int"),
        ("tiles", "int"),
    ),
)

# See `template.Template`.
REACH_OF_SIZE = {"block_m": 40.0, "block_n": 144.0, "stages": 1.0, "min_blocks_per_sm": 7.5}
REACH_OF_CHOICE = {"block_k": 16.0, "lazy_rescale": 16.0, "exp2_fma_every": 16.0}


class ForwardConfig(Config):
    """The axes that both templates have.

    Attributes:
        block_m: rows of Q (and O) per thread block.
        block_n: keys per step of the main loop.
        block_k: the slice of the head dim that one barrier of a Q or K load carries, in
            elements; the first product starts when the first slice is there. The head dim is
            padded (in shared memory only) to a multiple of it.
        stages: depth of the K ring and of the V ring.
        min_blocks_per_sm: thread blocks that must fit one SM; caps the registers of a thread.
        lazy_rescale: rescale O only when a row maximum grew by more than a factor of 2**8
            (FlashAttention-4), instead of in every step.
        exp2_fma_every: one in this many groups of four exponentials is computed by a polynomial
            on the FMA pipe instead of the special-function unit; 0 for none.
        head_grouping: run the tiles of as many heads side by side as have K and V that fit L2
            together, instead of head after head.
    """

    SIZE_AXES: ClassVar = ("block_m", "block_n", "block_k")

    block_m: int = Field(ge=16, le=256, multiple_of=16)
    block_n: int = Field(ge=16, le=256, multiple_of=16)
    block_k: int = Field(ge=16, le=256, multiple_of=16)
    stages: int = Field(ge=1, le=8)
    min_blocks_per_sm: int = Field(default=1, ge=1, le=16)
    lazy_rescale: bool = False
    exp2_fma_every: int = Field(default=0, ge=0, le=16)
    head_grouping: bool = True

    @property
    def steps(self) -> tuple[int, int]:
        return self.block_m, self.block_n

    @property
    def chunk(self) -> int:
        """Columns that lie side by side in shared memory: one swizzle span, 32 to 128 bytes."""
        return next(columns for columns in (64, 32, 16) if self.block_k % columns == 0)

    def head_dim_padded(self, problem: Problem) -> int:
        """Columns of a Q, K or V row in shared memory."""
        return round_up(problem.head_dim, self.block_k)

    def tile_bytes(self, problem: Problem) -> tuple[int, int]:
        """Shared memory of the Q tile, and of the K and V rings together."""
        row = self.head_dim_padded(problem) * problem.element.bytes
        return self.block_m * row, 2 * self.stages * self.block_n * row

    def register_cap(self, registers_per_sm: int) -> int:
        """Registers per thread at entry, as `__launch_bounds__` makes the compiler allot them.

        The SM's four schedulers share its registers and deal out the warps of all blocks evenly.
        """
        warps = self.min_blocks_per_sm * -(-self.threads // WARP)
        per_thread = registers_per_sm // SCHEDULERS // (-(-warps // SCHEDULERS) * WARP)
        return min(per_thread // 8 * 8, MAX_REGISTERS)

    def computing_registers(self, registers_per_sm: int) -> int:
        """Registers that a computing thread may take: the cap, if no thread gives any up."""
        return self.register_cap(registers_per_sm)

    @property
    def blocks_per_tile(self) -> int:
        """Thread blocks that share a tile, the work that is dealt out as one."""
        return 1

    @property
    def tile_rows(self) -> int:
        """Rows of Q of a tile."""
        return self.blocks_per_tile * self.block_m

    @abstractmethod
    def accumulator_registers(self, problem: Problem) -> int:
        """Registers that O, S and P (and Q where it is kept) take in a computing thread."""


def slice_values(problem: Problem, narrowest_span: int) -> tuple[int, ...]:
    """Values of block_k: multiples of the narrowest swizzle span that cut the padded head dim
    into equal slices, and the widest swizzle where that pads further.
    """
    padded = round_up(problem.head_dim, narrowest_span)
    spans = range(narrowest_span, padded + 1, narrowest_span)
    slices = {block_k for block_k in spans if padded % block_k == 0}
    if padded % 64:
        slices |= {64, round_up(problem.head_dim, 64)}
    return tuple(sorted(slices))


def whole_slice(problem: Problem, narrowest_span: int) -> int:
    """The value of block_k that pads least, and of those the largest."""
    values = slice_values(problem, narrowest_span)
    return max(values, key=lambda block_k: (-round_up(problem.head_dim, block_k), block_k))


def shared_axes(problem: Problem, narrowest_span: int) -> dict[str, tuple[Any, ...]]:
    """The axes with the same values in both templates."""
    return {
        "block_k": slice_values(problem, narrowest_span),
        "lazy_rescale": (False, True),
        "exp2_fma_every": (0, 8, 4),
        "head_grouping": (False, True),
    }


def seeds_for(
    problem: Problem, known: tuple[tuple[int, dict[str, Any]], ...], narrowest_span: int
) -> list[dict[str, Any]]:
    """The axes of the known configs for this head dim.

    Args:
        known: (head dims up to, axes), in groups of rising head dims.
    """
    limits = sorted({largest for largest, _ in known})
    limit = next(largest for largest in limits if problem.head_dim <= largest)
    whole = {"block_k": whole_slice(problem, narrowest_span)}
    return [whole | axes for largest, axes in known if largest == limit]


# ---- rules ----


def padding_problem(block_k: int, head_dim: int, narrowest_span: int) -> str | None:
    """Why slices of `block_k` columns do not fit, or None."""
    if block_k % narrowest_span:
        return (
            f"block_k={block_k} is not a multiple of {narrowest_span}, the narrowest swizzle span"
        )
    if block_k > round_up(head_dim, 64):
        return f"block_k={block_k} is more than head_dim {head_dim} padded to 64"
    return None


def accumulators_rule(c: Any, p: Problem, d: Device) -> str | None:
    """Accumulators leave enough registers free."""
    need = c.accumulator_registers(p)
    cap = c.computing_registers(d.arch.registers_per_sm)
    if need + SPARE_REGISTERS > cap:
        return f"accumulators take {need} of {cap} registers: {SPARE_REGISTERS} must stay free"
    return None


# ---- text and launch ----


def constants(problem: Problem, config: ForwardConfig) -> dict[str, Any]:
    """What both texts name beside the axes."""
    return {
        "kernel_name": symbol(problem),
        "element": problem.element.element,
        "head_dim_qk": problem.head_dim,
        "head_dim_v": problem.head_dim,
        "causal": problem.causal,
        "alignment": problem.alignment,
        "qk_columns": config.head_dim_padded(problem),
        "v_columns": config.head_dim_padded(problem),
        "chunk": config.chunk,
        "threads": config.threads,
        "smem_bytes": config.smem_bytes(problem),
        "params": PARAMS,
    }


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


def default_scalars(problem: Problem) -> tuple[float, ...]:
    """The scale of 1/sqrt(head_dim)."""
    return (scale_log2(problem.head_dim**-0.5),)


def heads_per_group(problem: Problem, shape: Shape) -> int:
    """Query heads whose tiles run side by side because their K and V fit the L2 together."""
    kv_bytes = 2 * shape.seqlen_k * problem.head_dim * problem.element.bytes
    heads_kv = max(1, GROUP_BYTES // max(1, kv_bytes))
    heads = heads_kv * (shape.heads_q // max(1, shape.heads_kv))
    return max(1, min(heads, shape.batch * shape.heads_q))


def tile_count(config: ForwardConfig, shape: Shape) -> int:
    """Tiles of `config.tile_rows` queries of one head.

    Raises:
        UnsupportedError: if there are more than a grid can have, or a sequence is too long.
    """
    longest = max(shape.seqlen_q, shape.seqlen_k)
    if longest > MAX_SEQLEN:
        raise UnsupportedError(f"a sequence of {longest:,}: allowed are up to {MAX_SEQLEN:,}")
    tiles = shape.batch * shape.heads_q * -(-shape.seqlen_q // config.tile_rows)
    most = MAX_TILES // config.blocks_per_tile
    if tiles > most:
        raise UnsupportedError(
            f"{tiles:,} tiles of {config.tile_rows} queries: one call takes up to {most:,}; "
            "split the batch"
        )
    return tiles


def pack_params(problem: Problem, shape: Shape, strides: tuple[Strides, ...], tiles: int) -> bytes:
    """`PARAMS` of a call, without addresses and scale."""
    named = zip(problem.operation.strided, strides, strict=True)
    return PARAMS.pack(
        {
            **{f"{operand.name}_strides": of_operand for operand, of_operand in named},
            **shape.model_dump(),
            "heads_per_group": heads_per_group(problem, shape),
            "tiles": tiles,
        }
    )
