"""Studies of the first release, which say in their names what they are about."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from tuning import A100, SHAPE, TASK, recorded, tune_recorded

from fagen.device import KNOWN_DEVICES
from fagen.problem import Problem
from fagen.tuning.outcome import Measured
from fagen.tuning.search.first_format import notes_of_name
from fagen.tuning.search.read import KeptStudy, read_studies, subject_of

HERE = Path(__file__).parent
JOURNALS = [
    HERE / "journals" / "first_format.journal.gz",
    *sorted((HERE / "tables").glob("*.journal.gz")),
    *sorted((HERE.parent / "benchmarks" / "results").glob("*.journal.gz")),
]


def unpacked(packed: Path, folder: Path) -> Path:
    path = folder / "trials.journal"
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return path


@pytest.mark.parametrize("packed", JOURNALS, ids=lambda path: path.name.partition(".")[0])
def test_committed_journals_are_read(packed: Path, tmp_path: Path) -> None:
    for kept in read_studies(unpacked(packed, tmp_path)):
        subject = subject_of(kept)
        assert "problem" not in kept.about
        assert subject is not None
        assert str(subject.problem) in kept.name
        assert str(subject.bucket) in kept.name
        assert subject.template in kept.name
        assert (subject.shape is None) == ("shape" not in kept.about)
        assert subject.device is not None
        assert subject.card == subject.device.key
        assert kept.unreadable == 0
        assert any(isinstance(trial.outcome, Measured) for trial in kept.trials)


def test_a_name_says_what_was_tuned() -> None:
    name = (
        "NVIDIA H200 (132 SMs) forward_fp16_d40_causal_narrow q512_k1024_bh64_g2 "
        "forward_sm80 v1 axes-0a1b2c #3"
    )
    subject = subject_of(KeptStudy(name, {}, (), 0))
    assert subject is not None
    assert subject.problem == Problem(dtype="fp16", head_dim=40, causal=True, alignment=2)
    assert str(subject.bucket) == "q512_k1024_bh64_g2"
    assert subject.template == "forward_sm80"
    assert subject.shape is None
    assert subject.device == KNOWN_DEVICES["NVIDIA H200"]
    assert notes_of_name("my own study") == {}
    assert subject_of(KeptStudy("my own study", {"shape": SHAPE.model_dump()}, (), 0)) is None


def test_a_study_of_the_first_release_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNING_LOG", str(tmp_path / "log"))
    (before,) = read_studies(unpacked(JOURNALS[0], tmp_path))
    assert len(before.trials) == 5
    result = tune_recorded(tmp_path)
    assert result.studies == (before.name,)
    (after,) = read_studies(tmp_path / "trials.journal")
    assert after.trials[:5] == before.trials
    assert len({trial.config for trial in after.trials}) == len(after.trials) == 11
    assert len((tmp_path / "log").read_text().splitlines()) == 6, "nothing is tried again"
    best = min((trial.config for trial in after.trials), key=recorded)
    assert [record.config for record in result.records] == [best]
    subject = subject_of(after)
    assert after.about["problem"] == TASK.problem.model_dump(exclude_defaults=True)
    assert subject is not None
    assert (subject.problem, subject.shape, subject.device) == (TASK.problem, SHAPE, A100)


def test_a_new_study_needs_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNING_LOG", str(tmp_path / "log"))
    tune_recorded(tmp_path, trials=2)
    (kept,) = read_studies(tmp_path / "trials.journal")
    subject = subject_of(KeptStudy("another name", kept.about, kept.trials, 0))
    assert subject is not None
    assert (subject.problem, subject.shape) == (TASK.problem, SHAPE)
    assert (subject.template, subject.card) == ("forward_sm80", A100.key)
