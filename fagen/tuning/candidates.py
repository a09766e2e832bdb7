"""Candidates of a tuning: which configs come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from fagen.device import Device
from fagen.kernels.space import adapted, seeds, why_illegal
from fagen.kernels.template import Config
from fagen.problem import Problem, Shape
from fagen.records.store import Store, TunedConfig
from fagen.tuning import model
from fagen.tuning.options import ASKS_PER_TRIAL, TuneOptions
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.tasks import Task

KNOWN_SEEDS = 6  # records of like problems that are tried first
MODEL_SAMPLE = 8000  # legal configs that the static model looks at, 25 us each
PICKS_PER_TILE = 2  # of one block_m and block_n, so that picks differ in what matters


def _records(out: Path) -> list[TunedConfig]:
    """Every record, those of the file to be written first."""
    stores = [*([Store(out)] if out.exists() else []), Store.open()]
    return [record for store in stores for record in store.records()]


def known_configs(
    problem: Problem, shapes: Sequence[Shape], template: str, device: Device, out: Path
) -> list[Config]:
    """Legal configs on record for other problems, shapes and cards, the most alike first.

    Axes whose values depend on the problem come from the default where they do not carry over.
    """
    buckets = [shape.bucket() for shape in shapes]

    def unlikeness(record: TunedConfig) -> tuple[Any, ...]:
        return (
            problem.distance(record.problem),
            record.device.arch != device.arch.name,
            record.device.key != device.key,
            not record.measured,
            min(bucket.distance(record.bucket) for bucket in buckets),
        )

    records = [r for r in _records(out) if r.config.template == template]
    known = (
        adapted(record.config, record.problem, problem)
        for record in sorted(records, key=unlikeness)
    )
    legal = (config for config in known if why_illegal(config, problem, device) is None)
    return list(dict.fromkeys(legal))[:KNOWN_SEEDS]


def incumbents(problem: Problem, shape: Shape, device: Device, out: Path) -> list[Config]:
    """Legal configs on record for this very device, problem and bucket, the first one counts."""
    key = (device.key, problem, shape.bucket())
    configs = [record.config for record in _records(out) if record.key == key]
    return [config for config in configs if why_illegal(config, problem, device) is None]


def ranked_by_model(legal: LegalSet, shape: Shape, seed: int) -> list[tuple[float, Config]]:
    """A sample of the legal set, or all of it if small, with predicted times, fastest first."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(legal))[:MODEL_SAMPLE]
    configs = [legal.config(int(row)) for row in rows]
    ranked = [
        (model.predict(legal.problem, shape, config, legal.device), config) for config in configs
    ]
    return sorted(ranked, key=lambda pair: pair[0])


def model_picks(legal: LegalSet, shape: Shape, count: int, seed: int) -> list[Config]:
    """The configs that the static model finds best, few of each tile."""
    tiles: Counter[tuple[int, int]] = Counter()
    picks: list[Config] = []
    for _, config in ranked_by_model(legal, shape, seed) if count > 0 else ():
        tiles[config.steps] += 1
        if tiles[config.steps] <= PICKS_PER_TILE:
            picks.append(config)
        if len(picks) == count:
            break
    return picks


def likely_candidates(legal: LegalSet, task: Task, options: TuneOptions) -> list[Config]:
    """What a search is likely to ask for, the most likely first: as many as it may ask for."""
    count = ASKS_PER_TRIAL * options.trials_per_shape
    of_shapes = [
        [config for _, config in ranked_by_model(legal, shape, options.seed)[:count]]
        for shape in task.shapes
    ]
    in_turn = (config for configs in zip_longest(*of_shapes) for config in configs if config)
    published = seeds(legal.template, legal.problem, legal.device)
    legal_ones = (config for config in published if legal.find(config.axes()) is not None)
    return list(dict.fromkeys([legal.default, *legal_ones, *in_turn]))
