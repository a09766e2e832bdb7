"""NVRTC, through CuPy: CUDA text -> cubin and log. Needs no GPU and no driver."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fagen.build.compiled import Resources
from fagen.device import Architecture
from fagen.errors import CacheError, CompileError, MissingDependencyError

# Beside the target and the header folder. NVRTC 13.0 takes generic lambdas for host code unless
# device is the default.
OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
FIRST_NVRTC_CACHE = (12, 9)  # its own cache, which keeps no log and costs time beside ours


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
def header_folder() -> Path:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise _missing("the CUDA headers (cuda_bf16.h, cuda_fp16.h) are not installed")
    return Path(folder)


def run_nvrtc(source: str, arch: Architecture, name: str) -> tuple[bytes, bytes, str]:
    """The cubin, the PTX and the log of one compilation.

    Args:
        name: what the text is called in messages.

    Raises:
        CompileError: if NVRTC refuses the text.
        CacheError: if CuPy cannot make its cache folder.
        MissingDependencyError: if NVRTC, CuPy or the CUDA headers are not installed.
    """
    nvrtc_version()  # loads the library, or says how to install it
    try:
        from cupy.cuda import nvrtc

        program = nvrtc.createProgram(source, f"{name}.cu", (), ())
    except ImportError:
        raise _missing("CuPy is not installed") from None
    except OSError as error:  # read-only homes are common in containers
        raise CacheError(
            f"CuPy cannot make its cache folder {error.filename} ({error.strerror}): set "
            "CUPY_CACHE_DIR to a folder that you can write"
        ) from None
    options = [f"-arch={arch.target}", *OPTIONS, f"-I{header_folder()}"]
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
            f"NVRTC {nvrtc_version()} refused {name} for {arch.target}: {first.strip()}", log
        ) from None
    finally:
        nvrtc.destroyProgram(program)


def parse_log(log: str, entries: Sequence[str]) -> dict[str, Resources]:
    """The resources of kernels, from the log of a compilation with ptxas's -v.

    Device functions that were not inlined count with the kernel they are listed under.

    Args:
        entries: the symbols of the kernels.

    Raises:
        CompileError: if the log does not speak of one of them.
    """
    sections = re.split(r"Compiling entry function '([^']+)'", log)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    warnings = tuple(
        line.strip()
        for line in log.splitlines()
        if re.search(r"\bwarning\b|\(C\d{4}\)|Potential Performance Loss", line)
    )
    found = {}
    for entry in entries:
        if entry not in texts:
            there = ", ".join(texts) or "none"
            raise CompileError(f'no `extern "C"` kernel {entry} in the source: {there}', log)
        found[entry] = _resources(entry, texts[entry], warnings, log)
    return found


def _resources(entry: str, text: str, warnings: tuple[str, ...], log: str) -> Resources:
    """What the part of a log about one kernel says."""
    registers = re.search(r"Used (\d+) registers", text)
    if registers is None:
        raise CompileError(f"ptxas does not say which resources {entry} takes", log)
    smem = re.search(r"(\d+) bytes smem", text)
    stack_frames = re.findall(r"(\d+) bytes stack frame", text)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    return Resources(
        registers=int(registers[1]),
        spill_bytes=sum(map(int, spills)),
        stack_bytes=sum(map(int, stack_frames)),
        smem_bytes=int(smem[1]) if smem else 0,
        warnings=warnings,
    )
