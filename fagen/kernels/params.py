"""The parameters that the host packs and a kernel takes by value, declared once.

The kernels' text asserts each offset, so that Python and C++ cannot drift apart.
"""

from __future__ import annotations

import struct
from typing import NamedTuple


class Params(NamedTuple):
    """A struct of parameters.

    Attributes:
        fields: (name, format of `struct`) in order, with no padding between them.
    """

    fields: tuple[tuple[str, str], ...]

    @property
    def format(self) -> str:
        """All fields as one format of `struct`."""
        return "<" + "".join(kind for _, kind in self.fields)

    @property
    def size(self) -> int:
        """Bytes of all fields."""
        return struct.calcsize(self.format)

    @property
    def offsets(self) -> dict[str, int]:
        """Where each field starts, in bytes."""
        return {
            name: Params(self.fields[:index]).size for index, (name, _) in enumerate(self.fields)
        }


FORWARD_PARAMS = Params(  # ForwardParams of templates/params.cuh
    (
        *((name, "Q") for name in ("q", "k", "v", "o", "lse")),
        *((f"{name}_strides", "3q") for name in ("q", "k", "v", "o")),
        ("scale_log2", "f"),
        *((name, "i") for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k")),
        ("heads_per_group", "i"),
        ("tiles", "i"),
    )
)
