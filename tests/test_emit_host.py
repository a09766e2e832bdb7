"""The emitted launcher against Python's plan: one geometry, the same launch to the byte.

The launcher is compiled by a host compiler alone, against tests/cuda_stub, which prints what CUDA
would have been asked for.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from fake_driver import FakeDriver, compiled
from pydantic import ValidationError

from fagen.build.emit import emit
from fagen.device import architecture
from fagen.errors import ArgumentError, UnsupportedError
from fagen.kernels import Sm80Forward, Sm90Forward
from fagen.kernels.forward import PARAMS, scale_log2
from fagen.kernels.template import Config
from fagen.operation import FORWARD
from fagen.problem import Problem, Shape
from fagen.run import ask
from fagen.run.executor import Executor, TensorView

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="neither g++ nor clang++ is on PATH")

BASE = 1 << 20
STREAM = 99


class Geometry(NamedTuple):
    """One call: sizes, and what is unusual about it.

    Attributes:
        strides: in elements of (batch, row, head), of the tensors named; others have no gaps.
        shift: elements between the tensors' addresses and a multiple of 1 MiB.
    """

    batch: int = 2
    heads_q: int = 8
    heads_kv: int = 2
    seqlen_q: int = 300
    seqlen_k: int = 500
    scale: float = 0.125
    strides: Mapping[str, tuple[int, int, int]] = MappingProxyType({})
    shift: int = 0
    lse: bool = True

    def views(self, head_dim: int) -> dict[str, TensorView]:
        """Q, K, V and O."""
        queries = (self.batch, self.seqlen_q, self.heads_q, head_dim)
        keys = (self.batch, self.seqlen_k, self.heads_kv, head_dim)
        views = {}
        for i, (name, shape) in enumerate(
            zip("qkvo", (queries, keys, keys, queries), strict=True), 1
        ):
            view = TensorView.contiguous(i * BASE + 2 * self.shift, shape)
            views[name] = view._replace(strides=self.strides.get(name, view.strides))
        return views


ROW = 8 * 4096  # longer than a row of any case's tensors
GEOMETRIES = (
    Geometry(),
    Geometry(lse=False),
    Geometry(batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_k=1),
    Geometry(batch=1, heads_q=1, heads_kv=1, strides=dict.fromkeys("qkvo", (7, 4096, 3))),
    Geometry(batch=20, heads_q=40, heads_kv=10, seqlen_q=3, seqlen_k=130),  # many tiles
    Geometry(batch=64, heads_q=64, heads_kv=8, seqlen_q=1000, seqlen_k=70_000),
    Geometry(heads_q=32, heads_kv=32, seqlen_k=(1 << 30) - 1),  # K and V of one head exceed the L2
    Geometry(seqlen_k=0),
    Geometry(seqlen_q=0),
    Geometry(batch=0),
    Geometry(heads_q=0),
    Geometry(scale=0.0),
    Geometry(scale=1.0 / 3),
    Geometry(scale=1e30),
    Geometry(strides={"q": (ROW * 300, ROW, 256), "o": (ROW * 301, ROW + 8, 264)}),
    Geometry(strides={"k": (0, ROW, 0), "v": (0, 0, 0)}),  # expanded
    Geometry(strides={"k": ((1 << 39) - 8, ROW, 256)}),
)
REFUSED = (
    Geometry(seqlen_k=1 << 30),
    Geometry(seqlen_q=1 << 30),
    Geometry(batch=1 << 20, heads_q=1 << 11, heads_kv=1, seqlen_q=1),
    Geometry(batch=1 << 20, heads_q=1 << 12, heads_kv=1, seqlen_q=1),
    Geometry(scale=-0.1),
    Geometry(scale=float("nan")),
    Geometry(scale=float("inf")),
    Geometry(scale=2e30),
    Geometry(heads_q=8, heads_kv=3),
    Geometry(strides={"o": (0, ROW, 256)}),
)
WIDE_ONLY = (  # for kernels with narrow loads alone
    Geometry(shift=1),
    Geometry(strides={"q": (ROW * 300, ROW + 1, 256)}),
    Geometry(strides={"v": (-ROW * 500, ROW, 256)}),
    Geometry(strides={"k": (1 << 39, ROW, 256)}),
)

_SIZES: dict[str, Any] = {"block_m": 128, "block_k": 64, "stages": 2}
_SM90 = Sm90Forward(block_n=176, **_SIZES)
_DRAWING = {"persistent": True, "q_stages": 2, "dynamic_tiles": True}
CASES: dict[str, tuple[Problem, Config]] = {
    "sm90": (Problem(dtype="bf16", head_dim=128, causal=True), _SM90),
    "cluster": (
        Problem(dtype="bf16", head_dim=128),
        _SM90.model_copy(update={"cluster": 2, "persistent": True, "producer_registers": 40}),
    ),
    "drawn": (
        Problem(dtype="bf16", head_dim=64),
        Sm90Forward(block_n=128, min_blocks_per_sm=1, **_SIZES, **_DRAWING),
    ),
    "64-byte swizzle": (
        Problem(dtype="fp16", head_dim=40),
        Sm90Forward(
            block_m=64, block_n=64, block_k=32, stages=2, ping_pong=False, producer_registers=0
        ),
    ),
    "sm80": (Problem(dtype="bf16", head_dim=128), Sm80Forward(block_n=64, **_SIZES)),
    "narrow": (
        Problem(dtype="fp16", head_dim=40, alignment=2),
        Sm80Forward(block_m=64, block_n=64, block_k=48, stages=1),
    ),
}

MAIN = """
#include "x_host.cu"
#include <cstdlib>

