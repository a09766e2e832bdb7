"""Tasks: which problems `fagen tune` is asked to answer, and for which shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fagen.errors import ArgumentError
from fagen.problem import DtypeName, Problem, Shape, standard_shape
from fagen.records.calls import Calls, load_calls
from fagen.tuning.options import Effort

# The standard list, common ones first.
STANDARD_DTYPES: tuple[DtypeName, ...] = ("bf16", "fp16")
STANDARD_HEAD_DIMS = (128, 64, 256, 96, 192)
STANDARD_CAUSAL = (True, False)
STANDARD_SEQLENS = (512, 2048, 8192)


@dataclass(frozen=True)
class Task:
    """A problem, and the shapes that it is tuned for, one for each bucket."""

    problem: Problem
    shapes: tuple[Shape, ...]


def timed_shapes(shape: Shape, effort: Effort) -> tuple[Shape, ...]:
    """The shapes that stand for a bucket, the one that its record names first."""
    return (shape, *ragged_shapes(shape)) if effort == "full" else (shape,)


def ragged_shapes(shape: Shape) -> tuple[Shape, ...]:
    """The ragged shape that a bucket is tuned on beside the usual one, if it has one.

    Its lengths are odd, so no multiples of any tile, and about four fifths of the given ones (or
    six fifths where the bucket ends before); the batch grows as they shrink.
    """
    for factor in (0.8, 1.2):
        lengths = {
            name: round(factor * length) // 2 * 2 + 1
            for name in ("seqlen_q", "seqlen_k")
            if (length := getattr(shape, name)) > 2
        }
        for batch in (round(shape.batch / factor), shape.batch) if lengths else ():
            ragged = shape.model_copy(update={**lengths, "batch": batch})
            if ragged.bucket() == shape.bucket():
                return (ragged,)
    return ()


def standard_tasks(
    *,
    dtypes: Sequence[DtypeName] = STANDARD_DTYPES,
    head_dims: Sequence[int] = STANDARD_HEAD_DIMS,
    causal: Sequence[bool] = STANDARD_CAUSAL,
    seqlens: Sequence[int | tuple[int, int]] = STANDARD_SEQLENS,
    batch: int | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
) -> list[Task]:
    """The problems of these values; what is left out is the standard list.

    Args:
        seqlens: lengths of queries and keys alike, or a pair for both.
        batch, heads, heads_kv: those of `standard_shape` if None.
    """
    lengths = [(each, each) if isinstance(each, int) else each for each in seqlens]
    tasks = []
    for dtype, head_dim, mask in itertools.product(dtypes, head_dims, causal):
        problem = Problem(dtype=dtype, head_dim=head_dim, causal=mask)
        shapes = [
            standard_shape(
                head_dim, seqlen_q, seqlen_k, batch=batch, heads=heads, heads_kv=heads_kv
            )
            for seqlen_q, seqlen_k in lengths
        ]
        one_a_bucket = {shape.bucket(): shape for shape in shapes}
        tasks.append(Task(problem, tuple(one_a_bucket.values())))
    return tasks


def tasks_from(path: str | Path) -> list[Task]:
    """The problems that a program called, as `fagen.record` wrote them; the most called first.

    Of each bucket of shapes, the task has the shape that was seen most often.

    Raises:
        StoreError: if the file cannot be read, or is no file of recorded calls.
        ArgumentError: if it holds no call.
    """
    by_problem: dict[Problem, list[Calls]] = {}
    for entry in sorted(load_calls(path), key=lambda entry: -entry.calls):
        by_problem.setdefault(entry.problem, []).append(entry)
    if not by_problem:
        raise ArgumentError(
            f"{path} holds no calls: call fagen.attention inside `with fagen.record(...):`"
        )
    ranked = sorted(by_problem.items(), key=lambda item: -sum(entry.calls for entry in item[1]))
    return [Task(problem, tuple(entry.shape for entry in calls)) for problem, calls in ranked]
