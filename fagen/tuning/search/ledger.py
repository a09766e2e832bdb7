"""A kept study that several processes write: who tries which config, and what came of it.

A config is claimed before it is evaluated, by a running trial; what came of it finishes that
trial, a rejection as a failed one with its kind and reason. Kill -9 leaves claims behind, which no
reader counts.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from fagen.errors import ArgumentError, WriteError
from fagen.kernels.template import Config
from fagen.tuning.outcome import Measured, Outcome
from fagen.tuning.search.read import CLAIM, complete_notes, outcome_of
from fagen.tuning.search.storage import Journal, quiet

CLAIM_SECONDS = 300.0  # after which a claim counts no more: a process of another host died


class Ledger:
    """This process's part in a kept study.

    A claim is a running trial with the config's axes. The storage numbers trials one after the
    other, and of the claims of a config the lowest number counts. One whose process has died, or
    that is `CLAIM_SECONDS` old where that cannot be told, is given up by whoever sees it.

    Args:
        name: of the study. Without `resume`, a new one gets a number.
        storage: of `open_storage`.
        distributions: of the axes.

    Attributes:
        name: the study's name.
        claimed: the axes of what other processes had claimed at the last `new_outcomes`.
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
        self._mine: dict[Config, int] = {}  # claims, by the ids of their trials
        self._running: dict[int, float] = {}  # when each claim was seen first, by its number
        self._read = 0  # trials with a lower number are finished, or in `_running`
        with self._writing():
            self.name = _next_name(name, set(optuna.get_all_study_names(storage)), resume)
            with quiet():
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
        kept = complete_notes(self.name, self._study.user_attrs)
        has_times = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        for key, value in json.loads(json.dumps(dict(about))).items():
            if has_times and kept.get(key) != value:
                raise ArgumentError(
                    f"the study {self.name!r} cannot go on: its {key} was {kept.get(key)}, and is "
                    f"{value} now; leave out --resume, or give the card and the --effort of before"
                )
        self.note(about)

    def new_outcomes(self) -> list[tuple[dict[str, Any], Outcome]]:
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
                    found.append((trial.params, outcome_of(trial)))
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

    def claim(self, config: Config) -> bool:
        """Whether this process is to evaluate a config, since no other does or did.

        `new_outcomes` has given up the claims of the dead before.
        """
        claim = self._trial(config, TrialState.RUNNING, {"kind": CLAIM, "owner": self._owner})
        with self._writing():
            trial_id = self._storage.create_new_trial(self._id, template_trial=claim)
            number = self._storage.get_trial_number_from_id(trial_id)
            for rival in self._study.get_trials(deepcopy=False)[:number]:
                counts = rival.state == TrialState.RUNNING or _is_outcome(rival)
                if counts and rival.params == claim.params:
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

    def keep(self, config: Config, outcome: Outcome) -> None:
        """Finishes the trial of a claimed config, and adds that of another as a whole."""
        measured = isinstance(outcome, Measured)
        state = TrialState.COMPLETE if measured else TrialState.FAIL
        value = outcome.objective if isinstance(outcome, Measured) else None
        attributes = ({"kind": "measured"} if measured else {}) | outcome.model_dump()
        with self._writing():
            if config in self._mine and attributes["kind"] != "illegal":
                self._finish(self._mine.pop(config), state, attributes, value)
                return
            self._study.add_trial(self._trial(config, state, attributes, value))

    def _trial(
        self,
        config: Config,
        state: TrialState,
        attributes: Mapping[str, Any],
        value: float | None = None,
    ) -> FrozenTrial:
        return optuna.trial.create_trial(
            state=state,
            value=value,
            params=config.axes(),
            distributions=self._distributions,
            user_attrs={"config": config.model_dump(), **attributes},
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
        once = storage.journal.at_once() if isinstance(storage, Journal) else nullcontext()
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
            where = storage.path if isinstance(storage, Journal) else "the database"
            why = getattr(error, "strerror", None) or str(error.__cause__ or error)
            raise WriteError(
                f"cannot keep trials in {where}: {why.splitlines()[0]}. Those before are kept: "
                "mend it, for example by freeing the disk, and go on with --resume"
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
