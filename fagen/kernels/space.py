"""The space of a template: its axes, and the single statement of what is legal.

`why_illegal` answers with the broken rule. `legal_configs` walks the space, dropping a branch as
soon as the axes that a rule reads are set, so the order of the axes is only a matter of speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fagen.device import Device
from fagen.errors import ArgumentError, ConfigError
from fagen.kernels.registry import TEMPLATES, default_config, template_of, templates_for
from fagen.kernels.template import Config, Rule
from fagen.problem import Problem


def axes(
    template: str, problem: Problem, fixed: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, ...]]:
    """Every axis of a template with the values that a search tries, for this problem.

    Args:
        fixed: axes held at one value, or at the values of a tuple.

    Raises:
        ArgumentError: if the template has no such axis.
    """
    names = TEMPLATES[template].Config.axis_names()
    if unknown := [name for name in fixed or () if name not in names]:
        raise ArgumentError(
            f"{template} has no axis {', '.join(unknown)}: its axes are {', '.join(names)}"
        )
    values = TEMPLATES[template].axes(problem)
    for name, held in (fixed or {}).items():
        wanted = held if isinstance(held, tuple) else (held,)
        in_order = [value for value in values[name] if value in wanted]
        values[name] = tuple(dict.fromkeys([*in_order, *wanted]))
    return values


def _applies(c: Config, p: Problem, d: Device) -> str | None:
    """The template answers the problem on this architecture."""
    template = template_of(c)
    here = templates_for(p.op, d.arch)
    if template in here:
        reason = template.why_not(p, d.arch)
        others = [t.NAME for t in here if t.why_not(p, d.arch) is None]
        return f"{reason}: take {' or '.join(others)}" if reason and others else reason
    names = " or ".join(t.NAME for t in here) or "none"
    return f"{template.NAME} does not answer {p.op} on {d.arch.name}: {names} does"


def _rules(template: str) -> tuple[Rule, ...]:
    return (Rule((), _applies), *TEMPLATES[template].RULES)


def free_axes(template: str) -> tuple[str, ...]:
    """The axes that no rule reads: what is legal is so with each of their values."""
    read = {axis for rule in _rules(template) for axis in rule.axes}
    return tuple(name for name in TEMPLATES[template].Config.axis_names() if name not in read)


def why_illegal(config: Config, problem: Problem, device: Device) -> str | None:
    """The first rule that `config` breaks for `problem` on `device`, or None if it is legal."""
    for rule in _rules(config.template):
        reason = rule.broken(config, problem, device)
        if reason:
            return reason
    return None


def require_legal(config: Config, problem: Problem, device: Device) -> None:
    """Nothing, if `config` is legal.

    Raises:
        ConfigError: if it is not; the message is the broken rule.
    """
    reason = why_illegal(config, problem, device)
    if reason:
        raise ConfigError(f"{config} is illegal for {problem} on {device.name}: {reason}")


def legal_configs(
    template: str,
    problem: Problem,
    device: Device,
    *,
    fixed: Mapping[str, Any] | None = None,
    rejections: Counter[str] | None = None,
) -> Iterator[Config]:
    """Every legal config of a template, without building the illegal ones.

    Args:
        fixed: as of `axes`.
        rejections: if given, counts the points of the space that each rule removes, by the
            rule's name.
    """
    values = axes(template, problem, fixed)
    rules = _rules(template)
    # The axes that most rules read come first, so that a branch falls early.
    order = sorted(values, key=lambda axis: -sum(axis in rule.axes for rule in rules))
    due: list[list[Rule]] = [[] for _ in range(len(order) + 1)]
    for rule in rules:
        due[max((order.index(axis) + 1 for axis in rule.axes), default=0)].append(rule)
    points_below = [1] * (len(order) + 1)
    for depth in range(len(order) - 1, -1, -1):
        points_below[depth] = points_below[depth + 1] * len(values[order[depth]])
    family = TEMPLATES[template].Config
    partial = family.__new__(family)  # has no axis yet: a rule that reads one too early fails
    known = vars(partial)  # where the walk sets the axes, as the model is frozen
    known["template"] = template

    def walk(depth: int) -> Iterator[Config]:
        for rule in due[depth]:
            if rule.broken(partial, problem, device):
                if rejections is not None:
                    rejections[rule.name] += points_below[depth]
                return
        if depth == len(order):
            yield family.model_construct(**known)
            return
        for value in values[order[depth]]:
            known[order[depth]] = value
            yield from walk(depth + 1)
        del known[order[depth]]

    return walk(0)


def adapted(config: Config, of: Problem, to: Problem) -> Config:
    """A config of one problem for another: an axis whose values differ between the two (slices of
    the head dim) comes from the default.
    """
    template = template_of(config)
    there, here = template.axes(of), template.axes(to)
    default = template.default(to)
    changed = {axis: getattr(default, axis) for axis in here if here[axis] != there[axis]}
    return config.model_copy(update=changed)


def seeds(template: str, problem: Problem, device: Device) -> list[Config]:
    """The configs that are good somewhere and legal here; a search tries them first."""
    default = default_config(problem, device, template).axes()
    family = TEMPLATES[template].Config
    configs = [family(**default | axes) for axes in TEMPLATES[template].seeds(problem)]
    return [config for config in configs if why_illegal(config, problem, device) is None]
