"""The samplers: which row of a legal set is tried next. Optuna's among them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from fagen.errors import ArgumentError, MissingDependencyError
from fagen.kernels import space
from fagen.kernels.registry import TEMPLATES
from fagen.kernels.template import Config
from fagen.tuning.options import SAMPLERS
from fagen.tuning.outcome import Measured, Outcome, Rejected
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.storage import quiet

NEEDED = {"gp": ("torch",)}  # packages that Optuna imports late
PENALTY = 2.0  # to the sampler, a rejected candidate is this many times slower than the slowest


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


class Walk:
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


class OptunaSampler:
    """A sampler of Optuna's, on a study in memory where a rejection counts as a bad value.

    Args:
        keep: gets each ask that is illegal or was tried; its nearest legal neighbour is the
            answer instead.
    """

    def __init__(
        self,
        legal: LegalSet,
        distributions: Mapping[str, BaseDistribution],
        name: str,
        rng: np.random.Generator,
        keep: Callable[[Config, Outcome], None],
    ) -> None:
        self._legal, self._distributions = legal, dict(distributions)
        self._rng, self._keep = rng, keep
        with quiet():
            self._study = optuna.create_study(sampler=_sampler(name, int(rng.integers(2**31))))
        self._trials: dict[int, optuna.trial.Trial] = {}  # of rows that are asked for or claimed
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
