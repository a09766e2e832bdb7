"""Summaries of studies, and results of the benchmark -> figures.

Colours are those of Okabe and Ito, which colour-blind eyes tell apart; what matters also has a
marker of its own. Importing this raises MissingDependencyError if matplotlib is not installed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fagen.device import Device
from fagen.errors import MissingDependencyError
from fagen.files import write_file
from fagen.show.results import TITLES, Cell, Results, length_name
from fagen.show.summary import (
    RooflinePoint,
    Summary,
    exp2_ceiling,
    tensor_ceiling,
    varied_axes,
)
from fagen.tuning.outcome import Trial

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter
except ImportError:
    raise MissingDependencyError('the plots need matplotlib: pip install "fagen[report]"') from None

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#6b6b6b"
DPI = 110
SIZE = (6.4, 4.0)  # inches
SLICES_PER_ROW = 4
MEANING = {
    "history": "Time of each trial and the best so far, with rejections marked",
    "importance": "Share of the variance in time that each axis explains",
    "slices": "Time against each axis",
    "prediction": "Measured time against the static model's prediction",
    "rejections": "Rejections by kind",
    "roofline": "Roofline with winner, default and peers",
}
MARKS: dict[str, dict[str, Any]] = {
    "winner": {"marker": "*", "color": RED, "s": 110, "zorder": 5, "linewidths": 0},
    "default": {"marker": "D", "c": "none", "edgecolors": ORANGE, "s": 95, "linewidths": 2},
    "trial": {"marker": "o", "color": BLUE, "s": 16, "alpha": 0.7, "linewidths": 0},
}
PEER_MARKS = ("s", "^", "v", "P")
PEER_COLOURS = (GREEN, PURPLE, SKY, GREY)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _new(title: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    _plain(axes)
    return figure, axes


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)


def _microseconds(axis: Axis) -> None:
    """Round numbers on a logarithmic axis, however short."""
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(ScalarFormatter())


def _mark(axes: Axes, summary: Summary, place: Callable[[Trial], float]) -> None:
    """Marks default and winner in a cloud of trials: their times over their places."""
    for name, trial in summary.marked.items():
        label = f"{name}, {trial.time_us:.1f} µs"
        axes.scatter(place(trial), trial.time_us, label=label, **MARKS[name])


# ---- one study ----


def history(summary: Summary) -> Figure:
    """Time of each trial and the best so far; rejections are on a line of their own."""
    figure, axes = _new(summary.title)
    times = [trial.time_us for trial in summary.trials]  # infinite for a rejection
    numbers = np.arange(1, len(times) + 1)
    axes.set_xlabel("trial")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if summary.measured:
        kept = np.isfinite(times)
        axes.scatter(numbers[kept], np.array(times)[kept], label="measured", **MARKS["trial"])
        best = np.minimum.accumulate(times)
        axes.step(numbers, best, where="post", color=BLUE, linewidth=1.6, label="best so far")
        _mark(axes, summary, lambda trial: summary.trials.index(trial) + 1)
        axes.set_ylabel("time of one call (µs, log scale)")
        axes.set_yscale("log")
        axes.margins(y=0.09)
        _microseconds(axes.yaxis)
    else:
        axes.set_yticks([])
        axes.set_ylabel("nothing was measured")
    rejected = numbers[~np.isfinite(times)]
    if len(rejected):
        axes.plot(
            rejected,
            np.full(len(rejected), 0.015),
            linestyle="",
            marker="x",
            markersize=5,
            color=GREY,
            label=f"rejected ({len(rejected)})",
            transform=axes.get_xaxis_transform(),
        )
    axes.legend(fontsize=8, framealpha=0.9)
    return figure


def importance(summary: Summary) -> Figure:
    """Bars: the share of the variance that each axis explains by itself."""
    shares = dict(reversed(summary.importance.items()))
    figure, axes = _new(
        f"{summary.title}\nvariance of log time explained by each axis's group means, "
        f"{len(summary.measured)} configs",
    )
    bars = axes.barh(list(shares), [100 * share for share in shares.values()], color=BLUE)
    axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=8)
    axes.set_xlim(0, max(110 * max(shares.values()), 10))
    axes.set_xlabel("share of variance (%), less what chance would explain")
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(visible=False, axis="y")
    return figure


def slices(summary: Summary) -> Figure:
    """Time against the value of each axis: a dot for each config, a bar at each median."""
    varied = varied_axes(summary.measured)
    rows = -(-len(varied) // SLICES_PER_ROW)
    columns = min(len(varied), SLICES_PER_ROW)
    figure = Figure(figsize=(3.1 * columns + 0.6, 2.5 * rows + 0.7), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    figure.suptitle(f"{summary.title}: time against each axis", fontsize=11)
    for panel, (axis, values) in zip(panels.flat, varied.items(), strict=False):
        _slice(panel, summary, axis, values)
    for panel in panels.flat[len(varied) :]:
        panel.set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel("time (µs, log scale)", fontsize=9)
    panels[0, 0].set_yscale("log")  # the others share it
    _microseconds(panels[0, 0].yaxis)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _slice(axes: Axes, summary: Summary, axis: str, values: list[Any]) -> None:
    _plain(axes)
    places = np.array([values.index(getattr(t.config, axis)) for t in summary.measured])
    times = np.array([trial.time_us for trial in summary.measured])
    aside = np.random.default_rng(0).uniform(-0.18, 0.18, len(times))  # so that dots show
    axes.scatter(places + aside, times, label="measured", **MARKS["trial"])
    medians = [float(np.median(times[places == place])) for place in range(len(values))]
    middle = np.arange(len(values))
    axes.hlines(medians, middle - 0.3, middle + 0.3, color="black", linewidth=1.5, label="median")
    _mark(axes, summary, lambda trial: values.index(getattr(trial.config, axis)))
    crowded = len(values) > 8
    names = [("no", "yes")[v] if isinstance(v, bool) else str(v) for v in values]
    axes.set_xticks(middle, names, fontsize=7 if crowded else 8, rotation=90 if crowded else 0)
    axes.set_xlabel(axis, fontsize=9)
    axes.grid(visible=False, axis="x")


def prediction(summary: Summary) -> Figure:
    """Measured against predicted time of each config, and the line where they agree."""
    rank = summary.spearman
    said = "too few configs to rank" if rank is None else f"Spearman correlation {rank:.2f}"
    figure, axes = _new(f"{summary.title}\n{said}, {len(summary.measured)} configs", (5.4, 4.6))
    predicted = dict(zip([t.config for t in summary.measured], summary.predicted_us, strict=True))
    times = [trial.time_us for trial in summary.measured]
    both = [*summary.predicted_us, *times]
    ends = [min(both) / 1.05, max(both) * 1.05]
    axes.plot(ends, ends, color=GREY, linewidth=1, linestyle="--", label="predicted = measured")
    axes.scatter(summary.predicted_us, times, label="measured", **MARKS["trial"])
    _mark(axes, summary, lambda trial: predicted[trial.config])
    axes.set_xlabel("predicted time (µs, log scale)")
    axes.set_ylabel("measured time (µs, log scale)")
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        _microseconds(axis)
    axes.legend(fontsize=8, framealpha=0.9)
    return figure


def rejections(summary: Summary) -> Figure:
    """Bars: how many trials were rejected for each kind of reason."""
    counts = {kind: reasons.total() for kind, reasons in reversed(summary.rejections.items())}
    total = sum(counts.values())
    figure, axes = _new(
        f"{summary.title}\n{total} of {len(summary.trials)} trials rejected",
        (SIZE[0], 1.4 + 0.35 * len(counts)),
    )
    bars = axes.barh(list(counts), list(counts.values()), color=GREY, height=0.6)
    axes.bar_label(bars, padding=3, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.margins(x=0.1)
    axes.set_xlabel("trials")
    axes.grid(visible=False, axis="y")
    return figure


# ---- rooflines ----


def roofline(summary: Summary, points: Sequence[RooflinePoint]) -> Figure:
    """TFLOP/s against intensity: the device's ceilings and a point for each contestant."""
    device = summary.device
    assert device is not None, "a roofline needs a known device"
    figure, axes = _new(f"{summary.title} on {device.name}", (6.4, 4.8))
    tensor = tensor_ceiling(device, summary.template)
    intensities = [point.intensity for point in points]
    _ceilings(axes, device, tensor, intensities)
    exp2 = exp2_ceiling(device, summary.problem.head_dim)
    if exp2 < 1.6 * tensor:
        label = f"exp2 units, one per score: {exp2:.0f}"
        axes.axhline(exp2, color=GREY, linestyle=":", linewidth=1.3, label=label)
    peers = 0
    for point in points:
        mark = MARKS.get(point.name)
        if mark is None:
            colour, marker = PEER_COLOURS[peers % 4], PEER_MARKS[peers % 4]
            mark, peers = {"marker": marker, "color": colour, "s": 40}, peers + 1
        label = f"{point.name}: {point.tflops:.0f} ({point.tflops / tensor:.0%} of tensor cores)"
        axes.scatter(point.intensity, point.tflops, label=label, **mark)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    return figure


