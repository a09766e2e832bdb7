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
from fagen.kernels.config import AnyConfig, Sm90Forward
from fagen.kernels.params import FORWARD_PARAMS
from fagen.problem import Problem

if TYPE_CHECKING:
    from jinja2 import Environment

ELEMENT = {"bf16": "Bfloat16", "fp16": "Half"}  # of ptx.cuh
# CUDA's own types, for code that computes with single elements.
NUMBER = {
    "bf16": {"number": "__nv_bfloat16", "number_header": "cuda_bf16.h"},
    "fp16": {"number": "__half", "number_header": "cuda_fp16.h"},
}
PTX_TYPE = {"bf16": "bf16", "fp16": "f16"}
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


def kernel_name(problem: Problem) -> str:
    """The kernel's symbol (`extern "C"`): "fagen_forward_bf16_d128_causal"."""
    return f"fagen_{problem.name}"


def _wgmma(
    name: str, n: int, steps: int, *, a_in_registers: bool, b_transposed: bool
) -> dict[str, Any]:
    """What one wrapper of products_sm90.cuh.j2 needs, as ready text; `steps` are of depth 16."""
    transpose_b = int(b_transposed)
    if a_in_registers:
        place, word, kind, per_step = "registers", "u32", "r", 4
        immediates = f"1, 1, {transpose_b}"  # scale-a, scale-b, transpose b
    else:  # by a descriptor
        place, word, kind, per_step = "shared memory", "u64", "l", 1
        immediates = f"1, 1, 0, {transpose_b}"  # ..., transpose a, transpose b
    # The operands' numbers, in the order of the asm statement; `accumulate` is the last.
    d = range(n // 2)
    a = range(d.stop, d.stop + per_step * steps)
    b = range(a.stop, a.stop + steps)
    a_of_steps = [a[i * per_step : (i + 1) * per_step] for i in range(steps)]
    return {
        "name": name,
        "n": n,
        "depth": 16 * steps,
        "accumulators": len(d),
        "a_place": place,
        "a_type": word,
        "a_operands": len(a),
        "steps": [
            {"a": _braced(step) if a_in_registers else f"%{step.start}", "b": f"%{descriptor}"}
            for step, descriptor in zip(a_of_steps, b, strict=True)
        ],
        "d_operands": _braced(d),
        "d_constraints": _constraints("+f", "d", len(d)),
        "a_constraints": _constraints(kind, "a", len(a)),
        "b_constraints": _constraints("l", "b", len(b)),
        "scale_operand": f"%{b.stop}",
        "immediates": immediates,
    }


def _braced(operands: range) -> str:
    """A vector of asm operands: "{%0, %1}"."""
    return "{" + ", ".join(f"%{i}" for i in operands) + "}"


def _constraints(kind: str, array: str, count: int) -> str:
    """The elements of an array as asm operands: '"r"(a[0]), "r"(a[1])'."""
    return ", ".join(f'"{kind}"({array}[{i}])' for i in range(count))


def constants(problem: Problem, config: AnyConfig) -> dict[str, Any]:
    """The values that a template may name: the axes, and the sizes that follow from them."""
    values: dict[str, Any] = {
        **config.axes(),
        "problem": problem,
        "config": config,
        "kernel_name": kernel_name(problem),
        "element": ELEMENT[problem.dtype],
        "head_dim_qk": problem.head_dim,
        "head_dim_v": problem.head_dim,
        "causal": problem.causal,
        "alignment": problem.alignment,
        "qk_columns": config.head_dim_padded(problem),
        "v_columns": config.head_dim_padded(problem),
        "chunk": config.chunk,
        "threads": config.threads,
        "smem_bytes": config.smem_bytes(problem),
        "params_offsets": FORWARD_PARAMS.offsets,
        "params_size": FORWARD_PARAMS.size,
    }
    if isinstance(config, Sm90Forward):
        qk_steps = config.qk_steps(problem)
        values |= {
            "consumer_warpgroups": config.consumer_warpgroups,
            "consumer_registers": config.consumer_registers(),
            "ptx_type": PTX_TYPE[problem.dtype],
            "qk_steps": qk_steps,
            "wgmmas": [
                _wgmma(
                    "wgmma_qk",
                    config.block_n,
                    qk_steps,
                    a_in_registers=False,
                    b_transposed=False,
                ),
                _wgmma(
                    "wgmma_pv",
                    problem.head_dim,
                    config.block_n // 16,
                    a_in_registers=not config.p_in_smem,
                    b_transposed=True,
                ),
            ],
        }
    return values


def render(problem: Problem, config: AnyConfig) -> str:
    """One self-contained `.cu` text: the kernel of `config` for `problem`.

    Pure: the same arguments and template files give the same text.
    """
    return fold(f"{config.template}.cu", **constants(problem, config))
