"""What YAML means to fagen, and what it refuses."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fagen.errors import StoreError
from fagen.files import packaged_folder
from fagen.records import yaml_file
from fagen.records.yaml_file import Item, list_text, read_list

SHIPPED = sorted(packaged_folder("tuned_configs").glob("*.yaml"))


def read(path: Path, text: str) -> tuple[Any, list[Item]]:
    path.write_text(text)
    return read_list(path, "things", kind="things", writer="this test")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "things.yaml"


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda path: path.name)
def test_the_shipped_files_mean_what_yaml_says(shipped: Path) -> None:
    schema, items = read_list(shipped, "records", kind="tuned configs", writer="fagen")
    text = shipped.read_text()
    content = {"schema": schema, "records": [item.content for item in items]}
    assert content == yaml.load(text, yaml_file._SafeLoader)
    lines = text.splitlines()
    assert all(lines[item.line - 1].startswith("- problem: ") for item in items)
    assert len(items) == sum(line.startswith("- ") for line in lines)


def test_scalars_have_the_type_that_yaml_gives_them(path: Path) -> None:
    text = "schema: 1\nthings: [1, 0x10, 1.5, .inf, true, ~, null, 2026-01-02, '7', no way, ]\n"
    values = [item.content for item in read(path, text)[1]]
    day = datetime.date(2026, 1, 2)
    assert values == [1, 16, 1.5, float("inf"), True, None, None, day, "7", "no way"]
    assert [type(value) for value in values[:2]] == [int, int]


@pytest.mark.parametrize(
    "text", ["[1\n\n\n, 2]", "{a: 1}", "a: b", "- 1", "# 1", "5", "", "\u2028"]
)
def test_a_string_is_never_parsed_again(path: Path, text: str) -> None:
    for thing in (text, f"a {text}", text * 2):
        assert read(path, list_text("things", [thing]))[1][0].content == thing
    assert read(path, "schema: 1\nthings:\n- a\n\n  - b\n")[1][0].content == "a\n- b"


def test_the_same_content_gives_the_same_bytes(path: Path) -> None:
    things = [{"a": 1, "b": [1.5, None]}, {"a": "é " * 60, "b": {"c": {"d": True}}}]
    text = list_text("things", [things[0], things[0], things[1]])
    assert "&" not in text
    _, items = read(path, text)
    assert list_text("things", [item.content for item in items]) == text


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        ("!!str a", "line 2: the tag 'tag:yaml.org,2002:str'"),
        ("! a", "line 2: the tag '!'"),
        ("[&a x, *a]", r"line 2: the alias \*a"),
        ("[&a [*a]]", r"line 2: the alias \*a"),
        ("[[[[[[[[x]]]]]]]]", "line 2: nested more than 8 deep"),
        ("[" * 1000000, "line 2: .*nest"),
        ("\n" + "- " * 100000 + "x", "line 3: nested more than 8 deep"),
        ("{1: 2}", "line 2: not a field name"),
        ("{[a]: 2}", "line 2: not a field name"),
        ("{a: 1, 'a': 2}", "line 2: a is given twice"),
        ("[<<]", "line 2: not YAML: << has to be in quotes"),
        ("[2026-99-99]", "line 2: not YAML: month"),
        ("[" + "9" * 101 + "]", "line 2: not YAML: a value of over 100 characters"),
        ("[1" + ":59" * 1000000 + "]", "line 2: not YAML: a value of over 100 characters"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_refused_is_named_with_its_line(path: Path, thing: str, said: str) -> None:
    start = time.process_time()
    with pytest.raises(StoreError, match=f"^{path}, {said}") as caught:
        read(path, f"schema: 1\nthings: {thing}\n")
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 30


def test_characters_of_tags_and_aliases_are_harmless_inside_a_string(path: Path) -> None:
    text = "schema: 1  # a *!\nthings: [a&b!*, '*a', \"!a\"]\n"
    assert [item.content for item in read(path, text)[1]] == ["a&b!*", "*a", "!a"]


def test_eight_levels_are_not_too_deep(path: Path) -> None:
    assert read(path, "schema: 1\nthings: [[[[[[[x]]]]]]]\n")[1][0].content == [[[[[["x"]]]]]]


def test_yaml_without_its_c_library_reads_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "schema: 1\nthings:\n- {a: 1, b: [x, 2.5]}\n-   y\n"
    expected = read(path, text)
    monkeypatch.setattr(yaml_file, "_SafeLoader", yaml.SafeLoader)
    assert read(path, text) == expected == (1, [Item({"a": 1, "b": ["x", 2.5]}, 3), Item("y", 4)])
    for thing, said in (("[!!int 1]", "the tag"), ("[" * 1000, "nested more"), ("[", "line 3")):
        with pytest.raises(StoreError, match=said):
            read(path, f"schema: 1\nthings: {thing}\n")
