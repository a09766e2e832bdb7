"""Where studies are kept: Optuna's storages, a journal file or a database, and their names.

Any number of processes, on any hosts, write one storage. Kill -9 leaves no half trials behind, and
`optuna.load_study` or optuna-dashboard read a study like any other.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from fagen.device import Device
from fagen.errors import ArgumentError, StoreError
from fagen.kernels.registry import TEMPLATES
from fagen.problem import Problem, Shape

LOCK_SECONDS = 60.0
TABLES_SECONDS = 20.0  # for another process to make a database's tables


@contextmanager
def quiet() -> Iterator[None]:
    """Optuna reports no new studies meanwhile; its log level is the caller's own otherwise."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


# ---- journals and databases ----


class _KernelLock:
    """The journal's lock by flock: the kernel frees it when its holder dies, however it dies.

    Optuna's own locks are files that outlive a killed process. What a dead holder left half
    written goes before the next line is written.
    """

    def __init__(self, path: Path) -> None:
        from filelock import FileLock

        self._path = path
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS)

    def acquire(self) -> bool:
        self._lock.acquire()
        _cut_torn_line(self._path)
        return True

    def release(self) -> None:
        self._lock.release()


class _File(JournalFileBackend):
    """A journal file that can be given several operations as one write."""

    def __init__(self, path: Path, lock: _KernelLock) -> None:
        # Duck-typed: the base class of Optuna's locks is not public.
        super().__init__(str(path), lock_obj=lock)  # type: ignore[arg-type]
        self._kernel_lock = lock
        self._waiting: list[dict[str, Any]] | None = None

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        if self._waiting is None:
            super().append_logs(logs)
        else:
            self._waiting += logs

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What is appended meanwhile is written at the end, if nothing is raised.

        Nobody else writes before that: what is read inside still holds then.
        """
        self._kernel_lock.acquire()
        try:
            waiting = self._waiting = []
            try:
                yield
            finally:
                self._waiting = None
            if waiting:
                self.append_logs(waiting)
        finally:
            self._kernel_lock.release()


class Journal(JournalStorage):
    def __init__(self, path: Path, lock: _KernelLock) -> None:
        self.path, self.journal = path, _File(path, lock)
        super().__init__(self.journal)


def open_storage(where: str | Path) -> BaseStorage:
    """Optuna's storage at a database URL (sqlite:///trials.db) or in a journal file.

    Several processes may open one that is not there yet. A last line that a killed process left
    half written in a journal is cut off, since Optuna would glue the next one to it and fail from
    then on.

    Raises:
        ArgumentError: for a URL that cannot be opened.
        StoreError: for a file that cannot be read or written, or is not a journal.
    """
    if "://" in str(where):
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return _open_database(str(where))
        except (ImportError, ValueError, SQLAlchemyError) as error:
            why = str(error).partition("\n")[0]
            if isinstance(error, ImportError) and str(where).startswith("postgresql"):
                why = 'its driver is not installed: pip install "fagen[postgresql]"'
            raise ArgumentError(
                f"cannot open the storage {without_password(where)}: {why}"
            ) from None
    path = Path(where).expanduser().absolute()
    lock = _KernelLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_journal(path)
        lock.acquire()
        lock.release()
        return Journal(path, lock)
    except OSError as error:
        raise StoreError(f"cannot open {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is not a journal of trials: {error}; give another file") from None


def without_password(where: str | Path) -> str:
    """A storage's URL or file as it may be shown."""
    return re.sub(r"(://[^/@]*):[^/@]*@", r"\1:***@", str(where))


def close_storage(storage: BaseStorage) -> None:
    """Closes a database's connections."""
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        storage.engine.dispose()


def _open_database(url: str) -> RDBStorage:
    from sqlalchemy.exc import SQLAlchemyError

    deadline = time.monotonic() + TABLES_SECONDS
    while True:
        try:
            return RDBStorage(url)
        except SQLAlchemyError as error:
            makes_tables_too = "already exists" in str(error) or "duplicate key" in str(error)
            if not makes_tables_too or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _require_journal(path: Path) -> None:
    """Raises ValueError if a file is of another kind."""
    if path.exists():
        with path.open("rb") as file:
            first = file.readline()
        whole = first.endswith(b"\n") and "op_code" in json.loads(first)
        if first and not whole and not (b'{"op_code"').startswith(first[:10]):
            raise ValueError("its first line was not written by Optuna")


def _cut_torn_line(path: Path) -> None:
    """Cuts off what was written after the last line's end."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read() not in (b"", b"\n"):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


# ---- names ----


def default_storage(device: Device) -> Path:
    """The journal file of a card's studies."""
    slug = re.sub(r"\W+", "-", device.key).strip("-")
    return _studies_folder() / f"{slug}.journal"


def last_storage() -> Path:
    """The journal file, of all cards', that was written last.

    Raises:
        ArgumentError: if there is none.
    """
    journals = list(_studies_folder().glob("*.journal"))
    if not journals:
        raise ArgumentError(
            f"{_studies_folder()} holds no studies: `fagen tune` makes some, or name a --storage"
        )
    return max(journals, key=lambda path: path.stat().st_mtime)


def _studies_folder() -> Path:
    from platformdirs import user_state_path

    return user_state_path("fagen", appauthor=False) / "studies"


def study_name(device: Device, problem: Problem, shape: Shape, template: str) -> str:
    """The name of a kept study, for people; `search.study` adds the axes, and maybe a number."""
    version = TEMPLATES[template].AXES_VERSION
    return f"{device.key} {problem} {shape.bucket()} {template} v{version}"
