"""What a template is: a module with these names.

All that knows one template stands in one module of this package. The registry
(`fagen.kernels.registry`) finds it by operation and architecture; nothing else names it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from fagen.device import RESERVED_SMEM_PER_BLOCK, Architecture, Device
from fagen.problem import Problem, Shape

if TYPE_CHECKING:
    from fagen.build.compiled import Resources
    from fagen.kernels.plan import Plan, Strides

WARP = 32
SCHEDULERS = 4  # of an SM
WARPGROUP = 128
WARPGROUP_ROWS = 64  # that a warpgroup computes: wgmma's M
MAX_REGISTERS = 255  # per thread, a limit of the instruction set


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def symbol(problem: Problem, part: str = "") -> str:
    """The name of a kernel (`extern "C"`): "fagen_forward_bf16_d128_causal".

    Args:
        part: which of several kernels of one text.
    """
    return f"fagen_{problem.name}{'_' if part else ''}{part}"


class Config(BaseModel):
    """A point of a template's space. Each template has a subclass with its axes as fields.

    Attributes:
        template: the file under templates/ that is rendered, without its suffix.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str

    # Axes that say how large a block is: configs that share them differ little.
    SIZE_AXES: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def axis_names(cls) -> tuple[str, ...]:
        """The fields that a search may vary, in declaration order."""
        return tuple(name for name in cls.model_fields if name != "template")

    def axes(self) -> dict[str, Any]:
        """This config's value of each axis."""
        return {name: getattr(self, name) for name in self.axis_names()}

    @property
    def size(self) -> tuple[int, ...]:
        """The values of `SIZE_AXES`."""
        return tuple(getattr(self, name) for name in self.SIZE_AXES)

    def __str__(self) -> str:
        words = (
            [self.template, "x".join(map(str, self.size))] if self.SIZE_AXES else [self.template]
        )
        for name, value in self.axes().items():
            if name in self.SIZE_AXES:
                continue
            if isinstance(value, bool):
                words += [name] if value else []
            else:
                words.append(f"{name}={value}")
        return " ".join(words)

    @property
    def steps(self) -> tuple[int, int]:
        """Rows and keys that a block works on at a time: lengths beside their multiples are
        where its tails are.
        """
        return 1, 1

    @property
    def is_persistent(self) -> bool:
        """Whether the grid holds no more blocks than fit the GPU, each looping over tiles."""
        return False

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads per block, the most of any kernel of the text."""

    @abstractmethod
    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block in bytes, the most of any kernel of the text."""


class Rule(NamedTuple):
    """One constraint on configs.

    Attributes:
        axes: the axes that it reads.
        broken: (config, problem, device) -> the reason, or None if it holds.
    """

    axes: tuple[str, ...]
    broken: Callable[[Any, Problem, Device], str | None]

    @property
    def name(self) -> str:
        """What rejections are counted under."""
        return self.broken.__name__.strip("_").removesuffix("_rule")


class Cost(NamedTuple):
    """What the static model adds up.

    Attributes:
        cycles: of the kernels; 0 if there is nothing to do.
        memory_norm: the exponent of the overlap of computing with device memory.
    """

    cycles: float
    memory_norm: float


class Template(Protocol):
    """The names that a template's module has.

    Attributes:
        NAME: of the file under templates/, without its suffix.
        OP: the operation that it answers.
        ARCHS: names of the architectures that it runs on.
        AXES_VERSION: raised when an axis changes its meaning: older records then do not apply.
        Config: its subclass of `Config`.
        HOST: what its emitted host text, templates/host/NAME.cu.j2, names beside the constants.
        RULES: what a legal config has to obey, beside `why_not`.
        REACH_OF_SIZE, REACH_OF_CHOICE: how far apart two configs are whose errors of the static
            model have little in common, by axis: in the axis's unit where it is one of a size, in
            changes of its value otherwise. Fitted to the studies that tests/test_model.py reads.
    """

    NAME: str
    OP: str
    ARCHS: tuple[str, ...]
    AXES_VERSION: int
    RULES: tuple[Rule, ...]
    HOST: Mapping[str, Any]
    REACH_OF_SIZE: Mapping[str, float]
    REACH_OF_CHOICE: Mapping[str, float]

    @property
    def Config(self) -> type[Config]: ...  # noqa: N802

    def why_not(self, problem: Problem, arch: Architecture) -> str | None:
        """Why it cannot answer a problem there, or None if it can."""

    def axes(self, problem: Problem) -> dict[str, tuple[Any, ...]]:
        """Every axis with the values that a search tries."""

    def default(self, problem: Problem) -> Any:
        """A plain config, legal wherever the template answers the problem."""

    def seeds(self, problem: Problem) -> list[dict[str, Any]]:
        """Axes beside the default's of configs that are good somewhere, to be tried first."""

    def entries(self, problem: Problem) -> tuple[str, ...]:
        """The symbols of its kernels."""

    def constants(self, problem: Problem, config: Any) -> dict[str, Any]:
        """What its text names beside the axes."""

    def default_scalars(self, problem: Problem) -> tuple[float, ...]:
        """The operation's scalars as the kernels take them, where a call gives none."""

    def plan(
        self,
        problem: Problem,
        config: Any,
        shape: Shape,
        strides: tuple[Strides, ...],
        device: Device,
    ) -> Plan:
        """The launches of a call. `strides` are those of `Operation.strided`, in this order.

        Raises:
            UnsupportedError: if one call cannot be so large.
        """

    def tensor_flops(self, arch: Architecture) -> int:
        """Peak of its tensor instruction: FLOP per clock and SM."""

    def cost(
        self,
        problem: Problem,
        shape: Shape,
        config: Any,
        device: Device,
        resources: Resources | None,
    ) -> Cost:
        """What the static model adds up."""


# ---- rules that every template has ----


def smem_rule(c: Any, p: Problem, d: Device) -> str | None:
    """The shared memory of `min_blocks_per_sm` blocks fits."""
    size = c.smem_bytes(p)
    if size > d.arch.smem_per_block:
        return (
            f"shared memory: {size:,} bytes of {d.arch.smem_per_block:,} per block on {d.arch.name}"
        )
    per_sm = c.min_blocks_per_sm * (size + RESERVED_SMEM_PER_BLOCK)
    if per_sm > d.arch.smem_per_sm:
        return (
            f"min_blocks_per_sm={c.min_blocks_per_sm} needs {per_sm:,} bytes of the "
            f"{d.arch.smem_per_sm:,} bytes of shared memory of an SM"
        )
    return None


def threads_rule(c: Any, p: Problem, d: Device) -> str | None:
    """The threads of `min_blocks_per_sm` blocks fit."""
    total = c.threads * c.min_blocks_per_sm
    if total > d.arch.threads_per_sm or c.min_blocks_per_sm > d.arch.blocks_per_sm:
        return (
            f"min_blocks_per_sm={c.min_blocks_per_sm} needs {total} threads of the "
            f"{d.arch.threads_per_sm} of an SM"
        )
    return None
