"""What became of one candidate: a time, or a typed reason why it has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fagen.kernels.template import Config

RejectionKind = Literal[
    "illegal",  # breaks a rule of the space, or was asked for before
    "compile",  # NVRTC refused it, or took too long
    "resources",  # spills, keeps a stack frame, wgmma serialised, setmaxnreg ignored
    "duplicate",  # its cubin is that of another candidate
    "blocked",  # it is on the blocklist: it crashed or hung twice in an earlier run
    "launch",  # the driver refused to load or start it
    "wrong",  # its numbers are wrong
    "stray",  # it wrote where it must not: its process ends too, as its memory is not trusted
    "crash",  # it killed the CUDA context, or the process
    "hang",  # it did not end in time
]
STATIC_REJECTIONS: frozenset[RejectionKind] = frozenset(
    ("illegal", "compile", "resources", "duplicate", "blocked")  # known before the GPU is touched
)


class Measured(BaseModel):
    """A candidate that gives right answers, and how long it takes.

    Attributes:
        time_us: median time of one call in microseconds.
        relative: geometric mean, over the shapes that it was timed on, of its time over that of
            the template's default (see objective.py); None where nobody compared.
        spread: interquartile range over median.
        samples: calls that were timed.
        policy: how, such as "cold-queued".
        cubin: `store.digest` of what ran; "" where it was no cubin (a recorded table).
        clock_mhz: the SM clock while it was timed, where that is known.
        stopped: whether timing ended early, since it was clearly slower than the best.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    time_us: float = Field(gt=0, allow_inf_nan=False)
    relative: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    spread: float = Field(default=0.0, ge=0)
    samples: int = Field(default=1, ge=1)
    policy: str = ""
    cubin: str = ""
    clock_mhz: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    stopped: bool = False

    @property
    def objective(self) -> float:
        """What a search minimises: `relative`, or the time itself."""
        return self.time_us if self.relative is None else self.relative


class Rejected(BaseModel):
    """A candidate without a time.

    Attributes:
        kind: the stage that it failed at.
        reason: one line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: RejectionKind
    reason: str


Outcome = Measured | Rejected


@dataclass(frozen=True)
class Trial:
    """A config and what became of it, and when, if that was kept (in local time)."""

    config: Config
    outcome: Outcome
    when: datetime | None = None

    @property
    def time_us(self) -> float:
        """Its time in microseconds, infinite for a rejection."""
        return self.outcome.time_us if isinstance(self.outcome, Measured) else float("inf")

    @property
    def objective(self) -> float:
        """What its search minimises, infinite for a rejection."""
        return self.outcome.objective if isinstance(self.outcome, Measured) else float("inf")


def rejections(trials: Iterable[Trial]) -> Counter[str]:
    """How many trials were rejected, by kind."""
    return Counter(t.outcome.kind for t in trials if isinstance(t.outcome, Rejected))


def describe_rejections(counts: Mapping[str, int]) -> str:
    """How many were rejected, by kind: "3 wrong, 1 hang"; empty if none was."""
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
