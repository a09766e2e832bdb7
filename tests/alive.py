"""Whether processes still run, by their ids."""

from __future__ import annotations

import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until_dead(*pids: int) -> None:
    """Fails if one of the processes still runs after ten seconds."""
    deadline = time.monotonic() + 10
    while running := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes still run: {running}"
        time.sleep(0.02)
