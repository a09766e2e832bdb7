"""The search for the fastest config of a legal set: beside `studies` the one module with Optuna.

A `Study` asks for configs and is told their outcomes; `search` runs several studies (one for each
class of shapes) side by side on the same candidates. What measures them is an argument, so a
recorded table stands in for a GPU::

    search([study], lambda configs: ((c, [table[c]]) for c in configs), trials=100)

What to try next is up to a `Sampler`; the kept study (`studies`) gets each finished trial.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import Trial, TrialState

from fagen.errors import ArgumentError, MissingDependencyError
from fagen.kernels import space
from fagen.kernels.registry import TEMPLATES, AnyConfig
from fagen.tuning.outcome import STATIC_REJECTIONS, Measured, Outcome, Rejected, Tried
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.statistics import spearman
from fagen.tuning.search.studies import Ledger
from fagen.tuning.search.surrogate import Surrogate

SAMPLERS = ("surrogate", "tpe", "random", "brute-force", "gp", "nsga2", "qmc")
NEEDED = {"gp": ("scipy", "torch"), "qmc": ("scipy",)}  # packages, which Optuna imports late
ASKS_PER_TRIAL = 5  # candidates that may fall to the static filter for each one that is timed
OFFERS_AHEAD = 64  # configs that are compiled and not measured yet; the sampler learns from those
WAIT_SECONDS = 0.05  # between looks at what other processes still evaluate
PENALTY = 2.0  # a rejected candidate looks so many times slower than the slowest, to the sampler


# ---- one study ----


class Sampler(Protocol):
    """Chooses rows of a legal set. A row is claimed first, then told or dropped."""

    def ask(self, taken: np.ndarray) -> int:
        """A row that is not taken; there is one."""

    def claim(self, row: int) -> None:
        """The outcome of a row is on its way."""

    def tell(self, row: int, outcome: Outcome) -> None:
        """What became of a claimed row; a rejection may also withdraw an earlier time."""

    def drop(self, rows: Sequence[int]) -> None:
        """The outcomes of claimed rows will not come after all."""


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
        measures: whether this process can measure. One that cannot offers what it has compiled,
            and what was offered it leaves to the others, who take it first.
        about: JSON values that are kept beside the trials, for those who read them.

    Attributes:
        name: the name of the kept study.
        legal: the legal set.
        tried: what came back, in order.
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
        seeds: Sequence[AnyConfig] = (),
        predict: Callable[[AnyConfig], float] = lambda config: 1.0,
        storage: BaseStorage | None = None,
        resume: bool = False,
        measures: bool = True,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.legal = legal
        self._measures = measures
        self.tried: list[Tried] = []
        self._predict = predict
        self._taken = np.zeros(len(legal), dtype=bool)
        self._pending: set[int] = set()
        self._elsewhere: set[int] = set()  # rows that other processes evaluate
        self._offered: set[int] = set()  # rows that are compiled already
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
        previous = self._news()
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
            return _Walk(order, self._elsewhere, self._rng)
        return _OptunaSampler(self.legal, self._distributions, name, self._rng, self._keep)

    @property
    def best(self) -> Tried | None:
        """The config with the best objective so far."""
        return min(self.measured, key=lambda tried: tried.objective, default=None)

    @property
    def measured(self) -> list[Tried]:
        """What has a time."""
        return [tried for tried in self.tried if isinstance(tried.outcome, Measured)]

    @property
    def rejections(self) -> Counter[str]:
        """How many configs fell at each hurdle."""
        return Counter(t.outcome.kind for t in self.tried if isinstance(t.outcome, Rejected))

    @property
    def waits(self) -> bool:
        """Whether other processes evaluate configs of it."""
        return bool(self._elsewhere)

    @property
    def is_ahead(self) -> bool:
        """Whether enough is compiled for those that measure."""
        return not self._measures and len(self._elsewhere) >= OFFERS_AHEAD

    @property
    def asked(self) -> int:
        """How many configs were asked for or claimed, those of other runs included."""
        return int(self._taken.sum())

    @property
    def exhausted(self) -> bool:
        """Whether every legal config was asked for."""
        return bool(self._taken.all())

    @property
    def done(self) -> int:
        """How many configs passed the static filter."""
        rejections = self.rejections
        return len(self.tried) - sum(rejections[kind] for kind in STATIC_REJECTIONS)

    @property
    def on_gpu(self) -> int:
        """How many configs passed the static filter, or may still."""
        return self.done + len(self._pending) + len(self._elsewhere)

    def ask(self) -> AnyConfig | None:
        """A config that was not asked for before; None when all were."""
        if self.exhausted:
            return None
        while self._seeds:
            row = self._seeds.pop(0)
            if not self._taken[row]:
                return self._claim(row)
        if offered := [row for row in self._offered if not self._taken[row]]:
            return self._claim(offered[0])
        return self._claim(self._sampler.ask(self._taken))

    def claim(self, config: AnyConfig) -> None:
        """Take part in a candidate that another study asked for, unless it is known here."""
        row = self.legal.find(config.axes())
        if row is not None and not self._taken[row]:
            self._claim(row)

    def tell(self, config: AnyConfig, outcome: Outcome) -> bool:
        """The outcome of a config that was asked for or claimed. False if it was neither.

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
        if not rejected or not any(tried.config == config for tried in self.measured):
            return False
        self.tried = [tried for tried in self.tried if tried.config != config]
        self._tell(row, outcome)
        return True

    def release(self) -> None:
        """Give up what was asked for and not told: it may be asked for again."""
        self._drop(list(self._pending))
        if self._kept is not None:
            self._kept.release()

    def is_pending(self, config: AnyConfig) -> bool:
        """Whether a config was asked for or claimed and not told."""
        return self.legal.find(config.axes()) in self._pending

    def hold(self, config: AnyConfig) -> bool:
        """Whether this process is the one to evaluate a config; from then on no other is."""
        return self._kept is None or self._kept.claim(config)

    def drop(self, config: AnyConfig) -> None:
        """Give up one config that was asked for or claimed."""
        row = self.legal.find(config.axes())
        assert row is not None
        self._drop([row])

    def _drop(self, rows: Sequence[int]) -> None:
        self._pending.difference_update(rows)
        self._taken[rows] = False
        self._sampler.drop(rows)

    def read(self) -> set[int]:
        """Learn what other processes found. Returns the rows that they evaluate now."""
        for row, outcome in self._news():
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
        claimed = self._rows(self._kept.claimed)
        self._offered = self._rows(self._kept.offers.values())
        return claimed if self._measures else claimed | self._offered

    def offer(self, config: AnyConfig) -> None:
        """Leave a compiled config to those that can measure it."""
        assert self._kept is not None, "nobody else knows this study"
        self._kept.offer(config)
        self.drop(config)

    def _rows(self, many: Iterable[dict[str, Any]]) -> set[int]:
        rows = {self.legal.find(axes) for axes in many}
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
        measured = {self.legal.find(tried.config.axes()): tried for tried in self.measured}
        static = spearman(
            [self._predict(tried.config) for tried in measured.values()],
            [tried.objective for tried in measured.values()],
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

    def _claim(self, row: int) -> AnyConfig:
        self._taken[row] = True
        self._pending.add(row)
        if isinstance(self._sampler, Surrogate):
            self._expected[row] = self._sampler.expect(row)
        self._sampler.claim(row)
        return self.legal.config(row)

    def _tell(self, row: int, outcome: Outcome) -> None:
        self.tried.append(Tried(self.legal.config(row), outcome))
        self._sampler.tell(row, outcome)

    def _keep(self, config: AnyConfig, outcome: Outcome) -> None:
        if self._kept is not None:
            self._kept.keep(config, outcome)

    def _news(self) -> list[tuple[int, Outcome]]:
        """The rows and outcomes that were kept since the last call; the last one counts."""
        kept = self._kept.news() if self._kept is not None else ()
        found = {self.legal.find(axes): outcome for axes, outcome in kept}
        return [(row, outcome) for row, outcome in found.items() if row is not None]


# ---- samplers ----


class _Walk:
    """Every row, in a given order.

    Args:
        elsewhere: the rows that other processes evaluate at the moment.
    """

    def __init__(self, order: np.ndarray, elsewhere: Set[int], rng: np.random.Generator) -> None:
        self._order, self._elsewhere, self._rng = order, elsewhere, rng

    def ask(self, taken: np.ndarray) -> int:
        left = self._order[~taken[self._order]]
        # Processes that walk together would claim the same next one.
        return int(self._rng.choice(left) if self._elsewhere else left[0])

    def claim(self, row: int) -> None:
        pass

    def tell(self, row: int, outcome: Outcome) -> None:
        pass

    def drop(self, rows: Sequence[int]) -> None:
        pass


class _OptunaSampler:
    """A sampler of Optuna's, on a study in memory where a rejection counts as a bad value.

    Args:
        keep: gets each ask that is illegal or was tried; its nearest legal neighbour is the
            answer instead.
    """

    def __init__(
        self,
        legal: LegalSet,
        distributions: dict[str, BaseDistribution],
        name: str,
        rng: np.random.Generator,
        keep: Callable[[AnyConfig, Outcome], None],
    ) -> None:
        self._legal, self._distributions = legal, distributions
        self._rng, self._keep = rng, keep
        self._study = optuna.create_study(sampler=_sampler(name, int(rng.integers(2**31))))
        self._trials: dict[int, Trial] = {}  # of rows that are asked for or claimed
        self._slowest = 1.0

    def ask(self, taken: np.ndarray) -> int:
        trial = self._study.ask(self._distributions)
        found = self._legal.find(trial.params)
        if found is not None and not taken[found]:
            self._trials[found] = trial
            return found
        config = TEMPLATES[self._legal.template].Config(**trial.params)
        reason = "tried before"
        if found is None:
            broken = space.why_illegal(config, self._legal.problem, self._legal.device)
            reason = broken or "not in the legal set"
        # No penalty: what is best often lies beside what is illegal.
        self._study.tell(trial, state=TrialState.FAIL)
        self._keep(config, Rejected(kind="illegal", reason=reason))
        place = self._legal.place(trial.params)
        assert place is not None, "Optuna sampled a value that is not on its axis"
        return self._legal.nearest(place, taken, self._rng)

    def claim(self, row: int) -> None:
        if row not in self._trials:
            self._study.enqueue_trial(self._legal.parameters(row))
            self._trials[row] = self._study.ask(self._distributions)

    def tell(self, row: int, outcome: Outcome) -> None:
        if row not in self._trials:
            return  # Optuna cannot take a time back
        if isinstance(outcome, Measured):
            value = outcome.objective
            self._slowest = max(self._slowest, value)
        else:
            value = PENALTY * self._slowest
        self._study.tell(self._trials.pop(row), value)

    def drop(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._study.tell(self._trials.pop(row), state=TrialState.FAIL)


def _sampler(name: str, seed: int) -> BaseSampler:
    """Optuna's sampler of that name.

    Raises:
        ArgumentError: for an unknown name.
        MissingDependencyError: if it needs a package that is not installed.
    """
    make: dict[str, Callable[[], BaseSampler]] = {
        # Spelled out, since Optuna 5 changed the defaults.
        "tpe": lambda: optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=False, constant_liar=True
        ),
        "gp": lambda: optuna.samplers.GPSampler(seed=seed),
        "nsga2": lambda: optuna.samplers.NSGAIISampler(seed=seed),
        "qmc": lambda: optuna.samplers.QMCSampler(seed=seed, warn_independent_sampling=False),
    }
    if name not in make:
        raise ArgumentError(f"unknown sampler {name!r}: allowed are {', '.join(SAMPLERS)}")
    missing = [package for package in NEEDED.get(name, ()) if find_spec(package) is None]
    if missing:
        raise MissingDependencyError(
            f"the sampler {name!r} needs more packages: pip install {' '.join(missing)}"
        )
    with warnings.catch_warnings():
        # Options that Optuna calls experimental; the versions that fagen takes all have them.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return make[name]()


# ---- the loop ----

Results = Generator[tuple[AnyConfig, Sequence[Outcome]], None, None]
Evaluate = Callable[[Iterator[AnyConfig]], Results]


def search(
    studies: Sequence[Study],
    evaluate: Evaluate,
    *,
    trials: int,
    budget_s: float | None = None,
    on_outcome: Callable[[Study, Tried], None] | None = None,
) -> bool:
    """Runs studies side by side on the same candidates, each asking in turn.

    Args:
        evaluate: takes configs from an iterator, as far ahead as it likes (to compile them),
            and yields each with its outcomes, one per study, in any order.
        trials: configs that have to pass the static filter, per study, those of the runs before
            included. The whole legal set is tried where it is no larger.
        budget_s: seconds after which nothing more is asked or waited for.
        on_outcome: called after each outcome.

    Where the studies are kept, other processes may search them at the same time: no config is
    evaluated twice, and each process ends when it knows the outcomes of all.

    Returns:
        False if Ctrl-C ended it: the studies hold what was known by then.
    """
    deadline = time.monotonic() + (float("inf") if budget_s is None else budget_s)
    most = ASKS_PER_TRIAL * trials
    for study in studies:
        if len(study.legal) <= trials:
            study.walk_all()

    def open_studies() -> list[Study]:
        return [
            study
            for study in studies
            if not study.exhausted
            and study.on_gpu < trials
            and study.asked < most
            and not study.is_ahead
        ]

    asked = 0

    def configs() -> Iterator[AnyConfig]:
        nonlocal asked
        _read(studies)
        while time.monotonic() < deadline and (asking := open_studies()):
            config = asking[asked % len(asking)].ask()
            assert config is not None, "an exhausted study was asked"
            asked += 1
            for study in studies:
                study.claim(config)
            if _hold(studies, config):
                yield config
            _read(studies)

    try:
        round_started_with = -1
        while asked != round_started_with:  # again, for those that fell to the static filter
            round_started_with = asked
            with closing(evaluate(configs())) as results:
                for config, outcomes in results:
                    # The first study last, as it may have the claim: who reads it reads the rest.
                    for study, outcome in reversed([*zip(studies, outcomes, strict=True)]):
                        if study.tell(config, outcome) and on_outcome is not None:
                            on_outcome(study, study.tried[-1])
                    if time.monotonic() >= deadline:
                        break
            while any(study.waits for study in studies) and time.monotonic() < deadline:
                if open_studies():  # what another process gave up
                    round_started_with = -1
                    break
                time.sleep(WAIT_SECONDS)
                _read(studies)
    except KeyboardInterrupt:
        return False
    finally:
        for study in studies:
            study.release()
    return True


def _read(studies: Sequence[Study]) -> None:
    """Takes in what other processes have done to the studies."""
    rows: set[int] = set().union(*(study.read() for study in studies))
    for study in studies:
        study.leave(rows)


def _hold(studies: Sequence[Study], config: AnyConfig) -> bool:
    """Claims a config for this process in the first study that lacks it, and so in all."""
    pending = [study for study in studies if study.is_pending(config)]
    if pending[0].hold(config):
        return True
    for study in pending:
        study.drop(config)
    return False
