"""What `fagen tune` shows while it runs: a bar on a terminal, otherwise plain lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Self

from fagen.problem import Problem, Shape
from fagen.tuning.events import (
    Event,
    ModelJudged,
    Notice,
    PhaseChanged,
    RecordSaved,
    TaskDone,
    TaskStarted,
    TrialDone,
)
from fagen.tuning.outcome import Measured, Trial, describe_rejections

if TYPE_CHECKING:
    from rich.console import Console

    from fagen.records.store import TunedConfig

LINE_EVERY = 25  # trials, if there is no bar


def span(seconds: float) -> str:
    """A length of time for people, such as "50 s" or "12 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def describe_best(problem: Problem, shape: Shape, best: Trial | None) -> str:
    """The fastest config so far, as time, speed and name."""
    if best is None or not isinstance(best.outcome, Measured):
        return "nothing yet"
    time_us = best.outcome.time_us
    return f"{time_us:.1f} us, {shape.tflops(problem, time_us):.0f} TFLOP/s: {best.config}"


def describe_space(event: TaskStarted) -> str:
    """The size of the space before and after its rules, and how many each rule removes."""
    removed = sorted(event.removed.items(), key=lambda item: -item[1])
    rules = ", ".join(f"{rule} {count:,}" for rule, count in removed)
    return f"{event.points:,} configs of {event.template}, {event.configs:,} of them legal" + (
        f"; removed by rule: {rules}" if rules else ""
    )


def describe_gain(records: Sequence[TunedConfig]) -> str | None:
    """How much faster the records are than the defaults and than torch, as geometric means."""
    gains = []
    for name, field in (("the default", "speedup_over_default"), ("torch", "speedup_over_torch")):
        ratios = [ratio for record in records if (ratio := getattr(record.result, field))]
        if ratios:
            gains.append(f"{geometric_mean(ratios):.2f}x as fast as {name}")
    return " and ".join(gains) or None


class TuneProgress:
    """Shows the events of `tune`; a context manager.

    Args:
        console: where to show them, with a bar if it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[best]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, best="")
        self._done: dict[Shape, int] = {}  # trials of the problem that is tuned now
        self._started = (0.0, 0)  # when it began, and how many trials were done by then

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Notice():
                self._say(event.text)
            case TaskStarted():
                self._start(event)
            case PhaseChanged(problem=problem, phase="finish", gpu_busy=busy):
                known = "" if busy is None else f"; the GPU was busy {busy:.0%} of the search"
                self._bar.update(self._task, best=f"final comparison{known}")
                self._plain(f"{problem}: final comparison{known}")
            case TrialDone():
                self._trial(event)
            case ModelJudged(static=float(static)):
                corrected = f", {event.corrected:.2f} corrected" if event.corrected else ""
                self._say(
                    f"{event.problem}, {event.shape}: rank correlation of the model "
                    f"with {event.measured} measured: {static:.2f}{corrected}"
                )
            case RecordSaved(record=record):
                result = record.result
                self._bar.advance(self._task)
                gain = describe_gain([record])
                self._say(
                    f"{record.problem}, {record.shape}: {result.kind} {result.median_us:.1f} us, "
                    f"{result.tflops:.0f} TFLOP/s{f', {gain}' if gain else ''}: {record.config}"
                )
            case TaskDone():
                parts = ", ".join(f"{name} {span(s)}" for name, s in event.seconds.items())
                self._plain(f"{event.problem}: {parts}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _plain(self, line: str) -> None:
        """Says what the bar shows anyway, if there is no bar."""
        if not self._console.is_terminal:
            self._say(line)

    def _start(self, event: TaskStarted) -> None:
        self._done = {}
        self._started = (time.monotonic(), event.resumed)
        name = f"[{event.number}/{event.total}] {event.task.problem}"
        known = f"; {event.resumed} known from earlier runs" if event.resumed else ""
        self._bar.reset(
            self._task, total=None, description=name.replace("[", r"\["), best=f"{event.template}"
        )
        self._say(f"{name}: {describe_space(event)}{known}")

    def _trial(self, event: TrialDone) -> None:
        self._done[event.shape] = event.done
        best = describe_best(event.problem, event.shape, event.best)
        counts = describe_rejections(event.rejections)
        rejected = f"; rejected: {counts}" if counts else ""
        self._bar.update(
            self._task,
            completed=sum(self._done.values()),
            total=event.trials * len(self._done),
            best=f"{event.shape}: {best}{rejected}",
        )
        if event.is_best or event.done % LINE_EVERY == 0:
            mark = "best" if event.is_best else "still"
            self._plain(
                f"{event.problem}, {event.shape}, {event.done} of {event.trials}"
                f"{self._remaining(event)}: {mark} {best}{rejected}"
            )

    def _remaining(self, event: TrialDone) -> str:
        start, done_before = self._started
        done = event.done - done_before
        if done < LINE_EVERY:
            return ""
        left = (time.monotonic() - start) * (event.trials - event.done) / done
        return f", about {span(left)} left"
