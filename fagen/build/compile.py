"""CUDA text -> cubin and resource report, by NVRTC. Needs no GPU and no driver.

The cache, under `cache_folder()`, is content-addressed; its entries never change::

    kernels/<key>/   kernel.cu, kernel.cubin, resources.json; key: hash of all that decides them
    index/<hash>.json   problem, config and template files -> key, so that a warm
                        `compile_kernel` renders nothing
    partial/   entries being written: each is renamed into its place when whole

An entry that is torn or corrupt is a miss, so nothing here waits for the disk. A cache that
cannot be written costs time, not the call; one that other users can write is refused, since its
cubins are code.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fagen import problem as problem_module
from fagen.build import render
from fagen.device import Architecture
from fagen.errors import CacheError, CompileError, MissingDependencyError
from fagen.kernels import config as config_module
from fagen.kernels.config import AnyConfig
from fagen.problem import Problem

CACHE_VERSION = 2  # part of every key: raised when an entry's files change their meaning
# Beside the target and the header folder. NVRTC 13.0 takes generic lambdas for host code unless
# device is the default.
OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
FIRST_NVRTC_CACHE = (12, 9)  # its own cache, which keeps no log and costs time beside ours
LEFTOVER_SECONDS = 3600.0  # age at which a half-written entry has lost its writer

_log = logging.getLogger(__name__)


class Resources(BaseModel):
    """What ptxas says one kernel takes.

    Attributes:
        registers: per thread, at entry.
        spill_bytes: bytes of spill stores and loads, per thread.
        stack_bytes: stack frame in bytes, per thread.
        smem_bytes: static shared memory in bytes, per block.
        warnings: the compiler's warnings and remarks on lost speed, one line each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    registers: int = Field(ge=0)
    spill_bytes: int = Field(ge=0)
    stack_bytes: int = Field(ge=0)
    smem_bytes: int = Field(ge=0)
    warnings: tuple[str, ...] = ()

    def why_bad(self) -> str | None:
        """Why the kernel cannot be fast, in a few words, or None."""
        for warning in self.warnings:
            if "wgmma.mma_async instructions are serialized" in warning:
                return f"the compiler serialised wgmma: {warning}"
            if "'setmaxnreg' ignored" in warning:
                return f"the compiler ignored setmaxnreg: {warning}"
        if self.spill_bytes:
            return f"spills {self.spill_bytes} bytes per thread"
        if self.stack_bytes:
            return f"keeps {self.stack_bytes} bytes per thread in a stack frame"
        return None


@dataclass(frozen=True)
class Compiled:
    """A kernel for one architecture.

    Attributes:
        kernel_name: its symbol in the cubin.
        arch: the architecture's name, such as "sm90".
        source: the CUDA text.
        cubin: what NVRTC made of it.
        resources: what ptxas says it takes.
        nvrtc: the compiler's version, such as "13.0".
        key: SHA-256, in hex, of everything that decides the cubin.
        path: the cache folder with kernel.cu and kernel.cubin; None if it is not cached.
    """

    kernel_name: str
    arch: str
    source: str
    cubin: bytes
    resources: Resources
    nvrtc: str
    key: str
    path: Path | None = None


def compile_source(
    source: str, arch: Architecture, kernel_name: str, *, cached: bool = True
) -> Compiled:
    """The cubin of a self-contained CUDA text, and the resources of one of its kernels.

    Args:
        source: CUDA C++; cuda_fp16.h and cuda_bf16.h may be included.
        kernel_name: an `extern "C" __global__` function of it.
        cached: look into the cache first, and store the result there.

    Raises:
        CompileError: if NVRTC refuses the text, or it has no such kernel.
        CacheError: if others can write the cache folder.
        MissingDependencyError: if NVRTC or the CUDA headers are not installed.
    """
    key = _key(source, arch, kernel_name)
    hit = _load(key, arch) if cached else None
    if hit is not None:
        return hit
    cubin, _, log = _run_nvrtc(source, arch, kernel_name)
    compiled = Compiled(
        kernel_name=kernel_name,
        arch=arch.name,
        source=source,
        cubin=cubin,
        resources=parse_log(log, kernel_name),
        nvrtc=nvrtc_version(),
        key=key,
    )
    return replace(compiled, path=_store(compiled, arch)) if cached else compiled


