"""`fagen list`: the tuned configs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fagen.cli.options import AsJson, ConfigFile, examples, new_app, open_store
from fagen.cli.output import print_json, print_records
from fagen.device import architecture
from fagen.records.dispatch import STALE, is_stale

app = new_app()


@app.command(epilog=examples("fagen list --json"))
def list_records(
    ctx: typer.Context,
    arch: Annotated[str | None, typer.Option(help="Only this architecture.")] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """List the tuned configs that dispatch may use, your own before the shipped ones."""
    store = open_store(ctx, config)
    name = None if arch is None else architecture(arch).name
    entries = store.entries(name)
    for file in store.files(name):
        for skipped in file.skipped:
            print(f"skipped: {file.path}, line {skipped.line}: {skipped.reason}", file=sys.stderr)
    if as_json:
        print_json(
            [
                record.model_dump(mode="json") | {"file": str(path), "stale": is_stale(record)}
                for record, path in entries
            ]
        )
        return
    if not entries:
        print("no tuned configs yet: `fagen tune` finds some")
    print_records(
        [record for record, _ in entries],
        notes=[STALE if is_stale(record) else "" for record, _ in entries],
    )
