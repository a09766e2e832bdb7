"""The benchmark's grids, check, arithmetic, table and plot, with a stand-in for the GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import no_file_beyond

from fagen.cli import app as cli
from fagen.device import KNOWN_DEVICES
from fagen.errors import ArgumentError, MissingDependencyError, WriteError
from fagen.judge.bench import Bench
from fagen.problem import Problem, Shape, standard_shape
from fagen.run import driver
from fagen.show import bench as room
from fagen.show import peers
from fagen.show.bench import bench, grid_points
from fagen.show.peers import PEERS, Inputs, Peer
from fagen.show.results import (
    BEGIN,
    END,
    Cell,
    Results,
    load_results,
    markdown,
    save_results,
    write_table,
)

SHAPE = Shape(batch=2, seqlen_q=96, seqlen_k=96, heads_q=2, heads_kv=2)
GROUPED = Shape(batch=2, seqlen_q=96, seqlen_k=96, heads_q=4, heads_kv=2)
FEW_QUERIES = Shape(batch=2, seqlen_q=32, seqlen_k=96, heads_q=2, heads_kv=2)
PROBLEM = Problem(dtype="bf16", head_dim=64, causal=True)


class OnDevice(np.ndarray):
    """A NumPy array in the place of a CuPy one."""

    def get(self) -> np.ndarray:
        return np.asarray(self)


def inputs(problem: Problem = PROBLEM, shape: Shape = SHAPE) -> Inputs:
    dice = np.random.default_rng(7)
    host = tuple(
        dice.standard_normal(dims, dtype=np.float32) for dims in room._dims(problem, shape)
    )
    q, k, v = (x.view(OnDevice) for x in host)
    return Inputs(problem, shape, 0, q, k, v, host=(host[0], host[1], host[2]))


def attend(x: Inputs, *, shift: int = 0, keys: int | None = None, bits: int = 7) -> Any:
    """Attention of the inputs in NumPy, P and O rounded to `bits` of mantissa."""
    q, k, v = (np.swapaxes(array, 1, 2).astype(np.float64) for array in x.host)
    k, v = (np.repeat(array, x.shape.heads_q // x.shape.heads_kv, axis=1) for array in (k, v))
    scores = q @ np.swapaxes(k, 2, 3) / math.sqrt(x.problem.head_dim)
    row, column = np.indices(scores.shape[-2:])
    visible = column < (keys or scores.shape[-1])
    if x.causal_offset is not None:
        visible &= column <= row + x.causal_offset + shift
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    return np.swapaxes(rounded(rounded(weights, bits) @ v / total, bits), 1, 2).view(OnDevice)


def rounded(values: np.ndarray, bits: int) -> Any:
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(fraction, bits + 1)), exponent - bits - 1)


@pytest.mark.parametrize("shape", [SHAPE, GROUPED, FEW_QUERIES], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_right_output_passes(causal: bool, shape: Shape) -> None:
    x = inputs(PROBLEM.model_copy(update={"causal": causal}), shape)
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
@pytest.mark.parametrize("shape", [SHAPE, GROUPED, FEW_QUERIES], ids=str)
def test_a_wrong_output_does_not(planted: dict[str, int], shape: Shape) -> None:
    x = inputs(shape=shape)
    reason = room._Sample(x).why_wrong(attend(x, **planted))
    assert reason is not None
    assert reason.startswith("wrong")


def test_a_mask_that_is_aligned_top_left_is_wrong() -> None:
    x = inputs(shape=FEW_QUERIES)
    assert room._Sample(x).why_wrong(attend(x, shift=-64)) is not None


def test_nan_is_wrong() -> None:
    x = inputs()
    assert room._Sample(x).why_wrong(np.full_like(attend(x), np.nan)) is not None


# ---- grids ----


def names(points: list[room.GridPoint]) -> list[str]:
    return [f"d{p.problem.head_dim} {p.problem.mask} {p.shape}" for p in points]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_grids(dtype: str) -> None:
    standard = grid_points("A", dtype)
    assert standard == grid_points("C", dtype)
    assert len(standard) == 36
    assert {p.problem.dtype for p in standard} == {dtype}
    assert all(p.shape.batch * p.shape.seqlen_q == 16384 for p in standard)
    assert all(p.shape.heads_q * p.problem.head_dim == 2048 for p in standard)
    other = names(grid_points("B", dtype))
    assert len(set(other)) == len(other) == 36 + 24 + 8 + 4
    assert {
        "d96 full b32 q512 k512 h21/21",
        "d160 causal b1 q16384 k16384 h12/12",
        "d192 full b8 q2048 k2048 h10/10",
        "d128 causal b4 q4096 k4096 h32/8",
        "d128 full b1 q16384 k16384 h64/8",
        "d128 causal b1 q1024 k1024 h8/8",
        "d128 full b1 q8192 k8192 h8/8",
        "d128 causal b2 q128 k8192 h16/16",
        "d128 full b2 q512 k8192 h16/16",
    } <= set(other)


def test_a_part_of_a_grid() -> None:
    assert names(grid_points("A", "bf16", [1000], [72])) == [
        "d72 full b16 q1000 k1000 h28/28",
        "d72 causal b16 q1000 k1000 h28/28",
    ]
    assert names(grid_points("B", "bf16", [128])) == [
        "d128 full b2 q128 k8192 h16/16",
        "d128 causal b2 q128 k8192 h16/16",
    ]
    assert len(grid_points("B", "bf16", None, [160])) == 12
    with pytest.raises(ArgumentError, match="multiple of 8"):
        grid_points("A", "bf16", None, [12])


def test_the_numbers_are_enough_for_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room._Memory, "_to_device", lambda self, rounded, dtype: rounded)
    problem = PROBLEM.model_copy(update={"head_dim": 8})
    points = [room.GridPoint(problem, shape) for shape in (SHAPE, GROUPED, FEW_QUERIES)]
    memory = room._Memory(points, 0)
    for _, shape, _ in points:
        x = memory.cut(problem, shape)
        assert x.q.shape == (2, shape.seqlen_q, shape.heads_q, 8)
        assert x.k.shape == x.v.shape == (2, shape.seqlen_k, shape.heads_kv, 8)
        for there, host in zip((x.q, x.k, x.v), x.host, strict=True):
            assert np.array_equal(there.astype(np.float32), host)
            assert 0.8 < host.std() < 1.2
    assert not np.array_equal(x.k, x.v)


# ---- a whole run ----


def _own(x: Inputs, config: object, *, with_lse: bool = False) -> Any:
    out = attend(x)
    return lambda stream: out


def _liar(x: Inputs) -> Any:
    out = attend(x) + 1
    return lambda stream: out


def _refuser(x: Inputs) -> Any:
    raise NotImplementedError("No such mask.\nAborting.")


def _crasher(x: Inputs) -> Any:
    def call(stream: int) -> Any:
        raise LookupError

    return call


def _missing(x: Inputs) -> Any:
    return peers.load("no_such_module", "fa3[cu13]")


TIMES = {"fagen": 100.0, "fagen_sm80": 200.0, "fagen_lse": 101.0, "fa2": 150.0, "cudnn": 80.0}
ROUNDS = (0.9, 1.7, 1.0, 1.1, 1.3)  # what slows a round slows all of it
Run = Callable[..., Results]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`bench` on a stand-in for an H200 at 1500 MHz: fa3 is not installed, fa4 wrong, flex
    breaks, cudnn takes one mask."""

    def compare(calls: dict[str, Any], bench: Bench) -> dict[str, list[float]]:
        assert bench is here
        return {name: [TIMES[name] * factor for factor in ROUNDS] for name in calls}

    class Memory:
        def __init__(self, *_: object) -> None: ...

        def cut(self, problem: Problem, shape: Shape) -> Inputs:
            return inputs(problem, shape)

    def adapt(name: str, adapter: Callable[[Inputs], Any]) -> None:
        monkeypatch.setitem(PEERS, name, Peer(PEERS[name].title, "no-such-package", adapter))

    here: Bench = object.__new__(Bench)  # of no GPU: nothing here asks it
    monkeypatch.setattr("fagen.judge.bench.bench_of", {0: here}.__getitem__)
    monkeypatch.setattr(driver, "query_device", lambda index: KNOWN_DEVICES["NVIDIA H200"])
    monkeypatch.setattr(driver, "driver_version", lambda: "13.0")
    monkeypatch.setattr("fagen.judge.measure.compare", compare)
    monkeypatch.setattr("fagen.judge.measure.read_clock", lambda bench: 1500.0)
    monkeypatch.setattr(room, "_Memory", Memory)
    monkeypatch.setattr(room, "_own", _own)
    monkeypatch.setattr("fagen.problem.TOKENS", 256)
    monkeypatch.setattr("fagen.problem.HIDDEN", 128)
    monkeypatch.setattr("fagen.build.nvrtc.nvrtc_version", lambda: "13.0")
    adapt("fa2", lambda x: _own(x, None))
    adapt("fa3", _missing)
    adapt("fa4", _liar)
    adapt("flex", _crasher)
    adapt("cudnn", lambda x: _refuser(x) if x.problem.causal else _own(x, None))
    usual: dict[str, Any] = {"seqlens": (64, 128), "head_dims": (64,), "peers": tuple(PEERS)}
    return lambda **options: bench(device_index=0, **(usual | options))


