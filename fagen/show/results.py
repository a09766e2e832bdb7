"""What `fagen bench` found: its JSON file and its table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fagen.errors import ArgumentError
from fagen.files import write_file
from fagen.problem import HIDDEN, TOKENS, Problem, Shape
from fagen.show.peers import PEERS
from fagen.tuning.finals import CONFIDENCE, Ratio, fastest, paired_ratio

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
TITLES = {
    "fagen": "fagen",
    "fagen_lse": "fagen with its LSE",
    "fagen_sm80": "fagen's sm80 template",
} | {name: peer.title for name, peer in PEERS.items()}
Grid = Literal["A", "B", "C"]


class Cell(BaseModel):
    """One point of the grid.

    Attributes:
        note: how its shape differs from the standard one.
        us: for each contestant that ran and was right, its time in each round in microseconds.
        tflops: 1e12 floating-point operations per second, from the median round.
        clock_mhz: the SM clock meanwhile, in MHz; None if it was not noted.
        tensor_share: `tflops` over what the tensor cores could do at that clock.
        config, tier: what fagen dispatched, and from which tier.
        failed: contestants that raised an error or were wrong, with the reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    problem: Problem
    shape: Shape
    note: str = ""
    us: dict[str, tuple[float, ...]]
    tflops: dict[str, float]
    clock_mhz: float | None = None
    tensor_share: dict[str, float] = {}
    config: str
    tier: str
    failed: dict[str, str] = {}

    @property
    def row(self) -> str:
        """What the cells of one row of the table have in common."""
        note = f", {self.note}" if self.note else ""
        return f"head dim {self.problem.head_dim}, {self.problem.mask}{note}"

    @property
    def name(self) -> str:
        """The cell in a few words."""
        note = f", {self.note}" if self.note else ""
        length = length_name(self.shape.seqlen_q)
        return f"d{self.problem.head_dim} {self.problem.mask} {length}{note}"

    def fastest(self, names: Sequence[str]) -> str | None:
        """The contestant with the lowest median time; None if none of them ran."""
        ran = [name for name in names if name in self.us]
        return fastest([self.us], ran) if ran else None

    def ratio(self, contestant: str, others: Sequence[str]) -> Ratio | None:
        """Speed of a contestant over the fastest of others; None if either is missing."""
        rival = self.fastest(others)
        if rival is None or contestant not in self.us:
            return None
        return paired_ratio([self.us], rival, contestant)


class Results(BaseModel):
    """One run of the benchmark, as its JSON file holds it.

    Attributes:
        device: name, SM count and architecture.
        date: UTC day.
        grid: which shapes, see `bench.grid_points`.
        versions: of fagen, the driver, NVRTC and each peer that ran.
        absent: peers that are not installed, with the line that installs them.
        cells: one for each point; they share operation and dtype.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    date: str
    grid: Grid = "A"
    versions: dict[str, str]
    absent: dict[str, str]
    cells: tuple[Cell, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _from_an_older_file(cls, data: Any) -> Any:
        """Reads files whose dtype stands beside the cells, not in their problems."""
        match data:
            case {"dtype": dtype, "cells": [*cells], **rest}:
                return rest | {"cells": [_older_cell(cell, dtype) for cell in cells]}
        return data

    @property
    def dtype(self) -> str:
        """The dtype of all cells."""
        return self.cells[0].problem.dtype

    @property
    def operation(self) -> str:
        """The operation of all cells, for titles: "Forward"."""
        return self.cells[0].problem.op.capitalize()

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers that ran anywhere, in the order of `PEERS`."""
        ran = {name for cell in self.cells for name in cell.us}
        return tuple(name for name in PEERS if name in ran)

    @property
    def rivals(self) -> tuple[str, ...]:
        """What fagen is compared with: on grid C, itself with the LSE."""
        return ("fagen_lse",) if self.grid == "C" else self.peers

    def ratios(self, contestant: str, others: Sequence[str]) -> dict[str, float]:
        """The median of `Cell.ratio` for each cell that has both, by the cell's name."""
        ratios = {cell.name: cell.ratio(contestant, others) for cell in self.cells}
        return {name: ratio.median for name, ratio in ratios.items() if ratio}

    def mean_ratio(self, contestant: str, others: Sequence[str]) -> Ratio | None:
        """The geometric mean of `Cell.ratio`; None if no cell has both."""
        both = [
            {"contestant": cell.us[contestant], "rival": cell.us[rival]}
            for cell in self.cells
            if contestant in cell.us and (rival := cell.fastest(others))
        ]
        return paired_ratio(both, "rival", "contestant") if both else None


def _older_cell(data: Any, dtype: Any) -> Any:
    """A cell as it is written now, from one with flat fields of its problem.

    The oldest cells have a square shape, and the medians only: they are read as one round.
    """
    match data:
        case {"head_dim": head_dim, "causal": causal, **rest}:
            data = rest | {"problem": {"dtype": dtype, "head_dim": head_dim, "causal": causal}}
    match data:
        case {"seqlen": n, "heads": h, "batch": b, "us": dict(us), "spread": _, **rest}:
            shape = {"batch": b, "seqlen_q": n, "seqlen_k": n, "heads_q": h, "heads_kv": h}
            data = rest | {"shape": shape, "us": {name: [time] for name, time in us.items()}}
    return data


