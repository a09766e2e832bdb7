"""Time that is dealt out, and time that was taken."""

from __future__ import annotations

import math
import time


class Budget:
    """Seconds for several tasks, each of which gets an equal share of what is left.

    Args:
        seconds: for all of them; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() > self._end

    def share(self, tasks: int) -> float | None:
        """Seconds for the next of this many tasks; None for no limit."""
        if self.seconds is None:
            return None
        return max(self._end - time.monotonic(), 0.0) / tasks


class Phases:
    """How long each part of a task took.

    Attributes:
        seconds: by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.monotonic()

    def end(self, name: str) -> float:
        """Ends a phase, and begins the next. Returns its seconds."""
        now = time.monotonic()
        self.seconds[name] = now - self._start
        self._start = now
        return self.seconds[name]