int main(int count, char** words) {
  sm_count = std::atoi(words[1]);
  for (int i = 2; i + 23 <= count; i += 23) {
    const auto number = [&](int k) { return std::atoll(words[i + k]); };
    const auto address = [&](int k) { return reinterpret_cast<void*>(number(k)); };
    long long strides[4][3];
    for (int k = 0; k < 12; ++k) strides[k / 3][k % 3] = number(11 + k);
    const int sizes[5] = {int(number(5)), int(number(6)), int(number(7)), int(number(8)),
                          int(number(9))};
    std::printf("call\\n");
    const cudaError_t error = x_launch(
        address(0), address(1), address(2), address(3), static_cast<float*>(address(4)), sizes[0],
        sizes[1], sizes[2], sizes[3], sizes[4], strides[0], strides[1], strides[2], strides[3],
        std::strtof(words[i + 10], nullptr), reinterpret_cast<cudaStream_t>(STREAM));
    std::printf("returned %d\\n", error);
  }
}
"""


def as_words(geometry: Geometry, head_dim: int) -> list[str]:
    """The arguments of a launch, as MAIN reads them."""
    views = geometry.views(head_dim)
    numbers = [
        *(view.pointer for view in views.values()),
        5 * BASE if geometry.lse else 0,
        *(geometry.batch, geometry.heads_q, geometry.heads_kv),
        *(geometry.seqlen_q, geometry.seqlen_k),
        geometry.scale,
        *itertools.chain.from_iterable(view.strides for view in views.values()),
    ]
    return [str(number) for number in numbers]


def build(problem: Problem, config: Config, folder: Path) -> Path:
    """The emitted launcher as a program for this machine.

    Of the kernel's text there are the constants and the parameters: the rest is device code.
    """
    files = {
        name: str(text)
        for name, text in emit(
            problem, config, architecture("sm90" if "sm90" in config.template else "sm80"), name="x"
        ).items()
    }
    kernel = files.pop("x.cu")
    name = f"fagen_{problem.name}"

    def found(pattern: str) -> str:
        match = re.search(pattern, kernel, re.DOTALL | re.MULTILINE)
        assert match, pattern
        return match[1]

    element = found(r"^using Element = (\w+);")
    checks = re.findall(
        r"^static_assert\((?:FIELD_OFFSET|sizeof\(Params).*\n", kernel, re.MULTILINE
    )
    assert len(checks) == 1 + len(PARAMS.fields)
    signature = found(rf"{name}\(([^;]*?)\) \{{").replace("__grid_constant__ ", "")
    (folder / "x.cu").write_text(
        f"namespace {name} {{\n"
        "using u32 = unsigned int;\n"
        f"struct {element} {{ unsigned short bits; }};\n"
        f"using Element = {element};\n"
        "struct alignas(128) TensorMap { unsigned long long opaque[16]; };\n"
        f"{found('^(constexpr int kHeadDimQk.*?)^// What the host')}"
        f"{found('^(struct Strides.*?^struct ForwardParams.*?^};)')}\n"
        "using Params = ForwardParams<Element>;\n"
        "#define FIELD_OFFSET(field) __builtin_offsetof(Params, field)\n"
        f"{''.join(checks)}"
        f"void {name}({signature}) {{}}\n}}\n"
    )
    for file in ("x.h", "x_host.cu"):
        (folder / file).write_text(files[file])
    (folder / "main.cpp").write_text(MAIN.replace("STREAM", str(STREAM)))
    stub = Path(__file__).parent / "cuda_stub"
    assert COMPILER
    options = ["-std=c++17", "-Wall", "-Wextra", "-Wno-unused-parameter", f"-I{stub}"]
    done = subprocess.run(
        [COMPILER, *options, "main.cpp", "-o", "main"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "main"


def by_cpp(program: Path, geometries: list[Geometry], head_dim: int, sms: int) -> list[list[str]]:
    """What the launcher asked CUDA for, call by call."""
    words = [word for geometry in geometries for word in as_words(geometry, head_dim)]
    done = subprocess.run(
        [program, str(sms), *words], capture_output=True, text=True, check=True, timeout=60
    )
    return [call.split("\n")[1:-1] for call in done.stdout.split("call")[1:]]


def by_python(problem: Problem, config: Config, fake: FakeDriver, geometry: Geometry) -> list[str]:
    """What Python asked the driver for, in the launcher's words."""
    kernel = Executor(compiled(problem), problem, config)
    fake.encoded.clear()
    fake.launches.clear()
    views = geometry.views(problem.head_dim)
    tensors = {
        operand.name: ask.Tensor(
            operand,
            views[operand.name].shape,
            views[operand.name].strides,
            problem.element,
            device_index=0,
        )
        for operand in FORWARD.strided
    }
    lse = TensorView.contiguous(5 * BASE, (geometry.batch, geometry.heads_q, geometry.seqlen_q))
    refused = ["returned 1"]
    try:
        shape = Shape.model_validate({name: getattr(geometry, name) for name in Shape.model_fields})
        # Where nothing is launched no address or stride matters.
        empty = 0 in (geometry.batch, geometry.heads_q, geometry.seqlen_q)
        if not empty:
            ask._require_fit([tensors["q"]], tensors["o"])
        used = [tensor for name, tensor in tensors.items() if geometry.seqlen_k or name in "qo"]
        aligned = all(views[tensor.operand.name].pointer % 16 == 0 for tensor in used)
        if not empty and (ask.alignment(used) if aligned else 2) < problem.alignment:
            return refused
        kernel.launch(
            shape,
            {**views, "lse": lse if geometry.lse else None},
            (scale_log2(geometry.scale),),
            device_index=0,
            stream=STREAM,
        )
    except (ArgumentError, UnsupportedError, ValidationError):
        return refused
    if not fake.launches:
        return ["returned 0"]
    (launch,) = fake.launches
    lines = [
        " ".join(["map", *(str(n) for field in encoded for n in _flat(field))])
        for encoded in fake.encoded
    ]
    lines.append(f"smem {launch.smem_bytes}")
    size = (*launch.grid, *launch.block, launch.smem_bytes, launch.stream)
    lines.append(" ".join(["launch", *map(str, size)]))
    lines += [f"argument {argument.hex()}" for argument in launch.arguments]
    return [*lines, "returned 0"]


