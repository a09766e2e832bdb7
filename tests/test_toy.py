"""An operation that fagen does not have goes through the whole house; see toy.py."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import toy
from fake_driver import FakeDriver
from records import some_record

from fagen.build import render
from fagen.build.cache import look_up
from fagen.build.compile import compile_kernel
from fagen.build.emit import emit
from fagen.device import KNOWN_DEVICES, architecture
from fagen.errors import ArgumentError, UnsupportedError
from fagen.judge import verify
from fagen.judge.inputs import random_inputs, slab_of
from fagen.kernels.registry import default_config, native_template, parse_config
from fagen.kernels.space import legal_configs, seeds, why_illegal
from fagen.kernels.template import round_up
from fagen.problem import Problem, Shape
from fagen.records.dispatch import Tier, choose
from fagen.records.store import Store, load_records, save_records
from fagen.run.executor import Executor, TensorView

H200 = KNOWN_DEVICES["NVIDIA H200"]
SHAPE = Shape(batch=1, seqlen_q=37, seqlen_k=37, heads_q=6, heads_kv=6)


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    toy.install(monkeypatch, tmp_path)
    yield
    monkeypatch.undo()
    render._environment.cache_clear()


def problem() -> Problem:
    return Problem(op="toy", dtype="bf16", head_dim=64)


def test_the_registry_finds_it_by_operation_and_architecture() -> None:
    assert native_template(problem(), H200.arch) is toy  # type: ignore[comparison-overlap]
    with pytest.raises(UnsupportedError, match="no template answers toy_bf16_d64_full on sm120"):
        native_template(problem(), architecture("sm120"))
    with pytest.raises(UnsupportedError, match="toy_any: the toy takes no mask"):
        native_template(problem().model_copy(update={"causal": True}), H200.arch)
    assert parse_config({"template": "toy_any", "threads_per_row": 8, "rows_per_block": 4}) == (
        toy.Config(threads_per_row=8, rows_per_block=4)
    )
    with pytest.raises(ArgumentError, match="bad config: block_m: Extra inputs"):
        parse_config(default_config(problem(), H200).model_dump() | {"block_m": 128})


def test_its_space_is_its_own() -> None:
    removed: Counter[str] = Counter()
    legal = list(legal_configs("toy_any", problem(), H200, rejections=removed))
    assert (len(legal), removed) == (16, {"block": 8})
    assert why_illegal(toy.Config(threads_per_row=4, rows_per_block=1), problem(), H200) == (
        "4 threads are not whole warps"
    )
    assert [config.size for config in seeds("toy_any", problem(), H200)] == [(8, 8)]


def test_one_text_gives_two_kernels_with_resources_of_their_own() -> None:
    config = default_config(problem(), H200)
    compiled = compile_kernel(problem(), config, H200.arch)
    name = "fagen_toy_bf16_d64_full"
    assert list(compiled.entries) == [f"{name}_squares", f"{name}_scale"]
    assert all(one.registers > 0 for one in compiled.entries.values())
    assert compiled.resources.registers == max(r.registers for r in compiled.entries.values())
    assert look_up(problem(), config, H200.arch) == compiled


class ToyParams(ctypes.Structure):
    """The struct of the text, by the C rules that ctypes follows."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "y", "mean", "squares")),
        *((name, ctypes.c_int) for name in ("x_row", "x_head", "y_row", "y_head")),
        ("epsilon", ctypes.c_float),
        ("rows", ctypes.c_int),
        ("heads", ctypes.c_int),
    )


