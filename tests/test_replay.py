"""The search on tables that were timed completely on a card: how often, how soon it finds the best.

tests/tables/*.journal.gz are Optuna storages of `fagen tune --sampler brute-force --set ...`, one
study each. Configs are compiled ahead, so sixteen asks are pending at any time, and outcomes come
in another order.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fagen.kernels.registry import AnyConfig, default_config
from fagen.problem import Shape
from fagen.show.summary import summarise
from fagen.tuning.objective import predicted
from fagen.tuning.outcome import Outcome, Trial
from fagen.tuning.search.joint import JointSearch
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.read import read_studies
from fagen.tuning.search.statistics import spearman
from fagen.tuning.search.study import Study

TABLES = sorted((Path(__file__).parent / "tables").glob("*.journal.gz"))
AHEAD = 16
SEEDS = 100
TRIALS = 50  # half of what `fagen tune` does, a tenth of what five minutes on the card allow
NEAR = 1.02


@dataclass(frozen=True)
class Table:
    """A completely measured legal set."""

    legal: LegalSet
    default: AnyConfig
    predict: Callable[[AnyConfig], float]
    outcomes: dict[AnyConfig, Outcome]
    measured: list[Trial]

    @property
    def best(self) -> float:
        return min(tried.objective for tried in self.measured)

    def found(self, sampler: str, seed: int, *, trials: int = TRIALS, blind: bool = False) -> float:
        """The best objective that a search finds which starts from the default, over the best.

        Args:
            blind: without the static model.
        """
        predict = (lambda config: 1.0) if blind else self.predict
        study = Study(
            "replay", self.legal, sampler=sampler, seed=seed, seeds=[self.default], predict=predict
        )
        dice = np.random.default_rng(seed)

        waiting: list[AnyConfig] = []
        search = JointSearch([study], trials=trials)
        while True:
            while len(waiting) < AHEAD and (config := search.ask()) is not None:
                waiting.append(config)
            if not waiting:
                break
            done = waiting.pop(int(dice.integers(min(len(waiting), 4))))
            search.tell(done, [self.outcomes[done]])
        assert study.best is not None
        return study.best.objective / self.best


@pytest.fixture(scope="module", params=TABLES, ids=lambda path: path.name.partition(".")[0])
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Table:
    path = tmp_path_factory.mktemp("tables") / "table.journal"
    path.write_bytes(gzip.decompress(request.param.read_bytes()))
    (kept,) = read_studies(path)
    summary = summarise(kept)
    assert summary is not None
    assert summary.device is not None
    configs = [trial.config for trial in summary.trials]
    axes = {
        axis: tuple(dict.fromkeys(getattr(config, axis) for config in configs))
        for axis in configs[0].axis_names()
    }
    default = default_config(summary.problem, summary.device, summary.template)
    shapes = [summary.shape, *map(Shape.model_validate, kept.about.get("ragged_shapes", ()))]
    return Table(
        legal=LegalSet(summary.problem, summary.device, summary.template, fixed=axes),
        default=default,
        predict=cache(predicted(summary.problem, shapes, default, summary.device)),
        outcomes={trial.config: trial.outcome for trial in summary.trials},
        measured=summary.measured,
    )


def test_the_table_is_complete(table: Table) -> None:
    assert 100 < len(table.legal) <= 800
    assert {table.legal.config(row) for row in range(len(table.legal))} == set(table.outcomes)


def test_the_static_model_knows_the_order(table: Table) -> None:
    predicted_order = [table.predict(tried.config) for tried in table.measured]
    correlation = spearman(predicted_order, [tried.objective for tried in table.measured])
    assert correlation is not None
    assert correlation >= 0.8


def test_the_search_finds_the_best(table: Table) -> None:
    found = [table.found("surrogate", seed) for seed in range(SEEDS)]
    assert sum(ratio <= NEAR for ratio in found) >= 0.95 * SEEDS


def test_it_finds_the_best_without_the_static_model(table: Table) -> None:
    """What it learns suffices, where the model knows nothing: twice the trials."""
    found = [table.found("surrogate", seed, trials=100, blind=True) for seed in range(SEEDS)]
    assert sum(ratio <= NEAR for ratio in found) >= 0.95 * SEEDS


def test_chance_does_not(table: Table) -> None:
    """Else the table would show nothing."""
    found = [table.found("random", seed, trials=100) for seed in range(SEEDS)]
    assert sum(ratio <= NEAR for ratio in found) < 0.8 * SEEDS
