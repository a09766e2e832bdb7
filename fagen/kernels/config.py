"""The answer: one point of a template's space, and what follows from it by arithmetic.

The sizes that follow from a config are computed by its class and nowhere else. The templates
repeat these sums as `static_assert`s, so Python and CUDA cannot drift apart.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fagen.errors import ArgumentError
from fagen.problem import Problem

ELEMENT_BYTES = 2
BARRIER_BYTES = 8
WORK_BYTES = 16  # which tile's Q a buffer holds
WARP = 32
WARPGROUP = 128
SCHEDULERS = 4  # of an SM
MAX_REGISTERS = 255  # per thread, a limit of the instruction set
SMEM_ALIGNMENT = 1024  # what the 128-byte swizzle needs of a tile's base


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


class _Config(BaseModel):
    """What both templates share.

    Attributes:
        template: the file under templates/ that is rendered, without its suffix.
        block_m: rows of Q (and O) per thread block.
        block_n: keys per step of the main loop.
        block_k: the slice of the head dim that one barrier of a Q or K load carries, in
            elements; the first product starts when the first slice is there. The head dim is
            padded (in shared memory only) to a multiple of it.
        stages: depth of the K ring and of the V ring.
        min_blocks_per_sm: thread blocks that must fit one SM; caps the registers of a thread.
        lazy_rescale: rescale O only when a row maximum grew by more than a factor of 2**8
            (FlashAttention-4), instead of in every step.
        exp2_fma_every: of so many groups of four exponentials, one is computed by a polynomial
            on the FMA pipe instead of the special-function unit; 0 for none.
        head_grouping: run the tiles of as many heads side by side as have K and V that fit L2
            together, instead of head after head.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Raised when an axis changes its meaning: older stored records then no longer apply.
    axes_version: ClassVar[int] = 1

    template: str
    block_m: int = Field(ge=16, le=256, multiple_of=16)
    block_n: int = Field(ge=16, le=256, multiple_of=16)
    block_k: int = Field(ge=16, le=256, multiple_of=16)
    stages: int = Field(ge=1, le=8)
    min_blocks_per_sm: int = Field(default=1, ge=1, le=16)
    lazy_rescale: bool = False
    exp2_fma_every: int = Field(default=0, ge=0, le=16)
    head_grouping: bool = True

    @classmethod
    def axis_names(cls) -> tuple[str, ...]:
        """The fields that a search may vary, in declaration order."""
        return tuple(name for name in cls.model_fields if name != "template")

    def axes(self) -> dict[str, Any]:
        """This config's value of each axis."""
        return {name: getattr(self, name) for name in self.axis_names()}

    def __str__(self) -> str:
        words = [f"{self.block_m}x{self.block_n}x{self.block_k}"]
        for name, value in self.axes().items():
            if name in ("block_m", "block_n", "block_k"):
                continue
            if isinstance(value, bool):
                words += [name] if value else []
            else:
                words.append(f"{name}={value}")
        return f"{self.template} {' '.join(words)}"

    @property
    def chunk(self) -> int:
        """Columns that lie side by side in shared memory: one swizzle span, 32 to 128 bytes."""
        return next(columns for columns in (64, 32, 16) if self.block_k % columns == 0)

    def head_dim_padded(self, problem: Problem) -> int:
        """Columns of a Q, K or V row in shared memory."""
        return round_up(problem.head_dim, self.block_k)

    def tile_bytes(self, problem: Problem) -> tuple[int, int]:
        """Shared memory of the Q tile, and of the K and V rings together."""
        row = self.head_dim_padded(problem) * ELEMENT_BYTES
        return self.block_m * row, 2 * self.stages * self.block_n * row

    def register_cap(self, registers_per_sm: int = 65536) -> int:
        """Registers per thread at entry, as `__launch_bounds__` makes the compiler allot them.

        The SM's four schedulers share its registers and deal out the warps of all blocks evenly.
        """
        warps = self.min_blocks_per_sm * -(-self.threads // WARP)
        per_thread = registers_per_sm // SCHEDULERS // (-(-warps // SCHEDULERS) * WARP)
        return min(per_thread // 8 * 8, MAX_REGISTERS)

    def computing_registers(self, registers_per_sm: int = 65536) -> int:
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

    @property
    def is_persistent(self) -> bool:
        """Whether the grid holds no more blocks than fit the GPU, each looping over tiles."""
        return False

    @property
    def draws_tiles(self) -> bool:
        """Whether a block takes its next tile from a counter in device memory."""
        return False

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads per block."""

    @abstractmethod
    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, in bytes, as the template asserts it."""

    @abstractmethod
    def accumulator_registers(self, problem: Problem) -> int:
        """Registers that O, S and P (and Q where it is kept) take in a computing thread."""


class Sm80Forward(_Config):
    """A config of templates/forward_sm80.cu.j2: mma.sync, ldmatrix, cp.async.

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


class Sm90Forward(_Config):
    """A config of templates/forward_sm90.cu.j2: TMA, wgmma, warp specialisation.

    Attributes:
        producer_registers: 0 for a producer of one warp and no register shift; otherwise the
            producer is a warpgroup that keeps so many registers per thread (setmaxnreg) and
            leaves the rest to the consumers.
        cluster: thread blocks that share a tile and load K and V for each other: each loads a part
            and multicasts it to all.
        ping_pong: consumer warpgroups take turns, one's softmax under another's products
            (FlashAttention-3, section 3.1).
        overlap: within a warpgroup, the softmax of one block runs under the second product of the
            one before (FlashAttention-3, section 3.2).
        persistent: as many thread blocks as fit the GPU, each looping over tiles.
        dynamic_tiles: a persistent block draws its next tile from a counter in device memory,
            instead of taking each so many-th.
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
    def draws_tiles(self) -> bool:
        return self.dynamic_tiles

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute: one for each 64 rows, wgmma's M."""
        return self.block_m // 64

    @property
    def threads(self) -> int:
        producer = WARPGROUP if self.producer_registers else WARP
        return self.consumer_warpgroups * WARPGROUP + producer

    def consumer_registers(self, registers_per_sm: int = 65536) -> int:
        """Registers of a consumer thread: the block's pool less the producer's, by setmaxnreg's
        rule that all warpgroups together hold no more than they did at entry.
        """
        cap = self.register_cap(registers_per_sm)
        if self.producer_registers == 0:
            return cap
        warpgroups = self.consumer_warpgroups
        pool = cap * (warpgroups + 1) - self.producer_registers
        return min(pool // warpgroups // 8 * 8, 240)

    def computing_registers(self, registers_per_sm: int = 65536) -> int:
        return self.consumer_registers(registers_per_sm)

    def smem_bytes(self, problem: Problem) -> int:
        q, ring = self.tile_bytes(problem)
        p = self.block_m * round_up(self.block_n, 64) * ELEMENT_BYTES if self.p_in_smem else 0
        slices = self.head_dim_padded(problem) // self.block_k
        # Each stage of Q: full per slice, empty. Of K and V: K full per slice, K empty, V full,
        # V empty.
        barriers = self.q_stages * (slices + 1) + self.stages * (slices + 3)
        size = self.q_stages * q + ring + p + round_up(barriers * BARRIER_BYTES, WORK_BYTES)
        return round_up(size + self.q_stages * WORK_BYTES, SMEM_ALIGNMENT)

    def qk_steps(self, problem: Problem) -> int:
        """Steps of Q K^T, 16 columns each, in one statement: so many that whole statements make
        up the head dim, and a slice.
        """
        return math.gcd(round_up(problem.head_dim, 16), self.block_k) // 16

    def accumulator_registers(self, problem: Problem) -> int:
        both = self.overlap and not self.p_in_smem  # S of one block beside P of the last
        return problem.head_dim // 2 + self.block_n // 2 + (self.block_n // 4 if both else 0)


AnyConfig = Sm80Forward | Sm90Forward
Config = Annotated[AnyConfig, Field(discriminator="template")]  # as a field of a model
TEMPLATES: dict[str, type[AnyConfig]] = {
    "forward_sm80": Sm80Forward,
    "forward_sm90": Sm90Forward,
}
_ADAPTER: TypeAdapter[AnyConfig] = TypeAdapter(Config)


def parse_config(fields: dict[str, Any]) -> AnyConfig:
    """The config with these fields, `template` among them.

    Raises:
        ArgumentError: in one line, for an unknown field or a value out of range.
    """
    with as_argument_error("bad config: {}"):
        return _ADAPTER.validate_python(fields)


@contextmanager
def as_argument_error(message: str = "{}") -> Iterator[None]:
    """What pydantic refuses inside becomes an ArgumentError.

    Args:
        message: the error's text, with "{}" where pydantic's reasons go, in one line.
    """
    try:
        yield
    except ValidationError as error:
        raise ArgumentError(message.format(one_line(error))) from None


def one_line(error: ValidationError) -> str:
    """What pydantic says, as one line with the fields' names."""
    parts = []
    for detail in error.errors():
        where = ".".join(str(part) for part in detail["loc"] if part not in TEMPLATES)
        got = "" if isinstance(detail["input"], dict) else f" (got {detail['input']!r})"
        message = detail["msg"].removeprefix("Value error, ")
        parts.append(f"{where}: {message}{got}" if where else f"{message}{got}")
    return "; ".join(parts)
