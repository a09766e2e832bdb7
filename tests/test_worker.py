"""The worker under kernels that hang, crash and lie; plain functions stand in for kernels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from alive import is_alive, wait_until_dead

from fagen.errors import DeviceError
from fagen.problem import Problem, Shape
from fagen.show.peers import torch_baseline
from fagen.tuning.outcome import Measured, Outcome, Rejected
from fagen.tuning.worker import Worker

ACT = "bad_evaluators:act"
SHAPE = Shape(batch=1, seqlen_q=512, seqlen_k=512, heads_q=16, heads_kv=16)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(0, evaluator=ACT, deadline_s=20) as worker:
        yield worker


def ask(worker: Worker, what: str) -> Outcome:
    nothing: Any = None
    return worker.evaluate(what, nothing, nothing, nothing)  # type: ignore[arg-type]


def pid(outcome: Outcome) -> int:
    assert isinstance(outcome, Measured)
    return int(outcome.time_us)


def test_one_process_serves_many_requests(worker: Worker) -> None:
    first, second = (pid(ask(worker, "well")) for _ in range(2))
    assert first == second != os.getpid()
    worker.close()
    wait_until_dead(first)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("abort", "SIGABRT"),
        ("segfault", "SIGSEGV"),
        ("exit", "code 3"),
        ("sticky", "illegal address"),
    ],
)
def test_a_crash_is_a_rejection_and_the_next_one_runs(
    worker: Worker, what: str, reason: str
) -> None:
    before = pid(ask(worker, "well"))
    crashed = ask(worker, what)
    assert isinstance(crashed, Rejected)
    assert crashed.kind == "crash"
    assert reason in crashed.reason
    assert pid(ask(worker, "well")) != before
    wait_until_dead(before)


def test_after_a_stray_write_the_next_one_gets_clean_memory(worker: Worker) -> None:
    before = pid(ask(worker, "well"))
    assert ask(worker, "stray") == Rejected(kind="stray", reason="wrote to its inputs")
    wait_until_dead(before)
    assert pid(ask(worker, "well")) != before


def test_a_hang_is_killed_and_the_next_one_runs(worker: Worker, tmp_path: Path) -> None:
    before = pid(ask(worker, "well"))
    worker.deadline_s = 0.3
    hung = ask(worker, f"hang-deaf {tmp_path / 'pid'}")
    worker.deadline_s = 20
    assert hung == Rejected(kind="hang", reason="no answer within 0.3 s; the process was killed")
    assert not is_alive(before)
    assert pid(ask(worker, "well")) != before


def test_a_new_process_gets_the_same_deadline(worker: Worker) -> None:
    """Its start, which takes longer than this deadline, is no part of it."""
    worker.deadline_s = 0.3
    assert pid(ask(worker, "well"))
    worker.close()
    start = time.monotonic()
    hung = ask(worker, "hang")
    assert isinstance(hung, Rejected)
    assert "within 0.3 s" in hung.reason
    assert time.monotonic() - start < 20


def test_the_time_spent_on_requests_is_known(worker: Worker) -> None:
    ask(worker, "well")
    assert worker.busy_s < 0.1, "the start of the process is no work"
    start = time.monotonic()
    ask(worker, "nap")
    ask(worker, "nap")
    assert 0.4 <= worker.busy_s <= time.monotonic() - start + 0.1


def test_a_killed_worker_is_replaced(worker: Worker) -> None:
    before = pid(ask(worker, "well"))
    os.kill(before, signal.SIGKILL)
    outcome = ask(worker, "well")
    if isinstance(outcome, Rejected):  # it was still dying when the request went out
        assert outcome == Rejected(
            kind="crash", reason="the process that ran it was killed by SIGKILL"
        )
        outcome = ask(worker, "well")
    assert pid(outcome) != before


def test_what_concerns_every_candidate_is_raised(worker: Worker) -> None:
    with pytest.raises(DeviceError, match="too little free memory"):
        ask(worker, "refuse")
    assert pid(ask(worker, "well"))


def test_a_fault_of_fagen_stops_the_search(
    worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="Python error"):
        ask(worker, "typo")
    assert "NameError: tpyo" in capfd.readouterr().err
    with pytest.raises(TypeError, match="returned None, which is not an outcome"):
        ask(worker, "nothing")


def test_the_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """In the middle of a kernel, and though the parent has no time to say so."""
    program = textwrap.dedent(
        f"""
        from fagen.tuning.worker import Worker
        if __name__ == "__main__":
            Worker(0, evaluator={ACT!r}).evaluate("hang-deaf {tmp_path / "pid"}", None, None, None)
        """
    )
    script = tmp_path / "parent.py"
    script.write_text(program)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment)
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.02)
    orphan = int((tmp_path / "pid").read_text())
    assert is_alive(orphan)
    parent.kill()
    parent.wait()
    wait_until_dead(orphan)


def test_ctrl_c_ends_the_request_and_the_process(worker: Worker) -> None:
    before = pid(ask(worker, "well"))
    program = f"import os, time; time.sleep(0.5); os.kill({os.getpid()}, {int(signal.SIGINT)})"
    with subprocess.Popen([sys.executable, "-c", program]), pytest.raises(KeyboardInterrupt):
        ask(worker, "hang")
    assert not is_alive(before)
    assert pid(ask(worker, "well")) != before


def test_no_device_is_one_line() -> None:
    from fagen.run import driver

    try:
        driver.device_count()
    except DeviceError:
        with Worker(0) as worker, pytest.raises(DeviceError, match="no usable CUDA driver"):
            worker.describe_device()
    else:
        pytest.skip("there is a device")


def test_where_torch_has_too_little_memory_nothing_is_compared_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("CUDA out of memory")  # torch.OutOfMemoryError is one of these

    torch = SimpleNamespace(bfloat16=None, float16=None, randn=full)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert torch_baseline(Problem(dtype="bf16", head_dim=64), SHAPE, 0) is None


def test_a_torch_for_another_cuda_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcublas.so.12: cannot open')")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert torch_baseline(Problem(dtype="bf16", head_dim=64), SHAPE, 0) is None


def test_a_torch_without_grouped_heads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(*arguments: Any, **options: Any) -> None:
        raise TypeError("scaled_dot_product_attention() got an unexpected argument 'enable_gqa'")

    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(bfloat16=None, float16=None, randn=old)
    )
    assert torch_baseline(Problem(dtype="bf16", head_dim=64), SHAPE, 0) is None