# ---- files ----


def save_results(results: Results, path: Path) -> None:
    """Writes a run as JSON.

    Raises:
        ArgumentError, WriteError: as `files.write_file` does.
    """
    write_file(path, results.model_dump_json(indent=1) + "\n")


def load_results(path: Path) -> Results:
    """The run that a JSON file holds.

    Raises:
        ArgumentError: if the file is missing or holds something else.
    """
    try:
        return Results.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError):
        raise ArgumentError(f"{path} is not a result of `fagen bench --json`") from None


def write_table(results: Results, path: Path) -> None:
    """Puts the table between the markers of a Markdown file.

    Raises:
        ArgumentError: if the file cannot be read, or does not have one pair of markers.
        WriteError: if it cannot be written.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    parts = re.split(f"({re.escape(BEGIN)}.*?{re.escape(END)})", text, flags=re.DOTALL)
    if len(parts) != 3:
        raise ArgumentError(f"{path} needs one pair of markers: {BEGIN} and {END}")
    write_file(path, f"{parts[0]}{BEGIN}\n{markdown(results)}\n{END}{parts[2]}")


# ---- the table ----


def markdown(results: Results) -> str:
    """The table: fagen's TFLOP/s, its share of the tensor cores' peak, and its speed over the
    fastest rival's.
    """
    lengths = sorted({cell.shape.seqlen_q for cell in results.cells})
    lines = [
        f"| {results.dtype}, sequence | {' | '.join(map(length_name, lengths))} |",
        f"|---|{'---:|' * len(lengths)}",
    ]
    cells = {(cell.row, cell.shape.seqlen_q): cell for cell in results.cells}
    for row in dict.fromkeys(cell.row for cell in results.cells):
        entries = [_entry(cells.get((row, length)), results.rivals) for length in lengths]
        lines.append(f"| {row} | {' | '.join(entries)} |")
    return "\n".join([*lines, "", *_summary(results)])


def length_name(seqlen: int) -> str:
    """A sequence length in few characters, such as 512 or 2k."""
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _entry(cell: Cell | None, rivals: Sequence[str]) -> str:
    if cell is None or "fagen" not in cell.tflops:
        return "-"
    share, ratio = cell.tensor_share.get("fagen"), cell.ratio("fagen", rivals)
    said = [f"{share:.0%}"] if share else []
    said += [f"{ratio.median:.2f}"] if ratio else []
    return f"{cell.tflops['fagen']:.0f}" + (f" ({', '.join(said)})" if said else "")


def _summary(results: Results) -> list[str]:
    """The sentences under the table."""
    rivals = results.rivals
    in_brackets = []
    if any(cell.tensor_share for cell in results.cells):
        in_brackets.append("the share of what the tensor cores could do at the clock meanwhile")
    if rivals:
        fastest_of = "the fastest of " if len(rivals) > 1 else ""
        in_brackets.append(
            f"the speed over {fastest_of}{', '.join(TITLES[name] for name in rivals)}"
        )
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [
        f"{results.operation}, {TOKENS // 1024}k tokens, hidden size {HIDDEN}"
        + (" unless the row says otherwise" if any(c.note for c in results.cells) else "")
        + ", TFLOP/s"
        + (f" (in brackets: {', and '.join(in_brackets)})." if in_brackets else "."),
        f"{results.device}, {results.date}; {versions}.",
    ]
    pairs = [("fagen", rivals), *(("fagen", (name,)) for name in rivals), ("fagen_sm80", ("fa2",))]
    lines += [line for pair in dict.fromkeys(pairs) for line in _comparison(results, *pair)]
    lines += [f"- {TITLES[name]} was not installed" for name in results.absent]
    failures = Counter(failure for cell in results.cells for failure in cell.failed.items())
    return lines + [
        f"- {TITLES[name]} was left out on {count} of {len(results.cells)} shapes: {why}"
        for (name, why), count in failures.items()
    ]


def _comparison(results: Results, contestant: str, others: Sequence[str]) -> list[str]:
    """The line about a contestant and the fastest of others, if any cell has both."""
    mean, ratios = results.mean_ratio(contestant, others), results.ratios(contestant, others)
    if mean is None:
        return []
    whom = "the fastest peer" if len(others) > 1 else TITLES[others[0]]
    interval = (
        f" ({CONFIDENCE:.0%}: {mean.low:.3f} to {mean.high:.3f})" if mean.low < mean.high else ""
    )
    lowest, highest = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return [
        f"- {TITLES[contestant]} over {whom}: geometric mean {mean.median:.3f}{interval}, "
        f"lowest {ratios[lowest]:.2f} ({lowest}), highest {ratios[highest]:.2f} ({highest})"
    ]
