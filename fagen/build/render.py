"""problem, config -> one self-contained CUDA text.

Jinja fills the constants at the top of a template, names the kernel and writes wgmma's operand
lists; local `#include`s are folded in, each once. Everything else is C++.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from fagen.files import packaged_folder
from fagen.kernels.registry import template_of
from fagen.kernels.template import Config
from fagen.problem import Problem

if TYPE_CHECKING:
    from jinja2 import Environment

_LOCAL_INCLUDE = re.compile(r'^#include "([\w./]+)"\n', re.MULTILINE)


def template_folder() -> Path:
    """The folder of the templates."""
    return packaged_folder("templates")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(template_folder()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        finalize=_cpp,
    )


def _cpp(value: Any) -> Any:
    """What `{{ }}` prints: booleans as C++ spells them, everything else as it is."""
    return str(value).lower() if isinstance(value, bool) else value


def fold(name: str, **values: Any) -> str:
    """The text of a file under templates/, its local includes folded in, each once.

    `name.j2` is rendered with `values`; a plain `name` is taken as it stands. An include is looked
    for beside the file that has it, then from templates/ on.
    """
    seen: set[str] = set()

    def text_of(file: str) -> str:
        seen.add(file)
        if (template_folder() / f"{file}.j2").is_file():
            text = _environment().get_template(f"{file}.j2").render(**values)
        else:
            text = (template_folder() / file).read_text(encoding="utf-8")
        text = text.replace("#pragma once\n", "")
        folder = PurePosixPath(file).parent
        return _LOCAL_INCLUDE.sub(lambda match: include(_found(folder, match[1])), text)

    def include(file: str) -> str:
        return "" if file in seen else text_of(file)

    return text_of(name)


def _found(folder: PurePosixPath, name: str) -> str:
    """The file that `folder` includes as `name`, from templates/ on."""
    beside = str(folder / name)
    places = (template_folder() / f"{beside}{suffix}" for suffix in ("", ".j2"))
    return beside if any(place.is_file() for place in places) else name


def render(problem: Problem, config: Config) -> str:
    """One self-contained `.cu` text: the kernels of `config` for `problem`.

    Pure: the same arguments and template files give the same text.
    """
    template = template_of(config)
    values = template.constants(problem, config)
    return fold(f"{template.NAME}.cu", problem=problem, config=config, **config.axes(), **values)
