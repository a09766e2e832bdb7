"""Kept studies: Optuna's storages, and how a trial of fagen is written to one and read back.

Any number of processes, on any hosts, write one study. A config is claimed before it is evaluated,
by a running trial; what came of it finishes that trial, a rejection as a failed one with its kind
and reason. Kill -9 leaves no half trials behind but claims, which no reader counts, and
`optuna.load_study` or optuna-dashboard read it like any other study.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from fagen.device import Device
from fagen.errors import ArgumentError, StoreError, WriteError
from fagen.kernels.registry import TEMPLATES, AnyConfig, parse_config
from fagen.problem import Problem, Shape
from fagen.tuning.outcome import Measured, Outcome, Rejected, Tried

LOCK_SECONDS = 60.0
TABLES_SECONDS = 20.0  # for another process to make a database's tables
CLAIM_SECONDS = 300.0  # after which a claim counts no more: a process of another host died
CLAIM = "claim"  # the kind of a trial that is no more than that
OFFER = "compiled"  # that of a waiting trial: to be measured by whoever can

optuna.logging.set_verbosity(optuna.logging.WARNING)


# ---- the storage ----


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


class _Journal(JournalFileBackend):
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


class _JournalStorage(JournalStorage):
    def __init__(self, path: Path, lock: _KernelLock) -> None:
        self.path, self.journal = path, _Journal(path, lock)
        super().__init__(self.journal)


def open_storage(where: str | Path) -> BaseStorage:
    """Optuna's storage at a database URL (sqlite:///trials.db) or in a journal file.

    Several processes may open one that is not there yet. A last line that a killed process left
    half written in a journal is cut off, since Optuna would glue the next one to it and fail from
    then on.

    Raises:
        ArgumentError: for a URL that cannot be opened.
        StoreError: for a file that cannot be read or written, or is no journal.
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
        return _JournalStorage(path, lock)
    except OSError as error:
        raise StoreError(f"cannot open {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is no journal of trials: {error}; give another file") from None


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
            raise ValueError("its first line is none of Optuna's")


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


# What `study_name` writes, and the rest that `search.Study` adds.
STUDY_NAME = re.compile(
    r"(?P<card>.+ \(\d+ SMs\)) "
    r"(?P<op>\w+)_(?P<dtype>[a-z]+\d+)_d(?P<head_dim>\d+)_(?P<mask>causal|full)(?P<narrow>_narrow)?"
    r" q(?P<seqlen_q>\d+)_k(?P<seqlen_k>\d+)_bh(?P<batch_heads>\d+)_g(?P<group>\d+)"
    r" (?P<template>\w+) v\d+ axes-\w+(?: #(?P<run>\d+))?"
)


def study_name(device: Device, problem: Problem, shape: Shape, template: str) -> str:
    """The name of a kept study, without what `search.Study` adds; `STUDY_NAME` takes it apart."""
    version = TEMPLATES[template].AXES_VERSION
    return f"{device.key} {problem} {shape.bucket()} {template} v{version}"


# ---- writing, in many processes ----


