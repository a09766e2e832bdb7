"""What kernels do to the process that runs them, done by plain Python: see test_worker.py."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from fagen.build.compiled import Compiled
from fagen.errors import DeviceError
from fagen.tuning.outcome import Measured, Outcome, Rejected

Arguments = Any  # compiled, problem, config, shape, device_index; the first says what to do


def act_on_source(compiled: Compiled, *rest: Arguments) -> Outcome:
    """Does what the text of the kernel says; some depends on what ran before."""
    match compiled.source.split():
        case ["abort-once", mark]:
            if not _mark(mark):
                os.abort()
        case ["abort-later", mark]:  # the first time: as if its fault were noticed by the next one
            if _mark(mark):
                os.abort()
            threading.Timer(0.1, os.abort).start()
        case ["scribble"]:  # into what the next one relies on
            os.environ["SCRIBBLED"] = "1"
            return Rejected(kind="wrong", reason="wrote outside of the output")
        case ["trusting"]:
            if "SCRIBBLED" in os.environ:
                os.abort()
    return act(compiled.source, *rest)


def act(compiled: Arguments, *rest: Arguments) -> Outcome:
    """Does what `compiled` names, or answers with this process's id as the time."""
    match str(compiled).split():
        case ["hang"]:
            time.sleep(3600)
        case ["hang-deaf", path]:  # as if in a kernel: no Python runs, signals go unheard
            Path(path).write_text(str(os.getpid()))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            ctypes.CDLL(None).sleep(3600)
        case ["nap"]:
            time.sleep(0.2)
        case ["abort"]:
            os.abort()
        case ["segfault"]:
            ctypes.string_at(0)
        case ["exit"]:
            os._exit(3)
        case ["sticky"]:
            return Rejected(kind="crash", reason="the CUDA driver reports illegal address (700)")
        case ["stray"]:
            return Rejected(kind="stray", reason="wrote to its inputs")
        case ["refuse"]:
            raise DeviceError("device 0 has too little free memory")
        case ["typo"]:
            raise NameError("tpyo")
        case ["nothing"]:
            return None  # type: ignore[return-value]
    return Measured(time_us=os.getpid())


def _mark(path: str) -> bool:
    """Whether a file was there; it is from now on."""
    there = Path(path).exists()
    Path(path).touch()
    return there
