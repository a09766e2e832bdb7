"""What a program calls -> a YAML file that says what to tune: `with fagen.record(FILE): ...`.

Calls are counted in memory by problem and exact lengths, under a lock; outside of every block, a
call pays one look at `active`. `store` keeps the files, `fagen tune --from FILE` reads them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fagen.errors import StoreError
from fagen.problem import Problem, Shape
from fagen.records.store import Calls, save_calls

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
        StoreError: before the block starts or at its end, if the file is none of recorded
            calls, or cannot be written. An exception of the block comes first: this one then is
            a note of it.
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
