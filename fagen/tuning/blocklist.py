"""The list of kernels that crashed or hung twice, which are never to run again.

It is a JSON file beside the studies; `runner` says what goes on it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fagen.device import Device
from fagen.errors import StoreError
from fagen.files import locked, replace_file
from fagen.kernels.template import Config
from fagen.problem import Problem, Shape
from fagen.tuning.events import Notice
from fagen.tuning.outcome import Rejected

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
        on_notice: told if the file is damaged, when an entry is first found, and by each `Runner`.
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
        self, cubin: str, problem: Problem, config: Config, shape: Shape, why: Rejected
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
    from fagen.tuning.search.storage import default_storage

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
        raise StoreError(f"{path} is not a blocklist of fagen: mend it or remove it") from None
