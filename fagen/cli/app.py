"""The command line: a thin skin, where each command calls a room.

Rooms are imported inside the commands, so that `fagen --help` is quick. Every `FagenError` and
every usage error becomes one line on stderr and exit code 2 (1 for a full disk and its like).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fagen.errors import ArgumentError, DeviceError, FagenError, UnsupportedError, WriteError

if TYPE_CHECKING:
    from fagen.device import Device
    from fagen.kernels.config import AnyConfig
    from fagen.problem import Problem, Shape
    from fagen.records.store import Record, Store
    from fagen.show.check import Report
    from fagen.tuning.tasks import Task

USAGE_ERROR = 2
INTERRUPTED = 130

# Worked examples of each command; the help shows them, and the tests parse them.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "tune": (
        "fagen tune --arch sm90 --dtype bf16 --head-dim 128 --causal --budget 5m",
        "fagen tune --from shapes.yaml --budget 1h",
    ),
    "emit": ("fagen emit --arch sm90 --dtype bf16 --head-dim 128 --causal -o out/",),
    "list": ("fagen list --json",),
    "explain": ("fagen explain --arch sm90 --dtype bf16 --head-dim 128 --causal --seqlen 4096",),
    "bench": (
        "fagen bench --head-dim 128 --against fa3,cudnn --json results.json",
        "fagen bench --from results.json --plot results.png",
    ),
    "report": ("fagen report --study d128_causal --bench results.json -o report/",),
    "check": ("fagen check --arch sm90 --sample 300",),
    "verify": ("fagen verify --dtype bf16 --head-dim 128",),
    "doctor": ("fagen doctor",),
    "cache path": ("fagen cache path",),
    "cache clear": ("fagen cache clear",),
}

app = typer.Typer(
    name="fagen",
    help="FlashAttention kernels, written for your GPU by search.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="The folder of compiled kernels.")
app.add_typer(cache_app, name="cache")

# ClickException, which typer brings along under another name in each of its versions.
_UsageError: type[Any] = typer.BadParameter.__mro__[2]

Arch = Annotated[
    str | None, typer.Option(help="Architecture, such as sm90. Default: the card that is present.")
]
DtypeName = Annotated[str | None, typer.Option(help="fp16 or bf16.")]
HeadDim = Annotated[int | None, typer.Option(help="Head dim: a multiple of 8 from 8 to 256.")]
Causal = Annotated[bool | None, typer.Option("--causal/--no-causal", help="The mask.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Sequences. Default: 16384 / seqlen.")]
Heads = Annotated[int | None, typer.Option(min=1, help="Query heads. Default: 2048 / head dim.")]
KvHeads = Annotated[
    int | None, typer.Option(min=1, help="Key/value heads (GQA). Default: as many as query heads.")
]
DeviceIndex = Annotated[int, typer.Option("--device", help="CUDA device number.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Read tuned configs from this YAML file only.", metavar="FILE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _example(command: str) -> str:
    return "Example: " + ", or ".join(f"`{words}`" for words in EXAMPLES[command])


# ---- flags -> values ----


def _problem(dtype: str, head_dim: int, causal: bool) -> Problem:
    from fagen.kernels.config import as_argument_error
    from fagen.problem import Problem

    with as_argument_error("{}; allowed: dtype fp16, bf16; head_dim a multiple of 8 from 8 to 256"):
        return Problem.model_validate({"dtype": dtype, "head_dim": head_dim, "causal": causal})


def _integers(text: str, flag: str, least: int = 1, example: str = "512,2048,8192") -> list[int]:
    """The numbers of a comma-separated list such as "512,2048"."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ArgumentError(
            f"{flag} {text!r}: want numbers of at least {least} with commas, as {example}"
        )
    return numbers


