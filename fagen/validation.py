"""What pydantic refuses, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from fagen.errors import ArgumentError


@contextmanager
def as_argument_error(message: str = "{}") -> Iterator[None]:
    """What pydantic refuses inside becomes an ArgumentError.

    Args:
        message: the error's text, with "{}" where pydantic's reasons go, in one line.
    """
    try:
        yield
    except ValidationError as error:
        raise ArgumentError(message.format(one_line(error))) from None


class NestedError(ValueError):
    """What `one_line` says of a field that is a model of its own; the names of its fields lead."""


def one_line(error: ValidationError) -> str:
    """What pydantic says, as one line with the fields' names."""
    parts = []
    for detail in error.errors():
        where = ".".join(str(part) for part in detail["loc"])
        got = "" if isinstance(detail["input"], dict) else f" (got {detail['input']!r})"
        message = detail["msg"].removeprefix("Value error, ")
        if isinstance(detail.get("ctx", {}).get("error"), NestedError):
            parts.append(f"{where}.{message}")
            continue
        parts.append(f"{where}: {message}{got}" if where else f"{message}{got}")
    return "; ".join(parts)
