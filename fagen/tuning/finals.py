"""The end of a search: its fastest configs side by side -> one record, the same one each time.

The top of the study, the template's default and what is on record are timed again, interleaved,
in random order. Times within a round are compared in pairs, since what slows a round slows all of
it. What cannot be told from the fastest is tied with it, and a tie is not left to noise: what is on
record stays, and otherwise a fixed tie-break decides. So no slower config replaces a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fagen.build.compile import compile_kernel
from fagen.build.compiled import Compiled
from fagen.device import Architecture
from fagen.errors import CompileError, DeviceError
from fagen.judge.measure import median_and_spread
from fagen.kernels.template import Config
from fagen.problem import Problem, Shape
from fagen.records.store import Card, Provenance, Result, TunedConfig
from fagen.tuning.events import Notice, OnEvent
from fagen.tuning.outcome import Measured, Rejected, Trial, describe_rejections, rejections
from fagen.tuning.runner import Runner
from fagen.tuning.worker_child import TORCH, DeviceReport

FINALISTS = 8  # the top of the study, beside the default and what is on record
TIE = 0.01  # closer medians are equal
CONFIDENCE = 0.95  # of the interval of a ratio
RESAMPLES = 2000
WORST_STEP = 0.01  # of worst ratios: a finer difference is noise

Times = Mapping[str, Sequence[float]]  # by `str(config)`: median of each round, microseconds


class Ratio(NamedTuple):
    """How much longer one kernel takes than another, by pairs of one round.

    Attributes:
        median: over the rounds; above 1 it is the slower one.
        low, high: the bootstrap interval of the median.
    """

    median: float
    low: float
    high: float

    @property
    def no_slower(self) -> bool:
        """Whether it is not known to be slower, or by no more than matters."""
        return self.median <= 1 + TIE or self.low <= 1


def paired_ratio(times: Sequence[Times], name: str, base: str) -> Ratio:
    """The time of `name` over that of `base`: over several shapes, their geometric mean.

    Args:
        times: of each shape.
    """
    from scipy import stats  # which takes a second to import

    rounds = min(len(at[base]) for at in times)
    logs = [np.log(np.asarray(at[name]) / np.asarray(at[base]))[:rounds] for at in times]
    ratios = np.exp(np.mean(logs, axis=0))
    median = float(np.median(ratios))
    if rounds == 1:
        return Ratio(median, median, median)
    found = stats.bootstrap(
        (ratios,),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),  # the same each time
    )
    low, high = found.confidence_interval
    return Ratio(median, float(low), float(high))


def fastest(times: Sequence[Times], names: Iterable[str]) -> str:
    """The name with the lowest median time: over several shapes, of their geometric mean."""

    def log_time(name: str) -> float:
        return math.fsum(math.log(float(np.median(at[name]))) for at in times)

    return min(names, key=lambda name: (log_time(name), name))


class Winner(NamedTuple):
    """The winner, and those that are no slower as far as one can tell, the winner among them."""

    config: Config
    tied: tuple[Config, ...]


def pick_winner(
    kernels: Mapping[Config, Compiled],
    problem: Problem,
    times: Sequence[Times],
    incumbents: Sequence[Config] = (),
) -> Winner:
    """The winner among configs that were timed side by side.

    Within a tie the first incumbent stays. Where there is none, that one wins which is better on
    its worst shape, takes less shared memory, has less code, comes first by its name.

    Args:
        kernels: the configs and what was compiled for them.
        times: of each shape.
        incumbents: what is on record, the one that counts first.
    """
    best = fastest(times, map(str, kernels))
    tied = tuple(c for c in kernels if paired_ratio(times, str(c), best).no_slower)
    stays = next((config for config in incumbents if config in tied), None)
    if stays is not None:
        return Winner(stays, tied)

    leaders = [fastest([at], map(str, tied)) for at in times]  # of each shape

    def tie_break(config: Config) -> tuple[float, int, int, str]:
        worst = max(
            paired_ratio([at], str(config), leader).median
            for at, leader in zip(times, leaders, strict=True)
        )
        return (
            round(worst / WORST_STEP) if len(times) > 1 else 0,
            config.smem_bytes(problem),
            len(kernels[config].cubin),
            str(config),
        )

    return Winner(min(tied, key=tie_break), tied)


def finalists(trials: Sequence[Trial], must: Iterable[Config]) -> list[Config]:
    """The fastest of a study, and those that must be there, unless they were found bad."""
    measured = sorted(
        (trial for trial in trials if isinstance(trial.outcome, Measured)),
        key=lambda trial: trial.objective,
    )
    bad = {
        trial.config
        for trial in trials
        if isinstance(trial.outcome, Rejected)
        and trial.outcome.kind not in ("illegal", "duplicate")
    }
    chosen = [trial.config for trial in measured[:FINALISTS]]
    return list(dict.fromkeys([*chosen, *(config for config in must if config not in bad)]))


def side_by_side(
    runner: Runner,
    kernels: Mapping[Config, Compiled],
    problem: Problem,
    shapes: Sequence[Shape],
) -> tuple[list[dict[str, list[float]]], dict[Config, Rejected]]:
    """The times of verified kernels on each shape, and which of them failed.

    Where one takes the process with it, each is run alone, and the rest is timed without those
    that failed.

    Raises:
        DeviceError: if the rest fails again.
    """
    failed = {
        config: why
        for config, kernel in kernels.items()
        for shape in shapes
        if (why := runner.why_blocked(kernel, shape))
    }

    def compare() -> list[dict[str, list[float]]]:
        candidates = [
            (kernel, config) for config, kernel in kernels.items() if config not in failed
        ]
        return [runner.worker.compare(candidates, problem, shape) for shape in shapes]

    try:
        times = compare()
    except DeviceError:
        for config, kernel in kernels.items():
            outcome = runner.evaluate(kernel, problem, config, shapes[0])
            if isinstance(outcome, Rejected):
                failed[config] = outcome
        # Some were well when they ran alone, and the next one paid for it.
        late = runner.withdrawn(problem)
        failed.update((config, why) for config, why in late if config in kernels)
        times = compare()
    for config in kernels:
        if config not in failed and any(str(config) not in at for at in times):
            failed[config] = Rejected(
                kind="wrong", reason="its numbers are wrong beside the others"
            )
    return times, failed


@dataclass(frozen=True)
class FinalComparison:
    """The end of the search for one shape.

    Attributes:
        problem: what was tuned.
        shapes: of one bucket; the record is for the first, and shows its time.
        runner, report: what the finalists run on.
        default: the template's default.
        incumbents: what is on record for the bucket, as `candidates.incumbents` says.
        on_event: gets a `Notice` of each finalist that failed, and where there is no record.
    """

    problem: Problem
    shapes: Sequence[Shape]
    runner: Runner
    report: DeviceReport
    default: Config
    incumbents: Sequence[Config]
    on_event: OnEvent

    def record(
        self, trials: Sequence[Trial], withdraw: Callable[[Config, Rejected], object]
    ) -> TunedConfig | None:
        """The record of a search, or None if nothing was fit for one.

        Args:
            trials: what the search came back with.
            withdraw: told of each finalist that failed, whose time in the search is void.
        """
        if not any(isinstance(trial.outcome, Measured) for trial in trials):
            rejected = describe_rejections(rejections(trials))
            self._say(f"nothing was measured ({rejected or 'nothing was tried'})")
            return None
        must = [self.default, *self.incumbents]
        kernels = _compiled(self.problem, finalists(trials, must), self.report.device.arch)
        try:
            times, failed = side_by_side(self.runner, kernels, self.problem, self.shapes)
        except DeviceError as error:
            self._say(f"no record, since the finalists: {error}")
            return None
        for config, why in failed.items():
            self._say(f"{config} fell out of the finals: {why.kind}: {why.reason}")
            withdraw(config, why)
            del kernels[config]
        if not kernels:
            self._say("no record, since every finalist fell out")
            return None
        winner = pick_winner(kernels, self.problem, times, self.incumbents)
        return self._record(winner, kernels[winner.config], times, trials)

    def _record(
        self,
        winner: Winner,
        kernel: Compiled,
        times: Sequence[Times],
        trials: Sequence[Trial],
    ) -> TunedConfig:
        name, shape = str(winner.config), self.shapes[0]
        median_us, spread = median_and_spread(times[0][name])
        measured = [trial.outcome for trial in trials if isinstance(trial.outcome, Measured)]

        def speedup_over(other: str) -> float | None:
            timed = all(other in at for at in times)  # it may have fallen out on one of the shapes
            return 1 / paired_ratio(times, name, other).median if timed else None

        result = Result(
            kind="measured",
            median_us=median_us,
            spread=spread,
            tflops=shape.tflops(self.problem, median_us),
            trials=len(measured),
            tied=len(winner.tied),
            speedup_over_default=speedup_over(str(self.default)),
            speedup_over_torch=speedup_over(TORCH),
            policy=measured[-1].policy,
        )
        return TunedConfig(
            problem=self.problem,
            shape=shape,
            device=Card.of(self.report.device),
            config=winner.config,
            result=result,
            provenance=Provenance.of(
                kernel.source, kernel.cubin, nvrtc=kernel.nvrtc, driver=self.report.driver
            ),
        )

    def _say(self, what: str) -> None:
        self.on_event(Notice(f"{self.problem}, {self.shapes[0]}: {what}."))


def _compiled(
    problem: Problem, configs: Iterable[Config], arch: Architecture
) -> dict[Config, Compiled]:
    """The kernels of configs, most of which are in the cache; without what does not compile."""
    kernels = {}
    for config in configs:
        with suppress(CompileError):
            kernels[config] = compile_kernel(problem, config, arch)
    return kernels
