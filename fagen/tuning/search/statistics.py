"""Numbers -> what they say of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MIN_FOR_CORRELATION = 3


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The rank correlation of two equally long lists, ties sharing their mean rank.

    None where it means nothing: fewer than three values, or all alike.
    """
    if len(a) < MIN_FOR_CORRELATION or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray[Any, Any] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks
