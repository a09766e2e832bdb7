"""outcomes so far -> the next config: the static model, corrected as measurements arrive.

The logarithm of a time is that of the static model plus what it misses: a Gaussian process over
the axes. Of a pool of legal configs (a sample's best by the static model, and the neighbours of
what looks best since) the next is the one with the largest expected improvement, times its chance
not to be rejected. Asks whose outcome is pending narrow the uncertainty but leave the mean alone
(GP-BUCB; Desautels, Krause, Burdick 2014), so that many asks in a row differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fagen.kernels.registry import TEMPLATES
from fagen.kernels.template import Config
from fagen.tuning.outcome import Measured, Outcome
from fagen.tuning.search.legal import LegalSet

Floats = NDArray[np.float64]
Predict = Callable[[Config], float]  # config -> objective

SAMPLE = 8000  # legal configs that the static model looks at, 25 us each
POOL = 2000  # the best of them
CLIMBS, CLIMBERS = 3, 16  # rounds in which the neighbours of so many of the pool's best join it

# For an axis of which the template does not say how far its errors reach; fit, as it is.
REACH_OF_OTHERS = 4.0
MODEL_ERROR = 0.05  # of the static model's logarithms, before anything is measured
MODEL_ERROR_WEIGHT = 4.0  # measurements that it counts as
# Variances, as multiples of the model error's:
NOISE = 0.01  # of a measurement
OFFSET = 1e4  # of the error that all configs share
ACCEPTED = 0.3  # accepted configs that each has among its like, beside the real ones


class Surrogate:
    """The corrected model of one study.

    Rows are those of the legal set. A row is claimed, when it is asked for or another study asked
    for it, and then told or dropped.

    Args:
        legal: where to search.
        predict: the static model: config -> objective.
        rng: draws the sample.
    """

    def __init__(self, legal: LegalSet, predict: Predict, rng: np.random.Generator) -> None:
        self._legal, self._predict = legal, predict
        self._likeness = _Likeness(legal)
        self._place: dict[int, int] = {}  # in the pool, of each of its rows
        self._rows = np.empty(0, dtype=np.int64)
        self._prior = np.empty(0)  # logarithms of the static objectives
        self._claimed = self._process()  # for what is left to learn
        self._measured = self._process()  # for what was learned
        self._told: dict[int, Outcome] = {}
        self._told_alike = np.empty((2, 0))  # of `_alike`, by place
        self._best = math.inf  # logarithm
        self._climbed: set[int] = set()  # rows whose neighbours are in the pool

        sample = rng.permutation(len(legal))[:SAMPLE]
        prior = self._static(sample)
        best = np.argsort(prior, kind="stable")[:POOL]
        self._join(sample[best], prior[best])
        for _ in range(CLIMBS):
            for place in np.argsort(self._prior, kind="stable")[:CLIMBERS]:
                self._climb(int(self._rows[place]))

    def ask(self, taken: NDArray[np.bool_]) -> int:
        """The most promising row that is not taken; there has to be one."""
        if taken[self._rows].all():
            self._add(np.flatnonzero(~taken)[:POOL])
        self._climb(int(self._rows[np.argmin(self._prior + self._measured.mean)]))
        accepted, told = ACCEPTED + self._told_alike
        score = self._improvement() * accepted / told
        score[taken[self._rows]] = -1.0
        return int(self._rows[np.argmax(score)])

    def claim(self, row: int) -> None:
        """A row's outcome is on its way: it leaves less to learn around it."""
        self._add([row])
        self._claimed.condition(self._rows, self._place[row])

    def tell(self, row: int, outcome: Outcome) -> None:
        """What became of a claimed row; a rejection may withdraw an earlier time."""
        withdraws = row in self._told
        self._told[row] = outcome
        if withdraws:
            self._measured = self._process()
            self._told_alike = np.zeros((2, len(self._rows)))
            self._best = math.inf
        for each in self._told if withdraws else [row]:
            self._learn(each)

    def drop(self, rows: Sequence[int]) -> None:
        """The outcomes of claimed rows will not come after all."""
        if rows:
            kept = [row for row in self._claimed.rows if row not in rows]
            self._claimed = self._process()
            for row in kept:
                self._claimed.condition(self._rows, self._place[row])

    def expect(self, row: int) -> float:
        """The objective of a row, as far as it can be known from what was told."""
        self._add([row])
        place = self._place[row]
        return math.exp(self._prior[place] + self._measured.mean[place])

    def _learn(self, row: int) -> None:
        outcome, place = self._told[row], self._place[row]
        if isinstance(outcome, Measured):
            value = math.log(outcome.objective)
            self._measured.condition(self._rows, place, value - self._prior[place])
            self._best = min(self._best, value)
        self._told_alike += self._alike(self._rows, [row])

    def _process(self) -> _Process:
        """One that knows nothing yet."""
        process = _Process(self._likeness)
        process.extend(self._rows)
        return process

    # ---- the pool ----

    def _static(self, rows: Iterable[int]) -> Floats:
        return np.log([self._predict(self._legal.config(int(row))) for row in rows])

    def _add(self, rows: Iterable[int]) -> None:
        new = [int(row) for row in rows if int(row) not in self._place]
        if new:
            self._join(np.array(new), self._static(new))

    def _join(self, rows: NDArray[np.int64], prior: Floats) -> None:
        """Rows with their static predictions become part of the pool."""
        self._place |= {int(row): len(self._rows) + n for n, row in enumerate(rows)}
        self._rows = np.concatenate([self._rows, rows])
        self._prior = np.concatenate([self._prior, prior])
        self._claimed.extend(rows)
        self._measured.extend(rows)
        self._told_alike = np.hstack([self._told_alike, self._alike(rows, self._told)])

    def _climb(self, row: int) -> None:
        """The legal configs that differ from a row in one axis become part of the pool."""
        if row in self._climbed:
            return
        self._climbed.add(row)
        values = self._legal.parameters(row)
        neighbours = (
            self._legal.find(values | {axis: value})
            for axis, choices in self._legal.axes.items()
            for value in choices
        )
        self._add(neighbour for neighbour in neighbours if neighbour is not None)

    # ---- what is promising ----

    def _improvement(self) -> Floats:
        """How far below the best so far each logarithm is expected to fall."""
        from scipy.special import ndtr

        mean = self._prior + self._measured.mean
        evidence = self._measured.evidence + MODEL_ERROR_WEIGHT * MODEL_ERROR**2
        error = evidence / (len(self._measured.rows) + MODEL_ERROR_WEIGHT)
        deviation = np.sqrt(error * (self._claimed.variance + NOISE))
        gain = min(self._best, float(mean.max())) - mean
        z = gain / deviation
        density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        return np.asarray(gain * ndtr(z) + deviation * density)

    def _alike(self, rows: NDArray[np.int64], told: Iterable[int]) -> Floats:
        """How many told rows are like each of some rows: (accepted, all), by row."""
        counts = np.zeros((2, len(rows)))
        for row in told:
            outcome = self._told[row]
            alike = self._likeness(rows, row) ** 2  # half as far as errors are
            if isinstance(outcome, Measured):
                counts += alike
            elif outcome.kind != "duplicate":  # which is as good as the first one
                counts[1] += alike
        return counts


