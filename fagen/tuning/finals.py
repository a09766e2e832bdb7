"""The end of a search: its fastest configs side by side -> one record, the same one each time.

The top of the study, the template's default and what is on record are timed again, interleaved,
in random order. Times within a round are compared in pairs, since what slows a round slows all of
it. Who cannot be told from the fastest is tied with it, and a tie is not left to noise: what is on
record stays, else the sturdiest wins. So a record never gives way to a slower one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fagen.build.compile import compile_kernel
from fagen.build.compiled import Compiled
from fagen.device import Architecture
from fagen.errors import CompileError, DeviceError
from fagen.judge.measure import median_and_spread
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem, Shape
from fagen.records.store import Card, Provenance, Record, Result
from fagen.tuning.blocklist import Guard
from fagen.tuning.events import Notice, OnEvent
from fagen.tuning.outcome import Measured, Rejected, Tried
from fagen.tuning.worker import TORCH, DeviceReport, Worker

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
    rounds = min(len(at[base]) for at in times)
    logs = [np.log(np.asarray(at[name]) / np.asarray(at[base]))[:rounds] for at in times]
    ratios = np.exp(np.mean(logs, axis=0))
    medians = np.median(_resampled(ratios), axis=1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(medians, (tail, 100 - tail))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def _resampled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(RESAMPLES, values) drawn with replacement, the same each time."""
    places = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    return values[places]


def fastest(times: Sequence[Times], names: Iterable[str]) -> str:
    """The name with the lowest median time: over several shapes, of their geometric mean."""

    def log_time(name: str) -> float:
        return math.fsum(math.log(float(np.median(at[name]))) for at in times)

    return min(names, key=lambda name: (log_time(name), name))


class Finish(NamedTuple):
    """The winner, and those that are no slower as far as one can tell, the winner among them."""

    winner: AnyConfig
    tied: tuple[AnyConfig, ...]


def pick_winner(
    kernels: Mapping[AnyConfig, Compiled],
    problem: Problem,
    times: Sequence[Times],
    incumbents: Sequence[AnyConfig] = (),
) -> Finish:
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
        return Finish(stays, tied)

    leaders = [fastest([at], map(str, tied)) for at in times]  # of each shape

    def frailty(config: AnyConfig) -> tuple[float, int, int, str]:
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

    return Finish(min(tied, key=frailty), tied)


def finalists(tried: Sequence[Tried], must: Iterable[AnyConfig]) -> list[AnyConfig]:
    """The fastest of a study, and those that must be there, unless they were found bad."""
    measured = sorted(
        (each for each in tried if isinstance(each.outcome, Measured)), key=lambda t: t.objective
    )
    bad = {
        each.config
        for each in tried
        if isinstance(each.outcome, Rejected) and each.outcome.kind not in ("illegal", "duplicate")
    }
    chosen = [each.config for each in measured[:FINALISTS]]
    return list(dict.fromkeys([*chosen, *(config for config in must if config not in bad)]))


def side_by_side(
    worker: Worker,
    guard: Guard,
    kernels: Mapping[AnyConfig, Compiled],
    problem: Problem,
    shapes: Sequence[Shape],
) -> tuple[list[dict[str, list[float]]], dict[AnyConfig, Rejected]]:
    """The times of verified kernels on each shape, and which of them failed.

    Where one takes the process with it, each is tried alone, and the rest is timed without those
    that failed.

    Raises:
        DeviceError: if the rest fails again.
    """
    failed = {
        config: why
        for config, kernel in kernels.items()
        for shape in shapes
        if (why := guard.why_blocked(kernel, shape))
    }

    def compare() -> list[dict[str, list[float]]]:
        candidates = [
            (kernel, config) for config, kernel in kernels.items() if config not in failed
        ]
        return [worker.compare(candidates, problem, shape) for shape in shapes]

    try:
        times = compare()
    except DeviceError:
        for config, kernel in kernels.items():
            outcome = guard.evaluate(kernel, problem, config, shapes[0])
            if isinstance(outcome, Rejected):
                failed[config] = outcome
        late = guard.withdrawn(problem)  # well when it was tried, but the next one paid for it
        failed.update((config, why) for config, why in late if config in kernels)
        times = compare()
    for config in kernels:
        if config not in failed and any(str(config) not in at for at in times):
            failed[config] = Rejected(
                kind="wrong", reason="its numbers are wrong beside the others"
            )
    return times, failed


def crown(
    worker: Worker,
    guard: Guard,
    report: DeviceReport,
    problem: Problem,
    shapes: Sequence[Shape],
    tried: Sequence[Tried],
    *,
    default: AnyConfig,
    incumbents: Sequence[AnyConfig],
    on_event: OnEvent,
    withdraw: Callable[[AnyConfig, Rejected], object],
) -> Record | None:
    """The record of a search, or None (and a `Notice`) if nothing was fit for one.

    Args:
        shapes: of one bucket; the record is for the first, and shows its time.
        tried: what the search came back with.
        default: the template's default.
        incumbents: what is on record for the bucket, as of `candidates.incumbents`.
        withdraw: told of each finalist that failed, whose time in the search is void.
    """
    about = f"{problem}, {shapes[0]}"
    measured = sum(isinstance(each.outcome, Measured) for each in tried)
    if not measured:
        counts = Counter(each.outcome.kind for each in tried if isinstance(each.outcome, Rejected))
        rejections = ", ".join(f"{n} {kind}" for kind, n in counts.items())
        on_event(Notice(f"{about}: nothing was measured ({rejections or 'nothing was tried'})."))
        return None
    device = report.device
    kernels = compiled_kernels(problem, finalists(tried, [default, *incumbents]), device.arch)
    try:
        times, failed = side_by_side(worker, guard, kernels, problem, shapes)
    except DeviceError as error:
        on_event(Notice(f"{about}: no record, since the finalists: {error}."))
        return None
    for config, why in failed.items():
        on_event(Notice(f"{about}: {config} fell out of the finals: {why.kind}: {why.reason}."))
        withdraw(config, why)
        del kernels[config]
    if not kernels:
        on_event(Notice(f"{about}: no record, since every finalist fell out."))
        return None
    winner, tied = pick_winner(kernels, problem, times, incumbents)
    kernel, name = kernels[winner], str(winner)
    won, spread = median_and_spread(times[0][name])

    def speedup_over(other: str) -> float | None:
        timed = all(other in at for at in times)  # it may have fallen out on one of the shapes
        return 1 / paired_ratio(times, name, other).median if timed else None

    policies = [each.outcome.policy for each in tried if isinstance(each.outcome, Measured)]
    return Record(
        problem=problem,
        shape=shapes[0],
        device=Card.of(device),
        config=winner,
        result=Result(
            kind="measured",
            median_us=won,
            spread=spread,
            tflops=shapes[0].tflops(problem, won),
            trials=measured,
            tied=len(tied),
            speedup_over_default=speedup_over(str(default)),
            speedup_over_torch=speedup_over(TORCH),
            policy=policies[-1],
        ),
        provenance=Provenance.of(
            kernel.source, kernel.cubin, nvrtc=kernel.nvrtc, driver=report.driver
        ),
    )


def compiled_kernels(
    problem: Problem, configs: Iterable[AnyConfig], arch: Architecture
) -> dict[AnyConfig, Compiled]:
    """The kernels of configs, most of which are in the cache; without what does not compile."""
    kernels = {}
    for config in configs:
        with suppress(CompileError):
            kernels[config] = compile_kernel(problem, config, arch)
    return kernels