class Ledger:
    """A kept study that several processes write: who tries which config, and what came of it.

    A claim is a running trial with the config's axes. The storage numbers trials one after the
    other, and of the claims of a config the lowest number counts. One whose process has died, or
    that is `CLAIM_SECONDS` old where that cannot be told, is given up by whoever sees it.

    Args:
        name: of the study. Without `resume`, a new one gets a number.
        storage: of `open_storage`.
        distributions: of the axes.

    Attributes:
        name: the study's name.
        claimed: the axes of what other processes have claimed, as of the last `news`.
        offers: the axes of what is compiled, and has no outcome yet, by `str(config)`.
    """

    def __init__(
        self,
        name: str,
        storage: BaseStorage,
        resume: bool,
        distributions: Mapping[str, BaseDistribution],
    ) -> None:
        self._storage = storage
        self._distributions = dict(distributions)
        self._owner = _owner()
        self.claimed: list[dict[str, Any]] = []
        self.offers: dict[str, dict[str, Any]] = {}
        self._mine: dict[AnyConfig, int] = {}  # claims, by the ids of their trials
        self._running: dict[int, float] = {}  # when each claim was seen first, by its number
        self._read = 0  # trials with a lower number are finished, or in `_running`
        with self._writing():
            self.name = _next_name(name, set(optuna.get_all_study_names(storage)), resume)
            self._study = optuna.create_study(
                study_name=self.name, storage=storage, load_if_exists=True
            )
            self._id = storage.get_study_id_from_name(self.name)

    def note(self, about: Mapping[str, Any]) -> None:
        """Keeps JSON values beside the trials."""
        with self._writing():
            for key, value in about.items():
                self._study.set_user_attr(key, value)

    def require(self, about: Mapping[str, Any]) -> None:
        """Keeps JSON values beside the trials, whose times are about the same if there are any.

        Raises:
            ArgumentError: if they are not.
        """
        kept = self._study.user_attrs
        has_times = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        for key, value in json.loads(json.dumps(dict(about))).items():
            if has_times and kept.get(key) != value:
                raise ArgumentError(
                    f"the study {self.name!r} cannot go on: its {key} was {kept.get(key)}, and is "
                    f"{value} now; leave out --resume, or give the card and the --effort of before"
                )
        self.note(about)

    def news(self) -> list[tuple[dict[str, Any], Outcome]]:
        """The axes and the outcome of each trial that was finished since the last call."""
        found = []
        running: dict[int, float] = {}
        claimed = []
        with self._writing():
            trials = self._study.get_trials(deepcopy=False)
            for number in [*self._running, *range(self._read, len(trials))]:
                trial = trials[number]
                owner = trial.user_attrs.get("owner", "")
                if _is_outcome(trial):
                    found.append((trial.params, _outcome(trial)))
                    self.offers.pop(trial.user_attrs["config"], None)
                elif trial.user_attrs.get("kind") == OFFER:
                    self.offers[trial.user_attrs["config"]] = trial.params
                elif trial.state == TrialState.RUNNING:
                    seen = self._running.get(number, time.monotonic())
                    if _is_dead(owner, self._owner) or time.monotonic() - seen > CLAIM_SECONDS:
                        self._give_up(
                            self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
                        )
                        continue
                    running[number] = seen
                    if owner != self._owner:
                        claimed.append(trial.params)
        self._running, self._read, self.claimed = running, len(trials), claimed
        return found

    def claim(self, config: AnyConfig) -> bool:
        """Whether this process is to evaluate a config, since no other does or did.

        `news` has given up the claims of the dead before.
        """
        claim = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=config.axes(),
            distributions=self._distributions,
            user_attrs={"config": str(config), "kind": CLAIM, "owner": self._owner},
        )
        with self._writing():
            trial_id = self._storage.create_new_trial(self._id, template_trial=claim)
            number = self._storage.get_trial_number_from_id(trial_id)
            for rival in self._study.get_trials(deepcopy=False)[:number]:
                counts = rival.state == TrialState.RUNNING or _is_outcome(rival)
                if counts and rival.user_attrs.get("config") == str(config):
                    self._give_up(trial_id)
                    return False
        self._mine[config] = trial_id
        return True

    def release(self) -> None:
        """Gives up what was claimed and not kept."""
        with suppress(WriteError), self._writing():  # else others do, when this process has ended
            for trial_id in self._mine.values():
                self._give_up(trial_id)
        self._mine.clear()

    def offer(self, config: AnyConfig) -> None:
        """Gives up a claimed config for those that can measure it; it is compiled."""
        offer = optuna.trial.create_trial(
            state=TrialState.WAITING,
            params=config.axes(),
            distributions=self._distributions,
            user_attrs={"config": str(config), "kind": OFFER},
        )
        with self._writing():
            self._study.add_trial(offer)
            if config in self._mine:
                self._give_up(self._mine.pop(config))

    def keep(self, config: AnyConfig, outcome: Outcome) -> None:
        """Finishes the trial of a claimed config, and adds that of another as a whole."""
        measured = isinstance(outcome, Measured)
        state = TrialState.COMPLETE if measured else TrialState.FAIL
        value = outcome.objective if isinstance(outcome, Measured) else None
        attributes = ({"kind": "measured"} if measured else {}) | outcome.model_dump()
        with self._writing():
            if config in self._mine and attributes["kind"] != "illegal":
                self._finish(self._mine.pop(config), state, attributes, value)
                return
            self._study.add_trial(
                optuna.trial.create_trial(
                    state=state,
                    value=value,
                    params=config.axes(),
                    distributions=self._distributions,
                    user_attrs={"config": str(config)} | attributes,
                )
            )

    def _give_up(self, trial_id: int) -> None:
        # Its process may have died while it kept the outcome.
        self._finish(trial_id, TrialState.FAIL, {"kind": CLAIM})

    def _finish(
        self,
        trial_id: int,
        state: TrialState,
        attributes: Mapping[str, Any],
        value: float | None = None,
    ) -> None:
        """Ends a running trial; one that another process has given up stays so."""
        storage = self._storage
        once = storage.journal.at_once() if isinstance(storage, _JournalStorage) else nullcontext()
        with suppress(UpdateFinishedTrialError), once:
            if storage.get_trial(trial_id).state.is_finished():
                return
            for key, attribute in attributes.items():
                storage.set_trial_user_attr(trial_id, key, attribute)
            storage.set_trial_state_values(trial_id, state, None if value is None else [value])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What the storage raises becomes a WriteError in one line."""
        try:
            yield
        except (OSError, StorageInternalError) as error:
            storage = self._storage
            where = storage.path if isinstance(storage, _JournalStorage) else "the database"
            why = getattr(error, "strerror", None) or str(error.__cause__ or error)
            raise WriteError(
                f"cannot keep trials in {where}: {why.splitlines()[0]}. Those before are kept: "
                "mend it, as by freeing the disk, and go on with --resume"
            ) from None


def _next_name(name: str, taken: set[str], resume: bool) -> str:
    """The last study of that name, to go on with, or a free name for a new one."""
    number = 1
    while f"{name} #{number + 1}" in taken:
        number += 1
    if name in taken and not resume:
        number += 1
    return f"{name} #{number}" if number > 1 else name


_ledgers = itertools.count()


def _owner() -> str:
    """A new ledger of this process, for `_is_dead`."""
    pid = os.getpid()
    return f"{_machine()} {pid} {_started(pid)} {next(_ledgers)}"


def _is_dead(owner: str, here: str) -> bool:
    """Whether no claim of `owner` will be kept any more, as the ledger `here` can tell."""
    if owner.count(" ") != 3:
        return True
    machine, pid, started, _ = owner.split(" ")
    if machine != _machine():
        return False
    if pid == here.split(" ")[1]:  # what came before in this process
        return owner != here
    return _started(int(pid)) != started


@cache
def _machine() -> str:
    """Where a process id means the same: this host since its boot, and its set of processes."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return "/".join(parts)


