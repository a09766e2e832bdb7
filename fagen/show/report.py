"""Kept studies -> a page that shows them: what was tried, what won, and what made the difference.

`report` reads the studies that `fagen tune` keeps and writes one self-contained HTML file, with
its plots beside it as PNG files. It needs matplotlib.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

import fagen
from fagen.errors import ArgumentError
from fagen.files import require_folder, write_files
from fagen.show import plots
from fagen.show.summary import Summary, roofline_points, summarise, varied_axes
from fagen.tuning.search.read import read_studies
from fagen.tuning.search.storage import without_password

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fagen.device import Device
    from fagen.show.results import Results

PAGE = "report.html"
EXAMPLES = 3  # reasons that are shown for each kind of rejection


@dataclass(frozen=True)
class Plot:
    """A drawing.

    Attributes:
        file: its file name.
        alt: what it shows, in words.
        png: the file's content.
    """

    file: str
    alt: str
    png: bytes

    @property
    def uri(self) -> str:
        """The PNG as a `data:` address."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


@dataclass(frozen=True)
class ReportFiles:
    """What `report` wrote.

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
) -> ReportFiles:
    """Writes `report.html` and its plots, as PNG files, into a folder.

    Args:
        storage: the database URL or journal file of `fagen tune`.
        out: the folder; it is made if it is missing.
        studies: which studies, by their names or parts of them; all if empty.
        bench: results of `fagen bench`, for the peers in the roofline.

    Raises:
        ArgumentError: if there is no such storage or study, or `out` is not a folder.
        StoreError: for a storage that cannot be read.
        WriteError: if `out` cannot be written.
    """
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
    drawn = {summary.name: _plots(summary, bench) for summary in summaries}
    every_plot = [*overview, *(plot for of_study in drawn.values() for plot in of_study)]
    page = _render(
        storage=shown,
        summaries=summaries,
        overview=overview,
        plots=drawn,
        bench=bench,
        ignored=ignored,
    )
    folder = Path(out)
    write_files({PAGE: page} | {plot.file: plot.png for plot in every_plot}, folder)
    return ReportFiles(
        page=folder / PAGE,
        plots=tuple(folder / plot.file for plot in every_plot),
        studies=tuple(summary.name for summary in summaries),
        ignored=ignored,
    )


def _overview(summaries: Sequence[Summary]) -> list[Plot]:
    """A roofline for each known card, with the winners of its studies."""
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
    """The plots of one study, without those that would be empty."""
    figures: dict[str, Figure] = {}
    if summary.trials:
        figures["history"] = plots.history(summary)
    if summary.device is not None and summary.winner is not None:
        figures["prediction"] = plots.prediction(summary)
        figures["roofline"] = plots.roofline(summary, roofline_points(summary, bench))
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
    return Plot(file, alt, plots.png(figure))


def _render(**values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.j2")
    return template.render(version=fagen.__version__, examples=EXAMPLES, **values)
