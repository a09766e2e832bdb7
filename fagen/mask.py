"""Who sees what: the one statement of it in Python; templates/mask.cuh is the one in CUDA.

A row (a query) sees the keys [begin, end). Masks are aligned bottom-right: the last row sees the
last key. Today `begin` is always 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = TypeVar("Rows", int, NDArray[np.int64])


class Mask(NamedTuple):
    """Which bounds a mask has.

    Attributes:
        causal: whether query i sees only keys up to i + seqlen_k - seqlen_q.
    """

    causal: bool = False

    def __str__(self) -> str:
        return "causal" if self.causal else "full"

    def visible(self, row: Rows, seqlen_q: int, seqlen_k: int) -> tuple[Rows, Rows]:
        """The keys [begin, end) that a row, or each of an array of rows, sees."""
        end = row + (1 + seqlen_k - seqlen_q) if self.causal else row * 0 + seqlen_k
        if not isinstance(end, int):
            return end * 0, end.clip(0, seqlen_k)
        return 0, min(max(end, 0), seqlen_k)

    def pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """How many (query, key) pairs of one head of one sequence are visible."""
        if not self.causal:
            return seqlen_q * seqlen_k
        rows = min(seqlen_q, seqlen_k)  # the last ones; those above them see no key
        return rows * (2 * seqlen_k - rows + 1) // 2
