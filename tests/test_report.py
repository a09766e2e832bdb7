"""The page and the plots of kept studies, on small ones that are made here."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from fagen.cli import app as cli
from fagen.device import KNOWN_DEVICES
from fagen.errors import ArgumentError
from fagen.kernels import Sm90Forward
from fagen.kernels.registry import default_config
from fagen.problem import Problem, Shape
from fagen.show.report import ReportFiles, report
from fagen.show.results import Cell, Results
from fagen.show.summary import (
    exp2_ceiling,
    importance,
    roofline_points,
    summarise,
    tensor_ceiling,
)
from fagen.tuning.outcome import Measured, Outcome, Rejected, Trial
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.read import read_studies
from fagen.tuning.search.statistics import spearman
from fagen.tuning.search.storage import open_storage, study_name
from fagen.tuning.search.study import Study

H200 = KNOWN_DEVICES["NVIDIA H200"]
PROBLEM = Problem(dtype="bf16", head_dim=128, causal=True)
SHAPE = Shape(batch=4, seqlen_q=3000, seqlen_k=3000, heads_q=16, heads_kv=16)
TEMPLATE = "forward_sm90"
ABOUT = {"shape": SHAPE.model_dump(), "device": H200.model_dump()}
FIXED = {
    "block_k": 64,
    "stages": 2,
    "min_blocks_per_sm": 1,
    "head_grouping": True,
    "producer_registers": 24,
    "persistent": False,
    "p_in_smem": False,
}
NAME = study_name(H200, PROBLEM, SHAPE, TEMPLATE)
NASTY = "<script>alert('no')</script> & spills"
PNG = b"\x89PNG\r\n\x1a\n"
Judge = Callable[[int], Outcome]


@pytest.fixture(scope="module")
def legal() -> LegalSet:
    return LegalSet(PROBLEM, H200, TEMPLATE, fixed=FIXED)


def mixed(number: int) -> Outcome:
    """Every third trial is rejected; the fifth is the best."""
    if number % 3 == 2:
        return Rejected(kind="resources", reason=NASTY)
    return Measured(time_us=500.0 if number == 4 else 600.0 + number, spread=0.01)


def all_failed(number: int) -> Outcome:
    return Rejected(kind=("compile", "hang")[number % 2], reason=f"reason {number}")


def keep(
    path: Path | str, legal: LegalSet, judge: Judge = mixed, trials: int = 9, **about: object
) -> Study:
    """A study of so many trials, the default first."""
    seeds = [default_config(PROBLEM, H200, TEMPLATE).model_copy(update=FIXED)]
    storage = open_storage(path)
    study = Study(NAME, legal, sampler="random", seeds=seeds, storage=storage, about=about or ABOUT)
    for number in range(trials):
        config = study.ask()
        assert config is not None
        study.tell(config, judge(number))
    return study


def check_files(written: ReportFiles, text: str) -> None:
    """Each plot is a PNG file, and stands in the page, which needs nothing from outside."""
    for path in written.plots:
        assert path.read_bytes().startswith(PNG)
    assert text.count('src="data:image/png;base64,') == len(written.plots)
    assert text.count("<img") == text.count("alt=") == len(written.plots)
    assert not re.search(r"https?://|<script|<link", text)


def test_the_page_names_every_study_and_config(tmp_path: Path, legal: LegalSet) -> None:
    path = tmp_path / "trials.journal"
    first, second = keep(path, legal), keep(path, legal, trials=4)
    assert second.name == f"{first.name} #2"
    written = report(path, tmp_path / "out")
    text = written.page.read_text(encoding="utf-8")
    check_files(written, text)
    assert written.studies == (first.name, second.name)
    for study in (first, second):
        assert html.escape(study.name) in text
        for tried in study.trials:
            assert html.escape(str(tried.config)) in text
    assert html.escape(NASTY, quote=False) in text.replace("&#39;", "'")
    kinds = {path.stem.rpartition("-")[2] for path in written.plots[1:]}
    assert kinds == {"history", "importance", "slices", "prediction", "rejections", "roofline"}
    assert len(set(written.plots)) == len(written.plots) == 1 + 2 * 6


def test_studies_are_chosen_by_name_or_a_part_of_it(tmp_path: Path, legal: LegalSet) -> None:
    path = f"sqlite:///{tmp_path}/trials.db?timeout=9"
    names = [keep(path, legal, trials=1).name for _ in range(2)]
    assert [study.name for study in read_studies(path, [names[0]])] == names[:1]
    assert [study.name for study in read_studies(path, ["#2"])] == names[1:]
    assert [study.name for study in read_studies(path, ["d128_causal"])] == names
    with pytest.raises(ArgumentError, match="no study 'd64'"):
        read_studies(path, ["d64"])


@pytest.mark.parametrize(("judge", "trials"), [(mixed, 0), (all_failed, 5), (mixed, 1)])
def test_little_to_show_is_no_error(
    tmp_path: Path, legal: LegalSet, judge: Judge, trials: int
) -> None:
    path = tmp_path / "trials.journal"
    keep(path, legal, judge, trials)
    written = report(path, tmp_path / "out")
    text = written.page.read_text(encoding="utf-8")
    check_files(written, text)
    assert ("nothing was measured" in text) == (judge is all_failed or trials == 0)
    assert ("reason 4" in text) == (judge is all_failed)


def test_a_summary_is_what_was_kept(tmp_path: Path, legal: LegalSet) -> None:
    path = tmp_path / "trials.journal"
    study = keep(path, legal)
    (kept,) = read_studies(path)
    assert [(t.config, t.outcome) for t in kept.trials] == [
        (t.config, t.outcome) for t in study.trials
    ]
    assert all(tried.when for tried in kept.trials)
    summary = summarise(kept)
    assert summary is not None
    assert (summary.problem, summary.shape, summary.device) == (PROBLEM, SHAPE, H200)
    assert summary.shape_known
    assert summary.winner is not None
    assert summary.winner.time_us == 500
    assert summary.rejections == {"resources": {NASTY: 3}}


def test_a_study_without_its_shape_gets_that_of_the_bucket(tmp_path: Path, legal: LegalSet) -> None:
    path = tmp_path / "trials.journal"
    keep(path, legal, note=1)
    (kept,) = read_studies(path)
    summary = summarise(kept)
    assert summary is not None
    assert not summary.shape_known
    assert summary.shape.bucket() == SHAPE.bucket()
    assert summary.device == H200
    assert "TFLOP/s may be off" in report(path, tmp_path).page.read_text(encoding="utf-8")


def test_a_file_in_place_of_the_folder_shows_before_the_plots_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="is not a folder"):
        report(tmp_path / "no storage", tmp_path / "file")


def test_no_password_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fagen.show.report.read_studies", lambda storage, studies: [])
    with pytest.raises(ArgumentError, match=r"me:\*\*\*@host/db holds no study"):
        report("postgresql://me:secret@host/db", tmp_path)


def test_trials_and_studies_of_others_are_counted_and_left_out(
    tmp_path: Path, legal: LegalSet
) -> None:
    path = tmp_path / "trials.journal"
    storage = open_storage(path)
    optuna.create_study(study_name="somebody's", storage=storage)
    with pytest.raises(ArgumentError, match="only others: somebody's"):
        report(path, tmp_path / "out")
    study = keep(path, legal, trials=2)
    other = optuna.load_study(study_name=study.name, storage=storage)
    other.add_trial(optuna.trial.create_trial(value=1.0))
    written = report(path, tmp_path / "out")
    assert written.ignored == ("somebody's",)
    assert "1 more not of this version" in written.page.read_text(encoding="utf-8")


# ---- the numbers ----


def test_spearman_is_of_ranks() -> None:
    assert spearman([1, 2, 3], [10, 20, 9000]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_importance_finds_the_axis_that_decides() -> None:
    tried = [
        Trial(
            Sm90Forward(block_m=m, block_n=n, block_k=64, stages=stages),
            Measured(time_us=100 * m / 64 + 0.1 * (n == 64)),
        )
        for m in (64, 128)
        for n in (64, 128)
        for stages in (2, 3)
    ]
    shares = importance(tried)
    assert next(iter(shares)) == "block_m"
    assert shares["block_m"] > 0.99
    assert shares["block_n"] == shares["stages"] == 0
    assert importance([]) == importance(tried[:1]) == {}


def test_the_ceilings_of_an_h200() -> None:
    assert tensor_ceiling(H200, "forward_sm90") == pytest.approx(1070.5, abs=0.1)
    assert tensor_ceiling(H200, "forward_sm80") == pytest.approx(669.1, abs=0.1)
    assert exp2_ceiling(H200, 128) == pytest.approx(2141.0, abs=0.1)


def test_the_roofline_has_the_peers_of_the_same_bucket(tmp_path: Path, legal: LegalSet) -> None:
    path = tmp_path / "trials.journal"
    keep(path, legal)
    summary = summarise(read_studies(path)[0])
    assert summary is not None
    cells = tuple(
        Cell(
            problem=PROBLEM,
            shape=SHAPE.model_copy(update={"seqlen_q": seqlen, "seqlen_k": seqlen}),
            us={"fagen": (1.0,), "fa3": (1.0,)},
            tflops={"fagen": 600.0, "fa3": float(seqlen)},
            config="",
            tier="",
        )
        for seqlen in (512, 4096)
    )
    bench = Results(device=str(H200), date="", versions={}, absent={}, cells=cells)
    found = {point.name: point.tflops for point in roofline_points(summary, bench)}
    assert found["FlashAttention-3"] == 4096
    assert found["winner"] == pytest.approx(SHAPE.tflops(PROBLEM, 500))
    assert "fagen" not in found
    elsewhere = bench.model_copy(update={"device": "NVIDIA L4 (58 SMs), sm89"})
    assert "FlashAttention-3" not in {point.name for point in roofline_points(summary, elsewhere)}


# ---- mistakes ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--storage", "no/such.journal"), "no such storage"),
        (("--storage", "sqlite:///no/such.db"), "no such storage"),
        (("--storage", "NOTES"), "not a journal of trials"),
        (("--storage", "JOURNAL", "--study", "d64"), "no study 'd64'"),
        (("--storage", "JOURNAL", "--bench", "no.json"), "no.json"),
        (("--storage", "JOURNAL", "-o", __file__), "is not a folder"),
        ((), "holds no studies"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path,
    legal: LegalSet,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    journal = tmp_path / "trials.journal"
    keep(journal, legal, trials=1)
    notes = tmp_path / "notes.txt"
    notes.write_text("not a journal\n")
    files = {"JOURNAL": str(journal), "NOTES": str(notes)}
    words = tuple(files.get(word, word) for word in words)
    assert cli.main(["report", "-o", str(tmp_path / "out"), *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_extra_is_named(
    capfd: pytest.CaptureFixture[str], no_matplotlib: None
) -> None:
    assert cli.main(["report", "--help"]) == 0
    capfd.readouterr()
    assert cli.main(["report", "--storage", "trials.journal", "-o", "out"]) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert 'pip install "fagen[report]"' in err


def test_the_command_says_what_it_wrote(
    tmp_path: Path, legal: LegalSet, capfd: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "trials.journal"
    keep(journal, legal, all_failed, trials=2)
    folder = tmp_path / "out"
    assert cli.main(["report", "--storage", str(journal), "-o", str(folder)]) == 0
    assert capfd.readouterr().out == f"{folder}/report.html: 1 study, 2 plots beside it\n"
