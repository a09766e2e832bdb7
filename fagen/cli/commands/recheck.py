"""`fagen recheck`: do the records still hold on this GPU?"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Annotated, Any

import typer

from fagen.cli.devices import device_for, present_devices
from fagen.cli.options import (
    Arch,
    AsJson,
    Causal,
    ConfigFile,
    DtypeName,
    HeadDim,
    examples,
    new_app,
    open_store,
)
from fagen.cli.output import counted, print_json
from fagen.errors import DeviceError
from fagen.records.store import TunedConfig
from fagen.show import recheck as rechecking
from fagen.tuning.worker import Worker

app = new_app()


@app.command(epilog=examples("fagen recheck --dtype bf16 --head-dim 128"))
def recheck(
    ctx: typer.Context,
    arch: Arch = None,
    dtype: DtypeName = None,
    head_dim: HeadDim = None,
    causal: Causal = None,
    config: ConfigFile = None,
    storage: Annotated[
        str | None,
        typer.Option(help="The studies, as for `fagen tune`, for each record's runners-up."),
    ] = None,
    device: Annotated[
        int | None, typer.Option(min=0, help="CUDA device number. Default: the first that fits.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the tuned configs again, beside their runners-up: do they still hold?

    Each record of this GPU "holds", is "stale" (something is now faster, by more than 1 %) or is
    "wrong". Exit code 1 if any does not hold.
    """
    if not present_devices():
        raise DeviceError("no CUDA device here to measure on; `fagen check` judges without one")
    gpu, index = device_for(arch, device)
    if index is None:
        raise DeviceError(
            f"no {gpu.arch.name} device here to measure on; `fagen check --arch {gpu.arch.name}` "
            "judges records without one"
        )
    chosen = {"dtype": dtype, "head_dim": head_dim, "causal": causal}
    records: dict[Any, TunedConfig] = {}
    for record in open_store(ctx, config).records(gpu.arch.name):
        if all(value in (None, getattr(record.problem, name)) for name, value in chosen.items()):
            records.setdefault(record.key, record)  # the one that dispatch takes
    found = []
    for item in rechecking.recheck(
        list(records.values()),
        Worker(index),
        storage=storage,
        on_notice=lambda notice: print(notice.text, file=sys.stderr),
    ):
        found.append(item)
        if not as_json:
            _print_item(item)
    states = Counter(item.state for item in found)
    if as_json:
        print_json([item.model_dump() for item in found])
    else:
        print(
            f"{counted(len(found), 'record')}: {states['holds']} hold, {states['stale']} stale, "
            f"{states['wrong']} wrong"
        )
    if states["holds"] < len(found):
        raise typer.Exit(1)


def _print_item(item: rechecking.Rechecked) -> None:
    now = "" if item.median_us is None else f", now {item.median_us:.1f} us"
    print(
        f"{item.state:<5}  {item.record}: {item.recorded_us:.1f} us on record{now}: "
        f"{item.config}{item.reason and f'; {item.reason}'}",
        flush=True,
    )
