"""YAML files that hold a list, such as tuned configs: read strictly, written canonically.

Only plain YAML is read. A tag, an alias, a name given twice or deep nesting is refused, so that
nothing in a file can mean more than it shows. The same content always gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fagen.errors import StoreError

SCHEMA = 1  # of a file as a whole; a field that is new in an item does not raise it
MAX_BYTES = 64 << 20  # of a file: a tuned config takes 800
MAX_DEPTH = 8  # of nested collections: a tuned config needs 4
MAX_VALUE = 100  # characters of a number or date: the time to convert one grows with its square
WHAT_TO_DO = (
    "Nothing of it was used or changed: mend the line, restore the file from git, "
    "or move it away, and the next run writes a new one"
)
_SafeLoader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_RESOLVER: Any = yaml.resolver.Resolver()
_STRING = "tag:yaml.org,2002:str"


class Item(NamedTuple):
    """One item of the list in a file: its content, and its line in the file, from 1."""

    content: Any
    line: int


# ---- reading ----


def read_list(path: Path, name: str, *, kind: str, writer: str) -> tuple[Any, list[Item]]:
    """The schema of a file and the items of its list, as plain dicts, lists and scalars.

    Args:
        path: the file: a mapping of `schema:` and of the list.
        name: the name of the list.
        kind: what such a file is called, such as "tuned configs".
        writer: the call or command that writes such a file.

    Returns:
        The schema, and the items; none if the schema is not `SCHEMA`.

    Raises:
        StoreError: the file is missing, damaged, not of that kind, or holds a tag or an alias.
    """
    text = _text(path, kind)
    try:
        content = _Reader(text).content()
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise StoreError(f"{path}{line}: {problem}. {WHAT_TO_DO}") from None
    except yaml.YAMLError as error:
        first_line = str(error).partition("\n")[0]
        raise StoreError(f"{path}: not YAML: {first_line}. {WHAT_TO_DO}") from None
    if not isinstance(content, dict) or not content.keys() <= {"schema", name}:
        raise StoreError(
            f"{path}: not a file of {kind}: it has to hold `schema: {SCHEMA}` and a list "
            f"`{name}:`, and nothing else. {writer} writes one"
        )
    if content.get("schema") != SCHEMA:
        return content.get("schema"), []
    if not isinstance(content.get(name), list):
        raise StoreError(f"{path}: `{name}:` has to be a list. {WHAT_TO_DO}")
    return SCHEMA, content[name]


def _text(path: Path, kind: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise StoreError(f"{path}: not a file of {kind}: it is over {MAX_BYTES >> 20} MiB")
        return data.decode()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise StoreError(f"{path}: not a text file: {error}. {WHAT_TO_DO}") from None


class _Reader:
    """One YAML document, event by event: a node of yaml's own takes twice the time and, in a
    process with many objects, far more of the garbage collector's.
    """

    def __init__(self, text: str) -> None:
        self._next = _SafeLoader(text).get_event

    def content(self) -> Any:
        """The document as dicts, lists and scalars, with an `Item` for each item of its lists."""
        self._next()  # start of the stream
        if type(self._next()) is yaml.StreamEndEvent:
            return None
        content = self._node(self._next(), 0)
        self._next()  # end of the document
        if type(event := self._next()) is not yaml.StreamEndEvent:
            raise _error(event, "a second document starts here")
        return content

    def _node(self, event: Any, depth: int) -> Any:
        kind = type(event)
        if kind is yaml.AliasEvent:
            raise _error(event, f"the alias *{event.anchor} is not allowed")
        if event.tag is not None:
            raise _error(event, f"the tag {event.tag!r} is not allowed")
        if kind is yaml.ScalarEvent:
            return self._scalar(event) if event.implicit[0] else event.value
        if depth == MAX_DEPTH:
            raise _error(event, f"nested more than {MAX_DEPTH} deep")
        if kind is yaml.SequenceStartEvent:
            items: list[Any] = []
            while type(event := self._next()) is not yaml.SequenceEndEvent:
                item = self._node(event, depth + 1)
                items.append(Item(item, event.start_mark.line + 1) if depth == 1 else item)
            return items
        mapping: dict[str, Any] = {}
        while type(event := self._next()) is not yaml.MappingEndEvent:
            name = self._node(event, depth + 1)
            if not isinstance(name, str):
                raise _error(event, "not a field name")
            if name in mapping:
                raise _error(event, f"{name} is given twice")
            mapping[name] = self._node(self._next(), depth + 1)
        return mapping

    def _scalar(self, event: Any) -> Any:
        try:
            return _resolved(event.value)
        except ValueError as error:
            raise _error(event, f"not YAML: {error}") from None


@lru_cache(maxsize=4096)  # few are distinct
def _resolved(text: str) -> Any:
    """The value of an unquoted scalar."""
    tag = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))
    if tag == _STRING:
        return text
    if len(text) > MAX_VALUE:
        raise ValueError(f"a value of over {MAX_VALUE} characters")
    try:
        return yaml.constructor.SafeConstructor().construct_object(yaml.ScalarNode(tag, text))
    except yaml.constructor.ConstructorError:
        raise ValueError(f"{text} has to be in quotes") from None


def _error(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


# ---- writing ----


def list_text(name: str, items: Iterable[Any]) -> str:
    """The canonical text of a list, which `read_list` reads: one line or two for each field."""
    # The Python dumper, never the C one: both wrap long lines, but not in the same places.
    text: str = yaml.dump(
        {"schema": SCHEMA, name: list(items)},
        Dumper=_Dumper,
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
        width=90,  # a line ends after the word that passes it
    )
    return text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True
