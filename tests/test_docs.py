"""What the documents say is what the code does."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import fagen
from fagen.cli import app as cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands() -> list[list[str]]:
    """Every `fagen ...` of the documents, as words."""
    found = []
    for path in (ROOT / "README.md", ROOT / "benchmarks" / "README.md"):
        for block in blocks("sh", path.read_text(encoding="utf-8")):
            for line in block.splitlines():
                for part in line.split("&&"):
                    words = shlex.split(part, comments=True)
                    if words[:1] == ["fagen"]:
                        found.append(words)
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_each_command_line_parses(words: list[str]) -> None:
    command: Any = get_command(cli.app)
    words = words[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context("fagen", words)  # raises what a user would see


def test_the_documents_show_every_command() -> None:
    shown = {words[1] for words in commands()}
    root: Any = get_command(cli.app)
    assert shown == set(root.commands)


def test_the_python_example_calls_what_exists() -> None:
    (example,) = blocks("python")
    calls = [
        node
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "fagen"
    ]
    assert {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)} == {
        "attention",
        "explain",
        "load",
        "tune",
    }
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        signature = inspect.signature(getattr(fagen, call.func.attr))
        signature.bind(*call.args, **{keyword.arg or "": keyword for keyword in call.keywords})


@pytest.mark.gpu
def test_the_python_example_runs() -> None:
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})


def test_the_table_of_rooms_is_complete() -> None:
    (table,) = re.findall(r"\| to change .*?\n\n", README, flags=re.DOTALL)
    named = set(re.findall(r"fagen/([\w/]+)\.py", table))
    modules = (path.relative_to(ROOT / "fagen") for path in (ROOT / "fagen").rglob("*.py"))
    there = {str(path.with_suffix("")) for path in modules if not path.stem.startswith("__")}
    assert named <= there
    assert there - named <= INNER


# Modules that serve one room and that nobody looks for first.
INNER = {
    "build/processes",
    "files",
    "judge/cupy_device",
    "tuning/clock",
    "tuning/outcome",
    "tuning/search/first_format",
}


def test_ci_calls_the_test_command_of_the_readme() -> None:
    (setup,) = [block for block in blocks("sh") if "pytest" in block]
    test_command = setup.split("&&")[1].strip()
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert ci.splitlines()[-1] == test_command
    assert '".[cuda13,dev]"' in setup
    assert '".[cuda13,dev]"' in ci


def test_the_changelog_knows_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changelog or f"## [{fagen.__version__}]" in changelog
