"""Element types: the one table of what each is called in Python, C++, PTX and the driver."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class _Names(NamedTuple):
    name: str
    bytes: int
    array_name: str
    element: str
    number: str
    number_header: str
    ptx: str
    tensor_map: str
    tensor_map_code: int


class Dtype(_Names):
    """What an element type is called, and how large it is.

    Attributes:
        name: in problems, files and flags, such as "bf16".
        bytes: of one element.
        array_name: in NumPy, torch and CuPy, such as "bfloat16".
        element: the type of templates/ptx.cuh that holds its bits.
        number, number_header: CUDA's own type, which computes, and its header.
        ptx: in the names of PTX instructions.
        tensor_map, tensor_map_code: CU_TENSOR_MAP_DATA_TYPE_..., and its value in cuda.h.
    """

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The same type in NumPy."""
        import ml_dtypes
        import numpy as np

        known = getattr(ml_dtypes, self.array_name, None)
        return np.dtype(known or self.array_name)

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        import ml_dtypes

        return float(ml_dtypes.finfo(self.numpy).eps)


DTYPES: dict[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        Dtype("fp16", 2, "float16", "Half", "__half", "cuda_fp16.h", "f16", "FLOAT16", 6),
        Dtype(
            "bf16", 2, "bfloat16", "Bfloat16", "__nv_bfloat16", "cuda_bf16.h", "bf16", "BFLOAT16", 9
        ),
        Dtype("fp32", 4, "float32", "float", "float", "", "f32", "FLOAT32", 7),
    )
}
BY_ARRAY_NAME = {dtype.array_name: dtype for dtype in DTYPES.values()}
