"""An operation that fagen does not have, all of it in this file: an RMS norm over the head dim.

Two kernels in one text that share a workspace, a 3-D input, two outputs, a config class of its own.
`install` registers it as a template's author would.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import Field

from fagen.build import render
from fagen.build.compiled import Resources
from fagen.device import Architecture, Device
from fagen.judge import reference
from fagen.judge.bench import Bench
from fagen.judge.reference import Reference, References, round_to
from fagen.kernels import registry
from fagen.kernels.plan import Buffer, Launch, Layout, Plan, Strides
from fagen.kernels.template import Config as BaseConfig
from fagen.kernels.template import Cost, Rule, symbol
from fagen.operation import OPERATIONS, Operand, Operation
from fagen.problem import Problem, Shape

ROWS = ("seqlen_q", "heads_q")
OPERATION = Operation(
    "toy",
    operands=(
        Operand("x", "in", (*ROWS, "head_dim")),
        Operand("y", "out", (*ROWS, "head_dim")),
        Operand("mean", "out", ROWS, "fp32", strided=False),
    ),
    scalars=("epsilon",),
    products=1,
)

# ---- the template: what a module of fagen/kernels/ says ----

NAME = "toy_any"
OP = "toy"
ARCHS = ("sm80", "sm90")
AXES_VERSION = 3
HOST: dict[str, Any] = {}
REACH_OF_SIZE = {"threads_per_row": 32.0}
REACH_OF_CHOICE: dict[str, float] = {}

PARAMS = Layout(
    "ToyParams",
    (
        ("x", "pointer"),
        ("y", "pointer"),
        ("mean", "pointer"),
        ("squares", "pointer"),
        ("x_row", "int"),
        ("x_head", "int"),
        ("y_row", "int"),
        ("y_head", "int"),
        ("epsilon", "scalar"),
        ("rows", "int"),
        ("heads", "int"),
    ),
)

TEXT = """\
// {{ kernel_name }}: x / sqrt(mean(x * x) + epsilon) over {{ problem.head_dim }} columns.
#include <{{ problem.element.number_header }}>

using Number = {{ problem.element.number }};
constexpr int kHeadDim = {{ problem.head_dim }};
constexpr int kThreadsPerRow = {{ threads_per_row }};
constexpr int kRowsPerBlock = {{ rows_per_block }};
constexpr bool kTwice = {{ twice }};  // a second, idle pass over the row

struct ToyParams {
  const Number* x;   // (rows, heads, kHeadDim)
  Number* y;         // (rows, heads, kHeadDim)
  float* mean;       // (rows, heads): mean of the squares
  float* squares;    // (rows * heads): sum of the squares, of the first kernel for the second
  int x_row, x_head, y_row, y_head;  // strides in elements
  float epsilon;
  int rows, heads;
};
{% for field, offset in params.offsets.items() %}
static_assert(__INTADDR__(&((ToyParams*)0)->{{ field }}) == {{ offset }}, "another layout");
{% endfor %}
static_assert(sizeof(ToyParams) == {{ params.size }}, "another layout");

