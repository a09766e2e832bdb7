"""Kernels that crash or hang: which one is to blame, and the list of those never to run again.

A GPU reports a fault late, and what one kernel broke may show in the next. So after a crash or a
hang both are run again, each in a new process: first the kernel before, whose time is withdrawn if
it fails, then the one that failed. What fails twice goes on the list, a JSON file beside the
studies, and later runs reject it unrun.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from fagen.build.compiled import Compiled
from fagen.device import Device
from fagen.errors import StoreError
from fagen.files import locked, replace_file
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem, Shape
from fagen.records.store import digest
from fagen.tuning.events import Notice
from fagen.tuning.outcome import Outcome, Rejected
from fagen.tuning.worker import Worker

_log = logging.getLogger(__name__)


class Blocked(BaseModel):
    """A kernel that failed twice.

    Attributes:
        card: `Device.key`.
        cubin: `store.digest` of what ran.
        bucket: of the lengths that it failed on; "" if it is never to run. A hang says nothing
            about shorter lengths, a crash does.
        kind, reason: how it failed the second time: "crash" or "hang", and one line.
        problem, config: what it was, for people.
        date: UTC day.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    card: str
    cubin: str
    bucket: str
    kind: str
    reason: str
    problem: str
    config: str
    date: date


class Blocklist:
    """The list of one card, in a file that other cards and processes may share.

    A file that is damaged counts as empty and stays as it is.

    Args:
        path: the file, which need not exist.
        card: `Device.key`.
        on_notice: told if the file is damaged, when an entry is first found, and by each `Guard`.
    """

    def __init__(
        self,
        path: Path,
        card: str,
        on_notice: Callable[[Notice], object] = lambda notice: None,
    ) -> None:
        self.path, self.card, self.on_notice = path, card, on_notice
        self._is_known = False  # to the user, that there is such a list
        self._of_card: dict[tuple[str, str], Blocked] = {}
        try:
            entries = _read(path)
        except StoreError as error:
            on_notice(Notice(f"{error}; kernels that crashed before are run again."))
        else:
            self._of_card = {(e.cubin, e.bucket): e for e in entries if e.card == card}

    def find(self, cubin: str, shape: Shape) -> Blocked | None:
        """The entry that keeps a cubin from running on these lengths."""
        of_card = self._of_card
        found = of_card.get((cubin, "")) or of_card.get((cubin, str(shape.bucket())))
        if found is not None and not self._is_known:
            self._is_known = True
            self.on_notice(
                Notice(
                    f"Kernels on the blocklist {self.path} are left out; edit it to try them again."
                )
            )
        return found

    def add(
        self, cubin: str, problem: Problem, config: AnyConfig, shape: Shape, why: Rejected
    ) -> None:
        """Puts a kernel on the list, and the list on disk.

        Raises:
            StoreError: if the file is damaged or cannot be written. This object knows the entry
                all the same.
        """
        entry = Blocked(
            card=self.card,
            cubin=cubin,
            bucket=str(shape.bucket()) if why.kind == "hang" else "",
            kind=why.kind,
            reason=why.reason,
            problem=str(problem),
            config=str(config),
            date=datetime.now(UTC).date(),
        )
        self._of_card[cubin, entry.bucket] = entry
        with locked(self.path) as place:
            others = [e for e in _read(place) if _key(e) != _key(entry)]
            items = [e.model_dump(mode="json") for e in [*others, entry]]
            replace_file(place, json.dumps(items, indent=1) + "\n")


def blocklist_path(storage: str | Path, device: Device) -> Path:
    """The list that goes with a storage of studies: beside its file, if it is one."""
    from fagen.tuning.search.studies import default_storage

    beside = default_storage(device) if "://" in str(storage) else Path(storage).expanduser()
    return beside.with_suffix(".blocklist.json")


def _key(entry: Blocked) -> tuple[str, str, str]:
    return entry.card, entry.cubin, entry.bucket