def test_both_launches_share_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver.install(monkeypatch)
    config = toy.Config(threads_per_row=8, rows_per_block=8)
    kernel = Executor(compile_kernel(problem(), config, H200.arch), problem(), config)
    dims = (37, 6, 64)
    views = {
        "x": TensorView(0x1000, dims, (6 * 72, 72)),
        "y": TensorView.contiguous(0x2000, dims),
        "mean": TensorView.contiguous(0x3000, dims[:2]),
    }
    size = kernel.workspace_bytes(SHAPE, ((6 * 72, 72), (6 * 64, 64)), 0)
    assert size == round_up(4 * 37 * 6, 256)
    for scalar in (1e-5, 0.5):
        kernel.launch(SHAPE, views, (scalar,), device_index=0, stream=9, workspace=0x9000)
    first, second, again, _ = fake.launches
    assert [launch.entry for launch in fake.launches[:2]] == list(kernel.compiled.entries)
    assert (first.grid[0], first.block[0]) == (-(-37 * 6 // 8), 64)
    assert (second.grid[0], second.block[0]) == (37 * 6, 64)
    for launch, epsilon in ((first, 1e-5), (second, 1e-5), (again, 0.5)):
        params = ToyParams.from_buffer_copy(launch.params)
        assert (params.x, params.y, params.mean, params.squares) == (0x1000, 0x2000, 0x3000, 0x9000)
        assert (params.x_row, params.x_head, params.y_row, params.y_head) == (432, 72, 384, 64)
        assert (params.rows, params.heads) == (37, 6)
        assert params.epsilon == pytest.approx(epsilon)


class OnDevice:
    """A NumPy array in the place of a CuPy one."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def get(self) -> Any:
        return self._array


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("", ""),
        ("y", "y is off by .* the first being query 0, head 1"),
        ("mean", "mean is off by .* the first being query 3, head 0"),
        ("unwritten", "mean was not written"),
        ("guard", "wrote outside of the y"),
        ("unsteady", "two runs differ"),
    ],
)
def test_each_output_is_judged_by_the_rule(
    fault: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = problem()
    inputs = random_inputs(asked, SHAPE)
    slabs = {operand.name: slab_of(operand, asked, SHAPE) for operand in toy.OPERATION.operands}
    found = toy.references(asked, inputs["x"], None)
    prepared = verify.Prepared(
        shape=SHAPE,
        views={},
        slabs=slabs,
        buffers={"x": OnDevice(slabs["x"].around(inputs["x"]))},
        uploaded={"x": slabs["x"].around(inputs["x"])},
        expected=verify._expected(found, asked),
    )
    runs = 0

    def run(kernel: Any, bench: Any, prepared: Any) -> dict[str, Any]:
        nonlocal runs
        runs += 1
        unavoidable = found["y"].unavoidable
        assert unavoidable is not None
        y = unavoidable.astype(asked.element.numpy)
        mean = found["mean"].exact.astype(np.float32)
        if fault == "y":
            y[1, 5] += 0.1
        if fault == "mean":
            mean[18] += 0.01
        flat = {
            "y": slabs["y"].around(y.reshape(37, 6, 64)),
            "mean": slabs["mean"].around(mean.reshape(37, 6)),
        }
        if fault == "unwritten":
            slabs["mean"].tensor(flat["mean"])[2, 2] = 0xFFFFFFFF
        if fault == "guard":
            flat["y"][3] = 0
        if fault == "unsteady" and runs == 2:
            slabs["y"].inside(flat["y"])[0, 0, 0] ^= 1
        return flat

    monkeypatch.setattr(verify, "run_poisoned", run)
    kernel: Any = SimpleNamespace(problem=asked)
    bench: Any = SimpleNamespace(use=nullcontext)
    verdict = verify.verify_one(kernel, bench, prepared)
    assert verdict.ok == (fault == ""), verdict.reason
    assert re.search(reason, verdict.reason), verdict.reason


def test_records_of_it_are_kept_and_dispatched(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    tuned = toy.Config(threads_per_row=16, rows_per_block=8, twice=True)
    record = some_record(problem(), tuned).model_copy(update={"shape": SHAPE})
    save_records(path, [record])
    assert load_records(path).records == (record,)
    text = path.read_text()
    assert "op: toy" in text
    assert "axes_version: 3" in text
    choice = choose(problem(), SHAPE, H200, store=Store(path))
    assert (choice.tier, choice.config) == (Tier.MEASURED_HERE, tuned)
    other = problem().model_copy(update={"dtype": "fp16"})
    default = choose(other, SHAPE, H200, store=Store(path))
    assert (default.tier, default.config) == (Tier.DEFAULT, toy.default(other))


def test_emit_gives_ptx_with_both_kernels() -> None:
    files = emit(problem(), default_config(problem(), H200), H200.arch, format="ptx")
    (ptx,) = files.values()
    assert str(ptx).count(".entry fagen_toy_bf16_d64_full_s") == 2


@pytest.mark.gpu
def test_it_runs_and_is_right_on_a_device() -> None:
    from fagen.judge.bench import bench_of
    from fagen.judge.measure import measure

    bench = bench_of(0)
    if bench.device.arch.name not in toy.ARCHS:
        pytest.skip(f"the toy does not run on {bench.device}")
    for config in legal_configs("toy_any", problem(), bench.device):
        kernel = Executor(compile_kernel(problem(), config, bench.device.arch), problem(), config)
        verdict = verify.verify(kernel, bench, shapes=[SHAPE])
        assert verdict, verdict.reason
    large = SHAPE.model_copy(update={"seqlen_q": 4096})
    assert verify.check_sample(kernel, large, bench)
    assert measure(kernel, large, bench).median_us > 0