def roofline_of_card(device: Device, summaries: Sequence[Summary]) -> Figure:
    """All studies of a device: each a line from its default up to its winner."""
    figure, axes = _new(f"{device}: winners, and the defaults they start from", (8.4, 5.0))
    tensor = max(tensor_ceiling(device, summary.template) for summary in summaries)
    _ceilings(axes, device, tensor, [summary.intensity for summary in summaries])
    head_dims = sorted({summary.problem.head_dim for summary in summaries})
    palette = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
    colours = {d: palette[place % len(palette)] for place, d in enumerate(head_dims)}
    said: set[str] = set()
    for summary in sorted(summaries, key=lambda s: (s.problem.head_dim, s.problem.causal)):
        problem, winner, default = summary.problem, summary.winner, summary.default
        assert winner is not None, "a study without a winner has no point"
        x, top, colour = (
            summary.intensity,
            summary.tflops(winner.time_us),
            colours[problem.head_dim],
        )
        label = f"head dim {problem.head_dim}, {problem.mask}"
        mark = "^" if problem.causal else "o"
        if default is not None:
            bottom = summary.tflops(default.time_us)
            axes.plot([x, x], [bottom, top], color=colour, linewidth=1, alpha=0.6)
            axes.plot(x, bottom, marker="_", color=colour, markersize=9)
        new = label if label not in said else None
        said.add(label)
        axes.scatter(x, top, s=45, marker=mark, color=colour, edgecolors="white", label=new)
    axes.plot([], [], "_", color=GREY, markersize=9, label="the template's default")
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)
    return figure


