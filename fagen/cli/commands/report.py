"""`fagen report`: kept studies as a page with plots."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fagen.cli.options import examples, new_app
from fagen.cli.output import counted
from fagen.show.results import load_results
from fagen.tuning.search.storage import last_storage

app = new_app()


@app.command(epilog=examples("fagen report --study d128_causal --bench results.json -o report/"))
def report(
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The folder to write into.", metavar="FOLDER")
    ],
    storage: Annotated[
        str | None,
        typer.Option(
            help="A journal file or a URL, as for `fagen tune`. Default: what it last wrote."
        ),
    ] = None,
    study: Annotated[
        list[str] | None,
        typer.Option(help="A study's name or a part of it; may be repeated. Default: all."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(help="Results of `fagen bench --json`, for the peers.", metavar="FILE"),
    ] = None,
) -> None:
    """Show the studies that `fagen tune` keeps: an HTML page, and its plots as PNG files.

    Needs matplotlib, which the extra "report" installs.
    """
    from fagen.show.report import report as write_report  # needs matplotlib, which --help does not

    written = write_report(
        storage if storage is not None else last_storage(),
        out,
        studies=study or (),
        bench=load_results(bench) if bench else None,
    )
    for name in written.ignored:
        print(f"left out, not of `fagen tune`: {name}", file=sys.stderr)
    studies = counted(len(written.studies), "study", "studies")
    print(f"{written.page}: {studies}, {counted(len(written.plots), 'plot')} beside it")
