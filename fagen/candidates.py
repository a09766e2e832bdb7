"""Candidates of a tuning: which configs come first, and their kernels, compiled ahead."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np

from fagen import model
from fagen.compile import Compiled, compile_kernel
from fagen.config import AnyConfig
from fagen.device import Architecture, Device
from fagen.errors import CompileError
from fagen.problem import Problem, Shape
from fagen.processes import in_processes
from fagen.search import LegalSet
from fagen.store import Record, Store

KNOWN_SEEDS = 6  # records of like problems that are tried first
MODEL_SAMPLE = 8000  # legal configs that the static model looks at, 25 us each
PICKS_PER_TILE = 2  # of one block_m and block_n, so that picks differ in what matters
COMPILE_SECONDS = 60.0


def _records(device: Device, out: Path) -> list[Record]:
    """Every record of the architecture, those of the file to be written first."""
    stores = [*([Store(out)] if out.exists() else []), Store.open()]
    return [record for store in stores for record in store.records(device.arch.name)]


def known_configs(problem: Problem, template: str, device: Device, out: Path) -> list[AnyConfig]:
    """Configs on record for problems of this head dim, the most alike first."""
    alike = [
        record
        for record in _records(device, out)
        if record.config.template == template and record.problem.head_dim == problem.head_dim
    ]
    alike.sort(
        key=lambda record: (
            record.device.key != device.key,
            not record.measured,
            record.problem.causal != problem.causal,
            record.problem.dtype != problem.dtype,
        )
    )
    return list(dict.fromkeys(record.config for record in alike))[:KNOWN_SEEDS]


def incumbents(problem: Problem, shape: Shape, device: Device, out: Path) -> list[AnyConfig]:
    """What is on record for this very device, problem and bucket."""
    key = (device.key, problem, shape.bucket())
    return [record.config for record in _records(device, out) if record.key == key]


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
        tiles[config.block_m, config.block_n] += 1
        if tiles[config.block_m, config.block_n] <= PICKS_PER_TILE:
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
