"""The templates: which there are, and which answers a problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny, ValidationError

from fagen.device import Architecture, Device
from fagen.errors import ArgumentError, UnsupportedError
from fagen.kernels import forward_sm80, forward_sm90
from fagen.kernels.template import Config, Template
from fagen.problem import Problem
from fagen.validation import NestedError, one_line

# By name. Of several that answer a problem the first is the native one.
TEMPLATES: dict[str, Template] = {
    template.NAME: template for template in (forward_sm90, forward_sm80)
}


def template_of(config: Config) -> Template:
    """The template that a config is a point of."""
    return TEMPLATES[config.template]


def templates_for(op: str, arch: Architecture) -> tuple[Template, ...]:
    """The templates of an operation that run on an architecture, the native one first."""
    return tuple(t for t in TEMPLATES.values() if op == t.OP and arch.name in t.ARCHS)


def native_template(problem: Problem, arch: Architecture) -> Template:
    """The first template that answers a problem.

    Raises:
        UnsupportedError: if there is none.
    """
    reasons = []
    for template in templates_for(problem.op, arch):
        reason = template.why_not(problem, arch)
        if reason is None:
            return template
        reasons.append(f"{template.NAME}: {reason}")
    raise UnsupportedError(
        f"no template answers {problem} on {arch.name}: {'; '.join(reasons) or 'there is none'}"
    )


def default_config(problem: Problem, device: Device, template: str | None = None) -> Config:
    """A template's default for a problem: a plain, always legal choice.

    Args:
        template: the native one if None.
    """
    chosen = TEMPLATES[template] if template else native_template(problem, device.arch)
    default: Config = chosen.default(problem)
    return default


def parse_config(fields: Mapping[str, Any]) -> Config:
    """The config with these fields, `template` among them.

    Raises:
        ArgumentError: in one line, for an unknown field or a value out of range.
    """
    try:
        return _validated(fields)
    except ValueError as error:
        raise ArgumentError(f"bad config: {error}") from None


def _validated(fields: Any) -> Config:
    """A config, or the one with these fields; a ValueError in one line otherwise."""
    if isinstance(fields, Config):
        return fields
    if not isinstance(fields, Mapping):
        raise ValueError("a config is a mapping of axes to values")
    name = fields.get("template")
    if not isinstance(name, str) or name not in TEMPLATES:
        raise ValueError(f"template {name!r} is none of {', '.join(TEMPLATES)}")
    try:
        return TEMPLATES[name].Config.model_validate(dict(fields))
    except ValidationError as error:
        raise NestedError(one_line(error)) from None


# A config as a field of a model.
AnyConfig = Annotated[Config, BeforeValidator(_validated), SerializeAsAny()]
