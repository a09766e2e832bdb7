"""FlashAttention kernels, written for your GPU by search.

Everything is loaded on first use, so that `import fagen` costs milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fagen import kernels

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fagen.api import Explanation, Kernel, attention, explain, load, tune
    from fagen.device import Device
    from fagen.errors import (
        ArgumentError,
        CacheError,
        CompileError,
        ConfigError,
        CudaError,
        DeviceError,
        FagenError,
        MissingDependencyError,
        StoreError,
        UnsupportedError,
        WriteError,
    )
    from fagen.kernels import *  # noqa: F403
    from fagen.problem import Problem, Shape
    from fagen.records.calls import record
    from fagen.tuning.events import (
        Notice,
        PhaseChanged,
        RecordSaved,
        TaskDone,
        TaskStarted,
        TrialDone,
    )
    from fagen.tuning.tasks import Task
    from fagen.tuning.tuner import TuneResult

__all__ = [
    "ArgumentError",
    "CacheError",
    "CompileError",
    "ConfigError",
    "CudaError",
    "Device",
    "DeviceError",
    "Explanation",
    "FagenError",
    "Kernel",
    "MissingDependencyError",
    "Notice",
    "PhaseChanged",
    "Problem",
    "RecordSaved",
    "Shape",
    "StoreError",
    "Task",
    "TaskDone",
    "TaskStarted",
    "TrialDone",
    "TuneResult",
    "UnsupportedError",
    "WriteError",
    "__version__",
    "attention",
    "explain",
    "load",
    "record",
    "tune",
]
__all__ += kernels.__all__  # the config classes

_HOMES = {
    "api": ("Explanation", "Kernel", "attention", "explain", "load", "tune"),
    "device": ("Device",),
    "errors": (
        "ArgumentError",
        "CacheError",
        "CompileError",
        "ConfigError",
        "CudaError",
        "DeviceError",
        "FagenError",
        "MissingDependencyError",
        "StoreError",
        "UnsupportedError",
        "WriteError",
    ),
    "tuning.events": (
        "Notice",
        "PhaseChanged",
        "RecordSaved",
        "TaskDone",
        "TaskStarted",
        "TrialDone",
    ),
    "problem": ("Problem", "Shape"),
    "records.calls": ("record",),
    "tuning.tasks": ("Task",),
    "tuning.tuner": ("TuneResult",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in kernels.__all__:
        return getattr(kernels, name)
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'fagen' has no attribute {name!r}")
    value = getattr(import_module(f"fagen.{module}"), name)
    globals()[name] = value  # the next access costs nothing
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
