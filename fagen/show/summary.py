"""A kept study -> what follows from it: winner, default, rejections, importance, roofline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fagen.device import Device
from fagen.kernels.registry import TEMPLATES, default_config
from fagen.problem import Bucket, Problem, Shape, standard_shape
from fagen.show.results import TITLES, Cell, Results
from fagen.tuning import model
from fagen.tuning.outcome import Measured, Rejected, Trial
from fagen.tuning.search.read import KeptStudy, subject_of
from fagen.tuning.search.statistics import spearman


@dataclass(frozen=True)
class Summary:
    """A study, and what follows from it.

    Attributes:
        name: the study's name.
        problem, shape, template: what was tuned.
        shape_known: whether the study kept its shape; otherwise it is the middle of the bucket.
        card: what the study says of its device.
        device: that device, or None if fagen does not know its limits.
        trials: the trials in order.
        unreadable: how many trials are of another version of fagen.
    """

    name: str
    problem: Problem
    shape: Shape
    template: str
    shape_known: bool
    card: str
    device: Device | None
    trials: tuple[Trial, ...]
    unreadable: int

    @property
    def title(self) -> str:
        """The study in a few words, for headings and plots."""
        run = re.search(r" #\d+$", self.name)
        return f"{self.problem} {self.shape.bucket()}{run[0] if run else ''}"

    @property
    def slug(self) -> str:
        """Its name as a file name and an anchor."""
        return re.sub(r"\W+", "-", self.name).strip("-")

    @cached_property
    def measured(self) -> list[Trial]:
        """The trials that have a time."""
        return [trial for trial in self.trials if isinstance(trial.outcome, Measured)]

    @cached_property
    def winner(self) -> Trial | None:
        """The trial with the best objective."""
        return min(self.measured, key=lambda trial: trial.objective, default=None)

    @cached_property
    def default(self) -> Trial | None:
        """The trial of the template's default, if it was measured."""
        if self.device is None:
            return None
        config = default_config(self.problem, self.device, self.template)
        return next((trial for trial in self.measured if trial.config == config), None)

    @property
    def marked(self) -> dict[str, Trial]:
        """Default and winner by these words, without what is missing."""
        both = {"default": self.default, "winner": self.winner}
        return {name: trial for name, trial in both.items() if trial is not None}

    @property
    def over_default(self) -> float | None:
        """How many times faster the winner is than the default."""
        if self.winner is None or self.default is None:
            return None
        return self.default.time_us / self.winner.time_us

    @cached_property
    def rejections(self) -> dict[str, Counter[str]]:
        """How often each reason was given, by kind, the most frequent kind first."""
        found: dict[str, Counter[str]] = {}
        for trial in self.trials:
            if isinstance(trial.outcome, Rejected):
                found.setdefault(trial.outcome.kind, Counter())[trial.outcome.reason] += 1
        return dict(sorted(found.items(), key=lambda item: -item[1].total()))

    @cached_property
    def predicted_us(self) -> list[float]:
        """The static model's time of each measured config; empty for an unknown device."""
        if self.device is None:
            return []
        return [
            model.predict(self.problem, self.shape, trial.config, self.device)
            for trial in self.measured
        ]

    @cached_property
    def spearman(self) -> float | None:
        """The rank correlation of predicted and measured times."""
        if not self.predicted_us:
            return None
        return spearman(self.predicted_us, [trial.time_us for trial in self.measured])

    @cached_property
    def importance(self) -> dict[str, float]:
        """`importance` of the axes that the measured configs differ in, the largest first."""
        return importance(self.measured)

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte of device memory that has to be moved."""
        return _intensity(self.shape, self.problem)

    def tflops(self, time_us: float) -> float:
        """The speed of a call that takes `time_us` microseconds, in 1e12 operations per second."""
        return self.shape.tflops(self.problem, time_us)


def _intensity(shape: Shape, problem: Problem) -> float:
    return shape.flops(problem) / max(shape.bytes(problem), 1)


def summarise(study: KeptStudy) -> Summary | None:
    """What a kept study is about, or None if `fagen tune` did not make it."""
    subject = subject_of(study)
    if subject is None or subject.template not in TEMPLATES:
        return None
    return Summary(
        name=study.name,
        problem=subject.problem,
        shape=subject.shape or shape_of(subject.bucket, subject.problem),
        template=subject.template,
        shape_known=subject.shape is not None,
        card=subject.card,
        device=subject.device,
        trials=study.trials,
        unreadable=study.unreadable,
    )


def shape_of(bucket: Bucket, problem: Problem) -> Shape:
    """A shape of a bucket: the standard one if it fits, otherwise one of the same size."""
    standard = standard_shape(problem.head_dim, bucket.seqlen_q, bucket.seqlen_k)
    if standard.bucket() == bucket:
        return standard
    return Shape(
        batch=bucket.batch_heads,
        seqlen_q=bucket.seqlen_q,
        seqlen_k=bucket.seqlen_k,
        heads_q=bucket.group,
        heads_kv=1,
    )


# ---- importance ----


def importance(measured: Sequence[Trial]) -> dict[str, float]:
    """The share of the variance of log time that the means over each axis's values explain.

    It is epsilon squared: eta squared less what as many values would explain by chance, never
    below 0. The axes are not sampled independently, so the shares may overlap, or miss what only
    two axes together explain.
    """
    times = np.log([trial.time_us for trial in measured])
    total = float(((times - times.mean()) ** 2).sum()) if len(times) else 0.0
    shares = {}
    for axis, values in varied_axes(measured).items():
        places = np.array([values.index(getattr(trial.config, axis)) for trial in measured])
        groups = [times[places == place] for place in range(len(values))]
        within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
        free = len(times) - len(groups)
        if total > 0 and free > 0:
            by_chance = (len(groups) - 1) * within / free
            shares[axis] = max(total - within - by_chance, 0.0) / total
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def varied_axes(measured: Sequence[Trial]) -> dict[str, list[Any]]:
    """The axes in which the configs differ, each with its values in order."""
    if not measured:
        return {}
    values = {
        axis: sorted({getattr(trial.config, axis) for trial in measured})
        for axis in measured[0].config.axis_names()
    }
    return {axis: found for axis, found in values.items() if len(found) > 1}


# ---- the roofline ----


@dataclass(frozen=True)
class RooflinePoint:
    """A contestant on the roofline.

    Attributes:
        name: whose time it is.
        intensity: floating-point operations per byte.
        tflops: its speed, in 1e12 operations per second.
    """

    name: str
    intensity: float
    tflops: float


def tensor_ceiling(device: Device, template: str) -> float:
    """TFLOP/s of the tensor cores with the instruction of a template, at the device's clock."""
    per_clock = TEMPLATES[template].tensor_flops(device.arch)
    return per_clock * device.sm_count * device.clock_mhz * 1e-6


def exp2_ceiling(device: Device, head_dim: int) -> float:
    """TFLOP/s at which the special-function units take one exponential for every score."""
    scores_per_us = device.arch.exp2_rate * device.sm_count * device.clock_mhz
    return 4 * head_dim * scores_per_us * 1e-6


def roofline_points(summary: Summary, bench: Results | None) -> list[RooflinePoint]:
    """Default, winner and peers on a study's problem and bucket."""
    found = [
        RooflinePoint(name, summary.intensity, summary.tflops(trial.time_us))
        for name, trial in summary.marked.items()
    ]
    for cell in bench.cells if bench else ():
        if bench and bench.device.startswith(summary.card) and _same_class(cell, summary):
            intensity = _intensity(cell.shape, cell.problem)
            found += [
                RooflinePoint(TITLES[name], intensity, cell.tflops[name])
                for name in bench.peers
                if name in cell.tflops
            ]
    return found


def _same_class(cell: Cell, summary: Summary) -> bool:
    """Whether a benchmark's cell is of a study's problem and bucket, whatever the alignment."""
    aligned = summary.problem.model_copy(update={"alignment": cell.problem.alignment})
    return cell.problem == aligned and cell.shape.bucket() == summary.shape.bucket()
