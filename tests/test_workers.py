"""Several workers that share the candidates: real processes, on plain functions."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import pytest
from alive import is_alive, wait_until_dead

from fagen.device import KNOWN_DEVICES, Device
from fagen.errors import ArgumentError, DeviceError
from fagen.tuning.outcome import Measured, Outcome
from fagen.tuning.worker import Worker
from fagen.tuning.worker_child import DeviceReport
from fagen.tuning.workers import WorkerPool

ACT = "bad_evaluators:act"


def ask(worker: Worker, what: str) -> Outcome:
    nothing: Any = None
    return worker.evaluate(what, nothing, nothing, nothing)  # type: ignore[arg-type]


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool([Worker(index, evaluator=ACT) for index in range(2)]) as both:
        yield both


def each(
    pool: WorkerPool, items: Iterable[Any], judge: Callable[[Worker, Any], Any]
) -> Iterator[Any]:
    """What `judge` says of each item, in the order of completion."""
    futures = [pool.submit(judge, item) for item in items]
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.stop()


def processes(pool: WorkerPool) -> set[int]:
    """The ids of both workers' processes."""
    pids = set()
    together = threading.Barrier(2, timeout=60)

    def judge(worker: Worker, _: int) -> Outcome:
        together.wait()  # so that each worker gets one
        return ask(worker, "well")

    for outcome in each(pool, range(2), judge):
        assert isinstance(outcome, Measured)
        pids.add(int(outcome.time_us))
    return pids


def test_each_candidate_goes_to_one_of_the_workers(pool: WorkerPool) -> None:
    assert len(processes(pool)) == 2
    seen = list(each(pool, range(50), lambda worker, item: (worker.device_index, item)))
    assert sorted(item for _, item in seen) == list(range(50))


def test_a_slow_candidate_holds_only_its_own_worker(pool: WorkerPool) -> None:
    slow_may_end = threading.Event()

    def judge(worker: Worker, item: int) -> int:
        if item == 0:
            assert slow_may_end.wait(60)
        return item

    done = []
    for item in each(pool, range(10), judge):
        done.append(item)
        if len(done) == 8:
            slow_may_end.set()
    assert set(done[:8]) <= set(range(1, 10))
    assert sorted(done) == list(range(10))


def test_ctrl_c_ends_what_every_worker_does(pool: WorkerPool, tmp_path: Path) -> None:
    before = processes(pool)
    files = [tmp_path / "0", tmp_path / "1"]

    def interrupt() -> None:
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        list(each(pool, files, lambda worker, file: ask(worker, f"hang-deaf {file}")))
    thread.join()
    wait_until_dead(*before)
    assert not processes(pool) & before  # they serve again


def test_what_concerns_every_candidate_ends_all(pool: WorkerPool, tmp_path: Path) -> None:
    before = processes(pool)
    asked = ["refuse", f"hang-deaf {tmp_path / 'pid'}"]
    with pytest.raises(DeviceError, match="too little free memory"):
        list(each(pool, asked, ask))
    assert len([pid for pid in before if is_alive(pid)]) <= 1


def test_the_processes_end_with_the_pool() -> None:
    with WorkerPool([Worker(index, evaluator=ACT) for index in range(2)]) as both:
        pids = processes(both)
    wait_until_dead(*pids)


class OfCard(Worker):
    def __init__(self, device_index: int, device: Device) -> None:
        super().__init__(device_index)
        self._device = device

    def describe_device(self) -> DeviceReport:
        return DeviceReport(device=self._device, driver="13.0")


def test_only_equal_cards_tune_together() -> None:
    a100, h200 = (KNOWN_DEVICES[name] for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H200"))
    assert WorkerPool([OfCard(0, h200), OfCard(1, h200)]).describe().device == h200
    with pytest.raises(
        ArgumentError, match=r"GPU 3 is NVIDIA A100.*, GPU 0 is NVIDIA H200"
    ) as said:
        WorkerPool([OfCard(0, h200), OfCard(3, a100)]).describe()
    assert "\n" not in str(said.value)
