"""Tensors to judge and time with: random inputs, outputs full of poison, guards around them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fagen.dtypes import DTYPES
from fagen.judge.bench import Bench
from fagen.operation import Operand
from fagen.problem import WIDE_ALIGNMENT, Problem, Shape

if TYPE_CHECKING:
    from fagen.run.executor import TensorView

POISON_BYTE = 0xFF  # of which every NaN of ours is made: in fp16, bf16 and float32 no kernel
# computes the one with all bits set
GUARD = 512  # poisoned elements before and after a tensor
PAD_ROWS = 32  # poisoned rows after each sequence
FILL_THREADS, FILL_BLOCKS = 256, 4096


def is_poison(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which elements have all their bits set."""
    words = values.view(np.dtype(f"u{values.dtype.itemsize}"))
    poisoned: NDArray[np.bool_] = words == np.iinfo(words.dtype).max
    return poisoned


def word_dtype(operand: Operand, problem: Problem) -> np.dtype[Any]:
    """The unsigned integers that hold an operand's elements bit by bit."""
    return np.dtype(f"u{DTYPES[operand.dtype or problem.dtype].bytes}")


# ---- for timing ----


@dataclass(frozen=True)
class Tensors:
    """Operands for timing: contiguous, random normal.

    Attributes:
        views: where each is, by name.
        arrays: the flat CuPy arrays of unsigned integers that hold them.
        lead: elements of each array before its tensor.
    """

    views: Mapping[str, TensorView]
    arrays: Mapping[str, Any]
    lead: int


@lru_cache(maxsize=4)
def timing_tensors(bench: Bench, problem: Problem, shape: Shape, seed: int = 0) -> Tensors:
    """Device tensors of that shape, made once; a narrow problem's are not aligned.

    Optional operands are left out.
    """
    import cupy

    from fagen.run.executor import TensorView

    lead = 0 if problem.alignment == WIDE_ALIGNMENT else 1
    views: dict[str, TensorView] = {}
    arrays: dict[str, Any] = {}
    with bench.use():
        fill = bench.kernel("fill_normal", "tools/measure.cu")
        for number, operand in enumerate(problem.operation.operands):
            if operand.optional:
                continue
            words = word_dtype(operand, problem)
            sizes = operand.sizes(problem, shape)
            array = cupy.empty(math.prod(sizes) + lead, words)
            if array.size and operand.dtype is None:
                blocks = min(-(-array.size // FILL_THREADS), FILL_BLOCKS)
                fill(
                    (blocks,),
                    (FILL_THREADS,),
                    (
                        array,
                        np.int64(array.size),
                        np.uint64(4 * seed + number),
                        np.int32(problem.dtype == "bf16"),
                    ),
                )
            arrays[operand.name] = array
            address = int(array.data.ptr) + words.itemsize * lead
            views[operand.name] = TensorView.contiguous(address, sizes)
        cupy.cuda.get_current_stream().synchronize()
    return Tensors(views, arrays, lead)


# ---- for verdicts ----


def random_inputs(
    problem: Problem, shape: Shape, *, drift: bool = False
) -> dict[str, NDArray[Any]]:
    """Random normal inputs by name, the same for the same arguments.

    Args:
        drift: multiply keys (the operand k) by 4 at one end of the sequence down to 1/4 at the
            other, in every other head backwards.
    """
    rng = np.random.default_rng(list(shape.model_dump().values()))
    inputs: dict[str, NDArray[Any]] = {}
    for operand in problem.operation.operands:
        if operand.role == "out":
            continue
        values = rng.standard_normal(operand.sizes(problem, shape), dtype=np.float32)
        if drift and operand.name == "k":
            growth = np.geomspace(0.25, 4.0, shape.seqlen_k, dtype=np.float32)[:, None]
            for batch, head in np.ndindex(shape.batch, shape.heads_kv):
                values[batch, :, head] *= growth if (batch + head) % 2 else growth[::-1]
        inputs[operand.name] = values.astype(DTYPES[operand.dtype or problem.dtype].numpy)
    return inputs


@dataclass(frozen=True)
class Slab:
    """A tensor in a flat buffer of unsigned integers, with poison around the whole and, where it
    has strides, between its rows and after its sequences.

    Attributes:
        dims: elements of each dimension.
        words: the integers that hold them.
        strided: whether there are gaps in it.
        narrow: whether it is aligned to single elements only.
    """

    dims: tuple[int, ...]
    words: np.dtype[Any]
    strided: bool
    narrow: bool

    @property
    def _four(self) -> tuple[int, int, int, int]:
        """The dimensions as (batch, rows, heads, columns)."""
        batch, rows, heads, columns = (*(1,) * (4 - len(self.dims)), *self.dims)
        return batch, rows, heads, columns

    @property
    def lead(self) -> int:
        """Elements before the tensor."""
        return GUARD + (1 if self.narrow else 0)

    @property
    def row(self) -> int:
        """Elements from one row to the next."""
        gap = (1 if self.narrow else 8) if self.strided else 0
        return self._four[2] * self._four[3] + gap

    @property
    def _padded(self) -> int:
        """Rows from one sequence to the next."""
        return self._four[1] + (PAD_ROWS if self.strided else 0)

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return self.lead + self._four[0] * self._padded * self.row + GUARD

    def inside(self, flat: NDArray[Any]) -> NDArray[Any]:
        """The tensor in a flat array: (batch, rows, heads * columns), a view."""
        batch, rows, heads, columns = self._four
        body = flat[self.lead : flat.size - GUARD].reshape(batch, self._padded, self.row)
        return body[:, :rows, : heads * columns]

    def tensor(self, flat: NDArray[Any]) -> NDArray[Any]:
        """The tensor in a flat array, with its own dimensions."""
        return self.inside(flat).reshape(self.dims)

    def view(self, buffer: Any) -> TensorView:
        """The tensor in a CuPy buffer of `size` words."""
        from fagen.run.executor import TensorView

        strides = (self._padded * self.row, self.row, self._four[3])
        address = int(buffer.data.ptr) + self.words.itemsize * self.lead
        return TensorView(address, self.dims, strides[4 - len(self.dims) :])

    def poison(self) -> NDArray[Any]:
        """A flat array full of it."""
        return np.full(self.size, np.iinfo(self.words).max, self.words)

    def around(self, values: NDArray[Any]) -> NDArray[Any]:
        """A flat array that holds `values`."""
        flat = self.poison()
        inside = self.inside(flat)
        inside[...] = values.view(self.words).reshape(inside.shape)
        return flat

    def is_alone(self, flat: NDArray[Any]) -> bool:
        """Whether all but the tensor is poison."""
        rest = flat.copy()
        self.inside(rest)[...] = np.iinfo(self.words).max
        return bool(is_poison(rest).all())


def slab_of(operand: Operand, problem: Problem, shape: Shape) -> Slab:
    """The slab of an operand of a call."""
    return Slab(
        operand.sizes(problem, shape),
        word_dtype(operand, problem),
        strided=operand.strided,
        narrow=operand.strided and problem.alignment != WIDE_ALIGNMENT,
    )
