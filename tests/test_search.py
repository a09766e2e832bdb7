"""Search on recorded tables: no GPU, no compiler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import optuna
import pytest

from fagen.device import KNOWN_DEVICES
from fagen.errors import ArgumentError, MissingDependencyError, StoreError
from fagen.kernels import Sm80Forward
from fagen.kernels.registry import AnyConfig, default_config, parse_config
from fagen.kernels.space import why_illegal
from fagen.problem import Problem, Shape
from fagen.tuning.model import predict
from fagen.tuning.outcome import Measured, Outcome, Rejected
from fagen.tuning.search.joint import JointSearch
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.storage import open_storage
from fagen.tuning.search.study import Study

PROBLEM = Problem(dtype="bf16", head_dim=64)
SHAPE = Shape(batch=8, seqlen_q=2048, seqlen_k=2048, heads_q=16, heads_kv=16)
DEVICE = KNOWN_DEVICES["NVIDIA A100-SXM4-80GB"]
TEMPLATE = "forward_sm80"
FIXED = {"block_k": 64, "exp2_fma_every": 0, "lazy_rescale": False, "head_grouping": True}
Table = dict[AnyConfig, Outcome]


@pytest.fixture(scope="module")
def legal() -> LegalSet:
    return LegalSet(PROBLEM, DEVICE, TEMPLATE, fixed=FIXED)


@pytest.fixture(scope="module")
def table(legal: LegalSet) -> Table:
    """A synthetic table, not a measured one: the static model with 3 % of seeded noise."""
    noise = np.random.default_rng(7).normal(1.0, 0.03, len(legal))
    configs = [legal.config(row) for row in range(len(legal))]
    return {
        config: Measured(time_us=predict(PROBLEM, SHAPE, config, DEVICE) * factor)
        for config, factor in zip(configs, noise, strict=True)
    }


def search(
    studies: Sequence[Study],
    evaluate: Callable[[AnyConfig], Sequence[Outcome]],
    *,
    trials: int,
    budget_s: float | None = None,
) -> None:
    """Searches to the end, one config after the other."""
    with JointSearch(studies, trials=trials, budget_s=budget_s) as joint:
        while (config := joint.ask()) is not None:
            joint.tell(config, evaluate(config))


def replay(table: Table, seen: list[AnyConfig] | None = None) -> Callable[..., Sequence[Outcome]]:
    """An evaluator that looks outcomes up, and notes what it was asked."""

    def evaluate(config: AnyConfig) -> Sequence[Outcome]:
        if seen is not None:
            seen.append(config)
        return [table[config]]

    return evaluate


def time_of(study: Study) -> float:
    assert study.best is not None
    return study.best.time_us


def best_time(table: Table) -> float:
    return min(o.time_us for o in table.values() if isinstance(o, Measured))


# ---- the legal set ----


def test_legal_set_holds_the_legal_configs_and_no_others(legal: LegalSet) -> None:
    everything = LegalSet(PROBLEM, DEVICE, TEMPLATE)
    assert 1000 < len(legal) < len(everything)
    for row in range(0, len(legal), 97):
        config = legal.config(row)
        assert why_illegal(config, PROBLEM, DEVICE) is None
        assert legal.find(config.axes()) == row
    illegal = default_config(PROBLEM, DEVICE, TEMPLATE).axes() | FIXED | {"block_m": 16}
    assert why_illegal(Sm80Forward(**illegal), PROBLEM, DEVICE) is not None
    assert legal.find(illegal) is None
    assert legal.find(illegal | {"block_m": 17}) is None


def test_nearest_is_the_fewest_steps_away_and_not_taken(legal: LegalSet) -> None:
    rng = np.random.default_rng(0)
    taken = np.zeros(len(legal), dtype=bool)
    place = legal.positions[100].astype(int)
    assert legal.nearest(place, taken, rng) == 100
    taken[100] = True
    row = legal.nearest(place, taken, rng)
    steps = np.abs(legal.positions.astype(int) - place).sum(axis=1)
    assert row != 100
    assert steps[row] == np.delete(steps, 100).min()


def test_unknown_axis_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no axis ping_pong: its axes are block_m"):
        LegalSet(PROBLEM, DEVICE, TEMPLATE, fixed={"ping_pong": True})


def test_an_axis_may_keep_several_values(legal: LegalSet) -> None:
    part = LegalSet(PROBLEM, DEVICE, TEMPLATE, fixed=FIXED | {"block_n": (128, 64), "warps": (4,)})
    assert part.axes["block_n"] == (64, 128)  # in the axis's own order
    assert {part.config(row) for row in range(len(part))} == {
        config
        for config in map(legal.config, range(len(legal)))
        if isinstance(config, Sm80Forward) and config.warps == 4 and config.block_n in (64, 128)
    }


def test_an_empty_subspace_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"no legal config of forward_sm80 with block_m=16 warps=4,8 on"
    ):
        LegalSet(PROBLEM, DEVICE, TEMPLATE, fixed={"block_m": 16, "warps": (4, 8)})


# ---- searching ----


@pytest.mark.parametrize("sampler", ["surrogate", "tpe", "random", "nsga2", "qmc"])
def test_search_asks_legal_configs_once_each(legal: LegalSet, table: Table, sampler: str) -> None:
    seen: list[AnyConfig] = []
    default = default_config(PROBLEM, DEVICE, TEMPLATE)
    study = Study("table", legal, sampler=sampler, seed=1, seeds=[default, default])
    search([study], replay(table, seen), trials=120)
    assert len(seen) == len(set(seen)) == len(study.trials) == 120
    assert all(why_illegal(config, PROBLEM, DEVICE) is None for config in seen)
    assert seen[0] == default
    assert time_of(study) == min(tried.time_us for tried in study.measured)


def test_a_sampler_names_the_packages_that_it_lacks(
    legal: LegalSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fagen.tuning.search.samplers.find_spec", lambda package: None)
    with pytest.raises(MissingDependencyError, match="pip install torch"):
        Study("table", legal, sampler="gp", seed=1)


def test_tpe_finds_what_chance_does_not(legal: LegalSet, table: Table) -> None:
    def found(sampler: str) -> list[float]:
        times = []
        for seed in range(4):
            study = Study("table", legal, sampler=sampler, seed=seed)
            search([study], replay(table), trials=120)
            times.append(time_of(study) / best_time(table))
        return times

    tpe, chance = found("tpe"), found("random")
    assert max(tpe) < 1.12
    assert np.mean(tpe) < np.mean(chance)


@pytest.mark.parametrize("sampler", ["surrogate", "tpe"])
def test_a_seed_repeats_itself(legal: LegalSet, table: Table, sampler: str) -> None:
    runs: list[list[AnyConfig]] = [[], []]
    for seen in runs:
        study = Study("table", legal, sampler=sampler, seed=5)
        search([study], replay(table, seen), trials=40)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("sampler", ["surrogate", "tpe", "brute-force"])
def test_a_small_set_is_tried_completely(table: Table, sampler: str) -> None:
    fixed = FIXED | {"block_m": 128, "warps": 4, "q_in_registers": False}
    small = LegalSet(PROBLEM, DEVICE, TEMPLATE, fixed=fixed)
    study = Study("table", small, sampler=sampler)
    assert 10 < len(small) < 200
    search([study], replay(table), trials=200)
    assert {tried.config for tried in study.trials} == {small.config(r) for r in range(len(small))}
    assert time_of(study) == min(
        o.time_us for c, o in table.items() if isinstance(o, Measured) and small.find(c.axes())
    )
    assert study.ask() is None


def test_unknown_sampler_is_refused(legal: LegalSet) -> None:
    with pytest.raises(
        ArgumentError, match="unknown sampler 'magic': allowed are surrogate, tpe, random"
    ):
        Study("table", legal, sampler="magic")


def test_failures_are_typed_and_do_not_end_it(legal: LegalSet, table: Table) -> None:
    """Static rejections do not count as trials; what failed on the GPU does."""

    numbers = count()

    def evaluate(config: AnyConfig) -> list[Outcome]:
        number = next(numbers)
        if number % 3 == 1:
            return [Rejected(kind="resources", reason="spills 8 bytes")]
        if number % 3 == 2:
            return [Rejected(kind="hang", reason="no answer within 20 s")]
        return [table[config]]

    study = Study("table", legal)
    search([study], evaluate, trials=40)
    assert study.done == 40
    assert study.rejections["resources"] >= 18
    assert study.rejections["hang"] + len(study.measured) == 40


def test_a_space_that_all_fails_ends(legal: LegalSet) -> None:
    study = Study("table", legal)
    search([study], lambda config: [Rejected(kind="compile", reason="refused")], trials=10)
    assert study.best is None
    assert study.rejections == {"compile": 50}


def test_a_fault_of_the_evaluator_stops_the_search(legal: LegalSet) -> None:
    def evaluate(config: AnyConfig) -> list[Outcome]:
        raise NameError("tpyo")

    with pytest.raises(NameError):
        search([Study("table", legal)], evaluate, trials=10)


def test_budget_ends_it(legal: LegalSet, table: Table) -> None:
    study = Study("table", legal)
    search([study], replay(table), trials=1000, budget_s=0.0)
    assert study.trials == []


def test_studies_share_candidates(legal: LegalSet, table: Table) -> None:
    def evaluate(config: AnyConfig) -> list[Outcome]:
        outcome = table[config]
        assert isinstance(outcome, Measured)
        return [outcome, Measured(time_us=1e6 / outcome.time_us)]

    studies = [Study(name, legal, seed=i) for i, name in enumerate(("short", "long"))]
    search(studies, evaluate, trials=60)
    first, second = ([trial.config for trial in study.trials] for study in studies)
    assert first == second
    assert len(set(first)) == 60
    assert studies[0].best != studies[1].best


# ---- what is kept ----


def test_kept_study_lists_each_trial(legal: LegalSet, tmp_path: Path) -> None:
    outcomes: list[Outcome] = [
        Measured(time_us=12.5, spread=0.01, samples=9, policy="cold-queued", cubin="ab"),
        Rejected(kind="wrong", reason="output is off by 1"),
    ]
    path = tmp_path / "trials.journal"
    study = Study("table", legal, sampler="tpe", storage=open_storage(path))
    for outcome in outcomes:
        config = study.ask()
        assert config is not None
        assert study.tell(config, outcome)
    kept = optuna.load_study(study_name=study.name, storage=open_storage(path))
    trials = [t for t in kept.get_trials() if t.user_attrs["kind"] != "illegal"]
    assert [t.state.name for t in trials] == ["COMPLETE", "FAIL"]
    assert trials[0].value == 12.5
    assert trials[0].user_attrs["cubin"] == "ab"
    assert trials[1].user_attrs["kind"] == "wrong"
    assert trials[1].user_attrs["reason"] == "output is off by 1"
    for trial, tried in zip(trials, study.trials, strict=True):
        assert parse_config({"template": TEMPLATE, **trial.params}) == tried.config
        assert parse_config(trial.user_attrs["config"]) == tried.config
    asked_in_vain = [t for t in kept.get_trials() if t.user_attrs["kind"] == "illegal"]
    assert all(t.state.name == "FAIL" and t.user_attrs["reason"] for t in asked_in_vain)


def test_illegal_asks_are_kept_with_the_rule(legal: LegalSet, table: Table, tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "trials.journal")
    study = Study("table", legal, sampler="tpe", storage=storage)
    search([study], replay(table), trials=40)
    kept = optuna.load_study(
        study_name=study.name, storage=open_storage(tmp_path / "trials.journal")
    )
    reasons = [
        t.user_attrs["reason"] for t in kept.get_trials() if t.user_attrs["kind"] == "illegal"
    ]
    assert len(reasons) > 5
    assert any("accumulators take" in reason for reason in reasons)


@pytest.mark.parametrize("where", ["trials.journal", "sqlite:///{}/trials.db"])
def test_resume_repeats_nothing(legal: LegalSet, table: Table, tmp_path: Path, where: str) -> None:
    url = where.format(tmp_path) if "://" in where else str(tmp_path / where)
    first: list[AnyConfig] = []
    second: list[AnyConfig] = []
    study = Study("table", legal, storage=open_storage(url))
    search([study], replay(table, first), trials=20)
    again = Study("table", legal, storage=open_storage(url), resume=True)
    assert again.name == study.name
    assert again.resumed == 20
    assert again.best == study.best
    search([again], replay(table, second), trials=50)
    assert len(second) == 30
    assert not set(first) & set(second)


def test_without_resume_a_new_study_gets_a_number(
    legal: LegalSet, table: Table, tmp_path: Path
) -> None:
    names = []
    for resume in (True, False, False, True):
        storage = open_storage(tmp_path / "trials.journal")
        names.append(Study("table", legal, storage=storage, resume=resume).name)
    assert names[1:] == [f"{names[0]} #2", f"{names[0]} #3", f"{names[0]} #3"]


def test_torn_last_line_is_cut(legal: LegalSet, table: Table, tmp_path: Path) -> None:
    path = tmp_path / "trials.journal"
    search([Study("table", legal, storage=open_storage(path))], replay(table), trials=10)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 7)
    resumed = Study("table", legal, storage=open_storage(path), resume=True)
    assert resumed.resumed == 9
    search([resumed], replay(table), trials=15)
    assert Study("table", legal, storage=open_storage(path), resume=True).resumed == 15


@pytest.mark.parametrize("text", ["not json\n", "{}\n", "[1]\n"])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises((StoreError, ArgumentError), match=r"notes\.txt"):
        open_storage(path)
    assert path.read_text() == text


def test_bad_urls_are_refused() -> None:
    with pytest.raises(ArgumentError, match="cannot open the storage nosql://"):
        open_storage("nosql://host/trials")


def test_ctrl_c_keeps_what_is_known(legal: LegalSet, table: Table, tmp_path: Path) -> None:
    path = tmp_path / "trials.journal"
    study = Study("table", legal, storage=open_storage(path))

    def run() -> None:
        with JointSearch([study], trials=100) as joint:
            ahead = [joint.ask() for _ in range(15)]
            for number, config in enumerate(ahead):
                assert config is not None
                if number == 12:
                    os.kill(os.getpid(), signal.SIGINT)
                joint.tell(config, [table[config]])

    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(study.trials) == 12
    assert study.best is not None
    resumed = Study("table", legal, storage=open_storage(path), resume=True)
    assert resumed.resumed == 12
    assert resumed.best == study.best


def test_kill_9_loses_only_what_is_in_flight(legal: LegalSet, table: Table, tmp_path: Path) -> None:
    """Another process searches, tells each outcome that it kept, and is killed on the way."""
    path = tmp_path / "trials.journal"
    program = textwrap.dedent(
        f"""
        from fagen.tuning.outcome import Measured
        from fagen.device import KNOWN_DEVICES
        from fagen.problem import Problem
        from fagen.tuning.search.legal import LegalSet
        from fagen.tuning.search.storage import open_storage
        from fagen.tuning.search.study import Study
        legal = LegalSet(Problem(dtype="bf16", head_dim=64),
                         KNOWN_DEVICES[{DEVICE.name!r}], {TEMPLATE!r}, fixed={FIXED!r})
        study = Study("table", legal, storage=open_storage({str(path)!r}))
        while config := study.ask():
            study.tell(config, Measured(time_us=1.0 + len(study.trials)))
            print(len(study.trials), flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = 0
    while told < 25:
        told = int(process.stdout.readline())
    process.kill()
    told += len(process.stdout.read().split())
    process.wait()
    process.stdout.close()
    resumed = Study("table", legal, storage=open_storage(path), resume=True)
    assert told <= resumed.resumed <= told + 1
    configs = [tried.config for tried in resumed.trials]
    assert len(configs) == len(set(configs))


def test_outcomes_survive_json() -> None:
    for outcome in (Measured(time_us=1.5, cubin="ff"), Rejected(kind="hang", reason="late")):
        assert type(outcome).model_validate_json(outcome.model_dump_json()) == outcome
    for fields in ({"time_us": 0.0}, {"time_us": float("nan")}, {"time_us": 1.0, "typo": 1}):
        with pytest.raises(ValueError, match="validation error"):
            Measured.model_validate(fields)
