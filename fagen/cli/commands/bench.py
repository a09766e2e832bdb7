"""`fagen bench`: fagen beside its peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fagen.cli.options import (
    DTYPE_HELP,
    ConfigFile,
    commas,
    examples,
    given,
    integers,
    new_app,
    open_store,
)
from fagen.errors import ArgumentError
from fagen.records.store import Store
from fagen.show.bench import DEFAULT_PEERS, GRIDS, HEAD_DIMS, SEQLENS
from fagen.show.bench import bench as measure
from fagen.show.peers import PEERS
from fagen.show.results import load_results, markdown, save_results, write_table

app = new_app()

MEASURING_FLAGS = ("grid", "against", "dtype", "seqlen", "head_dim", "device", "sm80_config")


@app.command(
    epilog=examples(
        "fagen bench --head-dim 128 --against fa3,cudnn --json results.json",
        "fagen bench --from results.json --plot results.png",
    )
)
def bench(
    ctx: typer.Context,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file.", metavar="FILE")
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option(help="Put the table between this file's markers.", metavar="FILE"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw TFLOP/s over the length, as PNG (extra: report).", metavar="FILE"),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option("--from", help="Measure nothing: read this JSON file.", metavar="FILE"),
    ] = None,
    grid: Annotated[
        str,
        typer.Option(help=" ".join(f"{name}: {what}." for name, what in GRIDS.items())),
    ] = "A",
    against: Annotated[str, typer.Option(help=f"Peers, some of {commas(PEERS)}.")] = commas(
        DEFAULT_PEERS
    ),
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "bf16",
    seqlen: Annotated[
        str | None, typer.Option(help=f"Sequence lengths. Default: {commas(SEQLENS)}.")
    ] = None,
    head_dim: Annotated[
        str | None,
        typer.Option(help=f"Head dims. Default: {commas(HEAD_DIMS)}; on grid B, all that it has."),
    ] = None,
    device: Annotated[int, typer.Option(min=0, help="CUDA device number.")] = 0,
    sm80_config: Annotated[
        Path | None,
        typer.Option(help="Records of the sm80 template, if another is native.", metavar="FILE"),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Measure fagen beside FlashAttention-2, -3 and -4, cuDNN and FlexAttention.

    Peers that are not installed are named and left out.
    """
    if plot:
        if plot.suffix != ".png":
            raise ArgumentError(f"--plot {plot}: it draws a PNG file, so name one ending in .png")
        from fagen.show import plots  # if matplotlib is missing, says so before measuring
    if results:
        if flags := given(ctx, MEASURING_FLAGS):
            raise ArgumentError(f"--from FILE measures nothing: leave out {flags}")
        found = load_results(results)
    else:
        found = measure(
            grid=grid,
            dtype=dtype,
            seqlens=integers(seqlen, "--seqlen") if seqlen is not None else None,
            head_dims=integers(head_dim, "--head-dim") if head_dim is not None else None,
            peers=against.split(","),
            store=open_store(ctx, config),
            sm80_store=Store.open(sm80_config) if sm80_config else None,
            device_index=device,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    if json_file:
        save_results(found, json_file)
    if readme:
        write_table(found, readme)
    if plot:
        plots.save_plot(found, plot)
    print(markdown(found))
