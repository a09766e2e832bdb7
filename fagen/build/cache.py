"""The cache of compiled kernels, under `cache_folder()`.

It is content-addressed; its entries never change::

    kernels/<key>/   kernel.cu, kernel.cubin, resources.json; key: hash of all that decides them
    index/<hash>.json   problem, config and template files -> key, so that a warm
                        `compile_kernel` renders nothing
    partial/   entries being written: each is renamed into its place when whole

An entry that is torn or corrupt is a miss, so nothing here waits for the disk. A cache that
cannot be written costs time, not the call; one that other users can write is refused, since its
cubins are code.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fagen.build import render
from fagen.build.compiled import Compiled, Resources
from fagen.build.nvrtc import OPTIONS, header_folder, nvrtc_version
from fagen.device import Architecture
from fagen.errors import CacheError
from fagen.kernels.registry import template_of
from fagen.kernels.template import Config
from fagen.problem import Problem

CACHE_VERSION = 3  # part of every key: raised when an entry's files change their meaning
LEFTOVER_SECONDS = 3600.0  # age at which a half-written entry has lost its writer

# Beside fagen/kernels, the modules of the package that decide a kernel's text.
TEXT_MODULES = (
    "dtypes.py", "mask.py", "operation.py", "problem.py", "build/render.py", "build/wgmma.py",
)  # fmt: skip

_log = logging.getLogger(__name__)


# ---- keys ----


def _digest(*parts: str) -> str:
    """SHA-256, in hex, of the parts; their borders count."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def cache_key(source: str, arch: Architecture, entries: Sequence[str]) -> str:
    """Everything that decides an entry. The header folder counts by its content, not its path."""
    return _digest(
        str(CACHE_VERSION),
        arch.target,
        *entries,
        *OPTIONS,
        nvrtc_version(),
        _headers_digest(),
        source,
    )


@cache
def _headers_digest() -> str:
    """Hash of the headers that kernels include: their wheel changes apart from NVRTC's."""
    return _digest(*map(_file_digest, sorted(header_folder().glob("cuda_*16.h*"))))


def _index_hash(problem: Problem, config: Config, arch: Architecture) -> str:
    """Everything that decides the text of a kernel, and with it the key.

    Read anew in each call (some 0.4 ms), so that an edited template counts at once.
    """
    package = Path(render.__file__).parent.parent
    code = sorted((package / "kernels").glob("*.py"))
    code += [package / name for name in TEXT_MODULES]
    templates = sorted(path for path in render.template_folder().rglob("*") if path.is_file())
    entries = template_of(config).entries(problem)
    return _digest(
        *(word for path in (*code, *templates) for word in (path.name, _file_digest(path))),
        problem.model_dump_json(),
        config.model_dump_json(),
        cache_key("", arch, entries),
    )


# ---- the cache ----


class _Entry(BaseModel):
    """resources.json: what an entry says about its cubin, and how to tell that it is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arch: str
    nvrtc: str
    cubin_sha256: str
    entries: dict[str, Resources]


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


def load_entry(key: str, arch: Architecture) -> Compiled | None:
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
    if cache_key(source, arch, list(entry.entries)) != key:
        return None
    return Compiled(
        arch=arch.name,
        source=source,
        cubin=cubin,
        entries=entry.entries,
        nvrtc=entry.nvrtc,
        key=key,
        path=folder,
    )


def look_up(problem: Problem, config: Config, arch: Architecture) -> Compiled | None:
    """The cached kernel of a config, found without rendering it."""
    index = cache_folder() / "index" / f"{_index_hash(problem, config, arch)}.json"
    try:
        key = json.loads(index.read_bytes())["key"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return load_entry(key, arch) if re.fullmatch(r"[0-9a-f]{64}", str(key)) else None


def store_entry(compiled: Compiled, arch: Architecture) -> Path | None:
    """Puts an entry in its place, and returns the place; None if it cannot be written."""
    entry = _Entry(
        arch=compiled.arch,
        nvrtc=compiled.nvrtc,
        cubin_sha256=hashlib.sha256(compiled.cubin).hexdigest(),
        entries=dict(compiled.entries),
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
            if load_entry(compiled.key, arch) is None:  # nothing there, or a damaged entry
                with suppress(FileNotFoundError):
                    place.rename(bench / "damaged")
                whole.rename(place)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # another process was faster
            return place
        _warn_uncached(f"{folder}: {error.strerror}")
        return None
    return place


def store_index(problem: Problem, config: Config, arch: Architecture, key: str) -> None:
    """Notes which entry a config's kernel is, for `look_up`."""
    folder = cache_folder()
    try:
        with _workbench(folder) as bench:
            (bench / "index.json").write_bytes(json.dumps({"key": key}).encode() + b"\n")
            (folder / "index").mkdir(mode=0o700, exist_ok=True)
            (bench / "index.json").replace(
                folder / "index" / f"{_index_hash(problem, config, arch)}.json"
            )
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
