"""Kept studies -> a page that shows them: what was tried, what won, and what made the difference.

`report` reads the studies that `fagen tune` keeps and writes one self-contained HTML file, with
its plots beside it as PNG files. The numbers are computed here, the drawing is in plots.py.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fagen.device import Device
from fagen.errors import ArgumentError, MissingDependencyError
from fagen.files import require_folder, write_files
from fagen.kernels.config import TEMPLATES
from fagen.kernels.space import default_config
from fagen.problem import Bucket, Problem, Shape, standard_shape
from fagen.tuning import model
from fagen.tuning.outcome import Measured, Rejected, Trial
from fagen.tuning.search.read import KeptStudy, read_studies, subject_of
from fagen.tuning.search.statistics import spearman
from fagen.tuning.search.storage import without_password

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fagen.show.results import Cell, Results

PAGE = "report.html"
EXAMPLES = 3  # reasons that are shown for each kind of rejection


# ---- one study ----


@dataclass(frozen=True)
class Summary:
    """A study, and what follows from it.

    Attributes:
        name: the study's.
        problem, shape, template: what was tuned.
        shape_known: whether the shape was kept; it is the bucket's middle otherwise.
        card: what the study says of its device.
        device: that device, or None if fagen does not know its limits.
        tried: the trials in order.
        unreadable: trials of another version of fagen.
    """

    name: str
    problem: Problem
    shape: Shape
    template: str
    shape_known: bool
    card: str
    device: Device | None
    tried: tuple[Trial, ...]
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
        return [tried for tried in self.tried if isinstance(tried.outcome, Measured)]

    @cached_property
    def winner(self) -> Trial | None:
        """The trial with the best objective."""
        return min(self.measured, key=lambda tried: tried.objective, default=None)

    @cached_property
    def default(self) -> Trial | None:
        """The trial of the template's default, if it was measured."""
        if self.device is None:
            return None
        config = default_config(self.problem, self.device, self.template)
        return next((tried for tried in self.measured if tried.config == config), None)

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
        for tried in self.tried:
            if isinstance(tried.outcome, Rejected):
                found.setdefault(tried.outcome.kind, Counter())[tried.outcome.reason] += 1
        return dict(sorted(found.items(), key=lambda item: -item[1].total()))

    @cached_property
    def predicted_us(self) -> list[float]:
        """The static model's time of each measured config; empty for an unknown device."""
        if self.device is None:
            return []
        return [
            model.predict(self.problem, self.shape, tried.config, self.device)
            for tried in self.measured
        ]

    @cached_property
    def spearman(self) -> float | None:
        """The rank correlation of predicted and measured times."""
        if not self.predicted_us:
            return None
        return spearman(self.predicted_us, [tried.time_us for tried in self.measured])

    @cached_property
    def importance(self) -> dict[str, float]:
        """`importance` of the axes that the measured configs differ in, the largest first."""
        return importance(self.measured)

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte of device memory that has to be moved."""
        return self.shape.flops(self.problem) / max(self.shape.bytes(self.problem), 1)

    def tflops(self, time_us: float) -> float:
        """The speed of a call, in 1e12 operations per second."""
        return self.shape.tflops(self.problem, time_us)


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
        tried=study.trials,
        unreadable=study.unreadable,
    )


def shape_of(bucket: Bucket, problem: Problem) -> Shape:
    """A shape of a bucket: the standard one where it fits, else one of the same size."""
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


# ---- statistics ----


def importance(measured: Sequence[Trial]) -> dict[str, float]:
    """The share of the variance of log time that the means over each axis's values explain.

    It is epsilon squared: eta squared less what as many values would explain by chance, never
    below 0. The axes are not sampled independently, so the shares may overlap or miss what only
    two axes together explain.
    """
    times = np.log([tried.time_us for tried in measured])
    total = float(((times - times.mean()) ** 2).sum()) if len(times) else 0.0
    shares = {}
    for axis, values in varied_axes(measured).items():
        places = np.array([values.index(getattr(tried.config, axis)) for tried in measured])
        groups = [times[places == place] for place in range(len(values))]
        within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
        free = len(times) - len(groups)
        if total > 0 and free > 0:
            by_chance = (len(groups) - 1) * within / free
            shares[axis] = max(total - within - by_chance, 0.0) / total
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def varied_axes(measured: Sequence[Trial]) -> dict[str, list[Any]]:
    """The sorted values of each axis that not all configs have in common."""
    if not measured:
        return {}
    values = {
        axis: sorted({getattr(tried.config, axis) for tried in measured})
        for axis in measured[0].config.axis_names()
    }
    return {axis: found for axis, found in values.items() if len(found) > 1}


# ---- the roofline ----


@dataclass(frozen=True)
class Point:
    """A contestant on the roofline.

    Attributes:
        name: whose time it is.
        intensity: FLOP per byte.
        tflops: its speed.
    """

    name: str
    intensity: float
    tflops: float


def tensor_ceiling(device: Device, template: str) -> float:
    """TFLOP/s of the tensor cores with the instruction of a template, at the card's clock."""
    arch = device.arch
    per_clock = arch.mma_flops if template == arch.templates[0] else arch.mma_sync_flops
    return per_clock * device.sm_count * device.clock_mhz * 1e-6


def exp2_ceiling(device: Device, head_dim: int) -> float:
    """TFLOP/s at which the special-function units take one exponential for every score."""
    scores_per_us = device.arch.exp2_rate * device.sm_count * device.clock_mhz
    return 4 * head_dim * scores_per_us * 1e-6


