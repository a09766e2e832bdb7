"""The benchmark's check, arithmetic and table, with a stand-in for the GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fagen import bench as room
from fagen import driver
from fagen.bench import BEGIN, END, Cell, Inputs, Results, bench, load_results, markdown
from fagen.device import KNOWN_DEVICES
from fagen.errors import ArgumentError
from fagen.problem import Problem, Shape

SHAPE = Shape(batch=2, seqlen_q=96, seqlen_k=96, heads_q=2, heads_kv=2)
PROBLEM = Problem(dtype="bf16", head_dim=64, causal=True)


class OnDevice(np.ndarray):
    """A NumPy array in the place of a CuPy one."""

    def get(self) -> np.ndarray:
        return np.asarray(self)


def inputs(problem: Problem = PROBLEM, shape: Shape = SHAPE) -> Inputs:
    dice = np.random.default_rng(7)
    sizes = (shape.batch, shape.seqlen_q, shape.heads_q, problem.head_dim)
    q, k, v = (dice.standard_normal(sizes, dtype=np.float32) for _ in range(3))
    there = [x.view(OnDevice) for x in (q, k, v)]
    return Inputs(problem, shape, 0, there[0], there[1], there[2], host=(q, k, v))


def attend(x: Inputs, *, shift: int = 0, keys: int | None = None, bits: int = 7) -> Any:
    """Attention of the inputs in NumPy, P and O rounded to `bits` of mantissa."""
    q, k, v = (np.swapaxes(array, 1, 2).astype(np.float64) for array in x.host)
    scores = q @ np.swapaxes(k, 2, 3) / math.sqrt(x.problem.head_dim)
    row, column = np.indices(scores.shape[-2:])
    visible = column < (keys or scores.shape[-1])
    if x.problem.causal:
        visible &= column <= row + shift
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    return np.swapaxes(rounded(rounded(weights, bits) @ v / total, bits), 1, 2).view(OnDevice)


def rounded(values: np.ndarray, bits: int) -> Any:
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(fraction, bits + 1)), exponent - bits - 1)


@pytest.mark.parametrize("causal", [False, True])
def test_a_right_output_passes(causal: bool) -> None:
    x = inputs(PROBLEM.model_copy(update={"causal": causal}))
    assert room._Sample(x).why_wrong(attend(x)) is None


@pytest.mark.parametrize(
    "planted",
    [
        {"shift": 1},  # sees one key too many
        {"keys": 80},  # drops the last keys
        {"bits": 3},  # FP8 in the disguise of bf16
    ],
    ids=str,
)
def test_a_wrong_output_does_not(planted: dict[str, int]) -> None:
    x = inputs()
    reason = room._Sample(x).why_wrong(attend(x, **planted))
    assert reason is not None
    assert reason.startswith("wrong")


def test_nan_is_wrong() -> None:
    x = inputs()
    assert room._Sample(x).why_wrong(np.full_like(attend(x), np.nan)) is not None


# ---- a whole run ----


def _own(x: Inputs, config: object) -> Any:
    out = attend(x)
    return lambda stream: out


def _liar(x: Inputs) -> Any:
    out = attend(x) + 1
    return lambda stream: out


def _refuser(x: Inputs) -> Any:
    def call(stream: int) -> Any:
        raise RuntimeError("No available kernel.\nAborting.")

    return call


TIMES = {"fagen": 100.0, "fagen_sm80": 200.0, "fa2": 150.0, "cudnn": 80.0}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Results:
    """A run on a stand-in for an H200: fa3 is not installed, fa4 wrong, cudnn takes one mask."""

    def compare(calls: dict[str, Any], *, device_index: int) -> dict[str, list[float]]:
        return {name: [0.9 * TIMES[name], TIMES[name], 1.1 * TIMES[name]] for name in calls}

    class Memory:
        def __init__(self, *_: object) -> None: ...

        def cut(self, problem: Problem, shape: Shape) -> Inputs:
            return inputs(problem, shape)

    monkeypatch.setattr(driver, "query_device", lambda index: KNOWN_DEVICES["NVIDIA H200"])
    monkeypatch.setattr(driver, "driver_version", lambda: "13.0")
    monkeypatch.setattr("fagen.measure.compare", compare)
    monkeypatch.setattr(room, "_Memory", Memory)
    monkeypatch.setattr(room, "_own", _own)
    monkeypatch.setattr("fagen.problem.TOKENS", 256)
    monkeypatch.setattr("fagen.problem.HIDDEN", 128)
    monkeypatch.setattr(room._Bench, "versions", lambda self: {"fagen": "0"})
    monkeypatch.setitem(room.ADAPTERS, "fa2", lambda x: _own(x, None))
    monkeypatch.setitem(room.ADAPTERS, "fa3", lambda x: room._import("no_such_module", "fa3"))
    monkeypatch.setitem(room.ADAPTERS, "fa4", _liar)
    monkeypatch.setitem(
        room.ADAPTERS, "cudnn", lambda x: _refuser(x) if x.problem.causal else _own(x, None)
    )
    return bench(seqlens=(64, 128), head_dims=(64,))


def test_contestants_that_are_absent_wrong_or_refuse_are_named(results: Results) -> None:
    assert results.absent.keys() == {"fa3"}
    assert results.absent["fa3"].startswith("pip install fa3")
    for cell in results.cells:
        assert cell.failed["fa4"].startswith("wrong")
        assert ("cudnn" in cell.failed) == cell.causal
        assert "fa4" not in cell.us
    assert results.peers == ("cudnn", "fa2")


def test_speed_and_ratio(results: Results) -> None:
    full = next(cell for cell in results.cells if not cell.causal and cell.seqlen == 128)
    shape = Shape(batch=2, seqlen_q=128, seqlen_k=128, heads_q=2, heads_kv=2)
    problem = Problem(dtype="bf16", head_dim=64)
    assert full.tflops["fagen"] == round(shape.flops(problem) / 100e-6 / 1e12, 1)
    assert full.spread["fagen"] == pytest.approx(0.1)
    by_hand = Cell(
        **full.model_dump(exclude={"tflops"}), tflops={"fagen": 90, "cudnn": 100, "fa2": 50}
    )
    assert by_hand.ratio("fagen", ("cudnn", "fa2")) == 0.9
    assert by_hand.ratio("fagen", ("fa3",)) is None
    assert by_hand.ratio("fa3", ("fa2",)) is None


def hand_made() -> Results:
    def cell(seqlen: int, causal: bool, **tflops: float) -> Cell:
        return Cell(
            head_dim=64, causal=causal, seqlen=seqlen, batch=1, heads=32, us={}, spread={},
            tflops=tflops, config="forward_sm90 128x128x64", tier="measured here",
        )  # fmt: skip

    return Results(
        device="NVIDIA H200 (132 SMs), sm90",
        date="2030-01-02",
        dtype="bf16",
        versions={"fagen": "1.0"},
        absent={"fa4": "pip install flash-attn-4"},
        cells=(
            cell(512, False, fagen=200, fa3=400, fa2=100, fagen_sm80=110),
            cell(1024, False, fagen=800, fa3=400, fa2=100, fagen_sm80=110),
            cell(512, True, fa3=400),
        ),
    )


def test_the_table() -> None:
    lines = markdown(hand_made()).splitlines()
    assert lines[0] == "| bf16, sequence | 512 | 1k |"
    assert "| head dim 64, full | 200 (0.50) | 800 (2.00) |" in lines
    assert "| head dim 64, causal | - | - |" in lines
    assert "- fagen over the fastest peer: geometric mean 1.00, lowest 0.50" in lines
    assert any("sm80 template over FlashAttention-2: geometric mean 1.10" in li for li in lines)
    assert "- FlashAttention-4 was not installed" in lines


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    room.save_results(hand_made(), path)
    assert load_results(path) == hand_made()
    path.write_text("{}")
    with pytest.raises(ArgumentError, match="no result"):
        load_results(path)


def test_the_table_goes_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        room.write_table(hand_made(), path)
        text = path.read_text()
        assert text.startswith(f"before\n{BEGIN}\n| bf16")
        assert text.endswith(f"\n{END}\nafter\n")
        assert "old" not in text
        assert text.count("head dim 64, full") == 1
    path.write_text("no markers")
    with pytest.raises(ArgumentError, match="markers"):
        room.write_table(hand_made(), path)
