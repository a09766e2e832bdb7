"""What `fagen check` finds in spaces and records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from records import H200, some_record

from fagen.build.compiled import Compiled, Resources
from fagen.device import architecture, typical_device
from fagen.errors import CompileError
from fagen.kernels.registry import AnyConfig, default_config, templates_for
from fagen.kernels.space import axes, free_axes, legal_configs, why_illegal
from fagen.problem import Problem
from fagen.records.store import Card, RecordFile, Skipped, TunedConfig
from fagen.show import check as room
from fagen.show.check import check, measure_space, sample_space, whole_space

HERE = Path("sm90.yaml")
SM90 = architecture("sm90")
PROBLEM = Problem(dtype="bf16", head_dim=64)
CONFIG = default_config(PROBLEM, H200)
CLEAN = Resources(registers=128, spill_bytes=0, stack_bytes=0, smem_bytes=0)


def record(config: AnyConfig = CONFIG, arch: str = "sm90") -> TunedConfig:
    card = Card(name=H200.name, sm_count=H200.sm_count, arch=arch)
    return some_record(PROBLEM, config, card=card, kind="predicted")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[AnyConfig, Resources | CompileError]:
    """What the compiler says of a config; a clean report if nothing else is set."""
    said: dict[AnyConfig, Resources | CompileError] = {}

    def compile_many(jobs: Any, arch: Any) -> Any:
        for problem, config in jobs:
            answer = said.get(config, CLEAN)
            if isinstance(answer, Resources):
                yield problem, config, Compiled(arch.name, "", b"", {"k": answer}, "13.0", "")
            else:
                yield problem, config, answer

    monkeypatch.setattr("fagen.build.compile.compile_many", compile_many)
    return said


def test_the_space_is_counted_as_it_is_walked() -> None:
    """The free axes, which are multiplied out, are those that no rule reads."""
    device = typical_device(architecture("sm120"))
    report = measure_space("forward_sm80", PROBLEM, device)
    assert report.legal == sum(1 for _ in legal_configs("forward_sm80", PROBLEM, device))
    assert report.legal + sum(report.rejections.values()) == report.points


def test_a_sample_is_legal_distinct_and_the_same_each_time() -> None:
    sample = sample_space(H200, 40)
    assert len(set(sample)) == 40
    assert sample == sample_space(H200, 40)
    assert sample != sample_space(H200, 40, seed=1)
    assert all(why_illegal(config, problem, H200) is None for problem, config in sample)
    assert {config.template for _, config in sample} == {
        t.NAME for t in templates_for("forward", SM90)
    }
    assert {problem.head_dim for problem, _ in sample} == set(room.HEAD_DIMS)


def test_the_whole_space_is_what_the_reports_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "HEAD_DIMS", (256,))
    device = typical_device(architecture("sm120"))
    report = measure_space("forward_sm80", Problem(dtype="bf16", head_dim=256), device)
    assert len(whole_space(device)) == 2 * report.legal  # full and causal


def test_records_are_judged(answers: dict[AnyConfig, Resources | CompileError]) -> None:
    slow, refused, wide = (CONFIG.model_copy(update={"stages": n}) for n in (1, 3, 8))
    answers[slow] = CLEAN.model_copy(update={"spill_bytes": 96})
    answers[refused] = CompileError("refused", log="note: x\nk.cu(7): error: no such thing\n")
    records = [record(c) for c in (CONFIG, slow, refused, wide)] + [record(arch="sm80")]
    report = check(SM90, [RecordFile(HERE, tuple(records))], sample=0)
    assert not report.ok
    faults = [judged.fault for judged in report.records]  # that of sm80 is left out
    assert faults[0] is None
    assert [str(fault).split(":")[0] for fault in faults[1:]] == [
        "spills 96 bytes per thread",
        "does not compile",
        "shared memory",
    ]
    assert "no such thing" in str(faults[2])
    assert report.records[0].registers == 128
    assert report.records[0].verified is None
    assert check(SM90, [RecordFile(HERE, (records[0],))], sample=0).ok


def test_a_record_that_cannot_be_read_is_a_fault(
    answers: dict[AnyConfig, Resources | CompileError],
) -> None:
    report = check(SM90, [RecordFile(HERE, skipped=(Skipped(7, "no template", {}),))], sample=0)
    assert report.unreadable == ("sm90.yaml, line 7: no template",)
    assert not report.ok


def test_a_refused_sample_is_a_fault_and_a_slow_one_is_not(
    answers: dict[AnyConfig, Resources | CompileError],
) -> None:
    (_, first), (_, second), *_ = sample_space(H200, 12)
    answers[first] = CLEAN.model_copy(update={"spill_bytes": 8})
    done: list[int] = []
    report = check(SM90, [], sample=12, progress=lambda count, total: done.append(count))
    assert report.ok
    assert report.sample.slow == {"spills N bytes per thread": 1}
    assert done == list(range(1, 13))
    answers[second] = CompileError("refused")
    report = check(SM90, [], sample=12)
    assert not report.ok
    assert len(report.sample.refused) == 1


@pytest.mark.parametrize(("ok", "fault"), [(True, None), (False, "wrong result: off by one")])
def test_with_a_device_the_verdict_counts(
    answers: dict[AnyConfig, Resources | CompileError],
    monkeypatch: pytest.MonkeyPatch,
    ok: bool,
    fault: str | None,
) -> None:
    class Verdict:
        def __init__(self) -> None:
            self.ok, self.reason = ok, "off by one"

    def verify(kernel: str, bench: str) -> Verdict:
        assert (kernel, bench) == ("kernel", "bench 0")
        return Verdict()

    monkeypatch.setattr("fagen.run.executor.Executor", lambda *_: "kernel")
    monkeypatch.setattr("fagen.judge.bench.bench_of", lambda index: f"bench {index}")
    monkeypatch.setattr("fagen.judge.verify.verify", verify)
    (judged,) = check(SM90, [RecordFile(HERE, (record(),))], sample=0, device_index=0).records
    assert (judged.verified, judged.fault) == (ok, fault)


def test_free_axes_are_those_that_no_rule_reads() -> None:
    for template in (t.NAME for t in templates_for("forward", SM90)):
        free = free_axes(template)
        assert set(free) < set(axes(template, PROBLEM))
        assert "head_grouping" in free
        assert not {"block_m", "block_n", "block_k", "stages"} & set(free)
