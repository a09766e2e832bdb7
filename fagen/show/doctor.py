"""What this machine has, what it lacks, and the line that fixes it: `fagen doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from tempfile import TemporaryFile
from typing import Literal

from pydantic import BaseModel, ConfigDict

from fagen.errors import DeviceError, FagenError, MissingDependencyError

INSTALL = 'pip install "fagen[cuda13]"   # or fagen[cuda12]'
COMPILE_ONLY = "none needed to compile: emit, check and predicted tuning work without one"
Status = Literal["ok", "warn", "fail"]


class Finding(BaseModel):
    """One line of the report.

    Attributes:
        what: the thing that was looked at.
        status: "ok"; "warn" if something optional is missing; "fail" if no kernel can be compiled
            without it.
        found: what is there, or what went wrong.
        fix: the line that fixes it, if there is one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: str
    status: Status
    found: str
    fix: str | None = None


def _first_line(error: FagenError) -> str:
    return str(error).partition("\n")[0]


def _python() -> Iterator[Finding]:
    ok = sys.version_info >= (3, 11)
    yield Finding(
        what="Python",
        status="ok" if ok else "fail",
        found=platform.python_version(),
        fix=None if ok else "fagen needs Python 3.11 or newer",
    )


def _cupy() -> Iterator[Finding]:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        ok = int(version.split(".")[0]) >= 14
        yield Finding(
            what="CuPy",
            status="ok" if ok else "fail",
            found=f"{name} {version}" + ("" if ok else ": too old to find the NVRTC wheels"),
            fix=None if ok else INSTALL,
        )
        return
    yield Finding(what="CuPy", status="fail", found="not installed", fix=INSTALL)


def _nvrtc() -> Iterator[Finding]:
    """NVRTC and its headers, proved by compiling a kernel that includes one."""
    from fagen.build.compile import compile_source
    from fagen.device import architecture

    source = '#include <cuda_bf16.h>\nextern "C" __global__ void probe(__nv_bfloat16* x) {}\n'
    try:
        compiled = compile_source(source, architecture("sm90"), "probe", cached=False)
    except FagenError as error:
        fix = INSTALL if isinstance(error, MissingDependencyError) else None
        yield Finding(what="NVRTC", status="fail", found=_first_line(error), fix=fix)
    else:
        yield Finding(
            what="NVRTC", status="ok", found=f"{compiled.nvrtc}, compiles with the CUDA headers"
        )


def _devices() -> Iterator[Finding]:
    from fagen.run import driver

    try:
        version, count = driver.driver_version(), driver.device_count()
        if not count:
            raise DeviceError("the driver sees no CUDA device")
    except FagenError as error:
        yield Finding(what="GPU", status="warn", found=_first_line(error), fix=COMPILE_ONLY)
        return
    yield Finding(what="driver", status="ok", found=f"for CUDA {version}")
    for index in range(count):
        try:
            card = driver.query_device(index)
        except FagenError as error:  # a card that is too old does not rule out the others
            yield Finding(what=f"GPU {index}", status="warn", found=_first_line(error))
        else:
            yield Finding(what=f"GPU {index}", status="ok", found=str(card))


def _cache() -> Iterator[Finding]:
    from fagen.build.cache import cache_folder

    fix = "export FAGEN_CACHE=/a/folder/that/only/you/can/write"
    try:
        folder = cache_folder()
        with TemporaryFile(dir=folder):
            pass
    except FagenError as error:
        yield Finding(what="cache", status="fail", found=_first_line(error), fix=fix)
    except OSError as error:
        found = f"{folder}: {error.strerror}: each process compiles its kernels again"
        yield Finding(what="cache", status="warn", found=found, fix=fix)
    else:
        yield Finding(what="cache", status="ok", found=f"{folder}, private to you")


def _templates() -> Iterator[Finding]:
    from fagen.build.render import template_folder
    from fagen.kernels.registry import TEMPLATES

    missing = [name for name in TEMPLATES if not (template_folder() / f"{name}.cu.j2").is_file()]
    yield Finding(
        what="templates",
        status="fail" if missing else "ok",
        found=f"{', '.join(missing)} missing in {template_folder()}"
        if missing
        else str(template_folder()),
        fix="reinstall fagen" if missing else None,
    )


def _records() -> Iterator[Finding]:
    from fagen.records.store import Store

    try:
        files = Store.open().files()
    except FagenError as error:
        yield Finding(what="records", status="fail", found=_first_line(error))
        return
    records = [record for file in files for record in file.records]
    skipped = sum(len(file.skipped) for file in files)
    found = f"{len(records)} tuned configs, {sum(r.measured for r in records)} of them measured"
    yield Finding(
        what="records",
        status="ok" if records else "warn",
        found=found + (f"; {skipped} skipped, `fagen list` says why" if skipped else ""),
        fix=None if records else "fagen tune",
    )


def _optional() -> Iterator[Finding]:
    torch = importlib.util.find_spec("torch") is not None
    yield Finding(
        what="PyTorch",
        status="ok",
        found=importlib.metadata.version("torch") if torch else "not installed (optional)",
    )
    yield Finding(
        what="nvcc",
        status="ok",
        found=shutil.which("nvcc") or "not found (optional: only emitted .cu files need it)",
    )


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _cupy,
    _nvrtc,
    _devices,
    _cache,
    _templates,
    _records,
    _optional,
)


def diagnose() -> list[Finding]:
    """Look at everything that fagen needs or can use; nothing is changed.

    Compiling works if no finding has the status "fail". A missing GPU is only a warning.
    """
    return [finding for check in CHECKS for finding in check()]
