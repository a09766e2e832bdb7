"""The space: the axes of a template, and the single statement of what is legal.

`why_illegal` answers with the broken rule. `legal_configs` walks the space, dropping a branch as
soon as the axes that a rule reads are set, so the order of the axes is only a matter of speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fagen.device import RESERVED_SMEM_PER_BLOCK, Device
from fagen.errors import ArgumentError, ConfigError
from fagen.kernels.config import TEMPLATES, AnyConfig, Sm80Forward, Sm90Forward, round_up
from fagen.problem import WIDE_ALIGNMENT, Problem

NARROWEST_SPAN = {"forward_sm80": 16, "forward_sm90": 32}  # columns that a swizzle spans
WGMMA_OVERHEAD_REGISTERS = 26  # beside its operands; ptxas names the sum when it refuses (C7602)
# For addresses and softmax state. With fewer, all of 294 kernels spilled or had wgmma serialised.
SPARE_REGISTERS = 24


def axes(
    template: str, problem: Problem, fixed: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, ...]]:
    """Every axis of a template with the values that a search tries, for this head dim.

    block_k runs over the multiples of the smallest swizzle span that cut the padded head dim
    into equal slices.

    Args:
        fixed: axes held at one value, or at the values of a tuple.

    Raises:
        ArgumentError: if the template has no such axis.
    """
    names = TEMPLATES[template].axis_names()
    if unknown := [name for name in fixed or () if name not in names]:
        raise ArgumentError(
            f"{template} has no axis {', '.join(unknown)}: its axes are {', '.join(names)}"
        )
    values = _all_axes(template, problem)
    for name, held in (fixed or {}).items():
        wanted = held if isinstance(held, tuple) else (held,)
        in_order = [value for value in values[name] if value in wanted]
        values[name] = tuple(dict.fromkeys([*in_order, *wanted]))
    return values


def _all_axes(template: str, problem: Problem) -> dict[str, tuple[Any, ...]]:
    span = NARROWEST_SPAN[template]
    padded = round_up(problem.head_dim, span)
    slices = tuple(block_k for block_k in range(span, padded + 1, span) if padded % block_k == 0)
    if padded % 64:  # or pad further, to the widest swizzle
        slices += tuple({64, round_up(problem.head_dim, 64)} - set(slices))
    shared: dict[str, tuple[Any, ...]] = {
        "block_k": tuple(sorted(slices)),
        "lazy_rescale": (False, True),
        "exp2_fma_every": (0, 8, 4),
        "head_grouping": (False, True),
    }
    if template == "forward_sm80":
        return {
            "block_m": (16, 32, 64, 128, 192, 256),
            "block_n": (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256),
            "warps": (1, 2, 4, 8),
            "stages": (1, 2, 3, 4),
            "min_blocks_per_sm": (1, 2, 3, 4),
            "q_in_registers": (False, True),
            **shared,
        }
    return {
        "block_m": (64, 128, 192),
        "block_n": tuple(range(16, 257, 16)),
        "stages": (1, 2, 3, 4),
        "producer_registers": (0, 24, 32, 40, 56),
        "min_blocks_per_sm": (1, 2, 3, 4),
        "p_in_smem": (False, True),
        "overlap": (True, False),
        "ping_pong": (True, False),
        "persistent": (False, True),
        "cluster": (1, 2),
        "dynamic_tiles": (False, True),
        "q_stages": (1, 2),
        **shared,
    }


class Rule(NamedTuple):
    """One constraint: the axes that it reads, and the reason when it is broken."""

    axes: tuple[str, ...]
    broken: Callable[[Any, Problem, Device], str | None]


def _template_runs(c: Any, p: Problem, d: Device) -> str | None:
    if c.template in d.arch.templates:
        return None
    return f"{c.template} does not run on {d.arch.name}: it takes {' or '.join(d.arch.templates)}"


def _wide_loads(c: Any, p: Problem, d: Device) -> str | None:
    if c.template == "forward_sm80" or p.alignment >= WIDE_ALIGNMENT:
        return None
    return (
        f"TMA needs bases and strides that are multiples of {WIDE_ALIGNMENT} bytes: "
        "forward_sm80 loads any"
    )


def _padding(c: Any, p: Problem, d: Device) -> str | None:
    span = NARROWEST_SPAN[c.template]
    if c.block_k % span:
        return f"block_k={c.block_k} is no multiple of {span}, the narrowest swizzle span"
    if c.block_k > round_up(p.head_dim, 64):
        return f"block_k={c.block_k} is more than head_dim {p.head_dim} padded to 64"
    return None


def _rows(c: Any, p: Problem, d: Device) -> str | None:
    if c.template == "forward_sm80":
        if c.block_m % (16 * c.warps):
            return f"block_m={c.block_m} does not split into 16-row tiles for {c.warps} warps"
        return None
    if c.block_m % 64 or c.block_m > 192:
        return f"block_m={c.block_m} is not 64, 128 or 192: a consumer warpgroup takes 64 rows"
    return None


def _turns(c: Any, p: Problem, d: Device) -> str | None:
    if c.ping_pong and c.block_m < 128:
        return "ping_pong needs two consumer warpgroups: block_m of at least 128"
    return None


def _q_stages(c: Any, p: Problem, d: Device) -> str | None:
    if c.q_stages > 1 and not c.persistent:
        return "q_stages=2 needs persistent: a block that computes one tile loads one Q"
    return None


def _dynamic(c: Any, p: Problem, d: Device) -> str | None:
    if c.dynamic_tiles and c.cluster > 1:
        return "dynamic_tiles needs cluster=1: the blocks of a cluster would draw different tiles"
    if c.dynamic_tiles and not c.persistent:
        return "dynamic_tiles needs persistent: a block that computes one tile draws no other"
    return None


def _smem(c: Any, p: Problem, d: Device) -> str | None:
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


def _threads(c: Any, p: Problem, d: Device) -> str | None:
    total = c.threads * c.min_blocks_per_sm
    if total > d.arch.threads_per_sm or c.min_blocks_per_sm > d.arch.blocks_per_sm:
        return (
            f"min_blocks_per_sm={c.min_blocks_per_sm} needs {total} threads of the "
            f"{d.arch.threads_per_sm} of an SM"
        )
    return None


def _register_pool(c: Any, p: Problem, d: Device) -> str | None:
    """setmaxnreg: multiples of 8 from 24, dec at most and inc at least the count at entry."""
    if c.producer_registers == 0:
        return None
    cap = c.register_cap(d.arch.registers_per_sm)
    consumer = c.consumer_registers(d.arch.registers_per_sm)
    if c.producer_registers < 24:
        return f"setmaxnreg takes at least 24 registers, not {c.producer_registers}"
    if c.producer_registers > cap:
        return f"the producer cannot give up to {c.producer_registers}: it enters with {cap}"
    if consumer < cap:
        return f"the consumers cannot take {consumer} registers: they enter with {cap}"
    return None


def _wgmma(c: Any, p: Problem, d: Device) -> str | None:
    """ptxas allots for entry, before setmaxnreg, and refuses a wgmma whose operands do not fit."""
    cap = c.register_cap(d.arch.registers_per_sm)
    p_operands = 0 if c.p_in_smem else 4
    need = max(c.block_n // 2, p.head_dim // 2 + p_operands) + WGMMA_OVERHEAD_REGISTERS
    if need > cap:
        return f"one wgmma needs {need} registers at entry, and a thread enters with {cap}"
    return None


def _accumulators(c: Any, p: Problem, d: Device) -> str | None:
    need = c.accumulator_registers(p)
    cap = c.computing_registers(d.arch.registers_per_sm)
    if need + SPARE_REGISTERS > cap:
        return f"accumulators take {need} of {cap} registers: {SPARE_REGISTERS} must stay free"
    return None


_SM80_REGISTERS = ("block_m", "block_n", "block_k", "warps", "min_blocks_per_sm", "q_in_registers")
_SM90_THREADS = ("block_m", "producer_registers", "min_blocks_per_sm")
_SM90_SMEM = (
    "block_m", "block_n", "block_k", "stages", "q_stages", "min_blocks_per_sm", "p_in_smem",
)  # fmt: skip
RULES: dict[str, tuple[Rule, ...]] = {
    "forward_sm80": (
        Rule((), _template_runs),
        Rule(("block_k",), _padding),
        Rule(("block_m", "warps"), _rows),
        Rule(("warps", "min_blocks_per_sm"), _threads),
        Rule(_SM80_REGISTERS, _accumulators),
        Rule((*_SM80_REGISTERS, "stages"), _smem),
    ),
    "forward_sm90": (
        Rule((), _template_runs),
        Rule((), _wide_loads),
        Rule(("block_k",), _padding),
        Rule(("block_m",), _rows),
        Rule(("block_m", "ping_pong"), _turns),
        Rule(_SM90_THREADS, _threads),
        Rule(_SM90_THREADS, _register_pool),
        Rule((*_SM90_THREADS, "block_n", "p_in_smem"), _wgmma),
        Rule((*_SM90_THREADS, "block_n", "overlap", "p_in_smem"), _accumulators),
        Rule(("persistent", "q_stages"), _q_stages),
        Rule(("persistent", "dynamic_tiles", "cluster"), _dynamic),
        Rule(_SM90_SMEM, _smem),
    ),
}


def free_axes(template: str) -> tuple[str, ...]:
    """The axes that no rule reads: what is legal is so with each of their values."""
    read = {axis for rule in RULES[template] for axis in rule.axes}
    return tuple(name for name in TEMPLATES[template].axis_names() if name not in read)


def why_illegal(config: AnyConfig, problem: Problem, device: Device) -> str | None:
    """The first rule that `config` breaks for `problem` on `device`, or None if it is legal."""
    for rule in RULES[config.template]:
        reason = rule.broken(config, problem, device)
        if reason:
            return reason
    return None


def legal_configs(
    template: str,
    problem: Problem,
    device: Device,
    *,
    fixed: Mapping[str, Any] | None = None,
    rejections: Counter[str] | None = None,
) -> Iterator[AnyConfig]:
    """Every legal config of a template, without building the illegal ones.

    Args:
        fixed: as of `axes`.
        rejections: if given, counts the points of the space that each rule removes, by the
            rule's name.
    """
    values = axes(template, problem, fixed)
    # The axes that most rules read come first, so that a branch falls early.
    order = sorted(values, key=lambda axis: -sum(axis in r.axes for r in RULES[template]))
    due: list[list[Rule]] = [[] for _ in range(len(order) + 1)]
    for rule in RULES[template]:
        due[max((order.index(axis) + 1 for axis in rule.axes), default=0)].append(rule)
    points_below = [1] * (len(order) + 1)
    for depth in range(len(order) - 1, -1, -1):
        points_below[depth] = points_below[depth + 1] * len(values[order[depth]])
    family = TEMPLATES[template]
    partial = family.__new__(family)  # has no axis yet: a rule that reads one too early fails
    known = vars(partial)  # where the walk sets the axes, as the model is frozen
    known["template"] = template

    def walk(depth: int) -> Iterator[AnyConfig]:
        for rule in due[depth]:
            if rule.broken(partial, problem, device):
                if rejections is not None:
                    rejections[rule.broken.__name__.strip("_")] += points_below[depth]
                return
        if depth == len(order):
            yield family.model_construct(**known)
            return
        for value in values[order[depth]]:
            known[order[depth]] = value
            yield from walk(depth + 1)
        del known[order[depth]]

    return walk(0)


def require_legal(config: AnyConfig, problem: Problem, device: Device) -> None:
    """Nothing, if `config` is legal.

    Raises:
        ConfigError: if it is not; the message is the broken rule.
    """
    reason = why_illegal(config, problem, device)
    if reason:
        raise ConfigError(f"{config} is illegal for {problem} on {device.name}: {reason}")


def default_config(problem: Problem, device: Device, template: str | None = None) -> AnyConfig:
    """The template's default for a problem: a plain, always legal choice.

    Args:
        template: one of the architecture's templates; the native one where it fits, if None.
    """
    if template is None:
        narrow = problem.alignment < WIDE_ALIGNMENT
        template = "forward_sm80" if narrow else device.arch.templates[0]
    d = problem.head_dim
    if template == "forward_sm80":
        block_m, block_n = (128, 64) if d <= 128 else (64, 32)
        return Sm80Forward(
            block_m=block_m, block_n=block_n, block_k=round_up(d, 16), warps=4, stages=1
        )
    block_n = 128 if d <= 128 else 80 if d > 192 else 112
    block_k = round_up(d, 64) if d % 64 == 0 or d > 32 else 32
    return Sm90Forward(block_m=128, block_n=block_n, block_k=block_k, stages=2)