def test_contestants_that_are_absent_wrong_or_refuse_are_named(run: Run) -> None:
    results = run()
    assert results.absent.keys() == {"fa3"}
    assert results.absent["fa3"].startswith('pip install "fa3[cu13]"')
    for cell in results.cells:
        assert cell.failed["fa4"].startswith("wrong")
        assert cell.failed["flex"] == "LookupError: "
        assert cell.failed.get("cudnn") == (
            "NotImplementedError: No such mask." if cell.problem.causal else None
        )
        assert cell.us.keys() == {"fagen", "fagen_sm80", "fa2"} | (
            set() if cell.problem.causal else {"cudnn"}
        )
    assert results.peers == ("cudnn", "fa2")
    assert results.versions == {"fagen": results.versions["fagen"], "driver": "CUDA 13.0"} | {
        "nvrtc": "13.0"
    }
    lines = markdown(results).splitlines()
    assert "- cuDNN was left out on 2 of 4 shapes: NotImplementedError: No such mask." in lines


def test_speed_share_and_ratio(run: Run) -> None:
    results = run()
    full = next(c for c in results.cells if not c.problem.causal and c.shape.seqlen_q == 128)
    assert full.shape == Shape(batch=2, seqlen_q=128, seqlen_k=128, heads_q=2, heads_kv=2)
    assert full.us["fagen"] == (90, 170, 100, 110, 130)
    tflops = full.shape.flops(Problem(dtype="bf16", head_dim=64)) / 110e-6 / 1e12
    assert full.tflops["fagen"] == round(tflops, 1)
    assert full.clock_mhz == 1500
    assert full.tensor_share["fagen"] == round(tflops / (132 * 4096 * 1500e6 / 1e12), 4)
    assert full.ratio("fagen", ("cudnn", "fa2")) == pytest.approx((0.8, 0.8, 0.8))
    assert full.ratio("fagen", ("fa3",)) is None
    assert full.ratio("fa3", ("fa2",)) is None
    mean = results.mean_ratio("fagen", results.peers)
    assert mean is not None
    assert mean.median == pytest.approx(math.sqrt(0.8 * 1.5)), "cudnn has one mask only"


