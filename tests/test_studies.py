"""Kept studies that several processes search at once, on a recorded table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import postgres
import pytest
from recorded import Known, known, legal_set, search_recorded

from fagen.errors import ArgumentError, StoreError, WriteError
from fagen.tuning.outcome import Measured, Rejected
from fagen.tuning.search import ledger, read
from fagen.tuning.search.read import read_studies
from fagen.tuning.search.storage import close_storage, open_storage
from fagen.tuning.search.study import Study


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    if reason := postgres.why_no_server():
        pytest.skip(reason)
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["journal", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of storage that several processes should write."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("database"))
    return str(tmp_path / "trials.journal")


def start(storage: str, log: Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            Path(__file__).with_name("recorded.py"),
            storage,
            log,
            json.dumps(options),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> list[Known]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [({(c, o) for c, o in outcomes}, best) for outcomes, best in json.loads(output)]


def evaluations(log: Path) -> Counter[str]:
    return Counter(log.read_text().splitlines()) if log.exists() else Counter()


def wait_for(log: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while evaluations(log).total() < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """What one process finds that searches the table to its end."""
    folder = tmp_path_factory.mktemp("alone")
    (study,) = search_recorded(str(folder / "trials.journal"), folder / "log")
    assert len(study.trials) == len(legal_set())
    return known(study)


def test_four_processes_find_what_one_does_and_evaluate_nothing_twice(
    storage: str, tmp_path: Path, alone: Known
) -> None:
    log = tmp_path / "log"
    processes = [start(storage, log, seconds=0.01) for _ in range(4)]
    for process in processes:
        assert finish(process) == [alone]
    assert set(evaluations(log).values()) == {1}
    assert evaluations(log).total() == len(legal_set())
    (kept,) = read_studies(storage)
    assert {(str(tried.config), str(tried.outcome)) for tried in kept.trials} == alone[0]
    assert kept.unreadable == 0


def test_studies_side_by_side_share_one_evaluation(tmp_path: Path, alone: Known) -> None:
    """Processes that ask on behalf of different studies do not both take a config."""
    storage, log = str(tmp_path / "trials.journal"), tmp_path / "log"
    processes = [start(storage, log, seconds=0.005, studies=2) for _ in range(3)]
    for process in processes:
        assert finish(process) == [alone, alone]
    assert set(evaluations(log).values()) == {1}


@pytest.mark.parametrize("joined", [False, True])
def test_what_a_killed_process_had_claimed_is_taken_over(
    tmp_path: Path, alone: Known, joined: bool
) -> None:
    """By one that searches at that time, and by one that comes later."""
    storage, log = str(tmp_path / "trials.journal"), tmp_path / "log"
    victim = start(storage, log, seconds=0.1)
    wait_for(log, 5)
    survivor = start(storage, log, seconds=0.01) if joined else None
    if joined:
        wait_for(log, 30)
    victim.kill()
    victim.communicate()
    if not joined:
        (kept,) = read_studies(storage)
        assert kept.unreadable == 0
        assert {(str(t.config), str(t.outcome)) for t in kept.trials} < alone[0]
    assert finish(survivor or start(storage, log)) == [alone]
    twice = [config for config, count in evaluations(log).items() if count > 1]
    assert len(twice) <= 1  # the one in flight
    assert len(evaluations(log)) == len(legal_set())


def test_a_claim_of_another_host_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join() -> Study:
        return Study("few", legal_set(), sampler="brute-force", storage=opened, resume=True)

    opened = open_storage(tmp_path / "trials.journal")
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_machine", lambda: "another")
        far = join()
        config = far.ask()
        assert config is not None
        assert far.claim(config)
        patch.undo()
        near = join()
        row = near.legal.find(config.axes())
        assert near.read() == {row}
        assert not near.claim(config)
        patch.setattr(ledger, "CLAIM_SECONDS", 0.0)
        assert near.read() == set()
        assert near.claim(config)
    far.tell(config, Measured(time_us=1.0))  # too late: the trial is another's now
    near.join(config)
    near.tell(config, Measured(time_us=2.0))
    assert [tried.time_us for tried in join().trials] == [2.0]


def test_survivors_that_give_up_the_same_claims_do_not_collide(storage: str) -> None:
    """Of one process, earlier ledgers are dead ones; threads stand in for the survivors."""
    opened = [open_storage(storage) for _ in range(4)]
    first, *survivors = (Study("many", legal_set(), storage=each, resume=True) for each in opened)
    claimed = [first.ask() for _ in range(30)]
    assert all(config is not None and first.claim(config) for config in claimed)
    together = threading.Barrier(len(survivors), timeout=60)

    def survive(study: Study) -> list[set[int]]:
        together.wait()
        return [study.read() for _ in range(3)]

    with ThreadPoolExecutor(len(survivors)) as threads:
        assert list(threads.map(survive, survivors)) == [[set()] * 3] * len(survivors)
    for each in opened:
        close_storage(each)


def test_the_log_level_of_optuna_is_the_callers_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = optuna.logging.get_verbosity()
    study = Study("few", legal_set(), sampler="tpe", storage=open_storage(tmp_path / "x.journal"))
    assert study.ask() is not None
    assert optuna.logging.get_verbosity() == before == optuna.logging.INFO
    assert capfd.readouterr().err == ""


def test_a_time_that_one_process_withdraws_is_withdrawn_in_all(tmp_path: Path) -> None:
    opened = open_storage(tmp_path / "trials.journal")
    one, other = (Study("few", legal_set(), storage=opened, resume=True) for _ in range(2))
    config = one.ask()
    assert config is not None
    one.tell(config, Measured(time_us=1.0))
    other.read()
    assert other.best == one.best
    why = Rejected(kind="crash", reason="on its second run")
    one.tell(config, why)
    other.read()
    assert [tried.outcome for tried in other.trials] == [why]


def test_a_line_that_a_killed_process_tore_harms_nobody(tmp_path: Path) -> None:
    path = tmp_path / "trials.journal"
    study = Study("torn", legal_set(), storage=open_storage(path))
    for torn in (b"", b'{"op_code":4,"study_id":0,"datetime_st', b"{"):
        with path.open("ab") as file:
            file.write(torn)
        config = study.ask()
        assert config is not None
        assert study.claim(config)
        study.tell(config, Measured(time_us=1.0))
    again = Study("torn", legal_set(), storage=open_storage(path), resume=True)
    assert [tried.config for tried in again.trials] == [tried.config for tried in study.trials]


@pytest.mark.parametrize("text", ["not json", "a", "{}", "{}\n", "not json\nnor this"])
def test_a_file_that_is_no_journal_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"notes\.txt is not a journal"):
        open_storage(path)
    assert path.read_text() == text


def test_a_database_that_goes_away_is_one_line() -> None:
    if reason := postgres.why_no_server():
        pytest.skip(reason)
    with postgres.server() as url:
        storage = open_storage(url)
        study = Study("few", legal_set(), storage=storage)
        config = study.ask()
        assert config is not None
        assert study.claim(config)
    with pytest.raises(WriteError, match="cannot keep trials in the database: ") as caught:
        study.tell(config, Measured(time_us=1.0))
    assert "\n" not in str(caught.value)
    study.release()
    close_storage(storage)


def test_a_database_that_goes_away_while_it_is_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reason := postgres.why_no_server():
        pytest.skip(reason)
    with postgres.server() as url:
        storage = open_storage(url)
    monkeypatch.setattr(read, "open_storage", lambda where: storage)
    with pytest.raises(StoreError, match="cannot read the studies of the database: ") as caught:
        read_studies(url)
    assert "\n" not in str(caught.value)


def test_a_database_that_cannot_be_opened_is_one_line_without_the_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)  # as if it were not installed
    with pytest.raises(ArgumentError, match=r'pip install "fagen\[postgresql\]"') as caught:
        open_storage("postgresql+psycopg://me:secret@localhost:1/db")
    assert "me:***@localhost" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
