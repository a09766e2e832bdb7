"""The operations: which tensors each takes and gives, by name and role.

One table for whoever has to know: arrays checks a call against it, verification fills, poisons
and judges by it, kernels take their pointers in its order.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Role = Literal["in", "out", "inout"]


class Operand(NamedTuple):
    """A tensor of an operation.

    Attributes:
        name: such as "q".
        role: whether kernels read it, write it, or both.
        dims: what its dimensions are, by names of `Shape`'s and `Problem`'s fields. The last one
            is contiguous.
        dtype: a name of `dtypes.DTYPES`; None for the problem's.
        strided: whether the other dimensions have strides of their own; else all is contiguous.
        optional: whether a call may go without it.
    """

    name: str
    role: Role
    dims: tuple[str, ...]
    dtype: str | None = None
    strided: bool = True
    optional: bool = False

    def sizes(self, problem: object, shape: object) -> tuple[int, ...]:
        """The elements of each dimension, a field of the one or the other."""
        return tuple(getattr(problem if hasattr(problem, dim) else shape, dim) for dim in self.dims)

    def elements(self, problem: object, shape: object) -> int:
        """How many elements it has."""
        return math.prod(self.sizes(problem, shape))


class Operation(NamedTuple):
    """What a kernel computes.

    Attributes:
        name: such as "forward".
        operands: its tensors; kernels take their addresses in this order.
        scalars: the numbers that each call brings beside them.
        products: matrix products over the visible (query, key) pairs.
    """

    name: str
    operands: tuple[Operand, ...]
    scalars: tuple[str, ...] = ()
    products: int = 0

    @property
    def strided(self) -> tuple[Operand, ...]:
        """The operands that come with strides."""
        return tuple(operand for operand in self.operands if operand.strided)

    def operand(self, name: str) -> Operand:
        """The operand of that name."""
        return next(operand for operand in self.operands if operand.name == name)


_QUERIES = ("batch", "seqlen_q", "heads_q", "head_dim")
_KEYS = ("batch", "seqlen_k", "heads_kv", "head_dim")

FORWARD = Operation(
    "forward",
    operands=(
        Operand("q", "in", _QUERIES),
        Operand("k", "in", _KEYS),
        Operand("v", "in", _KEYS),
        Operand("o", "out", _QUERIES),
        Operand(
            "lse", "out", ("batch", "heads_q", "seqlen_q"), "fp32", strided=False, optional=True
        ),
    ),
    scalars=("softmax_scale",),
    products=2,  # Q K^T and P V
)

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in (FORWARD,)}