def points(summary: Summary, bench: Results | None) -> list[Point]:
    """Default, winner and peers of a study's problem and bucket."""
    found = [
        Point(name, summary.intensity, summary.tflops(tried.time_us))
        for name, tried in (("default", summary.default), ("winner", summary.winner))
        if tried is not None
    ]
    if bench is None:
        return found
    from fagen.show.results import TITLES

    for cell in bench.cells:
        if _same_class(cell, bench, summary):
            intensity = cell.shape.flops(summary.problem) / cell.shape.bytes(summary.problem)
            found += [
                Point(TITLES[name], intensity, cell.tflops[name])
                for name in bench.peers
                if name in cell.tflops
            ]
    return found


def _same_class(cell: Cell, bench: Results, summary: Summary) -> bool:
    """Whether a benchmark's cell is of a study's card, problem and bucket."""
    problem = summary.problem
    return (
        bench.device.startswith(summary.card)
        and bench.dtype == problem.dtype
        and (cell.head_dim, cell.causal) == (problem.head_dim, problem.causal)
        and cell.shape.bucket() == summary.shape.bucket()
    )


# ---- the page ----


@dataclass(frozen=True)
class Plot:
    """A drawing: its file name, what it shows in words, and the PNG itself."""

    file: str
    alt: str
    png: bytes

    @property
    def uri(self) -> str:
        """The PNG as a `data:` address."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        page: the HTML file.
        plots: the PNG files.
        studies: the names of the studies shown.
        ignored: those of the storage that `fagen tune` did not make.
    """

    page: Path
    plots: tuple[Path, ...]
    studies: tuple[str, ...]
    ignored: tuple[str, ...]


def report(
    storage: str | Path,
    out: str | Path,
    *,
    studies: Sequence[str] = (),
    bench: Results | None = None,
) -> Report:
    """Writes `report.html` and its plots, as PNG files, into a folder.

    Args:
        storage: the database URL or journal file of `fagen tune`.
        out: the folder; it is made if it is missing.
        studies: which studies, by their names or parts of them; all if empty.
        bench: results of `fagen bench`, for the peers in the roofline.

    Raises:
        ArgumentError: where there is no such storage or study, or `out` is no folder.
        StoreError: for a storage that cannot be read; a WriteError where `out` cannot be written.
        MissingDependencyError: without matplotlib.
    """
    require_matplotlib()
    require_folder(Path(out))  # before the plots are drawn
    kept = read_studies(storage, studies)
    shown = without_password(storage)
    found = {study.name: summarise(study) for study in kept}
    summaries = [summary for summary in found.values() if summary is not None]
    ignored = tuple(name for name, summary in found.items() if summary is None)
    if not summaries:
        what = f"only others: {', '.join(ignored)}" if ignored else "none at all"
        raise ArgumentError(f"{shown} holds no study of `fagen tune`: {what}")
    overview = _overview(summaries)
    plots = {summary.name: _plots(summary, bench) for summary in summaries}
    every_plot = [*overview, *(plot for of_study in plots.values() for plot in of_study)]
    page = _render(
        storage=shown,
        summaries=summaries,
        overview=overview,
        plots=plots,
        bench=bench,
        ignored=ignored,
    )
    folder = Path(out)
    write_files({PAGE: page} | {plot.file: plot.png for plot in every_plot}, folder)
    return Report(
        page=folder / PAGE,
        plots=tuple(folder / plot.file for plot in every_plot),
        studies=tuple(summary.name for summary in summaries),
        ignored=ignored,
    )


def require_matplotlib() -> None:
    """Raises MissingDependencyError where the plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            'the plots need matplotlib: pip install "fagen[report]"'
        ) from None


def _overview(summaries: Sequence[Summary]) -> list[Plot]:
    """A roofline for each known card, with the winners of its studies."""
    from fagen.show import plots

    cards: dict[Device, list[Summary]] = {}
    for summary in summaries:
        if summary.device is not None and summary.winner is not None:
            cards.setdefault(summary.device, []).append(summary)
    return [
        _plot(
            plots.roofline_of_card(device, of_card),
            f"roofline-{number}.png",
            f"Roofline of {device}: winners and defaults of {len(of_card)} studies",
        )
        for number, (device, of_card) in enumerate(cards.items(), start=1)
    ]


def _plots(summary: Summary, bench: Results | None) -> list[Plot]:
    """Those of one study; what has nothing to show is left out."""
    from fagen.show import plots

    figures: dict[str, Figure] = {}
    if summary.tried:
        figures["history"] = plots.history(summary)
    if summary.device is not None and summary.winner is not None:
        figures["prediction"] = plots.prediction(summary)
        figures["roofline"] = plots.roofline(summary, points(summary, bench))
    if summary.importance:
        figures["importance"] = plots.importance(summary)
    if summary.rejections:
        figures["rejections"] = plots.rejections(summary)
    if varied_axes(summary.measured):
        figures["slices"] = plots.slices(summary)
    return [
        _plot(figure, f"{summary.slug}-{kind}.png", f"{plots.MEANING[kind]}: {summary.title}")
        for kind, figure in figures.items()
    ]


def _plot(figure: Figure, file: str, alt: str) -> Plot:
    from fagen.show import plots

    return Plot(file, alt, plots.png(figure))


def _render(**values: Any) -> str:
    import jinja2

    import fagen

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.j2")
    return template.render(version=fagen.__version__, examples=EXAMPLES, **values)