def compile_kernel(problem: Problem, config: AnyConfig, arch: Architecture) -> Compiled:
    """The kernel of `config` for `problem`; where it is cached, nothing is rendered.

    Raises:
        CompileError, CacheError, MissingDependencyError: as `compile_source` does.
    """
    hit = _look_up(problem, config, arch)
    if hit is not None:
        return hit
    source = render.render(problem, config)
    compiled = compile_source(source, arch, render.kernel_name(problem))
    if compiled.path is not None:
        _store_index(_index_hash(problem, config, arch), compiled.key)
    return compiled


def compile_many(
    jobs: Iterable[tuple[Problem, AnyConfig]],
    arch: Architecture,
    *,
    processes: int | None = None,
    timeout: float = 60.0,
) -> Iterator[tuple[Problem, AnyConfig, Compiled | CompileError]]:
    """Compiles many kernels in processes (NVRTC does not run on two threads of one).

    Args:
        processes: how many at most; one per available CPU if None.
        timeout: seconds after which a compilation is stopped and counts as refused.

    Yields:
        (problem, config, kernel or error), as they come: cached kernels first.

    Raises:
        FagenError: what concerns every job: CacheError, MissingDependencyError.
        ValueError: if `processes` is less than 1.
    """
    from fagen.build.processes import in_processes

    processes = len(os.sched_getaffinity(0)) if processes is None else processes
    if processes < 1:
        raise ValueError(f"processes is {processes}: at least 1 is needed")
    misses: list[tuple[Problem, AnyConfig, Architecture]] = []
    for problem, config in jobs:
        hit = _look_up(problem, config, arch)
        if hit is None:
            misses.append((problem, config, arch))
        else:
            yield problem, config, hit
    answers = in_processes(
        compile_kernel, misses, processes=processes, timeout=timeout, failure=CompileError
    )
    for (problem, config, _), answer in answers:
        yield problem, config, answer


def to_ptx(source: str, arch: Architecture, kernel_name: str) -> str:
    """The PTX that NVRTC makes of a CUDA text on its way to the cubin; not cached.

    Raises:
        CompileError, MissingDependencyError: as `compile_source` does.
    """
    return _run_nvrtc(source, arch, kernel_name)[1].decode().rstrip("\0")


# ---- NVRTC ----


def _missing(what: str) -> MissingDependencyError:
    return MissingDependencyError(
        f'{what}: run `pip install "fagen[cuda13]"` (or "fagen[cuda12]" for a driver before 580)'
    )


@cache
def nvrtc_version() -> str:
    """The version of NVRTC, such as "13.0".

    Asked of the library itself: CuPy's binding of this call imports all of CuPy, which a warm
    start does not need. CuPy finds the same library, since it is loaded by then.

    Raises:
        MissingDependencyError: if NVRTC is not installed.
    """
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        library = ctypes.CDLL(load_nvidia_dynamic_lib("nvrtc").abs_path)
    except DynamicLibNotFoundError:
        raise _missing("NVRTC is not installed") from None
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@cache
def _header_folder() -> Path:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise _missing("the CUDA headers (cuda_bf16.h, cuda_fp16.h) are not installed")
    return Path(folder)


@cache
def _headers_digest() -> str:
    """Hash of the headers that kernels include: their wheel changes apart from NVRTC's."""
    headers = sorted(_header_folder().glob("cuda_*16.h*"))
    return _digest(*(_file_digest(header) for header in headers))


