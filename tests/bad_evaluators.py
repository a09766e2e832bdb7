"""What kernels do to the process that runs them, done by plain Python: see test_worker.py."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from fagen.errors import DeviceError
from fagen.outcome import Measured, Outcome, Rejected

Arguments = Any  # compiled, problem, config, shape, device_index; the first says what to do


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
        case ["abort"]:
            os.abort()
        case ["segfault"]:
            ctypes.string_at(0)
        case ["exit"]:
            os._exit(3)
        case ["sticky"]:
            return Rejected(kind="crash", reason="the CUDA driver reports illegal address (700)")
        case ["refuse"]:
            raise DeviceError("device 0 has too little free memory")
        case ["typo"]:
            raise NameError("tpyo")
        case ["nothing"]:
            return None  # type: ignore[return-value]
    return Measured(time_us=os.getpid())
