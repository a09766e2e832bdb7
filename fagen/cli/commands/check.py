"""`fagen check`: is the search space sound, and are the records?"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from fagen.cli.devices import device_for
from fagen.cli.options import Arch, AsJson, ConfigFile, examples, new_app, open_store
from fagen.cli.output import counted, print_json, print_table
from fagen.show.check import SAMPLE, CheckReport
from fagen.show.check import check as run_checks

app = new_app()


@app.command(epilog=examples("fagen check --arch sm90 --sample 300"))
def check(
    ctx: typer.Context,
    arch: Arch = None,
    sample: Annotated[int, typer.Option(min=0, help="Legal configs to compile.")] = SAMPLE,
    everything: Annotated[
        bool, typer.Option("--all", help="Compile every legal config, which takes hours.")
    ] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Count the search space, compile a sample of it, and check every stored record.

    If a GPU of the architecture is present, each record's kernel also runs and is verified.
    Exit code 1 if anything is wrong.
    """
    device, index = device_for(arch)
    files = open_store(ctx, config).files(device.arch.name)
    with Progress(disable=not sys.stderr.isatty(), console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling", total=None)
        report = run_checks(
            device.arch,
            files,
            sample=sample,
            everything=everything,
            device=device,
            device_index=index,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print_json(report.model_dump(mode="json") | {"ok": report.ok})
    else:
        _print_report(report, verified=index is not None)
    if not report.ok:
        raise typer.Exit(1)


def _print_report(report: CheckReport, verified: bool) -> None:
    print(f"space on {report.spaces[0].device}, {report.arch}")
    print_table(
        ("template", "head dim", "points", "legal", "removed by rule"),
        [
            (
                space.template,
                space.head_dim,
                f"{space.points:,}",
                f"{space.legal:,}",
                ", ".join(f"{rule} {count:,}" for rule, count in space.rejections.items()),
            )
            for space in report.spaces
        ],
    )
    sample = report.sample
    slow = sum(sample.slow.values())
    print(f"compiled {sample.compiled} legal configs: {len(sample.refused)} refused, {slow} slow")
    for line in sample.refused:
        print(f"  refused: {line}")
    for reason, count in sample.slow.items():
        print(f"  {count} slow: {reason}")
    faults = [record for record in report.records if record.fault]
    how = "compiled and verified" if verified else "compiled (no GPU of this kind to run them)"
    print(f"{counted(len(report.records), 'record')}, {how}: {len(faults)} with a fault")
    for line in report.unreadable:
        print(f"  unreadable: {line}")
    for record in faults:
        print(f"  {record.record} {record.config}: {record.fault}")