def test_grid_c_is_fagen_with_and_without_the_lse(run: Run) -> None:
    results = run(grid="C")
    assert all(cell.us.keys() == {"fagen", "fagen_lse"} for cell in results.cells)
    assert not results.absent
    mean = results.mean_ratio("fagen", results.rivals)
    assert mean is not None
    assert mean.median == pytest.approx(1.01)
    (line,) = [line for line in markdown(results).splitlines() if line.startswith("- ")]
    assert line.startswith("- fagen over fagen with its LSE: geometric mean 1.010")


def test_grid_b_has_a_row_for_each_kind_of_shape(run: Run) -> None:
    results = run(grid="B", seqlens=(512,), head_dims=None, peers=())
    rows = [line.split(" | ")[0] for line in markdown(results).splitlines() if line[:1] == "|"]
    assert "| head dim 96, full" in rows
    assert "| head dim 128, causal, 64/8 heads" in rows
    assert "| head dim 128, full, 8k keys" in rows
    assert len(rows) == len(set(rows)) == 2 + 2 * (3 + 2 + 1)


# ---- table, files and plot ----


def cell(seqlen: int, causal: bool, note: str = "", **us: float) -> Cell:
    """One whose rounds are so slow and again up to half slower."""
    shape = Shape(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=32, heads_kv=32)
    return Cell(
        problem=Problem(dtype="bf16", head_dim=64, causal=causal),
        shape=shape,
        note=note,
        us={name: (time, 1.1 * time, 1.5 * time) for name, time in us.items()},
        tflops={name: 1000 / time for name, time in us.items()},
        clock_mhz=1500,
        tensor_share={name: 1 / time for name, time in us.items()},
        config="forward_sm90 128x128x64",
        tier="measured here",
    )