def _run_nvrtc(source: str, arch: Architecture, kernel_name: str) -> tuple[bytes, bytes, str]:
    """The cubin, the PTX and the log of one compilation."""
    nvrtc_version()  # loads the library, or says how to install it
    try:
        from cupy_backends.cuda.libs import nvrtc

        program = nvrtc.createProgram(source, f"{kernel_name}.cu", (), ())  # imports CuPy
    except ImportError:
        raise _missing("CuPy is not installed") from None
    except OSError as error:  # read-only homes are common in containers
        raise CacheError(
            f"CuPy cannot make its cache folder {error.filename} ({error.strerror}): set "
            "CUPY_CACHE_DIR to a folder that you can write"
        ) from None
    options = [f"-arch={arch.target}", *OPTIONS, f"-I{_header_folder()}"]
    if tuple(map(int, nvrtc_version().split("."))) >= FIRST_NVRTC_CACHE:
        options.append("--no-cache")
    try:
        nvrtc.compileProgram(program, tuple(options))
        log = nvrtc.getProgramLog(program)
        # CuPy takes the last byte, a zero of the ELF's headers, for a terminator.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getPTX(program), log
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        first = next(
            (line for line in log.splitlines() if re.search("error|fatal", line)), str(error)
        )
        raise CompileError(
            f"NVRTC {nvrtc_version()} refused {kernel_name} for {arch.target}: {first.strip()}", log
        ) from None
    finally:
        nvrtc.destroyProgram(program)


def parse_log(log: str, kernel_name: str) -> Resources:
    """The resources of one kernel, from the log of a compilation with ptxas's -v.

    Device functions that were not inlined count with the kernel they are listed under.

    Raises:
        CompileError: if the log does not speak of that kernel.
    """
    sections = re.split(r"Compiling entry function '([^']+)'", log)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    if kernel_name not in texts:
        found = ", ".join(texts) or "none"
        raise CompileError(f'no `extern "C"` kernel {kernel_name} in the source: {found}', log)
    text = texts[kernel_name]
    registers = re.search(r"Used (\d+) registers", text)
    if registers is None:
        raise CompileError(f"ptxas does not say which resources {kernel_name} takes", log)
    smem = re.search(r"(\d+) bytes smem", text)
    stack_frames = re.findall(r"(\d+) bytes stack frame", text)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    return Resources(
        registers=int(registers[1]),
        spill_bytes=sum(map(int, spills)),
        stack_bytes=sum(map(int, stack_frames)),
        smem_bytes=int(smem[1]) if smem else 0,
        warnings=tuple(
            line.strip()
            for line in log.splitlines()
            if re.search(r"\bwarning\b|\(C\d{4}\)|Potential Performance Loss", line)
        ),
    )


# ---- keys ----


def _digest(*parts: str) -> str:
    """SHA-256, in hex, of the parts; their borders count."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _key(source: str, arch: Architecture, kernel_name: str) -> str:
    """Everything that decides an entry. The header folder counts by its content, not its path."""
    return _digest(
        str(CACHE_VERSION),
        arch.target,
        kernel_name,
        *OPTIONS,
        nvrtc_version(),
        _headers_digest(),
        source,
    )


def _index_hash(problem: Problem, config: AnyConfig, arch: Architecture) -> str:
    """Everything that decides the text of a kernel, and with it the key.

    Read anew in each call (some 0.3 ms), so that an edited template counts at once.
    """
    modules = (config_module, problem_module, render)
    code = [Path(str(module.__file__)) for module in modules]
    templates = sorted(path for path in render.template_folder().iterdir() if path.is_file())
    return _digest(
        *(word for path in (*code, *templates) for word in (path.name, _file_digest(path))),
        problem.model_dump_json(),
        config.model_dump_json(),
        _key("", arch, render.kernel_name(problem)),
    )


# ---- the cache ----


class _Entry(BaseModel):
    """resources.json: what an entry says about its cubin, and how to tell that it is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel_name: str
    arch: str
    nvrtc: str
    cubin_sha256: str
    resources: Resources


def cache_folder() -> Path:
    """The folder of compiled kernels: FAGEN_CACHE, or the platform's place for caches.

    It is made where it is missing, if that can be done, for its user alone (mode 0700).

    Raises:
        CacheError: if another user owns or can write it.
    """
    from_environment = os.environ.get("FAGEN_CACHE")
    if from_environment:
        folder = Path(from_environment).expanduser().absolute()
    else:
        from platformdirs import user_cache_path

        folder = user_cache_path("fagen")
    with suppress(OSError):  # what needs the folder fails, and says why
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    try:
        status = folder.stat()
    except OSError:
        return folder
    fix = "set FAGEN_CACHE to a folder of your own"
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"the cache {folder} is not a folder: {fix}")
    if status.st_uid != os.geteuid():
        raise CacheError(f"the cache {folder} belongs to another user (uid {status.st_uid}): {fix}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"other users can write the cache {folder}, whose kernels would run as you: {fix}"
        )
    return folder


