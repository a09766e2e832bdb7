"""Files: those that come with fagen, and those that are written whole or not at all."""

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
    """Writes `files` into `folder`, which is made if need be; the paths it wrote, in order.

    Raises:
        ArgumentError: if `folder` is no folder, or as `write_file` does.
        WriteError: as `write_file` does.
    """
    require_folder(folder)
    for name, content in files.items():
        write_file(folder / name, content)
    return [folder / name for name in files]


def require_folder(place: Path) -> None:
    """An ArgumentError if something else than a folder is there; nothing may be."""
    if os.path.exists(place) and not os.path.isdir(place):  # not Path's: they may raise an OSError
        raise ArgumentError(f"{place} is no folder: give the folder to write the files into")


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file, and makes its folder if need be; one of the same name is replaced.

    Raises:
        ArgumentError: if it is a folder.
        WriteError: if the disk is full, or the place cannot be written; what was there is whole.
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
    """The file that a path names, so that a link stays one; an OSError for a loop of links."""
    try:
        return path.resolve()
    except RuntimeError:  # before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def replace_file(path: Path, content: str | bytes) -> None:
    """Puts a file in the place of another through a draft beside it; an OSError is the caller's."""
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