def _ceilings(axes: Axes, device: Device, tensor: float, intensities: Sequence[float]) -> None:
    """What memory and tensor cores allow, over a range that holds the points and the ridge."""
    ridge = tensor * 1e3 / device.memory_gbps
    low = min([ridge, *intensities]) / 4
    high = max([ridge, *intensities]) * 4
    x = np.geomspace(low, high, 200)
    memory = x * device.memory_gbps * 1e-3
    axes.plot(x, np.minimum(memory, tensor), color="black", linewidth=1.6)
    axes.annotate(
        f"tensor cores: {tensor:.0f} TFLOP/s",
        (high, tensor),
        textcoords="offset points",
        xytext=(-4, 4),
        ha="right",
        fontsize=8,
    )
    axes.annotate(
        f"memory: {device.memory_gbps / 1e3:.1f} TB/s",
        (ridge * 0.6, tensor * 0.6),
        textcoords="offset points",
        xytext=(7, -8),
        fontsize=8,
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlim(low, high)
    axes.set_ylim(0, tensor * 1.12)
    axes.set_xlabel("arithmetic intensity (FLOP per byte of device memory, log scale)")
    axes.set_ylabel("speed (TFLOP/s)")


# ---- the benchmark ----


def speeds(results: Results) -> Figure:
    """TFLOP/s over the sequence length: a row of panels for each head dim, full and causal."""
    rows = list(dict.fromkeys((cell.problem.head_dim, cell.note) for cell in results.cells))
    masks = sorted({cell.problem.causal for cell in results.cells})
    lengths = sorted({cell.shape.seqlen_q for cell in results.cells})
    figure = Figure(figsize=(4.2 * len(masks), 2.3 * len(rows) + 0.9), layout="constrained")
    panels = figure.subplots(len(rows), len(masks), sharex=True, sharey="row", squeeze=False)
    figure.suptitle(f"{results.operation}, {results.dtype}, {results.device}", fontsize=11)
    for (head_dim, note), row in zip(rows, panels, strict=True):
        for causal, panel in zip(masks, row, strict=True):
            wanted = (head_dim, note, causal)
            cells = [
                cell
                for cell in results.cells
                if (cell.problem.head_dim, cell.note, cell.problem.causal) == wanted
            ]
            _speed_panel(panel, results, sorted(cells, key=lambda cell: cell.shape.seqlen_q))
    for panel in panels[:, 0]:
        panel.set_ylabel("TFLOP/s", fontsize=9)
        panel.set_ylim(bottom=0)
    for panel in panels[-1]:
        panel.set_xlabel("sequence length", fontsize=9)
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [length_name(length) for length in lengths])
        panel.xaxis.set_minor_locator(NullLocator())
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _speed_panel(axes: Axes, results: Results, cells: Sequence[Cell]) -> None:
    """A line for each contestant over the cells of one row, the shortest first."""
    _plain(axes)
    axes.set_title(cells[0].row if cells else "", fontsize=9)
    names = ("fagen", *results.rivals)
    marks = zip((RED, *PEER_COLOURS, ORANGE), ("o", *PEER_MARKS, "X"), strict=True)
    for name, (colour, marker) in zip(names, marks, strict=False):
        ran = [cell for cell in cells if name in cell.tflops]
        axes.plot(
            [cell.shape.seqlen_q for cell in ran],
            [cell.tflops[name] for cell in ran],
            label=TITLES[name],
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=2 if name == "fagen" else 1.2,
            zorder=3 if name == "fagen" else 2,
        )


def save_plot(results: Results, path: Path) -> None:
    """Draws `speeds` as a PNG file.

    Raises:
        ArgumentError, WriteError: as `files.write_file` does.
    """
    write_file(path, png(speeds(results)))