def _flat(field: object) -> tuple[object, ...]:
    return field if isinstance(field, tuple) else (field,)


def comparable(lines: list[str]) -> list[str]:
    """Without what differs by design: where the tile counter is, what a map's bytes are, and the
    order in which maps are made.
    """
    told = [line for line in lines if len(line) not in (len("argument ") + n for n in (16, 256))]
    return sorted(told, key=lambda line: line if line.startswith("map") else "")


@pytest.mark.parametrize("case", CASES)
def test_launcher_and_plan_agree(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, config = CASES[case]
    fake = FakeDriver.install(monkeypatch)
    program = build(problem, config, tmp_path)
    geometries = [GEOMETRIES[0], *GEOMETRIES, *REFUSED, *WIDE_ONLY]
    answers = by_cpp(program, geometries, problem.head_dim, fake.device.sm_count)
    assert len(answers) == len(geometries)
    if "sm90" in config.template:
        assert answers[0] == ["returned 801"], "the first look-up of the encoder fails"
    for geometry, answer in zip(geometries[1:], answers[1:], strict=True):
        expected = by_python(problem, config, fake, geometry)
        assert comparable(answer) == comparable(expected), geometry
        if geometry in REFUSED:
            assert answer == ["returned 1"], geometry
        if geometry in WIDE_ONLY:
            assert (answer == ["returned 1"]) == (problem.alignment == 16), geometry
    assert any("launch" in line for answer in answers for line in answer)