def _seconds(text: str) -> float:
    """The seconds of "90", "90s", "5m" or "1.5h"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ArgumentError(f"--budget {text!r}: want a time above 0, such as 90s, 5m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _present_devices() -> dict[int, Device]:
    """The CUDA devices of this machine that fagen knows, by number; none without a driver."""
    from fagen.run import driver

    found: dict[int, Device] = {}
    with suppress(DeviceError):
        for number in range(driver.device_count()):
            with suppress(UnsupportedError):  # an old card beside others
                found[number] = driver.query_device(number)
    return found


def _device(arch: str | None, index: int | None = None) -> tuple[Device, int | None]:
    """The card to work for, and its number where it is present (None: it stands in).

    Raises:
        ArgumentError: for an unknown architecture, or a device that is not there.
        DeviceError: if there is neither a card nor an `arch`.
    """
    from fagen.device import architecture, typical_device

    wanted = None if arch is None else architecture(arch)
    present = _present_devices()
    if index is not None and index not in present:
        allowed = ", ".join(map(str, present)) or "none"
        raise ArgumentError(f"--device {index}: the CUDA devices that fagen knows here: {allowed}")
    for number, card in present.items():
        if (index is None or number == index) and (wanted is None or card.arch == wanted):
            return card, number
    if wanted is None:
        raise DeviceError("no CUDA device here: name an architecture, as --arch sm90")
    return typical_device(wanted), None


def _devices(arch: str | None, chosen: str | None) -> tuple[Device, list[int]]:
    """The card to tune for, and the numbers of those that are present: "0,1" or "all"."""
    if chosen is None or chosen == "all":
        card, number = _device(arch)
        if number is None or chosen is None:
            return card, [] if number is None else [number]
        present = _present_devices()
        return card, [index for index, other in present.items() if other.key == card.key]
    numbers = list(dict.fromkeys(_integers(chosen, "--device", least=0, example="0,1")))
    found = [_device(arch, number) for number in numbers]
    for number, (card, place) in zip(numbers, found, strict=True):
        if place is None:
            raise ArgumentError(f"--device {number}: no {card.arch.name} card; name another one")
    return found[0][0], numbers


def _axis_words(words: Sequence[str]) -> dict[str, str]:
    """Axes and their values, as they stand in words such as "block_m=128"."""
    values = {}
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not name or not equals or not value:
            raise ArgumentError(f"--set {word!r}: want an axis and its value, as block_m=128")
        values[name] = value
    return values


def _refuse_unknown_axes(names: Iterable[str], template: str) -> None:
    from fagen.kernels.config import TEMPLATES

    allowed = TEMPLATES[template].axis_names()
    for name in names:
        if name not in allowed:
            raise ArgumentError(
                f"--set {name}: no axis of {template}; its axes are {', '.join(allowed)}"
            )


def _override(base: AnyConfig, words: Sequence[str], problem: Problem, device: Device) -> AnyConfig:
    """`base` with axes replaced by words such as "block_m=128", checked against every rule."""
    from fagen.kernels.config import TEMPLATES, parse_config
    from fagen.kernels.space import default_config, require_legal

    values = _axis_words(words)
    template = values.pop("template", base.template)
    if template not in TEMPLATES:
        raise ArgumentError(f"--set template={template}: allowed are {', '.join(TEMPLATES)}")
    if template != base.template:
        base = default_config(problem, device, template)
    _refuse_unknown_axes(values, template)
    config = parse_config(base.model_dump() | values)
    require_legal(config, problem, device)
    return config


def _subspace(
    words: Sequence[str], template: str | None, task: Task, device: Device
) -> dict[str, Any]:
    """The values that words such as "block_n=64,128" leave to axes, for `tune`."""
    from fagen.kernels.config import parse_config
    from fagen.kernels.space import default_config

    default = default_config(task.problem, device, template)
    values = _axis_words(words)
    _refuse_unknown_axes(values, default.template)
    return {
        name: tuple(
            getattr(parse_config(default.model_dump() | {name: value.strip()}), name)
            for value in text.split(",")
        )
        for name, text in values.items()
    }


def _store(ctx: typer.Context, config: Path | None) -> Store:
    """The records of --config (given before or after the command), or the usual ones."""
    from fagen.records.store import Store

    return Store.open(config or ctx.find_root().params.get("config"))


# ---- values -> text ----


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """One line per row, for eyes, grep and awk alike; the last column may be long."""
    lines = [columns, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _print_records(records: Sequence[Record], notes: Sequence[str] | None = None) -> None:
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
        _print_table(columns, rows)


# ---- commands ----


def _print_version(wanted: bool) -> None:
    if wanted:
        import fagen

        print(f"fagen {fagen.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    config: ConfigFile = None,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print it."),
    ] = False,
) -> None:
    pass


@app.command(epilog=_example("tune"))
def tune(
    ctx: typer.Context,
    arch: Arch = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="fp16 or bf16; may be repeated. Default: both.")
    ] = None,
    head_dim: Annotated[
        list[int] | None,
        typer.Option(help="May be repeated. Default: 128, 64, 256, 96, 192."),
    ] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="The mask. Default: both.")
    ] = None,
    seqlen: Annotated[str, typer.Option(help="Sequence lengths.")] = "512,2048,8192",
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Tune what a program called, as fagen.record wrote it, in place of the above.",
            metavar="FILE",
        ),
    ] = None,
    effort: Annotated[
        str,
        typer.Option(
            help="full: 100 trials, each timed on a ragged length too. quick: 60, the given one."
        ),
    ] = "full",
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Configs to time for each problem and length, if not --effort's."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time for everything, as 90s, 5m or 1h.")
    ] = None,
    sampler: Annotated[
        str, typer.Option(help="surrogate, tpe, random, brute-force, gp, nsga2 or qmc.")
    ] = "surrogate",
    seed: Annotated[int, typer.Option(min=0, help="Of the sampler.")] = 0,
    template: Annotated[
        str | None, typer.Option(help="Default: the native one of the architecture.")
    ] = None,
    axes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Search these values of an axis only, as block_n=64,128."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="CUDA device numbers, as 0 or 0,1, or all: equal cards share the candidates. "
            "Default: the first that fits."
        ),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="A journal file, or a URL such as sqlite:///trials.db.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with what an earlier run tried.")] = False,
    compile_only: Annotated[
        bool,
        typer.Option(
            "--compile-only",
            help="On a host without a card: compile what those that tune are likely to try, into "
            "a FAGEN_CACHE that they share.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The YAML file to write. Default: your own records.", metavar="FILE"),
    ] = None,
) -> None:
    """Search the fastest config for each problem, verify it, time it, and save it.

    Where no card of the architecture is present, configs are compiled and ranked by a static
    model, and the records are marked as predicted. Ctrl-C keeps the best so far.
    """
    from rich.console import Console

    from fagen.cli.progress import TuneProgress, describe_gain, span
    from fagen.kernels.config import TEMPLATES
    from fagen.tuning import tuner as room
    from fagen.tuning.options import TuneOptions
    from fagen.tuning.search.storage import without_password
    from fagen.tuning.tasks import tasks_from

    numbers: list[int] = []
    if compile_only:
        card = _card_to_compile_for(ctx)
    else:
        card, numbers = _devices(arch, device)
    options = TuneOptions.of(
        arch=card.arch,
        devices=numbers or (0,),
        template=template,
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
    if template is not None and template not in TEMPLATES:
        raise ArgumentError(f"--template {template}: allowed are {', '.join(TEMPLATES)}")
    if recorded is None:
        tasks = _tasks(dtype, head_dim, causal, seqlen, batch, heads, kv_heads)
    else:
        if given := _given(ctx, PROBLEM_FLAGS):
            raise ArgumentError(f"--from FILE says which problems to tune: leave out {given}")
        tasks = tasks_from(recorded)
    fixed = _subspace(axes or (), template, tasks[0], card)
    options = options.model_copy(update={"fixed": fixed})
    measured = compile_only or bool(numbers)
    if not measured and (given := _given(ctx, ("trials", "sampler", "storage", "resume"))):
        print(f"Nothing will be measured, so {given} mean nothing here.", file=sys.stderr)
    expected = room.estimate_seconds(tasks, trials, effort=options.effort, measured=measured)
    shapes = sum(len(task.shapes) for task in tasks)
    print(
        f"{_counted(len(tasks), 'problem')}, {_counted(shapes, 'shape')}, {card}: about "
        f"{span(min(expected, options.budget_s or expected))}",
        file=sys.stderr,
    )
    with TuneProgress(Console(stderr=True)) as progress:
        result = room.tune(tasks, options, on_event=progress)
    _print_records(result.records)
    if result.records:
        print(f"saved in {result.path}")
    if result.storage:
        print(f"trials kept in {without_password(result.storage)}")
    if result.measured and (gain := describe_gain(result.records)):
        print(f"{_counted(len(result.records), 'kernel')}: {gain}")
    if result.interrupted:
        words = [word for word in ctx.obj or ("tune",) if word != "--resume"]
        words += ["--resume"] if result.measured else []  # a prediction keeps no trials
        print(f"interrupted; to go on: {shlex.join(['fagen', *words])}")
        raise typer.Exit(INTERRUPTED)


def _card_to_compile_for(ctx: typer.Context) -> Device:
    """The card that `fagen tune --compile-only` compiles for."""
    from fagen.device import architecture, typical_device

    given = ctx.params
    if given["device"] is not None or given["out"] is not None:
        raise ArgumentError(
            "--compile-only measures nothing and saves no record: leave out --device and --out"
        )
    if given["arch"] is None:
        raise ArgumentError("--compile-only has no card to ask: name the architecture with --arch")
    return typical_device(architecture(given["arch"]))


SHAPE_FLAGS = ("seqlen", "batch", "heads", "kv_heads")
PROBLEM_FLAGS = ("dtype", "head_dim", "causal", *SHAPE_FLAGS)


def _given(ctx: typer.Context, names: Sequence[str]) -> str:
    """Those of these flags that the user gave, as words: "--dtype, --seqlen"."""
    sources = {name: ctx.get_parameter_source(name) for name in names}
    return ", ".join(
        "--" + name.replace("_", "-")
        for name, source in sources.items()
        if source is not None and source.name != "DEFAULT"
    )


def _tasks(
    dtypes: list[str] | None,
    head_dims: list[int] | None,
    causal: bool | None,
    seqlens: str,
    batch: int | None,
    heads: int | None,
    kv_heads: int | None,
) -> list[Task]:
    from fagen.kernels.config import as_argument_error
    from fagen.tuning import tasks as room

    chosen: dict[str, Any] = {
        "dtypes": dtypes or room.STANDARD_DTYPES,
        "head_dims": head_dims or room.STANDARD_HEAD_DIMS,
        "causal": room.STANDARD_CAUSAL if causal is None else (causal,),
    }
    with as_argument_error():
        return room.standard_tasks(
            **chosen,
            seqlens=_integers(seqlens, "--seqlen"),
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
        )


@app.command(epilog=_example("emit"))
def emit(
    ctx: typer.Context,
    out: Annotated[str, typer.Option("-o", "--out", help="A folder, or - to print the kernel.")],
    arch: Arch = None,
    dtype: DtypeName = None,
    head_dim: HeadDim = None,
    causal: Causal = None,
    seqlen: Annotated[int, typer.Option(help="Which of a problem's configs to take.")] = 4096,
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    axes: Annotated[
        list[str] | None, typer.Option("--set", help="Another value of an axis, as block_m=128.")
    ] = None,
    format: Annotated[str, typer.Option(help="cu, ptx or cubin.")] = "cu",
    config: ConfigFile = None,
) -> None:
    """Write a kernel as files that need no Python: the kernel, a launcher, a self-check.

    With only --arch: every tuned kernel of that architecture.
    """
    from fagen.build import emit as room
    from fagen.files import write_files
    from fagen.records.dispatch import choose

    device, _ = _device(arch)
    store = _store(ctx, config)
    if dtype is None and head_dim is None and causal is None:
        if given := "--set" if axes else _given(ctx, SHAPE_FLAGS):
            raise ArgumentError(f"{given} wants one problem: give --dtype and --head-dim too")
        files = room.emit_all(device.arch, store.records(device.arch.name), format=format)
    else:
        if dtype is None or head_dim is None:
            raise ArgumentError("one problem takes both --dtype and --head-dim")
        problem = _problem(dtype, head_dim, bool(causal))
        shape = _default_shape(problem, seqlen, seqlen, batch, heads, kv_heads)
        choice = choose(problem, shape, device, store=store)
        answer, record = choice.config, choice.record
        if axes:
            answer, record = _override(answer, axes, problem, device), None
        files = room.emit(problem, answer, device.arch, record=record, format=format)
    if out == "-":
        _print_kernel(files)
        return
    for path in write_files(files, Path(out)):
        print(path)


def _default_shape(
    problem: Problem,
    seqlen_q: int,
    seqlen_k: int,
    batch: int | None,
    heads: int | None,
    kv_heads: int | None,
) -> Shape:
    """The shape of these flags; what is left out is filled up to 16k tokens of hidden size 2048."""
    from fagen.kernels.config import as_argument_error
    from fagen.problem import standard_shape

    with as_argument_error():
        return standard_shape(
            problem.head_dim, seqlen_q, seqlen_k, batch=batch, heads=heads, heads_kv=kv_heads
        )


def _print_kernel(files: dict[str, str | bytes]) -> None:
    """Print the kernel itself, which is the first of its files."""
    first, *rest = files
    stem = first.partition(".")[0]
    if any(not name.startswith(stem) for name in rest):
        raise ArgumentError("-o - prints one kernel: give --dtype and --head-dim, or a folder")
    content = files[first]
    sys.stdout.buffer.write(content.encode() if isinstance(content, str) else content)


@app.command("list", epilog=_example("list"))
def list_records(
    ctx: typer.Context,
    arch: Annotated[str | None, typer.Option(help="Only this architecture.")] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """List the tuned configs that dispatch may use, your own before the shipped ones."""
    from fagen.device import architecture
    from fagen.records.dispatch import STALE, is_stale

    store = _store(ctx, config)
    name = None if arch is None else architecture(arch).name
    entries = store.entries(name)
    for file in store.files(name):
        for skipped in file.skipped:
            print(f"skipped: {file.path}, line {skipped.line}: {skipped.reason}", file=sys.stderr)
    if as_json:
        _print_json(
            [
                record.model_dump(mode="json") | {"file": str(path), "stale": is_stale(record)}
                for record, path in entries
            ]
        )
        return
    if not entries:
        print("no tuned configs yet: `fagen tune` finds some")
    _print_records(
        [record for record, _ in entries],
        notes=[STALE if is_stale(record) else "" for record, _ in entries],
    )


@app.command(epilog=_example("explain"))
def explain(
    ctx: typer.Context,
    dtype: Annotated[str, typer.Option(help="fp16 or bf16.")] = "bf16",
    head_dim: Annotated[int, typer.Option(help="A multiple of 8 from 8 to 256.")] = 128,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="The mask.")] = False,
    seqlen: Annotated[int, typer.Option(help="Queries per sequence.")] = 4096,
    seqlen_k: Annotated[int | None, typer.Option(help="Keys; --seqlen if left out.")] = None,
    batch: Batch = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    arch: Arch = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Say which config a call would run, from which tier of the dispatch order, and why."""
    from fagen.records.dispatch import choose

    device, _ = _device(arch)
    problem = _problem(dtype, head_dim, causal)
    keys = seqlen if seqlen_k is None else seqlen_k
    shape = _default_shape(problem, seqlen, keys, batch, heads, kv_heads)
    choice = choose(problem, shape, device, store=_store(ctx, config))
    if as_json:
        _print_json(
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


MEASURING_FLAGS = ("grid", "against", "dtype", "seqlen", "head_dim", "device", "sm80_config")


@app.command(epilog=_example("bench"))
def bench(
    ctx: typer.Context,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results there.", metavar="FILE")
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
        typer.Option("--from", help="Measure nothing: read this JSON.", metavar="FILE"),
    ] = None,
    grid: Annotated[
        str,
        typer.Option(
            help="A: the standard shapes. B: other head dims, grouped heads, a half-empty GPU, few "
            "queries. C: A with and without LSE, without peers."
        ),
    ] = "A",
    against: Annotated[
        str, typer.Option(help="Peers, of fa3,fa4,cudnn,fa2,flex.")
    ] = "fa3,fa4,cudnn,fa2",
    dtype: Annotated[str, typer.Option(help="fp16 or bf16.")] = "bf16",
    seqlen: Annotated[
        str | None,
        typer.Option(help="Sequence lengths. Default: 512,1024,2048,4096,8192,16384."),
    ] = None,
    head_dim: Annotated[
        str | None, typer.Option(help="Head dims. Default: 64,128,256; of grid B, all it has.")
    ] = None,
    device: DeviceIndex = 0,
    sm80_config: Annotated[
        Path | None,
        typer.Option(help="Records of the sm80 template, if another is native.", metavar="FILE"),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Measure fagen beside FlashAttention-2, -3, -4, cuDNN and FlexAttention, where installed."""
    from fagen.records.store import Store
    from fagen.show import results as shown
    from fagen.show.bench import bench as measure

    if plot:  # its absence should show before minutes of measuring
        from fagen.show.report import require_matplotlib

        require_matplotlib()
    if plot and plot.suffix != ".png":
        raise ArgumentError(f"--plot {plot}: it draws PNG files, so name one that ends in .png")
    if results:
        if given := _given(ctx, MEASURING_FLAGS):
            raise ArgumentError(f"--from FILE measures nothing: leave out {given}")
        found = shown.load_results(results)
    else:
        found = measure(
            grid=grid,
            dtype=dtype,
            seqlens=_integers(seqlen, "--seqlen") if seqlen is not None else None,
            head_dims=_integers(head_dim, "--head-dim") if head_dim is not None else None,
            peers=against.split(","),
            store=_store(ctx, config),
            sm80_store=Store.open(sm80_config) if sm80_config else None,
            device_index=device,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    if json_file:
        shown.save_results(found, json_file)
    if readme:
        shown.write_table(found, readme)
    if plot:
        shown.save_plot(found, plot)
    print(shown.markdown(found))


@app.command(epilog=_example("report"))
def report(
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The folder to write into.", metavar="FOLDER")
    ],
    storage: Annotated[
        str | None,
        typer.Option(
            help="A journal file or a URL, as of `fagen tune`. Default: what it wrote last."
        ),
    ] = None,
    study: Annotated[
        list[str] | None,
        typer.Option(help="A study's name or a part of it; may be repeated. Default: all."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(help="Results of `fagen bench --json`: the peers.", metavar="FILE"),
    ] = None,
) -> None:
    """Show the studies that `fagen tune` keeps: one HTML page, and its plots as PNG files.

    Needs matplotlib, which the extra "report" installs.
    """
    from fagen.show import report as room
    from fagen.show.results import load_results
    from fagen.tuning.search.storage import last_storage

    written = room.report(
        storage if storage is not None else last_storage(),
        out,
        studies=study or (),
        bench=load_results(bench) if bench else None,
    )
    for name in written.ignored:
        print(f"left out, not of `fagen tune`: {name}", file=sys.stderr)
    studies = len(written.studies)
    counted = f"{studies} {'study' if studies == 1 else 'studies'}"
    print(f"{written.page}: {counted}, {_counted(len(written.plots), 'plot')} beside it")


@app.command(epilog=_example("check"))
def check(
    ctx: typer.Context,
    arch: Arch = None,
    sample: Annotated[int, typer.Option(min=0, help="Legal configs to compile.")] = 24,
    everything: Annotated[
        bool, typer.Option("--all", help="Compile every legal config: hours.")
    ] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Count the space, compile a sample of it, and judge every stored record.

    Where a card of the architecture is present, each record's kernel also runs and is verified.
    Exit code 1 if anything is wrong.
    """
    from rich.console import Console
    from rich.progress import Progress

    from fagen.show import check as room

    device, index = _device(arch)
    files = _store(ctx, config).files(device.arch.name)
    with Progress(disable=not sys.stderr.isatty(), console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling", total=None)
        report = room.check(
            device.arch,
            files,
            sample=sample,
            everything=everything,
            device=device,
            device_index=index,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        _print_json(report.model_dump(mode="json") | {"ok": report.ok})
    else:
        _print_report(report, verified=index is not None)
    if not report.ok:
        raise typer.Exit(1)


def _print_report(report: Report, verified: bool) -> None:
    print(f"space on {report.spaces[0].device}, {report.arch}")
    _print_table(
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
    faults = sum(record.fault is not None for record in report.records)
    how = "compiled and verified" if verified else "compiled (no such card here to run them)"
    print(f"{len(report.records)} records, {how}: {faults} with a fault")
    for line in report.unreadable:
        print(f"  unreadable: {line}")
    for record in report.records:
        if record.fault:
            print(f"  {record.record} {record.config}: {record.fault}")


@app.command(epilog=_example("verify"))
def verify(
    ctx: typer.Context,
    arch: Arch = None,
    dtype: DtypeName = None,
    head_dim: HeadDim = None,
    causal: Causal = None,
    config: ConfigFile = None,
    storage: Annotated[
        str | None,
        typer.Option(help="The studies, as of `fagen tune`: each record's runners-up."),
    ] = None,
    device: Annotated[
        int | None, typer.Option(min=0, help="CUDA device number. Default: the first that fits.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the tuned configs again, beside their runners-up: do they still hold?

    Of each record of this card: "holds", "stale" (something is faster now, by more than 1 %) or
    "wrong". Exit code 1 if any does not hold.
    """
    from collections import Counter

    from fagen.show.recheck import recheck

    if not _present_devices():
        raise DeviceError("no CUDA device here to measure on; `fagen check` judges without one")
    card, present = _device(arch, device)
    if present is None:
        raise DeviceError(
            f"no {card.arch.name} device here to measure on; `fagen check --arch {card.arch.name}` "
            "judges records without one"
        )
    chosen = {"dtype": dtype, "head_dim": head_dim, "causal": causal}
    records: dict[Any, Record] = {}
    for record in _store(ctx, config).records(card.arch.name):
        if all(value in (None, getattr(record.problem, name)) for name, value in chosen.items()):
            records.setdefault(record.key, record)  # the one that dispatch takes
    found = []
    for item in recheck(
        list(records.values()),
        device_index=present,
        storage=storage,
        on_notice=lambda notice: print(notice.text, file=sys.stderr),
    ):
        found.append(item)
        if not as_json:
            now = "" if item.median_us is None else f", now {item.median_us:.1f} us"
            print(
                f"{item.state:<5}  {item.record}: {item.recorded_us:.1f} us on record{now}: "
                f"{item.config}{item.reason and f'; {item.reason}'}",
                flush=True,
            )
    if as_json:
        _print_json([item.model_dump() for item in found])
    else:
        states = Counter(item.state for item in found)
        print(
            f"{_counted(len(found), 'record')}: {states['holds']} hold, {states['stale']} stale, "
            f"{states['wrong']} wrong"
        )
    if any(item.state != "holds" for item in found):
        raise typer.Exit(1)


@app.command(epilog=_example("doctor"))
def doctor(as_json: AsJson = False) -> None:
    """Say what is here, what is missing, and the line that fixes it.

    Exit code 1 if kernels cannot be compiled; a missing GPU is only a warning.
    """
    from fagen.show.doctor import diagnose

    findings = diagnose()
    if as_json:
        _print_json([finding.model_dump() for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.status:<5} {finding.what:<10} {finding.found}")
            if finding.fix:
                print(f"{'':<16} -> {finding.fix}")
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


@cache_app.command("path", epilog=_example("cache path"))
def cache_path() -> None:
    """Print the folder of compiled kernels (FAGEN_CACHE moves it)."""
    from fagen.build.compile import cache_folder

    print(cache_folder())


@cache_app.command("clear", epilog=_example("cache clear"))
def cache_clear() -> None:
    """Remove every compiled kernel; the next call compiles again."""
    from fagen.build.compile import clear_cache

    print(f"freed {clear_cache() / 1e6:.1f} MB")


# ---- entry ----


def _complain(message: str) -> int:
    print("fagen: " + " ".join(message.split()), file=sys.stderr)
    return USAGE_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        argv: the words after "fagen"; those of the process if None.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if sys.stdout is None:  # closed by the caller, as `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        code = app(args=words or ["--help"], obj=words, prog_name="fagen", standalone_mode=False)
        sys.stdout.flush()
    except FagenError as error:
        code = _complain(str(error))
        return 1 if isinstance(error, WriteError) else code
    except _UsageError as error:
        where = error.ctx.command_path if getattr(error, "ctx", None) else "fagen"
        return _complain(f"{error.format_message()} (`{where} --help` shows what is allowed)")
    except OSError as error:  # rooms report those of the files that they know of
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to print
        if isinstance(error, BrokenPipeError):  # `fagen list | head`
            return 1
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"cannot go on: {where}{error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0
