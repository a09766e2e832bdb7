"""A tuning that is killed, interrupted or out of disk: nothing is lost beyond the trial in flight.

All is real but the GPU: the parent, its compile processes and its worker, journal, YAML and cache.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from alive import wait_until_dead
from full_disk import no_file_beyond
from tuning import A100, FIXED, TASK, recorded, tune_recorded

from fagen.errors import WriteError
from fagen.kernels.registry import AnyConfig
from fagen.records.store import load_records
from fagen.tuning.outcome import Measured
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.read import read_studies

FULL = 14_600  # bytes
CONFIGS = len(LegalSet(TASK.problem, A100, "forward_sm80", fixed=FIXED))


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of evaluations, each of which takes a while."""
    monkeypatch.setenv("TUNING_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("TUNING_SECONDS", "0.1")
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "log"


@contextmanager
def tuning(folder: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A tuning in a process of its own."""
    words = json.dumps({"folder": str(folder)} | options)
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("tuning.py"), words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as process:
        try:
            yield process
            process.wait(60)
        finally:
            process.kill()


def evaluations(log: Path) -> list[tuple[int, str]]:
    """(process, config) of each."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(pid), config) for pid, _, config in (line.partition(" ") for line in lines)]


def wait_for(log: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(evaluations(log)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(pid: int) -> set[int]:
    """Its processes that compile or run kernels."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    pids = {int(child) for task in tasks for child in task.read_text().split()}
    return {child for child in pids if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()}


def kept(folder: Path) -> list[AnyConfig]:
    """What the journal holds a time for."""
    (study,) = read_studies(folder / "trials.journal")
    assert study.unreadable == 0
    times = {t.config: t.outcome.time_us for t in study.trials if isinstance(t.outcome, Measured)}
    assert len(times) == len(study.trials)
    assert all(time_us == recorded(config) for config, time_us in times.items())
    return list(times)


def assert_whole(folder: Path, log: Path, lost: int = 1) -> None:
    """Every config has its time, the winner is right, and at most `lost` were run twice."""
    assert len(kept(folder)) == CONFIGS
    (record,) = load_records(folder / "tuned.yaml").records
    assert record.config == min(kept(folder), key=recorded)
    runs = Counter(config for _, config in evaluations(log))
    assert len(runs) == CONFIGS
    assert sum(runs.values()) <= CONFIGS + lost


def test_kill_9_of_the_parent(tmp_path: Path, log: Path) -> None:
    with tuning(tmp_path) as process:
        wait_for(log, 4)
        started = children(process.pid)
        process.kill()
    assert started
    wait_until_dead(*started)
    assert len(kept(tmp_path)) >= 3
    with tuning(tmp_path) as process:
        pass
    assert process.returncode == 0
    assert_whole(tmp_path, log)


def test_kill_9_of_the_worker(tmp_path: Path, log: Path) -> None:
    with tuning(tmp_path) as process:
        wait_for(log, 4)
        worker, _ = evaluations(log)[-1]
        os.kill(worker, signal.SIGKILL)
    assert process.returncode == 0
    (study,) = read_studies(tmp_path / "trials.journal")
    measured = {t.config for t in study.trials if isinstance(t.outcome, Measured)}
    assert CONFIGS - 1 <= len(measured) <= len(study.trials) == CONFIGS
    (record,) = load_records(tmp_path / "tuned.yaml").records
    assert record.config == min(measured, key=recorded)


def test_kill_9_of_the_compile_processes(tmp_path: Path, log: Path) -> None:
    with tuning(tmp_path) as process:
        wait_for(log, 2)
        worker, _ = evaluations(log)[-1]
        compilers = children(process.pid) - {worker}
        for compiler in compilers:
            os.kill(compiler, signal.SIGKILL)
    assert compilers
    assert process.returncode == 0
    (study,) = read_studies(tmp_path / "trials.journal")
    measured = {t.config for t in study.trials if isinstance(t.outcome, Measured)}
    assert CONFIGS - len(compilers) <= len(measured) <= len(study.trials) == CONFIGS
    assert len(load_records(tmp_path / "tuned.yaml").records) == 1


def test_ctrl_c_saves_what_is_known_and_resume_goes_on(tmp_path: Path, log: Path) -> None:
    with tuning(tmp_path) as process:
        wait_for(log, 4)
        started = children(process.pid)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    wait_until_dead(*started)
    (record,) = load_records(tmp_path / "tuned.yaml").records
    assert record.config == min(kept(tmp_path), key=recorded)
    tune_recorded(tmp_path)
    assert_whole(tmp_path, log)


def test_two_tuners_on_one_study_and_one_file(tmp_path: Path, log: Path) -> None:
    with tuning(tmp_path) as first, tuning(tmp_path) as second:
        pass
    assert (first.returncode, second.returncode) == (0, 0)
    assert_whole(tmp_path, log, lost=0)
    assert len({pid for pid, _ in evaluations(log)}) == 2


def test_two_tuners_of_different_shapes_write_one_file(tmp_path: Path) -> None:
    with tuning(tmp_path) as first, tuning(tmp_path, seqlen=4096) as second:
        pass
    assert (first.returncode, second.returncode) == (0, 0)
    records = load_records(tmp_path / "tuned.yaml").records
    assert {record.shape.seqlen_q for record in records} == {512, 4096}


def test_a_full_disk_is_one_line_and_resume_goes_on(tmp_path: Path, log: Path) -> None:
    """The journal is torn where the disk was full, and no kernel could be cached."""
    with no_file_beyond(FULL), pytest.raises(WriteError) as caught:
        tune_recorded(tmp_path)
    said = str(caught.value)
    assert f"cannot keep trials in {tmp_path / 'trials.journal'}: File too large" in said
    assert "\n" not in said
    assert "--resume" in said
    assert (tmp_path / "trials.journal").stat().st_size == FULL
    found = kept(tmp_path)
    assert 2 <= len(found) < CONFIGS
    assert not (tmp_path / "tuned.yaml").exists()
    assert not list(tmp_path.glob("cache/kernels/*"))
    tune_recorded(tmp_path)
    assert set(found) <= set(kept(tmp_path))
    assert_whole(tmp_path, log)
