"""The command line: its commands by name, and the exit code of each way to end.

A command is a module of `fagen.cli.commands`, which is imported when that command is called, so
that `fagen --help` is quick. Every `FagenError` and every usage error becomes one line on stderr
and exit code 2 (1 if a file could not be written).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from fagen.errors import FagenError, WriteError

USAGE_ERROR = 2
INTERRUPTED = 130

# By name, the first sentence of each command's help.
COMMANDS = {
    "tune": "Search the fastest config for each problem, verify it, time it, and save it.",
    "emit": "Write a kernel as files that need no Python: the kernel, a launcher, a self-check.",
    "list": "List the tuned configs that dispatch may use, your own before the shipped ones.",
    "explain": "Say which config a call would run, which tier of dispatch it is from, and why.",
    "bench": "Measure fagen beside FlashAttention-2, -3 and -4, cuDNN and FlexAttention.",
    "report": "Show the studies that `fagen tune` keeps: an HTML page, and its plots as PNG files.",
    "check": "Count the search space, compile a sample of it, and check every stored record.",
    "recheck": "Measure the tuned configs again, beside their runners-up: do they still hold?",
    "doctor": "Say what is here, what is missing, and the line that fixes it.",
    "cache": "The folder of compiled kernels.",
}
OLD_NAMES = {"verify": "recheck"}  # still accepted, not shown


def load(name: str) -> Any:
    """A command (or group of commands) of `COMMANDS` or `OLD_NAMES`, ready to parse and run."""
    module = import_module(f"fagen.cli.commands.{OLD_NAMES.get(name, name)}")
    return get_command(module.app)


class _Commands(TyperGroup):
    """Knows the commands by name, and loads the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(str(name)), rest


app = typer.Typer(
    name="fagen",
    cls=_Commands,
    help="FlashAttention kernels, written for your GPU by search.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import fagen

        print(f"fagen {fagen.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same as --config of a command.")
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def _name_only() -> None:
    """Stands for a command until it is loaded."""


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_name_only)
for _name in OLD_NAMES:
    app.command(_name, hidden=True)(_name_only)


def _complain(message: str) -> int:
    print("fagen: " + " ".join(message.split()), file=sys.stderr)
    return USAGE_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        argv: the words after "fagen"; those of the process if None.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if sys.stdout is None:  # the caller closed it, as `>&-` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        code = app(args=words or ["--help"], obj=words, prog_name="fagen", standalone_mode=False)
        sys.stdout.flush()
    except FagenError as error:
        code = _complain(str(error))
        return 1 if isinstance(error, WriteError) else code
    except typer.TyperException as error:
        ctx = getattr(error, "ctx", None)
        where = ctx.command_path if ctx else "fagen"
        return _complain(f"{error.format_message()} (`{where} --help` shows what is allowed)")
    except OSError as error:  # of stdout: errors of other files are FagenErrors
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drops unprinted output
        if isinstance(error, BrokenPipeError):  # `fagen list | head`
            return 1
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"cannot go on: {where}{error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0