def clear_cache() -> int:
    """Deletes every compiled kernel, and returns the bytes freed.

    Only what fagen put there goes; processes that compile meanwhile are not disturbed.

    Raises:
        CacheError: if the folder is not private or something cannot be deleted.
    """
    folder = cache_folder()
    freed = 0
    for name in ("index", "kernels", "partial"):
        for path in folder.glob(f"{name}/**/*"):
            with suppress(FileNotFoundError):
                freed += path.stat().st_size if path.is_file() else 0
        try:
            with suppress(FileNotFoundError):
                shutil.rmtree(folder / name)
        except OSError as error:
            raise CacheError(f"the cache {folder / name} cannot be deleted: {error}") from None
    return freed


def _load(key: str, arch: Architecture) -> Compiled | None:
    """The entry of that key, or None if there is none or it is damaged."""
    folder = cache_folder() / "kernels" / key
    try:
        entry = _Entry.model_validate_json((folder / "resources.json").read_bytes())
        source = (folder / "kernel.cu").read_text("utf-8")
        cubin = (folder / "kernel.cubin").read_bytes()
    except (OSError, ValueError):
        return None
    if hashlib.sha256(cubin).hexdigest() != entry.cubin_sha256:
        return None
    if _key(source, arch, entry.kernel_name) != key:
        return None
    return Compiled(
        kernel_name=entry.kernel_name,
        arch=arch.name,
        source=source,
        cubin=cubin,
        resources=entry.resources,
        nvrtc=entry.nvrtc,
        key=key,
        path=folder,
    )


def _look_up(problem: Problem, config: AnyConfig, arch: Architecture) -> Compiled | None:
    """The cached kernel of a config, found without rendering it."""
    index = cache_folder() / "index" / f"{_index_hash(problem, config, arch)}.json"
    try:
        key = json.loads(index.read_bytes())["key"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return _load(key, arch) if re.fullmatch(r"[0-9a-f]{64}", str(key)) else None


def _store(compiled: Compiled, arch: Architecture) -> Path | None:
    """Puts an entry in its place, and returns the place; None if it cannot be written."""
    entry = _Entry(
        kernel_name=compiled.kernel_name,
        arch=compiled.arch,
        nvrtc=compiled.nvrtc,
        cubin_sha256=hashlib.sha256(compiled.cubin).hexdigest(),
        resources=compiled.resources,
    )
    folder = cache_folder()
    place = folder / "kernels" / compiled.key
    try:
        with _workbench(folder) as bench:
            whole = bench / "entry"
            whole.mkdir(mode=0o700)
            (whole / "kernel.cu").write_bytes(compiled.source.encode())
            (whole / "kernel.cubin").write_bytes(compiled.cubin)
            (whole / "resources.json").write_bytes(entry.model_dump_json(indent=2).encode() + b"\n")
            place.parent.mkdir(mode=0o700, exist_ok=True)
            if _load(compiled.key, arch) is None:  # nothing there, or a damaged entry
                with suppress(FileNotFoundError):
                    place.rename(bench / "damaged")
                whole.rename(place)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # another process was faster
            return place
        _warn_uncached(f"{folder}: {error.strerror}")
        return None
    return place


def _store_index(index_hash: str, key: str) -> None:
    folder = cache_folder()
    try:
        with _workbench(folder) as bench:
            (bench / "index.json").write_bytes(json.dumps({"key": key}).encode() + b"\n")
            (folder / "index").mkdir(mode=0o700, exist_ok=True)
            (bench / "index.json").replace(folder / "index" / f"{index_hash}.json")
    except OSError as error:
        _warn_uncached(f"{folder}: {error.strerror}")


@contextmanager
def _workbench(folder: Path) -> Iterator[Path]:
    """A new folder under partial/, gone afterwards; those that kill -9 left go first."""
    partial = folder / "partial"
    partial.mkdir(mode=0o700, exist_ok=True)
    for leftover in partial.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=partial, ignore_cleanup_errors=True) as bench:
        yield Path(bench)


@cache
def _warn_uncached(reason: str) -> None:
    """Logs each reason once per process."""
    _log.warning("compiled kernels are not cached: %s", reason)