extern "C" __global__ void {{ kernel_name }}_squares(const __grid_constant__ ToyParams params) {
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
  const int lane = threadIdx.x % kThreadsPerRow;
  float sum = 0.0f;
  if (row < params.rows * params.heads) {
    const int i = row / params.heads, head = row % params.heads;
    const Number* x = params.x + i * params.x_row + head * params.x_head;
    for (int pass = 0; pass < (kTwice ? 2 : 1); ++pass) {
      sum = 0.0f;
      for (int d = lane; d < kHeadDim; d += kThreadsPerRow) sum += float(x[d]) * float(x[d]);
    }
  }
  for (int i = kThreadsPerRow / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
  if (row < params.rows * params.heads && lane == 0) params.squares[row] = sum;
}

extern "C" __global__ void {{ kernel_name }}_scale(const __grid_constant__ ToyParams params) {
  const int row = blockIdx.x;
  const float mean = params.squares[row] / kHeadDim;
  const int i = row / params.heads, head = row % params.heads;
  const Number* x = params.x + i * params.x_row + head * params.x_head;
  Number* y = params.y + i * params.y_row + head * params.y_head;
  for (int d = threadIdx.x; d < kHeadDim; d += blockDim.x) {
    y[d] = Number(float(x[d]) * rsqrtf(mean + params.epsilon));
  }
  if (threadIdx.x == 0) params.mean[row] = mean;
}
"""


class Config(BaseConfig):
    """A point of the toy's space."""

    SIZE_AXES: ClassVar = ("threads_per_row", "rows_per_block")

    template: Literal["toy_any"] = "toy_any"
    threads_per_row: int = Field(ge=1, le=32)
    rows_per_block: int = Field(ge=1, le=64)
    twice: bool = False

    @property
    def threads(self) -> int:
        return self.threads_per_row * self.rows_per_block

    def smem_bytes(self, problem: Problem) -> int:
        return 0


def _block(c: Any, p: Problem, d: Device) -> str | None:
    if c.threads % 32:
        return f"{c.threads} threads are not whole warps"
    return None


RULES = (Rule(("threads_per_row", "rows_per_block"), _block),)


def why_not(problem: Problem, arch: Architecture) -> str | None:
    return "the toy takes no mask" if problem.causal else None


def axes(problem: Problem) -> dict[str, tuple[Any, ...]]:
    return {"threads_per_row": (4, 8, 16, 32), "rows_per_block": (1, 4, 8), "twice": (False, True)}


def default(problem: Problem) -> Config:
    return Config(threads_per_row=32, rows_per_block=4)


def seeds(problem: Problem) -> list[dict[str, Any]]:
    return [{"threads_per_row": 8, "rows_per_block": 8}, {"threads_per_row": 4}]


def entries(problem: Problem) -> tuple[str, ...]:
    return symbol(problem, "squares"), symbol(problem, "scale")


def constants(problem: Problem, config: Config) -> dict[str, Any]:
    return {"kernel_name": symbol(problem), "params": PARAMS}


def default_scalars(problem: Problem) -> tuple[float, ...]:
    return (1e-5,)


def plan(
    problem: Problem,
    config: Config,
    shape: Shape,
    strides: tuple[Strides, ...],
    device: Device,
) -> Plan:
    (x_row, x_head), (y_row, y_head) = strides
    rows = shape.seqlen_q * shape.heads_q
    if rows == 0:
        return Plan()
    values = {"x_row": x_row, "x_head": x_head, "y_row": y_row, "y_head": y_head}
    params = PARAMS.pack(values | {"rows": shape.seqlen_q, "heads": shape.heads_q})
    squares, scale = entries(problem)
    blocks = -(-rows // config.rows_per_block)
    return Plan(
        launches=(
            Launch(squares, blocks, config.threads, 0, PARAMS, params),
            Launch(scale, rows, 64, 0, PARAMS, params),
        ),
        workspace=(Buffer("squares", 4 * rows),),
    )


def tensor_flops(arch: Architecture) -> int:
    return arch.mma_sync_flops


def cost(
    problem: Problem, shape: Shape, config: Config, device: Device, resources: Resources | None
) -> Cost:
    lanes_idle = abs(config.threads_per_row - 8)
    return Cost(1e4 + 100.0 * lanes_idle + 1e3 * config.twice, 2.0)


# ---- what it is compared with ----


def references(problem: Problem, x: NDArray[Any], rows: NDArray[np.int64] | None) -> References:
    """In float64. x: (rows, heads, head_dim)."""
    exact_x = x.astype(np.float64).reshape(-1, problem.head_dim)
    mean = np.square(exact_x).mean(axis=1, keepdims=True)
    y = exact_x / np.sqrt(mean + default_scalars(problem)[0])
    low = round_to(exact_x / round_to(np.sqrt(mean), x.dtype), x.dtype)
    chosen = np.arange(len(y), dtype=np.int64) if rows is None else rows
    never = np.zeros(len(chosen), dtype=bool)
    soft = round_to(y, x.dtype)[chosen]
    return {
        "y": Reference(ROWS, chosen, y[chosen], round_to(low, x.dtype)[chosen], soft, never),
        "mean": Reference(ROWS, chosen, mean[chosen], None, None, never),
    }


def on_device(
    bench: Bench,
    problem: Problem,
    shape: Shape,
    views: Mapping[str, Any],
    rows: NDArray[np.int64] | None,
) -> References:
    """The same of tensors in device memory."""
    import cupy

    view = views["x"]
    size = problem.element.bytes
    words = (view.shape[0] - 1) * view.strides[0] + view.shape[1] * view.strides[1]
    with bench.use():
        memory = cupy.cuda.UnownedMemory(view.pointer, size * words, None)
        flat = cupy.ndarray(words, np.uint16, cupy.cuda.MemoryPointer(memory, 0)).get()
    strides = tuple(size * stride for stride in (*view.strides, 1))
    x = np.lib.stride_tricks.as_strided(flat, view.shape, strides).view(problem.element.numpy)
    return references(problem, x, rows)


# ---- registration ----


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Registers operation, template and reference, and puts its text beside the others."""
    folder = tmp_path / "templates"
    shutil.copytree(render.template_folder(), folder)
    (folder / f"{NAME}.cu.j2").write_text(TEXT)
    monkeypatch.setattr(render, "template_folder", lambda: folder)
    render._environment.cache_clear()
    monkeypatch.setitem(OPERATIONS, OPERATION.name, OPERATION)
    monkeypatch.setitem(registry.TEMPLATES, NAME, sys.modules[__name__])
    monkeypatch.setitem(reference.ON_DEVICE, OPERATION.name, on_device)
