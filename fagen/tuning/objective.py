"""One candidate on the shapes of a bucket -> one number, which a search minimises.

It is the geometric mean of the candidate's times, each over the time of the template's default
that the same worker took at the start. So it has no unit, a shape counts for no more than another,
and two cards (or a warm and a cold one) agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean

from fagen.device import Device
from fagen.kernels.template import Config
from fagen.problem import Problem, Shape
from fagen.tuning import model
from fagen.tuning.outcome import Measured, Outcome, Rejected

LOSER = 1.15  # times the best objective: beyond that it need not be known precisely


def baseline_us(
    outcomes: Mapping[Shape, Outcome],
    shapes: Sequence[Shape],
    problem: Problem,
    default: Config,
    device: Device,
) -> dict[Shape, float]:
    """What the times on each shape are compared with, in microseconds.

    Args:
        outcomes: what became of the template's default; where it has no time, the static model's
            stands in.
    """
    return {
        shape: outcome.time_us
        if isinstance(outcome := outcomes.get(shape), Measured)
        else model.predict(problem, shape, default, device)
        for shape in shapes
    }


def evaluate_shapes(
    shapes: Sequence[Shape],
    baseline: Mapping[Shape, float],
    evaluate: Callable[[Shape, float], Outcome],
    best: float,
) -> Outcome:
    """The outcome of a candidate: its time on the first shape, relative on all that it was run on.

    Args:
        baseline: of `baseline_us`.
        evaluate: runs the candidate on one shape, with the time in microseconds beyond which it
            is a loser.
        best: the best objective so far; a loser is not run on all shapes.
    """
    measured: list[Measured] = []
    for shape in shapes:
        outcome = evaluate(shape, LOSER * best * baseline[shape])
        if isinstance(outcome, Rejected):
            return outcome
        measured.append(outcome)
        ratios = [m.time_us / baseline[s] for m, s in zip(measured, shapes, strict=False)]
        relative = geometric_mean(ratios)
        if relative > LOSER * best:
            break
    return measured[0].model_copy(update={"relative": relative})


def predicted(
    problem: Problem, shapes: Sequence[Shape], default: Config, device: Device
) -> Callable[[Config], float]:
    """The objective as the static model sees it."""
    baseline = [model.predict(problem, shape, default, device) for shape in shapes]

    def predict(config: Config) -> float:
        times = (model.predict(problem, shape, config, device) for shape in shapes)
        return geometric_mean([time / base for time, base in zip(times, baseline, strict=True)])

    return predict
