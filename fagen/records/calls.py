"""What a program calls -> a YAML file that says what to tune: `with fagen.record(FILE): ...`.

Calls are counted in memory by problem and exact lengths, under a lock; outside of every block, a
call pays one look at `active`. `fagen tune --from FILE` reads the file.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fagen.errors import StoreError
from fagen.files import locked, replace_file
from fagen.problem import Bucket, Problem, Shape
from fagen.records.store import bucket_order, problem_fields, problem_order
from fagen.records.yaml_file import SCHEMA, WHAT_TO_DO, list_text, read_list
from fagen.validation import one_line

# ---- counting ----

Asked = tuple[Problem, Shape]  # what calls are counted under

active: tuple[Counter[Asked], ...] = ()  # those of the open blocks; replaced, never changed
_lock = threading.Lock()


def count(asked: Asked) -> None:
    """Counts a call in every open block."""
    with _lock:
        for counts in active:
            counts[asked] += 1


@contextmanager
def record(path: str | Path) -> Iterator[None]:
    """Notes which problems the calls inside the block are, for `fagen tune --from`.

    Every call of `fagen.attention` or of a `fagen.Kernel` counts, of any thread of the process,
    once it is launched; the replay of a CUDA graph is no call. One with nothing to compute (a
    length of 0) is left out. Blocks may be nested: a call counts in each.

    Args:
        path: a YAML file, made at once if there is none. At the end of the block, also when an
            exception ends it, the calls are added to what it holds by then. For each problem
            and bucket it keeps how many there were, and the shape that was seen most often.

    Raises:
        StoreError: before the block starts or at its end, if the file does not hold recorded
            calls, or cannot be written. If the block raises, its exception is raised instead,
            with this one as a note.
    """
    global active  # noqa: PLW0603
    path = Path(path).expanduser().absolute()  # the block may change the folder
    save_calls(path, ())  # what cannot be written is known before the work is done
    counts: Counter[Asked] = Counter()
    with _lock:
        active = (*active, counts)
    try:
        yield
    except BaseException as error:
        _close(counts)
        try:
            save_calls(path, _calls(counts))
        except StoreError as lost:
            error.add_note(f"fagen.record: {lost}")
        raise
    _close(counts)
    save_calls(path, _calls(counts))


def _close(counts: Counter[Asked]) -> None:
    """Ends the counting; from now on nothing changes `counts`."""
    global active  # noqa: PLW0603
    with _lock:
        active = tuple(other for other in active if other is not counts)


def _calls(counts: Counter[Asked]) -> Iterator[Calls]:
    """The calls that can be tuned for."""
    for (problem, shape), number in counts.items():
        if shape.flops(problem):
            yield Calls(problem=problem, shape=shape, calls=number, shape_calls=number)


# ---- the file ----


class Calls(BaseModel):
    """How often a program called one problem with shapes of one bucket.

    Attributes:
        problem: the static question.
        shape: the lengths that were seen most often.
        calls: how many calls were of the bucket of `shape`.
        shape_calls: how many of them had exactly these lengths.
    """

    # A field that this version does not know is an error: nothing is left out of a tuning unseen.
    model_config = ConfigDict(frozen=True, extra="forbid")

    problem: Problem
    shape: Shape
    calls: int = Field(ge=1)
    shape_calls: int = Field(ge=1)

    @model_validator(mode="after")
    def _can_be_tuned(self) -> Self:
        if self.shape.flops(self.problem) == 0:
            raise ValueError(f"{self.shape} has nothing to compute: lengths have to be above 0")
        if self.shape_calls > self.calls:
            raise ValueError(f"shape_calls is {self.shape_calls}, more than calls, {self.calls}")
        return self


def load_calls(path: str | Path) -> tuple[Calls, ...]:
    """What `save_calls` wrote, one entry per problem and bucket, in canonical order.

    Raises:
        StoreError: the file is missing, damaged, or not a file of recorded calls, or one of its
            entries cannot be used by this version.
    """
    path = Path(path).expanduser()
    schema, items = read_list(
        path, "calls", kind="recorded calls", writer="`with fagen.record(FILE):`"
    )
    if schema != SCHEMA:
        raise StoreError(
            f"{path}: not a file of recorded calls: its schema is {schema!r}, this fagen reads "
            f"{SCHEMA}. Use a new file"
        )
    entries = []
    for item in items:
        try:
            entries.append(Calls.model_validate(item.content))
        except ValidationError as error:
            reason = one_line(error)
            raise StoreError(f"{path}, line {item.line}: {reason}. {WHAT_TO_DO}") from None
    return _merged(entries)


def save_calls(path: str | Path, calls: Iterable[Calls]) -> None:
    """Add calls to those of a file, which is created if there is none; as safe as `save_records`.

    Raises:
        StoreError: the file is damaged or cannot be written; it is as it was.
    """
    with locked(path) as place:
        old = load_calls(place) if place.exists() else ()
        items = [
            {"problem": problem_fields(entry.problem)} | entry.model_dump(exclude={"problem"})
            for entry in _merged([*old, *calls])
        ]
        replace_file(place, _HEADER + list_text("calls", items))


_HEADER = """\
# What a program called, written by `fagen.record`; `fagen tune --from FILE` tunes it.
# calls: of this problem with lengths like these; shape_calls: with exactly these.
"""


def _merged(entries: Iterable[Calls]) -> tuple[Calls, ...]:
    """One entry per problem and bucket, with the shape that was seen most often."""
    of_bucket: Counter[tuple[Problem, Bucket]] = Counter()
    of_shape: Counter[tuple[Problem, Shape]] = Counter()
    for entry in entries:
        of_bucket[entry.problem, entry.shape.bucket()] += entry.calls
        of_shape[entry.problem, entry.shape] += entry.shape_calls
    merged: dict[tuple[Problem, Bucket], Calls] = {}
    # By falling count, then by lengths, so that a tie does not depend on the order of entries.
    for (problem, shape), seen in sorted(
        of_shape.items(), key=lambda item: (-item[1], str(item[0][1]))
    ):
        key = (problem, shape.bucket())
        if key not in merged:
            merged[key] = Calls(
                problem=problem, shape=shape, calls=of_bucket[key], shape_calls=seen
            )
    ordered = sorted(merged, key=lambda key: (problem_order(key[0]), bucket_order(key[1])))
    return tuple(merged[key] for key in ordered)
