"""Every error that fagen raises on purpose.

::

    FagenError
    ├── ArgumentError        a bad argument, flag or field of a file (also a ValueError)
    │   └── UnsupportedError a problem outside what fagen covers
    ├── ConfigError          a config that is illegal for its problem and device
    ├── CompileError         NVRTC refused a kernel; .log is what it printed
    ├── CacheError           the cache folder cannot be trusted or written
    ├── StoreError           a tuned_configs YAML file or a study that cannot be read or written
    │   └── WriteError       any file or study that cannot be written: a full disk, a lost database
    ├── DeviceError          no usable GPU, or the driver reported a failure
    │   └── CudaError        a CUDA driver call failed; .code is its number
    └── MissingDependencyError  a package that this call needs is not installed

Each message says what is wrong, what is allowed, and what to do next. The command line prints it
as one line and exits with code 2, or 1 for a WriteError, which is not the command line's fault.
"""

from __future__ import annotations


class FagenError(Exception):
    """The root of every error that fagen raises on purpose."""


class ArgumentError(FagenError, ValueError):
    """An argument, a flag or a field of a file is not one of the allowed values."""


class UnsupportedError(ArgumentError):
    """The problem is well formed, but outside what fagen covers."""


class ConfigError(FagenError):
    """A config is illegal for its problem and device; the message is the broken rule."""


class CompileError(FagenError):
    """NVRTC refused a kernel.

    Attributes:
        log: what the compiler printed.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class CacheError(FagenError):
    """The cache folder cannot be trusted (its cubins are code) or cannot be written."""


class StoreError(FagenError):
    """A file of tuned configs, or a study, cannot be read or written."""


class WriteError(StoreError):
    """A file or study cannot be written; what was there is intact, and a later try may succeed."""


class DeviceError(FagenError):
    """There is no usable GPU, or the driver reported a failure."""


class CudaError(DeviceError):
    """A CUDA driver call failed.

    Attributes:
        code: the CUresult as an integer.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[CudaError], tuple[str, int]]:
        return type(self), (str(self), self.code)  # or unpickling would lack the code


class MissingDependencyError(FagenError):
    """A package that this call needs is not installed; the message names the extra that has it."""
