"""What a call launches, as plain values: no driver, no addresses.

A template's `plan` gives them, `run.executor` carries them out, and the emitted host code does the
same in C++. Two configs with equal cubins and equal plans are one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

Strides = tuple[int, ...]  # in elements, of all dimensions but the last, which is contiguous

# Kinds of parameters: the address of an operand or buffer, three 64-bit strides, a float that each
# call brings, an int that the plan knows.
FieldKind = Literal["pointer", "strides", "scalar", "int"]
_FORMATS: dict[FieldKind, str] = {"pointer": "Q", "strides": "3q", "scalar": "f", "int": "i"}


class _Fields(NamedTuple):
    name: str
    fields: tuple[tuple[str, FieldKind], ...]


class Layout(_Fields):
    """The struct that a kernel takes by value, declared once.

    The kernel's text asserts size and offsets, so that C++ cannot lay it out in another way.

    Attributes:
        name: of the struct in templates/params.cuh.
        fields: (name, kind) in order. Pointers come first, each named for its operand or buffer.
    """

    @cached_property
    def _struct(self) -> struct.Struct:
        # "@" pads as C does; at the end "0q" rounds the size up to a multiple of 8.
        return struct.Struct("@" + "".join(_FORMATS[kind] for _, kind in self.fields) + "0q")

    @property
    def size(self) -> int:
        """Bytes of the struct."""
        return self._struct.size

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each field starts, in bytes."""
        places = {}
        before = "@"
        for name, kind in self.fields:
            after = before + _FORMATS[kind]
            places[name] = struct.calcsize(after) - struct.calcsize("@" + _FORMATS[kind])
            before = after
        return places

    def of_kind(self, kind: FieldKind) -> tuple[str, ...]:
        """The names of the fields of one kind."""
        return tuple(name for name, other in self.fields if other == kind)

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The struct's bytes: strides and ints by name, pointers and scalars still 0."""
        packed: list[Any] = []
        for name, kind in self.fields:
            if kind == "strides":
                packed += values[name]
            else:
                packed.append(values[name] if kind == "int" else 0)
        return self._struct.pack(*packed)


class TensorMap(NamedTuple):
    """What a tensor map says beside its address.

    Attributes:
        dtype: CUtensorMapDataType.
        dims: elements of each dimension, the contiguous one first.
        byte_strides: of the others.
        box: elements of each dimension that one copy carries.
        swizzle: CUtensorMapSwizzle.
    """

    dtype: int
    dims: tuple[int, ...]
    byte_strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


class Buffer(NamedTuple):
    """Device memory that the launches of a plan share, and nobody else sees.

    Attributes:
        name: what the parameters call it.
        bytes: its size.
        zeroed: whether it has to hold zeros before the first launch.
    """

    name: str
    bytes: int
    zeroed: bool = False


class Launch(NamedTuple):
    """One kernel launch. Its arguments are the maps, the parameters, the counter.

    Attributes:
        entry: the kernel's symbol.
        grid, threads: blocks, and threads of each.
        smem_bytes: dynamic shared memory of a block.
        layout, params: the struct and its bytes, without addresses and scalars.
        maps: operand and tensor map of each map argument; None for an operand without elements,
            which the kernel leaves alone.
        draws_tiles: whether the last argument is a word of device memory that is 0 before the
            launch and after it.
        cluster: blocks of a cluster.
        dependent: whether it may start before the launch ahead of it in the stream has ended
            (programmatic dependent launch); the kernel then waits by itself.
    """

    entry: str
    grid: int
    threads: int
    smem_bytes: int
    layout: Layout
    params: bytes
    maps: tuple[tuple[str, TensorMap | None], ...] = ()
    draws_tiles: bool = False
    cluster: int = 1
    dependent: bool = False


class Plan(NamedTuple):
    """The launches of a call, one after the other, and the memory that they share.

    Attributes:
        launches: none if there is nothing to do.
        workspace: the buffers.
    """

    launches: tuple[Launch, ...] = ()
    workspace: tuple[Buffer, ...] = ()
