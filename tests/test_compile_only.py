"""A helper without a GPU compiles for a tuning elsewhere, into the same cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tuning import A100, FIXED, TASK, tune_recorded

from fagen.device import architecture
from fagen.errors import ArgumentError
from fagen.records.store import load_records
from fagen.tuning.events import Event, Notice
from fagen.tuning.options import TuneOptions
from fagen.tuning.outcome import Measured
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.read import read_studies
from fagen.tuning.tuner import tune

SOME_SPILL = FIXED | {"warps": 1}


def cached(folder: Path) -> dict[str, int]:
    """The kernels of a cache, and when each was put there."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / "kernels").iterdir()}


def test_what_a_helper_compiled_is_found_by_those_that_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNING_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    options = {"folder": str(tmp_path), "compile_only": True, "arch": "sm80", "fixed": SOME_SPILL}
    helper = subprocess.run(
        [sys.executable, Path(__file__).with_name("tuning.py"), json.dumps(options)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=120,
        check=False,
    )
    assert helper.returncode == 0
    assert len(LegalSet(TASK.problem, A100, "forward_sm80", fixed=SOME_SPILL)) == 6
    compiled = cached(tmp_path / "cache")
    assert len(compiled) == 6 + 1  # and the default, which times are compared with
    assert not (tmp_path / "log").exists(), "nothing is measured"
    assert not (tmp_path / "trials.journal").exists()
    assert not (tmp_path / "tuned.yaml").exists()

    result = tune_recorded(tmp_path, fixed=SOME_SPILL)
    assert cached(tmp_path / "cache") == compiled, "nothing is compiled again"
    assert len((tmp_path / "log").read_text().splitlines()) == 4
    (study,) = read_studies(tmp_path / "trials.journal")
    measured = [trial.config for trial in study.trials if isinstance(trial.outcome, Measured)]
    assert (len(measured), len(study.trials)) == (4, 6)
    assert load_records(tmp_path / "tuned.yaml").records == result.records
    assert result.records[0].config in measured


def test_a_helper_keeps_to_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    events: list[Event] = []
    options = TuneOptions(
        compile_only=True, arch=architecture("sm80"), fixed=SOME_SPILL, budget_s=1e-9, processes=1
    )
    result = tune([TASK], options, on_event=events.append)
    assert not result.interrupted
    assert len(cached(tmp_path / "cache")) < 6
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any("1 of 7 likely candidates are in the cache" in text for text in notices)


def test_a_helper_has_to_be_told_what_to_compile_for(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="name the architecture to compile for"):
        tune([TASK], TuneOptions(compile_only=True, storage=tmp_path / "trials.journal"))
