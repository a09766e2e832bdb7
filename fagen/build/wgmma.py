"""Operand lists of wgmma, as text: `{%0` would be Jinja's, so the template gets them ready."""

from __future__ import annotations

from typing import Any


def wgmma(
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
