"""Candidates of a tuning: which configs come first, and their kernels, compiled ahead."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fagen.build.compile import compile_kernel
from fagen.build.compiled import Compiled
from fagen.build.processes import in_processes
from fagen.device import Architecture, Device
from fagen.errors import CompileError
from fagen.kernels.registry import AnyConfig
from fagen.kernels.space import adapted, why_illegal
from fagen.problem import Problem, Shape
from fagen.records.store import Record, Store
from fagen.tuning import model
from fagen.tuning.search.legal import LegalSet

KNOWN_SEEDS = 6  # records of like problems that are tried first
MODEL_SAMPLE = 8000  # legal configs that the static model looks at, 25 us each
PICKS_PER_TILE = 2  # of one block_m and block_n, so that picks differ in what matters
COMPILE_SECONDS = 60.0


def _records(out: Path) -> list[Record]:
    """Every record, those of the file to be written first."""
    stores = [*([Store(out)] if out.exists() else []), Store.open()]
    return [record for store in stores for record in store.records()]


def known_configs(
    problem: Problem, shapes: Sequence[Shape], template: str, device: Device, out: Path
) -> list[AnyConfig]:
    """Legal configs on record for other problems, shapes and cards, the most alike first.

    Axes whose values depend on the problem come from the default where they do not carry over.
    """
    buckets = [shape.bucket() for shape in shapes]

    def unlikeness(record: Record) -> tuple[Any, ...]:
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


def incumbents(problem: Problem, shape: Shape, device: Device, out: Path) -> list[AnyConfig]:
    """Legal configs on record for this very device, problem and bucket, the first one counts."""
    key = (device.key, problem, shape.bucket())
    configs = [record.config for record in _records(out) if record.key == key]
    return [config for config in configs if why_illegal(config, problem, device) is None]


def ranked_by_model(legal: LegalSet, shape: Shape, seed: int) -> list[tuple[float, AnyConfig]]:
    """A sample of the legal set, or all of it if small, with predicted times, fastest first."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(legal))[:MODEL_SAMPLE]
    configs = [legal.config(int(row)) for row in rows]
    ranked = [
        (model.predict(legal.problem, shape, config, legal.device), config) for config in configs
    ]
    return sorted(ranked, key=lambda pair: pair[0])


def model_picks(legal: LegalSet, shape: Shape, count: int, seed: int) -> list[AnyConfig]:
    """The configs that the static model finds best, few of each tile."""
    tiles: Counter[tuple[int, int]] = Counter()
    picks: list[AnyConfig] = []
    for _, config in ranked_by_model(legal, shape, seed) if count > 0 else ():
        tiles[config.steps] += 1
        if tiles[config.steps] <= PICKS_PER_TILE:
            picks.append(config)
        if len(picks) == count:
            break
    return picks


def compiled_ahead(
    jobs: Iterator[tuple[Problem, AnyConfig, Architecture]], processes: int | None
) -> Generator[tuple[AnyConfig, Compiled | CompileError], None, None]:
    """Compiles ahead, in processes that end with the iteration."""
    count = processes or max(1, len(os.sched_getaffinity(0)) - 1)
    answers = in_processes(
        compile_kernel, jobs, processes=count, timeout=COMPILE_SECONDS, failure=CompileError
    )
    for (_, config, _), compiled in answers:
        yield config, compiled
