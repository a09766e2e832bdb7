"""What `fagen.record` notes of a program's calls, and the tasks that come of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FLOAT16, FakeDriver, FakeTensor, compiled, fake_torch, forget_frameworks

import fagen
from fagen import api
from fagen import call as calling
from fagen.device import KNOWN_DEVICES
from fagen.errors import ArgumentError, StoreError
from fagen.kernels.registry import default_config
from fagen.problem import Problem, Shape
from fagen.records import calls as recording
from fagen.records import yaml_file
from fagen.records.calls import Calls, load_calls, save_calls
from fagen.tuning.tasks import Task, tasks_from

BF16 = Problem(dtype="bf16", head_dim=128)
H200 = KNOWN_DEVICES["NVIDIA H200"]


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def compile_kernel(problem: Any, config: Any, arch: Any) -> Any:
        return compiled(problem, arch.name)

    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    for module in (api, calling):
        monkeypatch.setattr(module, "compile_kernel", compile_kernel)
    monkeypatch.setattr(calling, "_kernels", {})
    monkeypatch.setattr(calling, "_thread", threading.local())
    forget_frameworks()
    FakeDriver.install(monkeypatch)
    yield
    forget_frameworks()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shapes.yaml"


def shape(seqlen: int = 1000, batch: int = 2) -> Shape:
    return Shape(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=8, heads_kv=8)


def call(seqlen: int = 1000, batch: int = 2, **options: Any) -> None:
    q, k, v = (FakeTensor((batch, seqlen, 8, 128)) for _ in range(3))
    fagen.attention(q, k, v, **options)


def calls(problem: Problem, shape: Shape, count: int, of_shape: int | None = None) -> Calls:
    return Calls(problem=problem, shape=shape, calls=count, shape_calls=of_shape or count)


# ---- what is recorded ----


def test_each_problem_and_bucket_is_counted_with_its_commonest_shape(path: Path) -> None:
    call(1000)  # before the block: has its plan, is not counted
    with fagen.record(path):
        for seqlen in (1000, 1010, 1010, 1020, 4000):
            call(seqlen)
        call(causal=True)
    call(1010)
    causal = Problem(dtype="bf16", head_dim=128, causal=True)
    assert load_calls(path) == (
        calls(BF16, shape(1010), 4, 2),
        calls(BF16, shape(4000), 1),
        calls(causal, shape(1000), 1),
    )
    assert not recording.active


def test_lengths_group_and_dtype_are_those_of_the_call(path: Path) -> None:
    q = FakeTensor((2, 8, 300, 64), FLOAT16)
    kv = FakeTensor((2, 2, 500, 64), FLOAT16)
    problem = Problem(dtype="fp16", head_dim=64)
    with fagen.record(str(path)):
        fagen.attention(q, kv, kv, layout="bhsd", config=default_config(problem, H200))
    (entry,) = load_calls(path)
    assert entry.problem == problem
    assert entry.shape == Shape(batch=2, seqlen_q=300, seqlen_k=500, heads_q=8, heads_kv=2)


def test_a_loaded_kernel_is_recorded_too(path: Path) -> None:
    kernel = fagen.load(dtype="bf16", head_dim=128, seqlen_q=64, seqlen_k=64, batch=2, heads=8)
    q = FakeTensor((2, 64, 8, 128))
    with fagen.record(path):
        kernel(q, q, q)
    assert load_calls(path) == (calls(BF16, shape(64), 1),)


def test_narrow_problems_are_recorded_and_take_the_narrow_template(path: Path) -> None:
    q = FakeTensor((2, 64, 8, 128))
    with fagen.record(path):
        fagen.attention(q, q, FakeTensor(q.shape, pointer=2))
    (task,) = tasks_from(path)
    assert task == Task(Problem(dtype="bf16", head_dim=128, alignment=2), (shape(64),))
    assert default_config(task.problem, H200).template == "forward_sm80"


def test_calls_that_launch_nothing_are_no_calls(path: Path) -> None:
    with fagen.record(path):
        call(batch=0)
        with pytest.raises(ArgumentError, match="softmax_scale"):
            call(softmax_scale=-1.0)
        with pytest.raises(ArgumentError, match="layout"):
            call(layout="sbhd")
    assert load_calls(path) == ()


def test_threads_lose_no_call(path: Path) -> None:
    def work(_: int) -> None:
        for _ in range(50):
            call()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with fagen.record(path), ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert load_calls(path) == (calls(BF16, shape(), 200),)


def test_blocks_may_be_nested(path: Path) -> None:
    inner = path.with_name("inner.yaml")
    with fagen.record(path):
        call()
        with fagen.record(inner):
            call()
            assert len(recording.active) == 2
        call()
    assert load_calls(inner) == (calls(BF16, shape(), 1),)
    assert load_calls(path) == (calls(BF16, shape(), 3),)


# ---- when it is written ----


def test_an_exception_in_the_block_loses_nothing(path: Path) -> None:
    @fagen.record(path)
    def program() -> None:
        call()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program()
    assert load_calls(path) == (calls(BF16, shape(), 1),)
    assert not recording.active


def test_an_exception_of_the_block_comes_before_that_of_the_file(path: Path) -> None:
    @fagen.record(path)
    def program(failure: BaseException | None) -> None:
        path.write_text("torn: [")
        if failure:
            raise failure

    with pytest.raises(ZeroDivisionError) as caught:
        program(ZeroDivisionError())
    assert any(str(path) in note for note in caught.value.__notes__)
    path.unlink()
    with pytest.raises(StoreError, match=r"shapes\.yaml, line \d"):
        program(None)
    assert not recording.active
    assert path.read_text() == "torn: ["


def test_what_cannot_be_written_is_known_before_the_block(tmp_path: Path) -> None:
    records = tmp_path / "records.yaml"
    records.write_text("schema: 1\nrecords: []\n")
    for where in (records, tmp_path, records / "below.yaml"):
        with pytest.raises(StoreError), fagen.record(where):
            pytest.fail("the block has started")
    assert not recording.active
    assert records.read_text() == "schema: 1\nrecords: []\n"


def test_the_path_is_that_of_the_folder_in_which_the_block_started(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    with fagen.record(path.name):
        call()
        monkeypatch.chdir("/")
    assert load_calls(path) == (calls(BF16, shape(), 1),)


# ---- the file ----


def test_calls_are_added_to_those_of_the_file(path: Path) -> None:
    old = [calls(BF16, shape(1000), 10, 6), calls(BF16, shape(64), 1)]
    save_calls(path, old)
    save_calls(path, [calls(BF16, shape(1010), 7), calls(BF16, shape(1000), 2)])
    assert load_calls(path) == (old[1], calls(BF16, shape(1000), 19, 8))
    save_calls(path, [calls(BF16, shape(1010), 9)])
    assert load_calls(path) == (old[1], calls(BF16, shape(1010), 28, 9))
    assert not list(path.parent.glob("*draft*"))


def test_the_text_does_not_depend_on_the_order(path: Path) -> None:
    entries = [calls(BF16, shape(n), 5) for n in (1000, 1010, 64)]
    save_calls(path, entries)
    other = path.with_name("other.yaml")
    save_calls(other, reversed(entries))
    assert other.read_bytes() == path.read_bytes()
    assert path.read_text().splitlines()[2:] == [
        "schema: 1",
        "calls:",
        "- problem: {dtype: bf16, head_dim: 128, causal: false}",
        "  shape: {batch: 2, seqlen_q: 64, seqlen_k: 64, heads_q: 8, heads_kv: 8}",
        "  calls: 5",
        "  shape_calls: 5",
        "- problem: {dtype: bf16, head_dim: 128, causal: false}",
        "  shape: {batch: 2, seqlen_q: 1000, seqlen_k: 1000, heads_q: 8, heads_kv: 8}",
        "  calls: 10",
        "  shape_calls: 5",
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema: 1", "schema: 2", "not a file of recorded calls"),
        ("schema: 1\ncalls:", "schema: 1\nrecords:", "not a file of recorded calls"),
        ("seqlen_q: 64", "seqlen_q: 0", "line 5: .*nothing to compute"),
        ("shape_calls: 5", "shape_calls: 6", "line 5: .*more than calls"),
        ("dtype: bf16", "dtype: fp64", "line 5: .*dtype"),
        ("calls: 5\n", "calls: 5\n  weight: 1\n", "line 5: .*weight"),
        ("dtype: bf16", "dtype: !!str bf16", "line 5: the tag"),
        ("shape_calls: 5", "shape_calls: [", "line "),
    ],
)
def test_what_is_no_file_of_calls_is_refused_in_one_line(
    path: Path, old: str, new: str, said: str
) -> None:
    save_calls(path, [calls(BF16, shape(64), 5)])
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    for read in (load_calls, tasks_from, lambda path: save_calls(path, ())):
        with pytest.raises(StoreError, match=said) as caught:
            read(path)
        assert "\n" not in str(caught.value)
    assert path.read_text() == text.replace(old, new, 1)


def test_an_endless_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_file, "MAX_BYTES", 1000)
    with pytest.raises(StoreError, match="not a file of recorded calls"):
        load_calls("/dev/zero")


# ---- the tasks ----


def test_tasks_are_grouped_by_problem_the_most_called_first(path: Path) -> None:
    with fagen.record(path):
        for seqlen in (1000, 1000, 512):
            call(seqlen, causal=True)
        for _ in range(2):
            call(64)
    causal = Problem(dtype="bf16", head_dim=128, causal=True)
    assert tasks_from(path) == [
        Task(causal, (shape(1000), shape(512))),
        Task(BF16, (shape(64),)),
    ]


def test_a_file_without_a_call_gives_no_tasks(path: Path) -> None:
    with fagen.record(path):
        pass
    with pytest.raises(ArgumentError, match="holds no calls"):
        tasks_from(path)