def hand_made(*cells: Cell) -> Results:
    return Results(
        device="NVIDIA H200 (132 SMs), sm90",
        date="2030-01-02",
        versions={"fagen": "1.0"},
        absent={"fa4": "pip install flash-attn-4"},
        cells=cells
        or (
            cell(512, False, fagen=4, fa3=2, fa2=10, fagen_sm80=8),
            cell(1024, False, fagen=2, fa3=4, fa2=10, fagen_sm80=8),
            cell(512, True, fa3=2),
        ),
    )


def test_the_table() -> None:
    lines = markdown(hand_made()).splitlines()
    assert lines[0] == "| bf16, sequence | 512 | 1k |"
    assert "| head dim 64, full | 250 (25%, 0.50) | 500 (50%, 2.00) |" in lines
    assert "| head dim 64, causal | - | - |" in lines
    assert (
        "- fagen over the fastest peer: geometric mean 1.000, "
        "lowest 0.50 (d64 full 512), highest 2.00 (d64 full 1k)" in lines
    )
    assert any("sm80 template over FlashAttention-2: geometric mean 1.250" in li for li in lines)
    assert "- FlashAttention-4 was not installed" in lines


def test_the_interval_of_a_mean_is_shown_where_rounds_differ() -> None:
    noisy = cell(512, False, fagen=4, fa3=4)
    noisy = noisy.model_copy(update={"us": noisy.us | {"fa3": (4.0, 4.2, 6.2)}})
    (line,) = [li for li in markdown(hand_made(noisy)).splitlines() if "geometric" in li]
    assert "geometric mean 1.000 (95%: 0.955 to 1.033), lowest 1.00 (d64 full 512)" in line


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    save_results(hand_made(), path)
    assert load_results(path) == hand_made()
    path.write_text("{}")
    with pytest.raises(ArgumentError, match="not a result"):
        load_results(path)


OLD_CELL = {
    "head_dim": 64,
    "causal": True,
    "seqlen": 512,
    "batch": 32,
    "heads": 16,
    "us": {"fagen": 200.0, "fa3": 100.0},
    "spread": {"fagen": 0.01, "fa3": 0.01},
    "tflops": {"fagen": 300.0, "fa3": 600.0},
    "config": "",
    "tier": "",
    "failed": {},
}