def _read(path: Path) -> list[Blocked]:
    """The entries of a file, none if there is no file."""
    try:
        return [Blocked.model_validate(item) for item in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read the blocklist {path}: {error.strerror}") from None
    except (ValueError, TypeError, ValidationError):
        raise StoreError(f"{path} is no blocklist of fagen: mend it or remove it") from None


class _Run(NamedTuple):
    """The arguments of `Worker.evaluate`."""

    compiled: Compiled
    problem: Problem
    config: AnyConfig
    shape: Shape


class Guard:
    """Evaluates on a worker, and finds out who is to blame when it is lost."""

    def __init__(self, worker: Worker, blocklist: Blocklist) -> None:
        self._worker, self._blocklist = worker, blocklist
        self._before: tuple[_Run, Outcome] | None = None  # what ran last in this process
        self._withdrawn: list[tuple[_Run, Rejected]] = []

    def evaluate(
        self,
        compiled: Compiled,
        problem: Problem,
        config: AnyConfig,
        shape: Shape,
        *,
        give_up_us: float | None = None,
    ) -> Outcome:
        """As `Worker.evaluate`, but what is on the list is not run, and what fails twice is put
        there.

        A kernel that fails once is rejected too, though it be well the second time.
        """
        blocked = self.why_blocked(compiled, shape)
        if blocked is not None:
            return blocked
        run = _Run(compiled, problem, config, shape)
        outcome = self._worker.evaluate(*run, give_up_us=give_up_us)
        if _is_lost(outcome):
            before, self._before = self._before, None
            if before is not None and before[0].config != config and self._convict(*before):
                outcome = self._worker.evaluate(*run, give_up_us=give_up_us)  # perhaps it was well
        if _is_lost(outcome):
            self._retry(run)
        else:
            self._before = run, outcome
        return outcome

    def why_blocked(self, compiled: Compiled, shape: Shape) -> Rejected | None:
        """The rejection of a kernel that is on the list."""
        entry = self._blocklist.find(digest(compiled.cubin), shape)
        if entry is None:
            return None
        reason = f"on the blocklist since {entry.date}: {entry.kind}: {entry.reason}"
        return Rejected(kind="blocked", reason=reason)

    def withdrawn(self, problem: Problem) -> list[tuple[AnyConfig, Rejected]]:
        """Configs whose earlier outcomes for a problem turned out to be worthless, told once.

        Those for other problems are forgotten: their records are written.
        """
        withdrawn, self._withdrawn = self._withdrawn, []
        return [(run.config, why) for run, why in withdrawn if run.problem == problem]

    def _convict(self, run: _Run, earlier: Outcome) -> bool:
        """Whether a kernel was found bad, or is so now, in a new process."""
        if isinstance(earlier, Rejected):
            return True
        outcome = self._worker.evaluate(*run)
        if not isinstance(outcome, Rejected):
            return False
        why = outcome.model_copy(update={"reason": f"on its second run: {outcome.reason}"})
        self._withdrawn.append((run, why))
        if _is_lost(outcome):
            self._retry(run)
        return True

    def _retry(self, run: _Run) -> None:
        """The second try of a kernel that failed, in a new process."""
        self._worker.close()
        again = self._worker.evaluate(*run)
        if not _is_lost(again):
            self._worker.close()  # it failed once: what it left behind is not trusted
            return
        why = cast(Rejected, again)
        blocklist = self._blocklist
        try:
            blocklist.add(digest(run.compiled.cubin), *run[1:], why)
        except StoreError as error:
            what = f"but {error}"
        else:
            what = f"now on the blocklist {blocklist.path}"
        blocklist.on_notice(Notice(f"{run.config}: {why.kind} twice, {what}."))


def _is_lost(outcome: Outcome) -> bool:
    return isinstance(outcome, Rejected) and outcome.kind in ("crash", "hang")
