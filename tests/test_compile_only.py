"""A helper without a GPU compiles for a tuning elsewhere: the same storage, the same cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tuning import A100, FIXED, TASK, tune_recorded

from fagen.device import architecture
from fagen.errors import ArgumentError
from fagen.records.store import load_records
from fagen.tuning.outcome import Measured
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.studies import Ledger, open_storage, read_studies
from fagen.tuning.tuner import tune

SOME_SPILL = FIXED | {"warps": 1}


def offers(storage: Path) -> int:
    """How many configs are compiled and wait to be measured."""
    if not storage.exists() or not (studies := read_studies(storage)):
        return 0
    ledger = Ledger(studies[0].name, open_storage(storage), True, {})
    ledger.news()
    return len(ledger.offers)


def test_what_a_helper_compiled_is_measured_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNING_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    options = {"folder": str(tmp_path), "compile_only": True, "arch": "sm80", "fixed": SOME_SPILL}
    storage = tmp_path / "trials.journal"
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("tuning.py"), json.dumps(options)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as helper:
        deadline = time.monotonic() + 60
        while offers(storage) < 4:
            assert time.monotonic() < deadline
            assert helper.poll() is None
            time.sleep(0.1)
        assert len(LegalSet(TASK.problem, A100, "forward_sm80", fixed=SOME_SPILL)) == 6
        assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 6
        (study,) = read_studies(storage)
        assert study.unreadable == 0
        assert [tried.outcome.kind for tried in study.tried] == ["resources", "resources"]  # type: ignore[union-attr]
        assert not (tmp_path / "log").exists()

        result = tune_recorded(tmp_path, fixed=SOME_SPILL)
        assert helper.wait(60) == 0  # it has seen every outcome
    assert len((tmp_path / "log").read_text().splitlines()) == 4
    (study,) = read_studies(storage)
    measured = [tried.config for tried in study.tried if isinstance(tried.outcome, Measured)]
    assert (len(measured), len(study.tried)) == (4, 6)
    assert load_records(tmp_path / "tuned.yaml").records == result.records
    assert result.records[0].config in measured
    assert offers(storage) == 0


def test_a_helper_has_to_be_told_what_it_joins(tmp_path: Path) -> None:
    storage = tmp_path / "trials.journal"
    with pytest.raises(ArgumentError, match="name its arch and storage, and resume it"):
        tune([TASK], compile_only=True, storage=storage, resume=True)
    with pytest.raises(ArgumentError, match="name its arch and storage, and resume it"):
        tune([TASK], compile_only=True, storage=storage, arch=architecture("sm80"))
    assert not storage.exists()
