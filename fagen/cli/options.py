"""The flags that several commands share, and the values that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fagen.errors import ArgumentError
from fagen.kernels.registry import TEMPLATES
from fagen.problem import (
    DTYPE_NAMES,
    HEAD_DIM_MULTIPLE,
    HIDDEN,
    MAX_HEAD_DIM,
    TOKENS,
    Problem,
    Shape,
)
from fagen.records.store import Store
from fagen.tuning.tasks import STANDARD_SEQLENS, Task, standard_tasks
from fagen.validation import as_argument_error


def commas(values: Iterable[object]) -> str:
    """Values as a flag takes several: "512,2048"."""
    return ",".join(map(str, values))


LENGTHS = commas(STANDARD_SEQLENS)
DTYPE_HELP = f"{' or '.join(DTYPE_NAMES)}."
HEAD_DIM_HELP = f"A multiple of {HEAD_DIM_MULTIPLE}, at most {MAX_HEAD_DIM}."

Arch = Annotated[
    str | None, typer.Option(help="Architecture, such as sm90. Default: that of the GPU here.")
]
DtypeName = Annotated[str | None, typer.Option(help=DTYPE_HELP)]
HeadDim = Annotated[int | None, typer.Option(help=HEAD_DIM_HELP)]
Causal = Annotated[
    bool | None, typer.Option("--causal/--no-causal", help="Whether the mask is causal.")
]
Batch = Annotated[
    int | None, typer.Option(min=1, help=f"Sequences. Default: {TOKENS} / sequence length.")
]
Heads = Annotated[
    int | None, typer.Option(min=1, help=f"Query heads. Default: {HIDDEN} / head dim.")
]
HeadsKv = Annotated[
    int | None, typer.Option(min=1, help="Key/value heads (GQA). Default: as many as query heads.")
]
KvHeads = Annotated[int | None, typer.Option(hidden=True, help="The old name of --heads-kv.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Read tuned configs from this YAML file only.", metavar="FILE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

SHAPE_FLAGS = ("seqlen", "batch", "heads", "heads_kv", "kv_heads")
PROBLEM_FLAGS = ("dtype", "head_dim", "causal", *SHAPE_FLAGS)


def new_app(help: str | None = None) -> typer.Typer:
    """What a command's module declares its function on."""
    return typer.Typer(help=help, add_completion=False)


def examples(*lines: str) -> str:
    """Worked examples, the end of a command's help."""
    return "Example: " + ", or ".join(f"`{line}`" for line in lines)


def given(ctx: typer.Context, names: Sequence[str]) -> str:
    """The flags among `names` that the user gave, as words: "--dtype, --seqlen"."""
    sources = {name: ctx.get_parameter_source(name) for name in names}
    return ", ".join(
        "--" + name.replace("_", "-")
        for name, source in sources.items()
        if source is not None and source.name != "DEFAULT"
    )


def integers(text: str, flag: str, least: int = 1, example: str = LENGTHS) -> list[int]:
    """The numbers of a list such as "512,2048".

    Raises:
        ArgumentError: for anything else, and for a number below `least`.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ArgumentError(
            f"{flag} {text!r}: give whole numbers of at least {least} with commas between them, "
            f"such as {example}"
        )
    return numbers


def tasks_of(
    *,
    dtypes: Sequence[str],
    head_dims: Sequence[int],
    causal: Sequence[bool],
    seqlens: Sequence[int | tuple[int, int]],
    batch: int | None,
    heads: int | None,
    heads_kv: int | None,
    kv_heads: int | None,
) -> list[Task]:
    """Every problem that these values of the flags name, with its shapes.

    Args:
        seqlens: lengths of queries and keys alike, or a pair for both.
        batch, heads, heads_kv: those of `standard_shape` if None.
        kv_heads: what --kv-heads, the old name of --heads-kv, says.

    Raises:
        ArgumentError: for a value that is not allowed.
    """
    if heads_kv is not None and kv_heads is not None:
        raise ArgumentError("--kv-heads is the old name of --heads-kv: give only one of them")
    named: dict[str, Any] = {"dtypes": dtypes}  # pydantic checks the words
    with as_argument_error():
        return standard_tasks(
            **named,
            head_dims=head_dims,
            causal=causal,
            seqlens=seqlens,
            batch=batch,
            heads=heads,
            heads_kv=kv_heads if heads_kv is None else heads_kv,
        )


def call_of(
    *, dtype: str, head_dim: int, causal: bool, seqlen_q: int, seqlen_k: int, **sizes: int | None
) -> tuple[Problem, Shape]:
    """The one problem and shape that flags name; the sizes are those of `tasks_of`."""
    (task,) = tasks_of(
        dtypes=[dtype],
        head_dims=[head_dim],
        causal=[causal],
        seqlens=[(seqlen_q, seqlen_k)],
        **sizes,
    )
    (shape,) = task.shapes
    return task.problem, shape


def axis_words(words: Sequence[str]) -> dict[str, str]:
    """Axes and their values, from words such as "block_m=128"."""
    values = {}
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not name or not equals or not value:
            raise ArgumentError(f"--set {word!r}: give an axis and its value, such as block_m=128")
        values[name] = value
    return values


def refuse_unknown_axes(names: Iterable[str], template: str) -> None:
    """Raises an ArgumentError for a name that is not an axis of the template."""
    allowed = TEMPLATES[template].Config.axis_names()
    for name in names:
        if name not in allowed:
            raise ArgumentError(
                f"--set {name}: {template} has no such axis; its axes are {', '.join(allowed)}"
            )


def open_store(ctx: typer.Context, config: Path | None) -> Store:
    """The records of --config (given before or after the command), or the usual ones."""
    return Store.open(config or ctx.find_root().params.get("config"))
