"""What happens while tuning, as values: `tuner.tune` hands each to its `on_event`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from fagen.device import Device
from fagen.problem import Problem, Shape
from fagen.records.store import TunedConfig
from fagen.tuning.outcome import Trial
from fagen.tuning.tasks import Task

if TYPE_CHECKING:
    from fagen.tuning.search.legal import LegalSet


@dataclass(frozen=True)
class Notice:
    """Something that the user should read, as one sentence."""

    text: str


@dataclass(frozen=True)
class TaskStarted:
    """A problem is next: number 1 to `total`.

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

    @classmethod
    def of(cls, task: Task, legal: LegalSet, number: int, total: int, *, resumed: int = 0) -> Self:
        """The event of a task that is searched in a legal set."""
        return cls(
            task=task,
            number=number,
            total=total,
            template=legal.template,
            device=legal.device,
            points=legal.points,
            removed=legal.removed,
            configs=len(legal),
            resumed=resumed,
        )


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
        trial: the config and its outcome.
        best: the fastest so far; is_best if that is new.
        done, trials: configs that have passed the static filter on this shape, of how many.
        rejections: how many were rejected at each stage.
    """

    problem: Problem
    shape: Shape
    trial: Trial
    best: Trial | None
    is_best: bool
    done: int
    trials: int
    rejections: Mapping[str, int]

    @property
    def tried(self) -> Trial:
        """The same as `trial`, by its name of the first release."""
        return self.trial


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

    record: TunedConfig
    path: Path


@dataclass(frozen=True)
class TaskDone:
    """A problem is answered.

    Attributes:
        seconds: what it took, by phase: "enumerate" (the legal set and its seeds), "compile wait",
            "gpu" (verifying and timing candidates), "finals"; or "compile", where that is all.
    """

    problem: Problem
    seconds: Mapping[str, float]


Event = Notice | TaskStarted | PhaseChanged | TrialDone | ModelJudged | RecordSaved | TaskDone
OnEvent = Callable[[Event], None]


def one_at_a_time(on_event: OnEvent) -> OnEvent:
    """`on_event` for several threads, of which one after the other calls it."""
    lock = threading.RLock()

    def locked(event: Event) -> None:
        with lock:
            on_event(event)

    return locked
