"""`fagen emit`: write kernels as files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fagen.build.emit import emit as emit_kernel
from fagen.build.emit import emit_all
from fagen.cli.devices import device_for
from fagen.cli.options import (
    SHAPE_FLAGS,
    Arch,
    Batch,
    Causal,
    ConfigFile,
    DtypeName,
    HeadDim,
    Heads,
    HeadsKv,
    KvHeads,
    axis_words,
    call_of,
    examples,
    given,
    new_app,
    open_store,
    refuse_unknown_axes,
)
from fagen.device import Device
from fagen.errors import ArgumentError
from fagen.files import write_files
from fagen.kernels.registry import TEMPLATES, default_config, parse_config
from fagen.kernels.space import require_legal
from fagen.kernels.template import Config
from fagen.problem import Problem
from fagen.records.dispatch import choose

app = new_app()


@app.command(epilog=examples("fagen emit --arch sm90 --dtype bf16 --head-dim 128 --causal -o out/"))
def emit(
    ctx: typer.Context,
    out: Annotated[str, typer.Option("-o", "--out", help="A folder, or - to print the kernel.")],
    arch: Arch = None,
    dtype: DtypeName = None,
    head_dim: HeadDim = None,
    causal: Causal = None,
    seqlen: Annotated[
        int, typer.Option(help="Take the config that is tuned for this sequence length.")
    ] = 4096,
    batch: Batch = None,
    heads: Heads = None,
    heads_kv: HeadsKv = None,
    kv_heads: KvHeads = None,
    axes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value of an axis, such as block_m=128."),
    ] = None,
    format: Annotated[str, typer.Option(help="cu, ptx or cubin.")] = "cu",
    config: ConfigFile = None,
) -> None:
    """Write a kernel as files that need no Python: the kernel, a launcher, a self-check.

    With --arch alone: every tuned kernel of that architecture.
    """
    device, _ = device_for(arch)
    store = open_store(ctx, config)
    if dtype is None and head_dim is None and causal is None:
        if flags := "--set" if axes else given(ctx, SHAPE_FLAGS):
            raise ArgumentError(f"{flags}: for one problem only, so give --dtype and --head-dim")
        files = emit_all(device.arch, store.records(device.arch.name), format=format)
    else:
        if dtype is None or head_dim is None:
            raise ArgumentError("one problem needs both --dtype and --head-dim")
        problem, shape = call_of(
            dtype=dtype,
            head_dim=head_dim,
            causal=bool(causal),
            seqlen_q=seqlen,
            seqlen_k=seqlen,
            batch=batch,
            heads=heads,
            heads_kv=heads_kv,
            kv_heads=kv_heads,
        )
        choice = choose(problem, shape, device, store=store)
        answer, record = choice.config, choice.record
        if axes:
            answer, record = _override(answer, axes, problem, device), None
        files = emit_kernel(problem, answer, device.arch, record=record, format=format)
    if out == "-":
        _print_kernel(files)
        return
    for path in write_files(files, Path(out)):
        print(path)


def _override(base: Config, words: Sequence[str], problem: Problem, device: Device) -> Config:
    """`base` with axes replaced by words such as "block_m=128", checked against every rule."""
    values = axis_words(words)
    template = values.pop("template", base.template)
    if template not in TEMPLATES:
        raise ArgumentError(f"--set template={template}: allowed are {', '.join(TEMPLATES)}")
    if template != base.template:
        base = default_config(problem, device, template)
    refuse_unknown_axes(values, template)
    config = parse_config(base.model_dump() | values)
    require_legal(config, problem, device)
    return config


def _print_kernel(files: dict[str, str | bytes]) -> None:
    """Prints the kernel itself, the first of its files."""
    first, *rest = files
    stem = first.partition(".")[0]
    if any(not name.startswith(stem) for name in rest):
        raise ArgumentError("-o - prints one kernel: give --dtype and --head-dim, or a folder")
    content = files[first]
    sys.stdout.buffer.write(content.encode() if isinstance(content, str) else content)
