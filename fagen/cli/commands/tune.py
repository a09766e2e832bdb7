"""`fagen tune`: search, verify, time and save a config for each problem."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fagen.cli.app import INTERRUPTED
from fagen.cli.devices import devices_for
from fagen.cli.options import (
    DTYPE_HELP,
    HEAD_DIM_HELP,
    LENGTHS,
    PROBLEM_FLAGS,
    Arch,
    Batch,
    Heads,
    HeadsKv,
    KvHeads,
    axis_words,
    commas,
    examples,
    given,
    integers,
    new_app,
    refuse_unknown_axes,
    tasks_of,
)
from fagen.cli.output import counted, print_records
from fagen.cli.progress import TuneProgress, describe_gain, span
from fagen.device import Device, architecture, typical_device
from fagen.errors import ArgumentError
from fagen.kernels.registry import TEMPLATES, default_config, parse_config
from fagen.tuning import tuner
from fagen.tuning.options import SAMPLERS, TRIALS, TuneOptions
from fagen.tuning.search.storage import without_password
from fagen.tuning.tasks import (
    STANDARD_CAUSAL,
    STANDARD_DTYPES,
    STANDARD_HEAD_DIMS,
    Task,
    tasks_from,
)

app = new_app()

DEFAULT = TuneOptions()

Dtypes = Annotated[
    list[str] | None,
    typer.Option(help=f"{DTYPE_HELP} May be repeated. Default: {commas(STANDARD_DTYPES)}."),
]
HeadDims = Annotated[
    list[int] | None,
    typer.Option(help=f"{HEAD_DIM_HELP} May be repeated. Default: {commas(STANDARD_HEAD_DIMS)}."),
]
Causal = Annotated[
    bool | None,
    typer.Option("--causal/--no-causal", help="Whether the mask is causal. Default: both."),
]
Seqlens = Annotated[str, typer.Option(help="Sequence lengths.")]
Recorded = Annotated[
    Path | None,
    typer.Option(
        "--from",
        help="Tune what a program called, from a file that fagen.record wrote, instead of the "
        "problems above.",
        metavar="FILE",
    ),
]
Effort = Annotated[
    str,
    typer.Option(
        help=f"full: {TRIALS['full']} trials, each also timed on a ragged length. "
        f"quick: {TRIALS['quick']} trials, on the given lengths only."
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        min=1, help="Configs to time for each problem and length. Default: --effort decides."
    ),
]
Budget = Annotated[str | None, typer.Option(help="Time for everything, such as 90s, 5m or 1h.")]
Sampler = Annotated[str, typer.Option(help=f"One of {', '.join(SAMPLERS)}.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sampler.")]
Template = Annotated[
    str | None, typer.Option(help="The template to search. Default: the architecture's own.")
]
Axes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Search only these values of an axis, such as block_n=64,128."),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="CUDA device numbers, such as 0 or 0,1, or all: equal GPUs share the candidates. "
        "Default: the first that fits.",
    ),
]
Storage = Annotated[
    str | None, typer.Option(help="A journal file, or a URL such as sqlite:///trials.db.")
]
Resume = Annotated[bool, typer.Option(help="Continue from the trials of earlier runs.")]
CompileOnly = Annotated[
    bool,
    typer.Option(
        "--compile-only",
        help="On a host without a GPU: compile what those that tune are likely to try, into a "
        "FAGEN_CACHE that they share.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="The YAML file to write. Default: your own records.", metavar="FILE"),
]


@app.command(
    epilog=examples(
        "fagen tune --arch sm90 --dtype bf16 --head-dim 128 --causal --budget 5m",
        "fagen tune --from shapes.yaml --budget 1h",
    )
)
def tune(
    ctx: typer.Context,
    arch: Arch = None,
    dtype: Dtypes = None,
    head_dim: HeadDims = None,
    causal: Causal = None,
    seqlen: Seqlens = LENGTHS,
    batch: Batch = None,
    heads: Heads = None,
    heads_kv: HeadsKv = None,
    kv_heads: KvHeads = None,
    recorded: Recorded = None,
    effort: Effort = DEFAULT.effort,
    trials: Trials = None,
    budget: Budget = None,
    sampler: Sampler = DEFAULT.sampler,
    seed: Seed = DEFAULT.seed,
    template: Template = None,
    axes: Axes = None,
    devices: Devices = None,
    storage: Storage = None,
    resume: Resume = False,
    compile_only: CompileOnly = False,
    out: Out = None,
) -> None:
    """Search the fastest config for each problem, verify it, time it, and save it.

    If no GPU of the architecture is present, configs are compiled and ranked by a static model,
    and the records are marked as predicted. Ctrl-C keeps the best so far.
    """
    device, numbers = _device_to_compile_for(ctx) if compile_only else devices_for(arch, devices)
    if recorded is None:
        tasks = tasks_of(
            dtypes=dtype or STANDARD_DTYPES,
            head_dims=head_dim or STANDARD_HEAD_DIMS,
            causal=STANDARD_CAUSAL if causal is None else [causal],
            seqlens=integers(seqlen, "--seqlen"),
            batch=batch,
            heads=heads,
            heads_kv=heads_kv,
            kv_heads=kv_heads,
        )
    elif flags := given(ctx, PROBLEM_FLAGS):
        raise ArgumentError(f"--from FILE says which problems to tune: leave out {flags}")
    else:
        tasks = tasks_from(recorded)
    options = TuneOptions.of(
        arch=device.arch,
        devices=numbers or (0,),
        template=template,
        fixed=_subspace(axes or (), template, tasks[0], device),
        effort=effort,
        trials=trials,
        budget_s=None if budget is None else _seconds(budget),
        sampler=sampler,
        seed=seed,
        storage=storage,
        resume=resume,
        compile_only=compile_only,
        out=out,
    )
    measured = compile_only or bool(numbers)
    unused = ("storage", "resume") if measured else ("trials", "sampler", "storage", "resume")
    if not numbers and (flags := given(ctx, unused)):
        print(f"Nothing is measured here, so these have no effect: {flags}.", file=sys.stderr)
    expected = tuner.estimate_seconds(tasks, trials, effort=options.effort, measured=measured)
    _announce(tasks, device, min(expected, options.budget_s or expected))
    with TuneProgress(Console(stderr=True)) as progress:
        result = tuner.tune(tasks, options, on_event=progress)
    _print_result(result)
    if result.interrupted:
        words = [word for word in ctx.obj or ("tune",) if word != "--resume"]
        words += ["--resume"] if result.measured else []  # a prediction keeps no trials
        print(f"interrupted; to continue: {shlex.join(['fagen', *words])}")
        raise typer.Exit(INTERRUPTED)


def _device_to_compile_for(ctx: typer.Context) -> tuple[Device, list[int]]:
    """The device that --compile-only compiles for, and no device to measure on."""
    flags = ctx.params
    if flags["devices"] is not None or flags["out"] is not None:
        raise ArgumentError(
            "--compile-only measures nothing and saves no record: leave out --device and --out"
        )
    if flags["arch"] is None:
        raise ArgumentError("--compile-only has no GPU to ask: name the architecture with --arch")
    return typical_device(architecture(flags["arch"])), []


def _seconds(text: str) -> float:
    """The seconds of "90", "90s", "5m" or "1.5h"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ArgumentError(f"--budget {text!r}: give a time above 0, such as 90s, 5m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _subspace(
    words: Sequence[str], template: str | None, task: Task, device: Device
) -> dict[str, Any]:
    """The values that words such as "block_n=64,128" leave to axes of the template."""
    if template is not None and template not in TEMPLATES:
        raise ArgumentError(f"--template {template}: allowed are {', '.join(TEMPLATES)}")
    default = default_config(task.problem, device, template)
    values = axis_words(words)
    refuse_unknown_axes(values, default.template)
    return {
        name: tuple(
            getattr(parse_config(default.model_dump() | {name: value.strip()}), name)
            for value in text.split(",")
        )
        for name, text in values.items()
    }


def _announce(tasks: Sequence[Task], device: Device, seconds: float) -> None:
    shapes = sum(len(task.shapes) for task in tasks)
    print(
        f"{counted(len(tasks), 'problem')}, {counted(shapes, 'shape')}, {device}: "
        f"about {span(seconds)}",
        file=sys.stderr,
    )


def _print_result(result: tuner.TuneResult) -> None:
    print_records(result.records)
    if result.records:
        print(f"saved in {result.path}")
    if result.storage:
        print(f"trials kept in {without_password(result.storage)}")
    if result.measured and (gain := describe_gain(result.records)):
        print(f"{counted(len(result.records), 'kernel')}: {gain}")
