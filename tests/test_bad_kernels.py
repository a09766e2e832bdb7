"""A space seeded with kernels that attack: the study ends, and its winner is right."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from wrong.attacks import ATTACKS, PLAN, TEMPLATE, tampered
from wrong.bugs import BUGS

from fagen.build.compile import compile_kernel
from fagen.device import KNOWN_DEVICES, architecture
from fagen.kernels import Sm90Forward
from fagen.kernels.registry import default_config, native_template
from fagen.kernels.space import legal_configs
from fagen.problem import Problem, Shape
from fagen.records.store import CONFIG_VARIABLE, TunedConfig, digest, load_records, save_records
from fagen.tuning.events import Event, Notice
from fagen.tuning.model import predict
from fagen.tuning.options import TuneOptions
from fagen.tuning.outcome import Measured, Rejected
from fagen.tuning.search.read import read_studies
from fagen.tuning.tasks import Task
from fagen.tuning.tuner import tune
from fagen.tuning.worker import Worker
from fagen.tuning.worker_child import Candidate, DeviceReport

PROBLEM = Problem(dtype="bf16", head_dim=128)
SHAPE = Shape(batch=4, seqlen_q=2048, seqlen_k=2048, heads_q=16, heads_kv=16)
H200 = KNOWN_DEVICES["NVIDIA H200"]
DEFAULT = default_config(PROBLEM, H200)
FIXED = {axis: value for axis, value in DEFAULT.axes().items() if axis != "block_n"}
LEGAL = {c.axes()["block_n"] for c in legal_configs(TEMPLATE, PROBLEM, H200, fixed=FIXED)}
SECONDS = 120  # for the study on a GPU; about 56 when nothing else runs there


def config(block_n: int) -> Sm90Forward:
    return Sm90Forward(**{**DEFAULT.axes(), "block_n": block_n})


def test_each_attack_is_planned_once_and_spares_the_default() -> None:
    assert sorted(PLAN.values()) == sorted(ATTACKS)
    assert PLAN.keys() < LEGAL
    assert DEFAULT.axes()["block_n"] in LEGAL - PLAN.keys()


@pytest.mark.parametrize(("block_n", "attack"), PLAN.items())
def test_attacks_compile_and_come_past_the_static_filter(block_n: int, attack: str) -> None:
    right = compile_kernel(PROBLEM, config(block_n), architecture("sm90"))
    assert right.resources.why_bad() is None, "it must reach the GPU"
    wrong = tampered(right, attack)
    assert digest(wrong.cubin) != digest(right.cubin)
    assert wrong.resources.why_bad() is None
    if attack == "exceeds resources":
        smem = wrong.resources.smem_bytes + config(block_n).smem_bytes(PROBLEM)
        assert smem > H200.arch.smem_per_block


EXPECTED = {  # the kind, and a regular expression for the reason
    "hangs": ("hang", "no answer within . s"),
    "crashes": ("crash", "(?i)illegal|launch failure|SIGABRT"),
    "writes out of bounds": ("stray", "wrote outside of the logsumexp"),
    "wrong on tails": ("wrong", BUGS["last keys dropped"].reason),
    "wrong on the second run": ("wrong", "two runs differ"),
    "exceeds resources": ("launch", "INVALID_VALUE|OUT_OF_RESOURCES"),
}


def survive(
    worker: Worker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[TunedConfig, float]:
    """Runs the study; returns its record, and the best time that the search saw."""
    save_records(folder / "none.yaml", [])  # in place of the shipped records: none is compared
    monkeypatch.setenv(CONFIG_VARIABLE, str(folder / "none.yaml"))
    events: list[Event] = []
    result = tune(
        [Task(PROBLEM, (SHAPE,))],
        TuneOptions(
            template=TEMPLATE,
            fixed=FIXED,
            out=folder / "tuned.yaml",
            storage=folder / "trials.journal",
        ),
        on_event=events.append,
        workers=[worker],
    )
    assert not result.interrupted
    (record,) = result.records
    assert load_records(result.path).records == result.records
    assert record.config.axes()["block_n"] not in PLAN

    (study,) = read_studies(result.storage, result.studies)
    outcomes = {trial.config.axes()["block_n"]: trial.outcome for trial in study.trials}
    assert outcomes.keys() == LEGAL, "each was tried"
    for block_n, attack in PLAN.items():
        outcome = outcomes[block_n]
        kind, reason = EXPECTED[attack]
        assert isinstance(outcome, Rejected), (attack, outcome)
        assert outcome.kind == kind, (attack, outcome)
        assert re.search(reason, outcome.reason), (attack, outcome)
    good = {block_n: outcomes[block_n] for block_n in LEGAL - PLAN.keys()}
    times_us = [outcome.time_us for outcome in good.values() if isinstance(outcome, Measured)]
    assert len(times_us) == len(good), good

    blocked = json.loads((folder / "trials.blocklist.json").read_text())
    assert {entry["config"]: entry["kind"] for entry in blocked} == {
        str(config(block_n)): EXPECTED[attack][0]
        for block_n, attack in PLAN.items()
        if attack in ("hangs", "crashes")
    }
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert sum("now on the blocklist" in text for text in notices) == 2
    return record, min(times_us)


class Pretender(Worker):
    """An H200 that is not there."""

    def describe_device(self) -> DeviceReport:
        return DeviceReport(device=H200, driver="13.0")

    def compare(
        self, candidates: Sequence[Candidate], problem: Problem, shape: Shape
    ) -> dict[str, list[float]]:
        return {str(c): [predict(problem, shape, c, H200)] * 3 for _, c in candidates}


def test_a_study_survives_attacks_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process hangs and dies for real; what the kernels say of themselves is made up."""
    worker = Pretender(0, evaluator="wrong.attacks:pretend", deadline_s=3)
    record, best_us = survive(worker, tmp_path, monkeypatch)
    assert record.result.median_us == pytest.approx(best_us, rel=0.01)


@pytest.mark.gpu
def test_a_study_survives_attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen.run.driver import query_device

    device = query_device(0)
    if native_template(PROBLEM, device.arch).NAME != TEMPLATE:
        pytest.skip(f"{TEMPLATE} is not native to {device}")
    for block_n, attack in PLAN.items():  # into the cache, so that no deadline counts it
        tampered(compile_kernel(PROBLEM, config(block_n), device.arch), attack)
    start = time.monotonic()
    worker = Worker(0, evaluator="wrong.attacks:evaluate", deadline_s=6)
    record, best_us = survive(worker, tmp_path, monkeypatch)
    assert time.monotonic() - start < SECONDS
    with Worker(0) as clean:  # which none of this has touched
        kernel = compile_kernel(PROBLEM, record.config, device.arch)
        again = clean.evaluate(kernel, PROBLEM, record.config, SHAPE)
    assert isinstance(again, Measured), again
    assert again.time_us < 1.05 * best_us
