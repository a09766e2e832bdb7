"""The question: which attention, on which shapes.

`Problem` is static: it decides the text of a kernel. `Shape` is what a call adds at run time.
`Shape.bucket()` is the one place where shapes are rounded, for tuning and dispatch alike.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fagen.dtypes import DTYPES, Dtype
from fagen.mask import Mask
from fagen.operation import OPERATIONS, Operation

DtypeName = Literal["fp16", "bf16"]  # of Q, K, V and O
DTYPE_NAMES: tuple[DtypeName, ...] = ("fp16", "bf16")
HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 256
WIDE_ALIGNMENT = 16  # bytes: what TMA and 16-byte cp.async need of bases and strides

# The standard shapes, those of FlashAttention's own benchmarks.
TOKENS = 16384  # batch * seqlen
HIDDEN = 2048  # heads * head_dim


class Problem(BaseModel):
    """The static question that one kernel text answers.

    Attributes:
        op: the operation, a name of `operation.OPERATIONS`.
        dtype: element type of Q, K, V and O; sums are always float32.
        head_dim: elements per head, a multiple of 8 from 8 to 256.
        causal: whether query i sees only keys up to i + seqlen_k - seqlen_q (bottom-right).
        alignment: bytes that every base address and stride is a multiple of: 16 for wide loads
            (TMA, 16-byte cp.async), 2 for anything else.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    op: str = "forward"
    dtype: DtypeName
    head_dim: Annotated[
        int, Field(ge=HEAD_DIM_MULTIPLE, le=MAX_HEAD_DIM, multiple_of=HEAD_DIM_MULTIPLE)
    ]
    causal: bool = False
    alignment: Literal[2, 16] = 16

    @field_validator("op")
    @classmethod
    def _known(cls, op: str) -> str:
        if op not in OPERATIONS:
            raise ValueError(f"the operation has to be one of {', '.join(OPERATIONS)}")
        return op

    @property
    def operation(self) -> Operation:
        """The operation with its operands."""
        return OPERATIONS[self.op]

    @property
    def element(self) -> Dtype:
        """The element type of Q, K, V and O, with all its names."""
        return DTYPES[self.dtype]

    @property
    def mask(self) -> Mask:
        """Who sees what; as text "causal" or "full"."""
        return Mask(causal=self.causal)

    @property
    def name(self) -> str:
        """An identifier for files and kernels, such as "forward_bf16_d128_causal".

        Beside the words that every problem has it says what is not the default.
        """
        words = [self.op, self.dtype, f"d{self.head_dim}", str(self.mask)]
        if self.alignment != WIDE_ALIGNMENT:
            words.append("narrow")
        return "_".join(words)

    def distance(self, other: Problem) -> float:
        """How unlike two problems are, to try first what is tuned for the most alike.

        The head dim decides (a factor of 2 is a distance of 1); infinite between operations.
        """
        if self.op != other.op:
            return math.inf
        others = self.causal != other.causal, self.dtype != other.dtype
        differing = 0.02 * others[0] + 0.01 * others[1]
        return abs(math.log2(self.head_dim / other.head_dim)) + differing

    def __str__(self) -> str:
        return self.name


class Bucket(BaseModel):
    """A class of shapes that share one tuned config.

    Attributes:
        group: query heads per key/value head.
        seqlen_q, seqlen_k, batch_heads: powers of two, the nearest in the logarithm to the
            sequence lengths and to batch * heads_kv (0 stays 0).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: int = Field(ge=1)
    seqlen_q: int = Field(ge=0)
    seqlen_k: int = Field(ge=0)
    batch_heads: int = Field(ge=0)

    def distance(self, other: Bucket) -> float:
        """How unlike two buckets are: summed log2 ratios, sequence lengths weighing most."""

        def log_ratio(a: int, b: int) -> float:
            return abs(max(a, 1).bit_length() - max(b, 1).bit_length())

        return (
            2.0 * log_ratio(self.seqlen_q, other.seqlen_q)
            + 2.0 * log_ratio(self.seqlen_k, other.seqlen_k)
            + log_ratio(self.batch_heads, other.batch_heads)
            + 0.5 * log_ratio(self.group, other.group)
        )

    def __str__(self) -> str:
        return f"q{self.seqlen_q}_k{self.seqlen_k}_bh{self.batch_heads}_g{self.group}"


def _round_to_power_of_two(value: int) -> int:
    """The power of two nearest to `value` in the logarithm; 0 stays 0."""
    if value == 0:
        return 0
    lower = 1 << (value.bit_length() - 1)
    return lower if value * value <= 2 * lower * lower else 2 * lower


class Shape(BaseModel):
    """The run-time lengths of one call: (batch, seqlen, heads, head_dim) without the last.

    Attributes:
        batch: sequences in the batch.
        seqlen_q, seqlen_k: queries and keys per sequence; either may be 0.
        heads_q, heads_kv: heads of Q and of K/V; heads_q is a multiple of heads_kv.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int = Field(ge=0)
    seqlen_q: int = Field(ge=0)
    seqlen_k: int = Field(ge=0)
    heads_q: int = Field(ge=0)
    heads_kv: int = Field(ge=0)

    @model_validator(mode="after")
    def _grouped(self) -> Self:
        if self.heads_q != 0 and (self.heads_kv == 0 or self.heads_q % self.heads_kv != 0):
            raise ValueError(
                f"heads_q is {self.heads_q} and heads_kv is {self.heads_kv}: "
                "heads_q has to be a multiple of heads_kv"
            )
        return self

    def bucket(self) -> Bucket:
        """The bucket that this shape is tuned and dispatched under."""
        return Bucket(
            group=max(self.heads_q // max(self.heads_kv, 1), 1),
            seqlen_q=_round_to_power_of_two(self.seqlen_q),
            seqlen_k=_round_to_power_of_two(self.seqlen_k),
            batch_heads=_round_to_power_of_two(self.batch * self.heads_kv),
        )

    def flops(self, problem: Problem) -> int:
        """Floating-point operations: 2 per product, visible pair and head-dim element.

        4 * head_dim * pairs * batch * heads for the forward pass, as FlashAttention-2 counts
        (section 4.1).
        """
        pairs = problem.mask.pairs(self.seqlen_q, self.seqlen_k)
        per_pair = 2 * problem.operation.products * problem.head_dim
        return per_pair * pairs * self.batch * self.heads_q

    def tflops(self, problem: Problem, time_us: float) -> float:
        """The speed of a call that takes `time_us` microseconds, in 1e12 operations a second."""
        return self.flops(problem) / time_us * 1e-6

    def bytes(self, problem: Problem) -> int:
        """Fewest bytes of device memory moved: what is read, once, and what is written, once."""
        return sum(
            operand.elements(problem, self)
            * DTYPES[operand.dtype or problem.dtype].bytes
            * (2 if operand.role == "inout" else 1)
            for operand in problem.operation.operands
            if not operand.optional
        )

    def __str__(self) -> str:
        return f"b{self.batch} q{self.seqlen_q} k{self.seqlen_k} h{self.heads_q}/{self.heads_kv}"


def standard_shape(
    head_dim: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
) -> Shape:
    """A shape of these lengths; what is None is filled up to the standard size, to 1 at least.

    Args:
        batch: TOKENS // seqlen_q if None.
        heads: query heads, HIDDEN // head_dim if None.
        heads_kv: as many as heads if None.
    """
    heads_q = max(HIDDEN // head_dim, 1) if heads is None else heads
    return Shape(
        batch=max(TOKENS // max(seqlen_q, 1), 1) if batch is None else batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_kv=heads_q if heads_kv is None else heads_kv,
    )
