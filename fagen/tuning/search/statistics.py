"""Numbers -> what they say of each other."""

from __future__ import annotations

from collections.abc import Sequence

MIN_FOR_CORRELATION = 3


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The rank correlation of two equally long lists, ties sharing their mean rank.

    None where it means nothing: fewer than three values, or all alike.
    """
    if len(a) < MIN_FOR_CORRELATION or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    from scipy import stats  # which takes a second to import

    return float(stats.spearmanr(a, b).statistic)
