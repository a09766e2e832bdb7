"""`fagen explain`: which config a call would run, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from fagen.cli.devices import device_for
from fagen.cli.options import (
    DTYPE_HELP,
    HEAD_DIM_HELP,
    Arch,
    AsJson,
    Batch,
    ConfigFile,
    Heads,
    HeadsKv,
    KvHeads,
    call_of,
    examples,
    new_app,
    open_store,
)
from fagen.cli.output import print_json
from fagen.records.dispatch import choose

app = new_app()


@app.command(
    epilog=examples("fagen explain --arch sm90 --dtype bf16 --head-dim 128 --causal --seqlen 4096")
)
def explain(
    ctx: typer.Context,
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "bf16",
    head_dim: Annotated[int, typer.Option(help=HEAD_DIM_HELP)] = 128,
    causal: Annotated[
        bool, typer.Option("--causal/--no-causal", help="Whether the mask is causal.")
    ] = False,
    seqlen: Annotated[int, typer.Option(help="Queries per sequence.")] = 4096,
    seqlen_k: Annotated[
        int | None, typer.Option(help="Keys per sequence. Default: --seqlen.")
    ] = None,
    batch: Batch = None,
    heads: Heads = None,
    heads_kv: HeadsKv = None,
    kv_heads: KvHeads = None,
    arch: Arch = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Say which config a call would run, which tier of dispatch it is from, and why."""
    device, _ = device_for(arch)
    problem, shape = call_of(
        dtype=dtype,
        head_dim=head_dim,
        causal=causal,
        seqlen_q=seqlen,
        seqlen_k=seqlen if seqlen_k is None else seqlen_k,
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        kv_heads=kv_heads,
    )
    choice = choose(problem, shape, device, store=open_store(ctx, config))
    if as_json:
        print_json(
            {
                "problem": problem.model_dump(),
                "shape": shape.model_dump(),
                "device": device.key,
                "config": choice.config.model_dump(),
                "tier": int(choice.tier),
                "tier_name": choice.tier_name,
                "reason": choice.reason,
                "stale": choice.stale,
                "record": choice.record.model_dump(mode="json") if choice.record else None,
                "file": str(choice.path) if choice.path else None,
            }
        )
        return
    print(f"shape    {shape}, bucket {shape.bucket()}")
    print(choice.describe())
