"""Kept studies: Optuna's storages, and how a trial of fagen is written to one and read back.

A trial is written as one whole, a rejection as a failed trial with its kind and reason: kill -9
leaves no half trials behind, and `optuna.load_study` or optuna-dashboard read it like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from fagen.config import TEMPLATES, AnyConfig, parse_config
from fagen.device import Device
from fagen.errors import ArgumentError, StoreError
from fagen.outcome import Measured, Outcome, Rejected, Tried
from fagen.problem import Problem, Shape

LOCK_SECONDS = 60.0

optuna.logging.set_verbosity(optuna.logging.WARNING)


# ---- the storage ----


class _KernelLock:
    """The journal's lock by flock: the kernel frees it when its holder dies, however it dies.

    Optuna's own locks are files that outlive a killed process.
    """

    def __init__(self, path: Path) -> None:
        from filelock import FileLock

        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS)

    def acquire(self) -> bool:
        self._lock.acquire()
        return True

    def release(self) -> None:
        self._lock.release()


def open_storage(where: str | Path) -> BaseStorage:
    """Optuna's storage at a database URL (sqlite:///trials.db) or in a journal file.

    A last line that a killed process left half written is cut off, since Optuna would glue the
    next one to it and fail from then on.

    Raises:
        ArgumentError: for a URL that cannot be opened.
        StoreError: for a file that cannot be read or written, or is no journal.
    """
    if "://" in str(where):
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return RDBStorage(str(where))
        except (ImportError, ValueError, SQLAlchemyError) as error:
            first_line = str(error).partition("\n")[0]
            raise ArgumentError(f"cannot open the storage {where}: {first_line}") from None
    path = Path(where).expanduser().absolute()
    lock = _KernelLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        try:
            _mend(path)
        finally:
            lock.release()
        # Duck-typed: the base class of Optuna's locks is not public.
        backend = JournalFileBackend(str(path), lock_obj=lock)  # type: ignore[arg-type]
        return JournalStorage(backend)
    except OSError as error:
        raise StoreError(f"cannot open {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is no journal of trials: {error}; give another file") from None


def _mend(path: Path) -> None:
    """Cuts a torn last line off a journal.

    Raises:
        ValueError: if it is another kind of file, which stays as it is.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        text = file.read()
        whole = text.rfind(b"\n") + 1
        first, newline, _ = text.partition(b"\n")
        if newline and "op_code" not in json.loads(first):
            raise ValueError("its first line is none of Optuna's")
        if whole != len(text):
            file.truncate(whole)


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
    """The name of a kept study, without what `search.Study` adds; report.py takes it apart."""
    version = TEMPLATES[template].axes_version
    return f"{device.key} {problem} {shape.bucket()} {template} v{version}"


# ---- writing ----


def keep_study(
    name: str, storage: BaseStorage | None, resume: bool
) -> tuple[str, optuna.Study | None]:
    """The kept study: the last one of that name to go on with, or a new one under a free name."""
    if storage is None:
        return name, None
    taken = set(optuna.get_all_study_names(storage))
    number = 1
    while f"{name} #{number + 1}" in taken:
        number += 1
    last = f"{name} #{number}" if number > 1 else name
    if name in taken and not resume:
        last = f"{name} #{number + 1}"
    return last, optuna.create_study(study_name=last, storage=storage, load_if_exists=True)


def keep_trial(
    study: optuna.Study,
    config: AnyConfig,
    distributions: dict[str, BaseDistribution],
    outcome: Outcome,
) -> None:
    """Adds a finished trial."""
    measured = isinstance(outcome, Measured)
    kind = {"kind": "measured"} if measured else {}
    study.add_trial(
        optuna.trial.create_trial(
            state=TrialState.COMPLETE if measured else TrialState.FAIL,
            value=outcome.time_us if isinstance(outcome, Measured) else None,
            params=config.axes(),
            distributions=distributions,
            user_attrs={"config": str(config)} | kind | outcome.model_dump(),
        )
    )


def kept_outcomes(study: optuna.Study) -> Iterator[tuple[dict[str, Any], Outcome]]:
    """The axes and the outcome of each trial, but for the sampler's asks that nothing came of."""
    for trial in study.get_trials(deepcopy=False):
        if trial.user_attrs.get("kind") != "illegal":
            yield trial.params, _outcome(trial)


def _outcome(trial: FrozenTrial) -> Outcome:
    """What `Study` kept in a trial."""
    fields = {key: value for key, value in trial.user_attrs.items() if key != "config"}
    if trial.state == TrialState.COMPLETE:
        return Measured(**{key: value for key, value in fields.items() if key != "kind"})
    return Rejected(**fields)


# ---- reading what was kept ----


@dataclass(frozen=True)
class KeptStudy:
    """A study as its storage holds it.

    Attributes:
        name: that of the study.
        about: what was kept beside the trials.
        tried: its trials in order, the sampler's asks for illegal configs among them, but no time
            that was withdrawn.
        unreadable: trials that are none of this version's.
    """

    name: str
    about: Mapping[str, Any]
    tried: tuple[Tried, ...]
    unreadable: int


def read_studies(where: str | Path, wanted: Sequence[str] = ()) -> list[KeptStudy]:
    """The studies of a storage, in the order that they were started.

    Args:
        where: as for `open_storage`, but it has to exist.
        wanted: names; one that no study has stands for all that contain it. None: every study.

    Raises:
        ArgumentError: where there is no storage, or no such study.
        StoreError: as `open_storage`.
    """
    file = str(where)
    if file.startswith("sqlite:///"):  # which would be made
        file = file.removeprefix("sqlite:///").partition("?")[0]
    if "://" not in file and not Path(file).expanduser().is_file():
        raise ArgumentError(f"{where}: no such storage; `fagen tune --storage` writes one")
    storage = open_storage(where)
    names = optuna.get_all_study_names(storage)
    chosen = set() if wanted else set(names)
    for part in wanted:
        found = {part} & set(names) or {name for name in names if part in name}
        if not found:
            raise ArgumentError(
                f"{where} has no study {part!r}: it has {', '.join(map(repr, names)) or 'none'}"
            )
        chosen |= found
    return [_read_study(name, storage) for name in names if name in chosen]


def _read_study(name: str, storage: BaseStorage) -> KeptStudy:
    study = optuna.load_study(study_name=name, storage=storage)
    tried = [_read_trial(trial) for trial in study.get_trials(deepcopy=False)]
    readable = [each for each in tried if each is not None]
    unreadable = len(tried) - len(readable)
    # A time may have been withdrawn later.
    rejected = {each.config: i for i, each in enumerate(readable) if _is_verdict(each.outcome)}
    standing = tuple(
        each
        for i, each in enumerate(readable)
        if isinstance(each.outcome, Rejected) or rejected.get(each.config, -1) < i
    )
    return KeptStudy(name, study.user_attrs, standing, unreadable)


def _is_verdict(outcome: Outcome) -> bool:
    """Whether it is a rejection, and not of an ask that nothing came of."""
    return isinstance(outcome, Rejected) and outcome.kind != "illegal"


def _read_trial(trial: FrozenTrial) -> Tried | None:
    """What a trial tells, or None if this version's `Study` did not keep it."""
    template = str(trial.user_attrs.get("config")).partition(" ")[0]
    try:
        config = parse_config({"template": template, **trial.params})
        return Tried(config, _outcome(trial), trial.datetime_complete)
    except (ArgumentError, ValidationError):
        return None