class _Likeness:
    """What the model's errors at rows of a legal set have in common with that at one: 0 to 1."""

    def __init__(self, legal: LegalSet) -> None:
        self._positions = legal.positions
        template = TEMPLATES[legal.template]
        self._sizes = {
            column: np.array(values) / template.REACH_OF_SIZE[axis]
            for column, (axis, values) in enumerate(legal.axes.items())
            if axis in template.REACH_OF_SIZE
        }
        self._choices = {
            column: 1 / template.REACH_OF_CHOICE.get(axis, REACH_OF_OTHERS)
            for column, axis in enumerate(legal.axes)
            if axis not in template.REACH_OF_SIZE
        }

    def __call__(self, rows: NDArray[np.int64], row: int) -> Floats:
        places, place = self._positions[rows].T, self._positions[row]
        distance = np.zeros(len(rows))
        for column, sizes in self._sizes.items():
            distance += np.abs(sizes - sizes[place[column]])[places[column]]
        for column, weight in self._choices.items():
            distance += weight * (places[column] != place[column])
        return np.asarray(np.exp(-distance))


class _Process:
    """A Gaussian process over the pool, conditioned on one of its rows after another.

    Variances are multiples of the model error's. Products go without BLAS, whose threads wait for
    cores that compile kernels.

    Attributes:
        rows: what it is conditioned on.
        mean, variance: of each row of the pool, given those.
        evidence: the errors at those rows, squared in the metric of their covariance.
    """

    def __init__(self, likeness: _Likeness) -> None:
        self.rows: list[int] = []
        self.mean, self.variance = np.empty(0), np.empty(0)
        self.evidence = 0.0
        self._likeness = likeness
        self._factors = np.empty((0, 0))  # (rows, pool): of Cholesky
        self._conditions: list[tuple[int, float, float]] = []  # place, root, weight

    def extend(self, rows: NDArray[np.int64]) -> None:
        """Rows join the pool."""
        factors = np.empty((len(self.rows), len(rows)))
        mean, variance = np.zeros(len(rows)), np.full(len(rows), 1 + OFFSET)
        for n, (place, root, weight) in enumerate(self._conditions):
            before = _product(self._factors[:n, place], factors[:n])
            factors[n] = (self._likeness(rows, self.rows[n]) + OFFSET - before) / root
            mean += weight * factors[n]
            variance -= factors[n] ** 2
        self._factors = np.hstack([self._factors, factors])
        self.mean = np.concatenate([self.mean, mean])
        self.variance = np.concatenate([self.variance, np.maximum(variance, 0.0)])

    def condition(self, pool: NDArray[np.int64], place: int, error: float = 0.0) -> None:
        """The error at a place in the pool is known (or will be: then the mean means nothing)."""
        row = int(pool[place])
        rest = self._likeness(pool, row) + OFFSET - _product(self._factors[:, place], self._factors)
        root = math.sqrt(max(rest[place], 0.0) + NOISE)
        factor, weight = rest / root, (error - self.mean[place]) / root
        self.mean = self.mean + weight * factor
        self.variance = np.maximum(self.variance - factor**2, 0.0)
        self.evidence += weight**2
        self._factors = np.vstack([self._factors, factor])
        self._conditions.append((place, root, weight))
        self.rows.append(row)


def _product(vector: Floats, matrix: Floats) -> Floats:
    return np.asarray(np.einsum("i,ij->j", vector, matrix))
