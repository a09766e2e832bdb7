"""What commands print: counts, JSON and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fagen.records.store import TunedConfig


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun: "1 record", "2 records"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def print_json(value: Any) -> None:
    """Prints a JSON value for people and programs."""
    print(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints one line per row, for eyes, grep and awk alike; the last column may be long."""
    lines = [columns, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def print_records(records: Sequence[TunedConfig], notes: Sequence[str] | None = None) -> None:
    """Prints a table of records, with a column of notes if there are any."""
    columns = ["problem", "bucket", "device", "kind", "us", "TFLOP/s", "/ default", "config"]
    rows = []
    for record in records:
        result = record.result
        ratio = result.speedup_over_default
        rows.append(
            [
                record.problem,
                record.bucket,
                record.device.key,
                result.kind,
                f"{result.median_us:.1f}",
                f"{result.tflops:.0f}",
                f"{ratio:.2f}" if ratio else "-",
                record.config,
            ]
        )
    if notes and any(notes):
        columns.append("note")
        rows = [[*row, note] for row, note in zip(rows, notes, strict=True)]
    if rows:
        print_table(columns, rows)
