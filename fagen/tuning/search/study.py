"""One study: the search for the fastest config of a legal set, by asking and telling."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import BaseStorage

from fagen.kernels.template import Config
from fagen.tuning.outcome import (
    STATIC_REJECTIONS,
    Measured,
    Outcome,
    Rejected,
    Trial,
    rejections,
)
from fagen.tuning.search.ledger import Ledger
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.samplers import OptunaSampler, Sampler, Walk
from fagen.tuning.search.statistics import spearman
from fagen.tuning.search.surrogate import Surrogate


class Study:
    """The search for one objective over one legal set, by asking and telling.

    Args:
        name: names the kept study.
        sampler: one of `SAMPLERS`. "surrogate" is the static model, corrected as outcomes
            arrive; "random" and "brute-force" walk the legal set, at random and in order; the
            others are Optuna's.
        seed: makes a study with the same outcomes repeat itself.
        seeds: configs to try first, the most promising one first.
        predict: the static model's `Measured.objective` of a config; flat if left out.
        storage: of `open_storage`, or None to keep nothing.
        resume: go on with the kept study of that name. Without it, a new one gets a number.
        about: JSON values that are kept beside the trials, for those who read them.

    Attributes:
        name: the name of the kept study.
        legal: the legal set.
        trials: what came back, in order.
        resumed: how many of them are from an earlier run.

    Raises:
        ArgumentError: for an unknown sampler, or a kept study about something else.
    """

    def __init__(
        self,
        name: str,
        legal: LegalSet,
        *,
        sampler: str = "surrogate",
        seed: int = 0,
        seeds: Sequence[Config] = (),
        predict: Callable[[Config], float] = lambda config: 1.0,
        storage: BaseStorage | None = None,
        resume: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.legal = legal
        self.trials: list[Trial] = []
        self._predict = predict
        self._taken = np.zeros(len(legal), dtype=bool)
        self._pending: set[int] = set()
        self._elsewhere: set[int] = set()  # rows that other processes evaluate
        self._expected: dict[int, float] = {}  # by the surrogate, before the outcome
        self._distributions: dict[str, BaseDistribution] = {
            axis: CategoricalDistribution(values) for axis, values in legal.axes.items()
        }
        # The axes' values are part of the name: Optuna refuses a study whose axes change.
        digest = hashlib.sha256(repr(legal.axes).encode()).hexdigest()[:6]
        self.name = f"{name} axes-{digest}"
        self._kept: Ledger | None = None
        if storage is not None:
            self._kept = Ledger(self.name, storage, resume, self._distributions)
            self.name = self._kept.name
            self._kept.require(about or {})
        previous = self._new_outcomes()
        self.resumed = len(previous)
        self._rng = np.random.default_rng([seed, self.resumed])
        self._sampler = self._new_sampler(sampler)
        for row, outcome in previous:
            self._taken[row] = True
            self._sampler.claim(row)
            self._tell(row, outcome)
        rows = [legal.find(config.axes()) for config in seeds]
        self._seeds = [row for row in dict.fromkeys(rows) if row is not None]

    def _new_sampler(self, name: str) -> Sampler:
        if name == "surrogate":
            return Surrogate(self.legal, self._predict, self._rng)
        if name in ("random", "brute-force"):
            rows = np.arange(len(self.legal))
            order = self._rng.permutation(rows) if name == "random" else rows
            return Walk(order, self._elsewhere, self._rng)
        return OptunaSampler(self.legal, self._distributions, name, self._rng, self._keep)

    @property
    def best(self) -> Trial | None:
        """The config with the best objective so far."""
        return min(self.measured, key=lambda trial: trial.objective, default=None)

    @property
    def measured(self) -> list[Trial]:
        """What has a time."""
        return [trial for trial in self.trials if isinstance(trial.outcome, Measured)]

    @property
    def rejections(self) -> Counter[str]:
        """How many configs were rejected at each stage."""
        return rejections(self.trials)

    @property
    def waits(self) -> bool:
        """Whether other processes evaluate configs of it."""
        return bool(self._elsewhere)

    @property
    def asked(self) -> int:
        """How many configs were asked for or joined, those of other runs included."""
        return int(self._taken.sum())

    @property
    def exhausted(self) -> bool:
        """Whether every legal config was asked for."""
        return bool(self._taken.all())

    @property
    def done(self) -> int:
        """How many configs passed the static filter."""
        rejected = self.rejections
        return len(self.trials) - sum(rejected[kind] for kind in STATIC_REJECTIONS)

    @property
    def on_gpu(self) -> int:
        """How many configs passed the static filter, or may still."""
        return self.done + len(self._pending) + len(self._elsewhere)

    def ask(self) -> Config | None:
        """A config that was not asked for before; None when all were."""
        if self.exhausted:
            return None
        while self._seeds:
            row = self._seeds.pop(0)
            if not self._taken[row]:
                return self._take(row)
        return self._take(self._sampler.ask(self._taken))

    def join(self, config: Config) -> None:
        """Take part in a candidate that another study asked for, unless it is known here."""
        row = self.legal.find(config.axes())
        if row is not None and not self._taken[row]:
            self._take(row)

    def tell(self, config: Config, outcome: Outcome) -> bool:
        """The outcome of a config that was asked for or joined. False if it was neither.

        A rejection of a config that has a time withdraws the time.
        """
        row = self.legal.find(config.axes())
        if row is None:
            return False
        if row in self._pending:
            self._pending.remove(row)
            self._tell(row, outcome)
        elif not self._withdraw(row, outcome):
            return False
        self._keep(config, outcome)
        return True

    def _withdraw(self, row: int, outcome: Outcome) -> bool:
        """Whether a rejection has withdrawn the time of a row."""
        config = self.legal.config(row)
        rejected = isinstance(outcome, Rejected)
        if not rejected or not any(trial.config == config for trial in self.measured):
            return False
        self.trials = [trial for trial in self.trials if trial.config != config]
        self._tell(row, outcome)
        return True

    def release(self) -> None:
        """Give up what was asked for and not told: it may be asked for again."""
        self._drop(list(self._pending))
        if self._kept is not None:
            self._kept.release()

    def is_pending(self, config: Config) -> bool:
        """Whether a config was asked for or joined and not told."""
        return self.legal.find(config.axes()) in self._pending

    def claim(self, config: Config) -> bool:
        """Whether this process is the one to evaluate a config; from then on no other is."""
        return self._kept is None or self._kept.claim(config)

    def drop(self, config: Config) -> None:
        """Give up one config that was asked for or joined."""
        row = self.legal.find(config.axes())
        assert row is not None
        self._drop([row])

    def _drop(self, rows: Sequence[int]) -> None:
        self._pending.difference_update(rows)
        self._taken[rows] = False
        self._sampler.drop(rows)

    def read(self) -> set[int]:
        """Learn what other processes found. Returns the rows that they evaluate now."""
        for row, outcome in self._new_outcomes():
            if not self._taken[row]:
                self._taken[row] = True
                self._sampler.claim(row)
                self._tell(row, outcome)
            elif row in self._elsewhere:
                self._elsewhere.remove(row)
                self._tell(row, outcome)
            elif row not in self._pending:
                self._withdraw(row, outcome)
        if self._kept is None:
            return set()
        rows = {self.legal.find(axes) for axes in self._kept.claimed}
        return {row for row in rows if row is not None}

    def leave(self, rows: Set[int]) -> None:
        """Leave rows to other processes, and take back those that were left before."""
        left = {row for row in rows if not self._taken[row] or row in self._elsewhere}
        given_up = list(self._elsewhere - left)
        self._taken[given_up] = False
        self._sampler.drop(given_up)
        for row in sorted(left - self._elsewhere):
            self._taken[row] = True
            self._sampler.claim(row)
        self._elsewhere.clear()  # which a sampler looks into
        self._elsewhere.update(left)

    def judge_model(self) -> tuple[float | None, float | None]:
        """Spearman's rank correlation of predicted and measured objectives; it is kept, too.

        Returns:
            That of the static model, and that of the surrogate as it was when each config was
            asked for. None where it means nothing.
        """
        measured = {self.legal.find(trial.config.axes()): trial for trial in self.measured}
        static = spearman(
            [self._predict(trial.config) for trial in measured.values()],
            [trial.objective for trial in measured.values()],
        )
        foreseen = [row for row in measured if row in self._expected]
        corrected = spearman(
            [self._expected[row] for row in foreseen],
            [measured[row].objective for row in foreseen],
        )
        if self._kept is not None:
            self._kept.note({"spearman": {"static": static, "corrected": corrected}})
        return static, corrected

    def walk_all(self) -> None:
        """Ask the sampler nothing more, since all that is left will be tried."""
        self._sampler = self._new_sampler("brute-force")

    def _take(self, row: int) -> Config:
        self._taken[row] = True
        self._pending.add(row)
        if isinstance(self._sampler, Surrogate):
            self._expected[row] = self._sampler.expect(row)
        self._sampler.claim(row)
        return self.legal.config(row)

    def _tell(self, row: int, outcome: Outcome) -> None:
        self.trials.append(Trial(self.legal.config(row), outcome))
        self._sampler.tell(row, outcome)

    def _keep(self, config: Config, outcome: Outcome) -> None:
        if self._kept is not None:
            self._kept.keep(config, outcome)

    def _new_outcomes(self) -> list[tuple[int, Outcome]]:
        """The rows and outcomes that were kept since the last call; the last one counts."""
        kept = self._kept.new_outcomes() if self._kept is not None else ()
        found = {self.legal.find(axes): outcome for axes, outcome in kept}
        return [(row, outcome) for row, outcome in found.items() if row is not None]
