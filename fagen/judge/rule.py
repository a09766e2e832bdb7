"""The rule that every output of a kernel is judged by, on plain arrays.

The error may be twice that of the low-precision variant of the maths (the rule of FlashAttention's
own tests), its mean square 1.5 times that of the roundings no fused kernel can avoid; a float32
output is near exact; rows that nothing goes into are exactly what they have to be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fagen.dtypes import DTYPES
from fagen.judge.inputs import is_poison
from fagen.judge.reference import Float64, Reference, round_to
from fagen.operation import Operand
from fagen.problem import Problem, Shape

MAX_ERROR_FACTOR = 2.0
MAX_RMS_RATIO = 1.5
RMS_ELEMENTS = 4096  # the ratio over fewer says too little alone: such shapes are pooled
EXACT_ABSOLUTE, EXACT_RELATIVE = 1e-3, 1e-6  # of a float32 output

# What messages call an output and the dimensions of its rows, where that is not its own name.
_WORDS = {
    "o": "output", "lse": "logsumexp", "heads_q": "head", "heads_kv": "head", "seqlen_q": "query",
    "seqlen_k": "key",
}  # fmt: skip


def word(name: str) -> str:
    """What messages call an output or a dimension."""
    return _WORDS.get(name, name)


class OutputErrors(BaseModel):
    """How near one output came to the limits.

    Attributes:
        max_error: largest |output - reference|.
        allowed_error: its limit.
        rms_ratio: the RMS error over that of the unavoidable roundings; 0 if there is no element.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_error: float = 0.0
    allowed_error: float = 0.0
    rms_ratio: float = 0.0

    @property
    def nearness(self) -> float:
        """The largest error over its limit; 0 where no error is allowed and none was made."""
        return self.max_error / self.allowed_error if self.max_error else 0.0


@dataclass(frozen=True)
class Expected:
    """What `judge` compares one output with, and its limits.

    Attributes:
        operand: the output.
        reference: its rows.
        allowed_error, relative_error: of any element, the second as a share of its exact value.
        row_rms: of each row's exact values; errors are taken relative to it, so that rows of few
            keys, whose outputs are large, do not decide alone.
        rms: the relative RMS error that is unavoidable; 0 if that is not asked.
        elements: of the rows that something goes into.
    """

    operand: Operand
    reference: Reference
    allowed_error: float
    relative_error: float
    row_rms: Float64
    rms: float
    elements: int


def expect(operand: Operand, reference: Reference, problem: Problem) -> Expected:
    """The limits of an output."""
    exact, full = reference.exact, ~reference.empty
    elements = int(full.sum()) * exact.shape[1]
    if reference.low_precision is None or reference.unavoidable is None:
        ones = np.ones(len(exact))
        return Expected(operand, reference, EXACT_ABSOLUTE, EXACT_RELATIVE, ones, 0.0, elements)
    dtype = DTYPES[operand.dtype or problem.dtype]
    rounded = round_to(exact, dtype.numpy)
    noise = round_to(round_to(rounded + 0.3, dtype.numpy) - 0.3, dtype.numpy) - rounded
    low_error = _largest(reference.low_precision - exact)
    row_rms = np.sqrt(np.mean(np.square(exact), axis=1))
    row_rms[row_rms == 0] = 1.0  # no key, or V is 0: the error counts as it is
    unavoidable = ((reference.unavoidable - exact) / row_rms[:, None])[full]
    return Expected(
        operand,
        reference,
        allowed_error=MAX_ERROR_FACTOR * low_error + 2 * _largest(noise),
        relative_error=0.0,
        row_rms=row_rms,
        # Where the output happens to be exact (one key) the baseline would be 0: at least what
        # rounding it costs on average.
        rms=max(_rms(unavoidable), 0.2 * dtype.epsilon),
        elements=elements,
    )


def _largest(x: Float64) -> float:
    return float(np.abs(x).max(initial=0.0))


def _rms(x: Float64) -> float:
    return math.sqrt(float(np.mean(np.square(x)))) if x.size else 0.0


@dataclass(frozen=True)
class Judged:
    """What `judge` found: the broken rule, or "", and the errors."""

    broken: str
    errors: OutputErrors


def judge(values: NDArray[Any], expected: Expected, shape: Shape) -> Judged:
    """Whether one output is right.

    Args:
        values: (rows, columns) in the output's dtype, rows as in the reference.
    """
    reference = expected.reference
    name = word(expected.operand.name)
    exact, empty = reference.exact, reference.empty
    target = np.where(empty[:, None], 0.0, exact)
    error = np.where(empty[:, None], 0.0, values.astype(np.float64) - target)
    squares = np.einsum("rc,rc->r", error, error) / np.square(expected.row_rms)
    error = np.abs(error, out=error)  # NaN where the output is
    limit = expected.allowed_error + expected.relative_error * np.abs(target)
    max_error = _largest(error)
    rms_ratio = 0.0
    if expected.elements and expected.rms:
        rms_ratio = math.sqrt(squares[~empty].sum() / expected.elements) / expected.rms
    errors = OutputErrors(
        max_error=max_error, allowed_error=expected.allowed_error, rms_ratio=rms_ratio
    )
    nothing = f"{exact[empty][0, 0]:g}" if empty.any() else ""
    # What is wrong, and in which elements.
    rules = (
        (f"{name} was not written", is_poison(values)),
        (f"{name} is NaN or infinite", ~empty[:, None] & ~np.isfinite(error)),
        (
            f"{name} of a row without keys is not {nothing}",
            empty[:, None] & ~(values == exact),
        ),
        (f"{name} is off by {max_error:.2e}, allowed is {_largest(limit):.2e}", ~(error <= limit)),
    )
    for rule, bad in rules:
        if bad.any():
            bad_rows: NDArray[np.bool_] = np.logical_or.reduce(np.asarray(bad), axis=1)
            return Judged(f"{rule}, {_describe(bad_rows, reference, shape)}", errors)
    if expected.elements >= RMS_ELEMENTS and rms_ratio > MAX_RMS_RATIO:
        return Judged(rms_rule(name, rms_ratio), errors)
    return Judged("", errors)


def rms_rule(name: str, ratio: float) -> str:
    return (
        f"RMS error of the {name} is {ratio:.2f} times the unavoidable one, "
        f"{MAX_RMS_RATIO} times is allowed"
    )


def _describe(bad_rows: NDArray[np.bool_], reference: Reference, shape: Shape) -> str:
    """How many rows, and which is the first."""
    sizes = [getattr(shape, dim) for dim in reference.row_dims]
    first = np.unravel_index(int(reference.rows[np.argmax(bad_rows)]), sizes)
    place = ", ".join(
        f"{word(dim)} {index}" for dim, index in zip(reference.row_dims, first, strict=True)
    )
    return f"{int(bad_rows.sum())} of {bad_rows.size} rows, the first being {place}"


def rows_of(tensor: NDArray[Any], operand: Operand, row_dims: tuple[str, ...]) -> NDArray[Any]:
    """A tensor with the operand's dimensions as (rows, columns)."""
    columns = [dim for dim in operand.dims if dim not in row_dims]
    moved = tensor.transpose([operand.dims.index(dim) for dim in (*row_dims, *columns)])
    rows = math.prod(moved.shape[: len(row_dims)])
    return moved.reshape(rows, math.prod(moved.shape[len(row_dims) :]))
