"""What happens while tuning, as values: `tuner.tune` hands each to its `on_event`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fagen.device import Device
from fagen.problem import Problem, Shape
from fagen.records.store import Record
from fagen.tuning.outcome import Tried
from fagen.tuning.tasks import Task


@dataclass(frozen=True)
class Notice:
    """Something that the user should read, as one sentence."""

    text: str


@dataclass(frozen=True)
class TaskStarted:
    """A problem is next: the `number`-th of `total`.

    Attributes:
        points: size of the template's space.
        removed: how many of them each rule of space.py removes, by the rule's name.
        configs: how many are left: the legal set.
        resumed: configs that earlier runs have tried, per shape.
    """

    task: Task
    number: int
    total: int
    template: str
    device: Device
    points: int
    removed: Mapping[str, int]
    configs: int
    resumed: int


@dataclass(frozen=True)
class PhaseChanged:
    """What happens to the problem now: "search", or "finish" (the final comparison).

    Attributes:
        gpu_busy: the share of the search in which the GPU had a kernel to verify or time, at its
            end.
    """

    problem: Problem
    phase: Literal["search", "finish"]
    gpu_busy: float | None = None


@dataclass(frozen=True)
class TrialDone:
    """A config was tried on one shape.

    Attributes:
        tried: the config and its outcome.
        best: the fastest so far; is_best if that is new.
        done, trials: configs that have passed the static filter on this shape, of how many.
        rejections: how many fell at each hurdle, by kind.
    """

    problem: Problem
    shape: Shape
    tried: Tried
    best: Tried | None
    is_best: bool
    done: int
    trials: int
    rejections: Mapping[str, int]


@dataclass(frozen=True)
class ModelJudged:
    """How well the order of the measured configs of a shape was foreseen, once it is searched.

    Attributes:
        static: Spearman's rank correlation of the static model with what was measured.
        corrected: that of the surrogate, which foresaw each config before it was measured. Both
            None where it means nothing; this one also for another sampler.
        measured: configs with a time.
    """

    problem: Problem
    shape: Shape
    static: float | None
    corrected: float | None
    measured: int


@dataclass(frozen=True)
class RecordSaved:
    """An answer was written."""

    record: Record
    path: Path


@dataclass(frozen=True)
class TaskDone:
    """A problem is answered.

    Attributes:
        seconds: what it took, by phase: "enumerate" (the legal set and its seeds), "compile wait",
            "gpu" (verifying and timing candidates), "finals".
    """

    problem: Problem
    seconds: Mapping[str, float]


Event = Notice | TaskStarted | PhaseChanged | TrialDone | ModelJudged | RecordSaved | TaskDone
OnEvent = Callable[[Event], None]


def one_at_a_time(on_event: OnEvent) -> OnEvent:
    """Called by several threads, calls `on_event` from one after the other."""
    lock = threading.RLock()

    def locked(event: Event) -> None:
        with lock:
            on_event(event)

    return locked