def test_files_without_rounds_are_still_read(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    old = hand_made().model_dump(mode="json", exclude={"grid"})
    old |= {"dtype": "bf16", "cells": [OLD_CELL]}
    path.write_text(json.dumps(old))
    results = load_results(path)
    assert results.cells[0].problem == PROBLEM
    assert results.cells[0].shape.heads_kv == 16
    lines = markdown(results).splitlines()
    assert "| head dim 64, causal | 300 (0.50) |" in lines
    assert (
        "- fagen over FlashAttention-3: geometric mean 0.500, lowest 0.50 (d64 causal 512), "
        "highest 0.50 (d64 causal 512)" in lines
    )
    for broken in ({"us": 3}, {"heads": "many"}, {"batch": None}):
        path.write_text(json.dumps(old | {"cells": [OLD_CELL | broken]}))
        with pytest.raises(ArgumentError, match="not a result"):
            load_results(path)


def test_files_whose_cells_have_no_problem_are_still_read(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    data = hand_made().model_dump(mode="json")
    for one in data["cells"]:
        problem = one.pop("problem")
        one |= {"head_dim": problem["head_dim"], "causal": problem["causal"]}
    path.write_text(json.dumps(data | {"dtype": "bf16"}))
    assert load_results(path) == hand_made()
    path.write_text(json.dumps(data | {"dtype": "fp64"}))
    with pytest.raises(ArgumentError, match="not a result"):
        load_results(path)


COMMITTED = Path(__file__).parent.parent / "benchmarks" / "results"


@pytest.mark.parametrize(
    "path",
    sorted({*COMMITTED.glob("*.json")} - {COMMITTED / "h200_host_time.json"}),
    ids=lambda path: path.name,
)
def test_the_committed_results_are_still_read(path: Path) -> None:
    results = load_results(path)
    assert results.dtype == ("fp16" if "fp16" in path.name else "bf16")
    assert markdown(results).startswith(f"| {results.dtype}, sequence")


def test_the_table_goes_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        write_table(hand_made(), path)
        text = path.read_text()
        assert text.startswith(f"before\n{BEGIN}\n| bf16")
        assert text.endswith(f"\n{END}\nafter\n")
        assert "old" not in text
        assert text.count("head dim 64, full") == 1
    path.write_text("no markers")
    with pytest.raises(ArgumentError, match="markers"):
        write_table(hand_made(), path)


def test_a_table_that_does_not_fit_the_disk_leaves_the_text_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    before = path.read_bytes()
    with no_file_beyond(len(before)), pytest.raises(WriteError, match="File too large"):
        write_table(hand_made(), path)
    assert path.read_bytes() == before


def test_the_plot_has_a_panel_for_each_head_dim_and_mask(tmp_path: Path) -> None:
    from fagen.show.plots import save_plot, speeds

    results = hand_made(*hand_made().cells, cell(1024, True, "32/8 heads", fagen=4, fa3=5))
    panels = speeds(results).axes
    assert [panel.get_title() for panel in panels] == [
        "head dim 64, full",
        "head dim 64, causal",
        "",
        "head dim 64, causal, 32/8 heads",
    ]
    lines = {str(line.get_label()): line for line in panels[0].get_lines()}
    assert lines.keys() == {"fagen", "FlashAttention-3", "FlashAttention-2"}
    assert np.array_equal(lines["fagen"].get_xydata(), [[512, 250], [1024, 500]])
    path = tmp_path / "new" / "speeds.png"
    save_plot(results, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_is_a_line(
    capfd: pytest.CaptureFixture[str], no_matplotlib: None
) -> None:
    assert cli.main(["bench", "--plot", "speeds.png"]) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert 'pip install "fagen[report]"' in err


# ---- on a GPU ----


def adapted(name: str, x: Inputs) -> peers.Call:
    """The peer's call, which has run once; skips where it is missing or does not take the input."""
    pytest.importorskip("torch")
    if name in ("fa3", "fa4") and driver.query_device(0).arch.name != "sm90":
        pytest.skip("for Hopper")
    try:
        call = PEERS[name].adapt(x)
        call(0)
    except (MissingDependencyError, NotImplementedError, RuntimeError) as error:
        pytest.skip(f"{type(error).__name__}: {error}")
    return call


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # a peer's are not ours
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("lengths", [(256, 256, 2), (256, 256, 8), (128, 384, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_each_peer_that_is_installed_is_called_right(
    name: str, lengths: tuple[int, int, int], causal: bool
) -> None:
    seqlen_q, seqlen_k, heads = lengths
    problem = PROBLEM.model_copy(update={"causal": causal})
    shape = Shape(batch=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads, heads_kv=2)
    x = room._Memory([room.GridPoint(problem, shape)], 0).cut(problem, shape)
    assert room._Sample(x).why_wrong(adapted(name, x)(0)) is None
    assert PEERS[name].versions()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # a peer's are not ours
@pytest.mark.parametrize("name", PEERS)
def test_each_peer_works_on_the_stream_that_it_is_given(name: str) -> None:
    """On another one its work would not be timed."""
    from fagen.judge.bench import bench_of
    from fagen.judge.measure import time_call

    problem = Problem(dtype="bf16", head_dim=128)
    shape = standard_shape(128, 4096, 4096)
    x = room._Memory([room.GridPoint(problem, shape)], 0).cut(problem, shape)
    timing = time_call(adapted(name, x), bench_of(0))
    assert shape.tflops(problem, timing.median_us) < 2000, "faster than any of these cards"


@pytest.mark.gpu
def test_a_run_with_and_without_the_lse() -> None:
    results = bench(grid="C", seqlens=(512,), head_dims=(64,), device_index=0)
    for timed in results.cells:
        assert not timed.failed
        assert timed.clock_mhz is not None
        assert 300 < timed.clock_mhz < 4000
        assert 0.05 < timed.tensor_share["fagen"] < 1
        ratio = timed.ratio("fagen", results.rivals)
        assert ratio is not None
        assert 0.8 < ratio.low <= ratio.median <= ratio.high < 1.25
