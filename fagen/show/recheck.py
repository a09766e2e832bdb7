"""Records, a device -> do they still hold? What `fagen recheck` reports.

Each record's kernel is verified again and timed side by side with its runners-up: the best of the
kept study, the template's default, and the records of the nearest buckets of its problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fagen.build.compile import compile_many
from fagen.build.compiled import Compiled
from fagen.device import Device
from fagen.errors import ArgumentError, CompileError, DeviceError
from fagen.judge.measure import median_and_spread
from fagen.kernels.registry import default_config
from fagen.kernels.space import why_illegal
from fagen.kernels.template import Config
from fagen.problem import Problem
from fagen.records.store import TunedConfig
from fagen.tuning.blocklist import Blocklist, blocklist_path
from fagen.tuning.events import Notice
from fagen.tuning.finals import fastest, paired_ratio, side_by_side
from fagen.tuning.outcome import Rejected
from fagen.tuning.runner import Runner
from fagen.tuning.search.read import KeptStudy, read_studies
from fagen.tuning.search.storage import default_storage, study_name
from fagen.tuning.worker import Worker

RUNNERS_UP = 4  # of the kept study
NEIGHBOURS = 2  # records of other buckets

State = Literal["holds", "stale", "wrong"]


class Rechecked(BaseModel):
    """Whether one record still holds.

    Attributes:
        record: its problem, bucket and device.
        config: its config in one line.
        state: "holds": nothing that was tried is faster; "stale": something is, by more than 1 %;
            "wrong": its kernel fails, or gives wrong numbers.
        reason: one line; empty if it holds.
        rivals: how many configs it was timed with; 0 if it is wrong.
        recorded_us, median_us: the time on record, and the time now, in microseconds.
        faster: the faster config, if it is stale.
        ratio: the time now over that of `faster`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    record: str
    config: str
    state: State
    reason: str = ""
    rivals: int = 0
    recorded_us: float
    median_us: float | None = None
    faster: str | None = None
    ratio: float | None = None


def recheck(
    records: Sequence[TunedConfig],
    worker: Worker,
    *,
    storage: str | Path | None = None,
    processes: int | None = None,
    on_notice: Callable[[Notice], object] = lambda notice: None,
) -> Iterator[Rechecked]:
    """Measures records again, without predictions and those of other devices.

    Args:
        worker: measures, on its device; it is closed in the end.
        storage: where the studies are kept; `default_storage` if None, which need not exist.
        processes: how many compile; one per available CPU if None.
        on_notice: called if kernels are on the blocklist, or get there.

    Raises:
        DeviceError: if the worker has no device.
        ArgumentError: if no record was measured on it, or there is no such storage.
    """
    with worker as running:
        device = running.describe_device().device
        mine = [r for r in records if r.measured and r.device.key == device.key]
        if not mine:
            raise ArgumentError(
                f"no record that was chosen was measured on {device.key}: `fagen tune` makes some"
            )
        where = storage if storage is not None else default_storage(device)
        kept = read_studies(where) if storage is not None or Path(where).exists() else []
        blocklist = Blocklist(blocklist_path(where, device), device.key, on_notice)
        runner = Runner(running, blocklist)
        rivals = {record.key: _rivals(record, records, kept, device) for record in mine}
        jobs = [(r.problem, config) for r in mine for config in [r.config, *rivals[r.key]]]
        kernels: dict[tuple[Problem, Config], Compiled | CompileError] = {}
        for problem, config, compiled in compile_many(
            dict.fromkeys(jobs), device.arch, processes=processes
        ):
            kernels[problem, config] = compiled
        for record in mine:
            mix = {c: kernels[record.problem, c] for c in [record.config, *rivals[record.key]]}
            yield _judge(record, mix, runner, device)


def _rivals(
    record: TunedConfig, records: Iterable[TunedConfig], kept: Iterable[KeptStudy], device: Device
) -> list[Config]:
    """What a record is compared with, itself not included."""
    problem, template = record.problem, record.config.template
    prefix = study_name(device, problem, record.shape, template) + " "
    tried = [each for study in kept if study.name.startswith(prefix) for each in study.trials]
    ranked = dict.fromkeys(
        each.config
        for each in sorted(tried, key=lambda each: each.time_us)
        if not isinstance(each.outcome, Rejected) and each.config != record.config
    )
    others = [
        other
        for other in records
        if other.problem == problem and other.device.key == device.key and other.key != record.key
    ]
    others.sort(key=lambda other: record.bucket.distance(other.bucket))
    chosen = [
        *list(ranked)[:RUNNERS_UP],
        default_config(problem, device, template),
        *(other.config for other in others[:NEIGHBOURS]),
    ]
    return [
        config
        for config in dict.fromkeys(chosen)
        if config != record.config and why_illegal(config, problem, device) is None
    ]


def _judge(
    record: TunedConfig,
    mix: Mapping[Config, Compiled | CompileError],
    runner: Runner,
    device: Device,
) -> Rechecked:
    """Judges one record by its own kernel and those of its rivals."""
    kernels = {config: k for config, k in mix.items() if not isinstance(k, CompileError)}
    problem, shape, own = record.problem, record.shape, str(record.config)

    def verdict(state: State, reason: str = "", **found: Any) -> Rechecked:
        return Rechecked(
            record=f"{problem} {record.bucket} {record.device.key}",
            config=own,
            state=state,
            reason=reason,
            recorded_us=record.result.median_us,
            **found,
        )

    if fault := _fault(record, kernels.get(record.config), runner, device):
        return verdict("wrong", fault)
    try:
        (times,), failed = side_by_side(runner, kernels, problem, [shape])
    except DeviceError as error:
        return verdict("wrong", f"beside its rivals: {error}")
    if record.config in failed:
        why = failed[record.config]
        return verdict("wrong", f"{why.kind}: {why.reason}")
    for config in failed:
        del kernels[config]
    best = fastest([times], map(str, kernels))
    ratio = paired_ratio([times], own, best)
    median_us, _ = median_and_spread(times[own])
    timed: dict[str, Any] = {"rivals": len(kernels) - 1, "median_us": median_us}
    if ratio.no_slower:
        return verdict("holds", **timed)
    reason = f"{best} is {ratio.median - 1:.1%} faster"
    return verdict("stale", reason, faster=best, ratio=ratio.median, **timed)


def _fault(
    record: TunedConfig, kernel: Compiled | None, runner: Runner, device: Device
) -> str | None:
    """What is wrong with a record's kernel, run alone."""
    if broken := why_illegal(record.config, record.problem, device):
        return f"illegal on this device: {broken}"
    if kernel is None:
        return "does not compile"
    outcome = runner.evaluate(kernel, record.problem, record.config, record.shape)
    return f"{outcome.kind}: {outcome.reason}" if isinstance(outcome, Rejected) else None
