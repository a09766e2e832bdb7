"""Files that come with fagen, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from fagen.errors import ArgumentError, StoreError, WriteError

LOCK_SECONDS = 60.0


@cache
def packaged_folder(name: str) -> Path:
    """A folder that comes with fagen: inside the wheel, or at the top of a checkout."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def write_files(files: Mapping[str, str | bytes], folder: Path) -> list[Path]:
    """Writes `files`, by name, into `folder`, which is made if it is missing.

    Returns:
        The paths of the files, in order.

    Raises:
        ArgumentError: if `folder` is something else, or as `write_file`.
        WriteError: as `write_file`.
    """
    require_folder(folder)
    for name, content in files.items():
        write_file(folder / name, content)
    return [folder / name for name in files]


def require_folder(place: Path) -> None:
    """Raises an ArgumentError if something other than a folder is there; it may be missing."""
    if os.path.exists(place) and not os.path.isdir(place):  # Path's may raise an OSError
        raise ArgumentError(f"{place} is not a folder: give the folder to write the files into")


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file, or replaces it; its folder is made if it is missing.

    Raises:
        ArgumentError: if `path` is a folder.
        WriteError: if it cannot be written; what was there before is intact.
    """
    try:
        if path.is_dir():
            raise ArgumentError(f"cannot write {path}: it is a folder; name a file")
        if path.exists() and not path.is_file():  # a pipe, or a device such as /dev/stdout
            path.write_bytes(_bytes(content))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(link_target(path), content)
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from None


def link_target(path: Path) -> Path:
    """The file behind a path, so that writing keeps a link; an OSError for a loop of links."""
    try:
        return path.resolve()
    except RuntimeError:  # before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def replace_file(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step, through a draft beside it; raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("wb") as file:
            file.write(_bytes(content))
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def locked(path: str | Path) -> Iterator[Path]:
    """The place of a file, under its lock; an OSError becomes a StoreError."""
    from filelock import FileLock, Timeout

    path = Path(path).expanduser()
    try:
        path = link_target(path)
        if path.exists() and not path.is_file():
            raise StoreError(f"cannot write {path}: it is not a file; name another one")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        lock.touch()  # the lock would wait for a place that cannot be written
        with FileLock(lock, timeout=LOCK_SECONDS):
            yield path
    except Timeout:
        raise WriteError(
            f"cannot write {path}: another process has held it for {LOCK_SECONDS:.0f} s ({lock}). "
            "The file is as it was; try again when that has ended, or name another one"
        ) from None
    except OSError as error:
        why = (error.strerror or str(error)).rstrip(".")
        raise WriteError(
            f"cannot write {path}: {why}. The file is as it was; name one that can be written"
        ) from None


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