def _started(pid: int) -> str:
    """When a process started, in ticks since the boot; "-" if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "-"
    return "-" if fields[0] in "ZX" else fields[19]


def _is_outcome(trial: FrozenTrial) -> bool:
    """Whether a trial says what became of its config."""
    no_outcome = (CLAIM, "illegal")
    return trial.state.is_finished() and trial.user_attrs.get("kind") not in no_outcome


def _outcome(trial: FrozenTrial) -> Outcome:
    """What a finished trial of a `Ledger` says."""
    fields = {k: v for k, v in trial.user_attrs.items() if k not in ("config", "owner")}
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
        wanted: names; one that no study has stands for all that contain it. Empty: every study.

    Raises:
        ArgumentError: where there is no storage, or no such study.
        StoreError: as `open_storage`, or if the database goes away.
    """
    file, shown = str(where), without_password(where)
    if file.startswith("sqlite:///"):  # which would be made
        file = file.removeprefix("sqlite:///").partition("?")[0]
    if "://" not in file and not Path(file).expanduser().is_file():
        raise ArgumentError(f"{shown}: no such storage; `fagen tune --storage` writes one")
    storage = open_storage(where)
    try:
        names = optuna.get_all_study_names(storage)
        chosen = set() if wanted else set(names)
        for part in wanted:
            found = {part} & set(names) or {name for name in names if part in name}
            if not found:
                raise ArgumentError(
                    f"{shown} has no study {part!r}: it has {', '.join(map(repr, names)) or 'none'}"
                )
            chosen |= found
        return [_read_study(name, storage) for name in names if name in chosen]
    except StorageInternalError as error:
        why = str(error.__cause__ or error).splitlines()[0]
        raise StoreError(f"cannot read the studies of the database: {why}") from None
    finally:
        close_storage(storage)


def _read_study(name: str, storage: BaseStorage) -> KeptStudy:
    study = optuna.load_study(study_name=name, storage=storage)
    tried = [
        _read_trial(trial)
        for trial in study.get_trials(deepcopy=False)
        if trial.state.is_finished() and trial.user_attrs.get("kind") != CLAIM
    ]
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
