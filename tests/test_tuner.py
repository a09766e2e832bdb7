"""Tuning from tasks to records, with a worker and a compiler made of plain functions."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from records import some_record

from fagen.build.compiled import Compiled, Resources
from fagen.device import KNOWN_DEVICES, architecture, typical_device
from fagen.errors import ArgumentError, CompileError, DeviceError
from fagen.kernels.registry import AnyConfig, default_config
from fagen.kernels.space import why_illegal
from fagen.problem import Problem, Shape, standard_shape
from fagen.records.store import CONFIG_VARIABLE, Card, load_records, save_records
from fagen.show.bench import HEAD_DIMS, SEQLENS
from fagen.show.summary import summarise
from fagen.tuning import candidates, evaluation, finals, prediction
from fagen.tuning import tuner as tuning
from fagen.tuning.blocklist import Blocklist
from fagen.tuning.candidates import known_configs
from fagen.tuning.events import (
    Event,
    ModelJudged,
    Notice,
    PhaseChanged,
    RecordSaved,
    TaskDone,
    TaskStarted,
    TrialDone,
)
from fagen.tuning.model import predict
from fagen.tuning.options import TuneOptions
from fagen.tuning.outcome import Measured, Outcome, Rejected
from fagen.tuning.search.joint import JointSearch
from fagen.tuning.search.read import read_studies
from fagen.tuning.search.storage import default_storage, last_storage, open_storage
from fagen.tuning.tasks import Task, ragged_shapes, standard_tasks, tasks_from
from fagen.tuning.tuner import TuneResult, estimate_seconds, tune
from fagen.tuning.worker import Worker
from fagen.tuning.worker_child import TORCH, Candidate, DeviceReport

H200 = KNOWN_DEVICES["NVIDIA H200"]
GRID_B = Path(__file__).parents[1] / "benchmarks" / "grid_b.yaml"
FIXED = {"exp2_fma_every": 0, "head_grouping": True, "p_in_smem": False, "block_k": 128}
TASKS = standard_tasks(dtypes=["bf16"], head_dims=[128], causal=[True], seqlens=[512, 8192])
TASK = TASKS[0]
ONE = Task(TASK.problem, TASK.shapes[:1])
NARROW = Task(Problem(dtype="bf16", head_dim=64, alignment=2), TASK.shapes)
Fate = Callable[[AnyConfig, Shape], Outcome | None]


class FakeWorker(Worker):
    """An H200 whose kernels take as long as the static model says."""

    def __init__(self, fate: Fate = lambda config, shape: None) -> None:
        super().__init__(0)
        self.fate = fate
        self.evaluated: Counter[tuple[AnyConfig, Shape]] = Counter()
        self.compared: list[list[AnyConfig]] = []

    def describe_device(self) -> DeviceReport:
        return DeviceReport(device=H200, driver="13.0")

    def evaluate(
        self, compiled: Compiled, problem: Problem, config: AnyConfig, shape: Shape, **_: Any
    ) -> Outcome:
        self.evaluated[config, shape] += 1
        decided = self.fate(config, shape)
        if decided is not None:
            return decided
        time_us = predict(problem, shape, config, H200)
        return Measured(time_us=time_us, samples=9, policy="cold-queued", cubin=compiled.key[:16])

    def compare(self, candidates: Any, problem: Problem, shape: Shape) -> dict[str, list[float]]:
        self.compared.append([config for _, config in candidates])
        times = {str(c): [predict(problem, shape, c, H200)] * 3 for _, c in candidates}
        return times | {TORCH: [1000.0] * 3}


class NoDevice(FakeWorker):
    def describe_device(self) -> DeviceReport:
        raise DeviceError("no usable CUDA driver (not found)")


def fake_kernel(problem: Problem, config: AnyConfig, *_: Any, spill_bytes: int = 0) -> Compiled:
    text = f"{problem} {config}"
    resources = Resources(registers=168, spill_bytes=spill_bytes, stack_bytes=0, smem_bytes=0)
    key = hashlib.sha256(text.encode()).hexdigest()
    return Compiled("sm90", text, text.encode(), {"kernel": resources}, "13.0", key)


class FakeCompilers:
    """A pool whose answers are there at once: what `compiled` returns or raises."""

    processes = 1

    def __init__(self, compiled: Callable[..., Compiled]) -> None:
        self._compiled = compiled

    def __enter__(self) -> FakeCompilers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, _: Any, problem: Problem, config: AnyConfig, arch: Any) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        try:
            future.set_result(self._compiled(problem, config))
        except CompileError as error:
            future.set_exception(error)
        return future


def compile_by(monkeypatch: pytest.MonkeyPatch, compiled: Callable[..., Compiled]) -> None:
    """Puts `compiled` in the place of the compiler of candidates."""

    def compile_many(jobs: Any, arch: Any, **_: Any) -> Iterator[tuple[Problem, AnyConfig, Any]]:
        for problem, config in jobs:
            try:
                yield problem, config, compiled(problem, config)
            except CompileError as error:
                yield problem, config, error

    monkeypatch.setattr(tuning, "compile_processes", lambda processes: FakeCompilers(compiled))
    monkeypatch.setattr(prediction, "compile_many", compile_many)


@pytest.fixture(autouse=True)
def _no_compiler_and_no_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    none = tmp_path / "none.yaml"
    save_records(none, [])
    monkeypatch.setenv(CONFIG_VARIABLE, str(none))
    compile_by(monkeypatch, fake_kernel)
    monkeypatch.setattr(finals, "compile_kernel", fake_kernel)
    monkeypatch.setattr(candidates, "MODEL_SAMPLE", 500)


def run(
    tmp_path: Path, worker: Worker | None = None, tasks: list[Task] = TASKS, **options: Any
) -> tuple[TuneResult, list[Event]]:
    events: list[Event] = []
    on_event = options.pop("on_event", events.append)
    workers = options.pop("workers", [worker or FakeWorker()])
    defaults = {
        "trials": 40,
        "effort": "quick",
        "fixed": FIXED,
        "out": tmp_path / "tuned.yaml",
        "storage": tmp_path / "trials.journal",
    }
    chosen = TuneOptions.of(**defaults | options)
    return tune(tasks, chosen, on_event=on_event, workers=workers), events


def test_tuning_saves_the_fastest_of_each_shape(tmp_path: Path) -> None:
    worker = FakeWorker()
    result, events = run(tmp_path, worker)
    assert result.measured
    assert not result.interrupted
    assert set(worker.evaluated.values()) == {1}
    assert load_records(result.path).records == result.records
    default = default_config(TASK.problem, H200)
    for shape, record in zip(TASK.shapes, result.records, strict=True):
        assert (record.shape, record.problem, record.device.key) == (shape, TASK.problem, H200.key)
        tried = {config for config, at in worker.evaluated if at == shape}
        assert default in tried
        best_us = min(predict(TASK.problem, shape, config, H200) for config in tried)
        assert record.config in tried
        won_us = predict(TASK.problem, shape, record.config, H200)
        assert won_us == pytest.approx(best_us, rel=0.01)  # there may be ties
        assert why_illegal(record.config, TASK.problem, H200) is None
        default_us = predict(TASK.problem, shape, default, H200)
        numbers = record.result
        assert numbers.trials == len(tried) == 40
        assert numbers.speedup_over_default == pytest.approx(default_us / numbers.median_us, 1e-3)
        assert numbers.speedup_over_torch == pytest.approx(1000 / numbers.median_us, 1e-3)
        assert numbers.policy == "cold-queued"
        assert record.provenance.driver == "13.0"
    assert all(default in compared for compared in worker.compared)
    kinds = Counter(type(event).__name__ for event in events)
    assert kinds == {
        "TaskStarted": 1,
        "PhaseChanged": 2,
        "TrialDone": 80,
        "ModelJudged": 2,
        "RecordSaved": 2,
        "TaskDone": 1,
    }
    started, done = events[0], events[-1]
    assert isinstance(started, TaskStarted)
    assert started.points == started.configs + sum(started.removed.values())
    assert isinstance(done, TaskDone)
    assert set(done.seconds) == {"enumerate", "compile wait", "gpu", "finals"}
    assert min(done.seconds.values()) >= 0
    last = [event for event in events if isinstance(event, TrialDone)][-1]
    assert (last.done, last.trials) == (40, 40)


def test_the_kept_studies_list_every_trial(tmp_path: Path) -> None:
    result, _ = run(tmp_path)
    assert len(result.studies) == 2
    for name, shape in zip(result.studies, TASK.shapes, strict=True):
        assert H200.key in name
        assert str(shape.bucket()) in name
        kept = optuna.load_study(study_name=name, storage=open_storage(result.storage))
        measured = [t for t in kept.get_trials() if t.state.name == "COMPLETE"]
        assert len(measured) == 40
        assert all(t.user_attrs["cubin"] and "block_n" in t.params for t in measured)


def test_a_report_knows_what_was_tuned(tmp_path: Path) -> None:
    """The names and notes of the kept studies, where they are made and where they are read."""
    shape = Shape(batch=3, seqlen_q=700, seqlen_k=900, heads_q=10, heads_kv=5)
    for problem in (TASK.problem, NARROW.problem):
        result, _ = run(tmp_path, tasks=[Task(problem, (shape,))], trials=2, fixed=None)
        (kept,) = read_studies(result.storage, result.studies)
        summary = summarise(kept)
        assert summary is not None
        assert (summary.problem, summary.shape, summary.device) == (problem, shape, H200)
        assert len(summary.measured) == 2


def test_the_default_wins_where_the_search_was_lucky(tmp_path: Path) -> None:
    """What looked faster in the search and is slower side by side is not recorded."""
    default = default_config(TASK.problem, H200)

    class Sobering(FakeWorker):
        def compare(
            self, candidates: Sequence[Candidate], problem: Problem, shape: Shape
        ) -> dict[str, list[float]]:
            return {str(c): [10.0 if c == default else 11.0] * 3 for _, c in candidates}

    result, _ = run(tmp_path, Sobering())
    assert [record.config for record in result.records] == [default, default]
    assert [record.result.speedup_over_default for record in result.records] == [1.0, 1.0]
    assert result.records[0].result.speedup_over_torch is None


def test_what_fails_on_one_shape_is_rejected_on_all(tmp_path: Path) -> None:
    _, long = TASK.shapes
    bad = Rejected(kind="wrong", reason="output is off by 1")
    worker = FakeWorker(lambda c, s: bad if c.axes()["block_n"] == 128 and s == long else None)
    result, _ = run(tmp_path, worker)
    assert all(record.config.axes()["block_n"] != 128 for record in result.records)
    for name in result.studies:
        kept = optuna.load_study(study_name=name, storage=open_storage(result.storage))
        rejected = [t for t in kept.get_trials() if t.user_attrs["kind"] == "wrong"]
        assert rejected
        assert all(t.params["block_n"] == 128 for t in rejected)


def test_one_failure_is_enough(tmp_path: Path) -> None:
    """A kernel that hangs costs one deadline, not one for each shape."""
    hang = Rejected(kind="hang", reason="no answer within 20 s")
    worker = FakeWorker(lambda config, shape: hang)
    result, events = run(tmp_path, worker)
    assert {shape for _, shape in worker.evaluated} == {TASK.shapes[0]}
    assert result.records == ()
    assert not result.path.exists() or load_records(result.path).records == ()
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any("nothing was measured (40 hang)" in text for text in notices)


def test_what_hangs_twice_is_not_run_by_later_studies(tmp_path: Path) -> None:
    hang = Rejected(kind="hang", reason="no answer within 20 s")
    first = FakeWorker(lambda config, shape: hang if config.axes()["block_n"] == 128 else None)
    _, events = run(tmp_path, first)
    hung = {config for config, _ in first.evaluated if config.axes()["block_n"] == 128}
    path = tmp_path / "trials.blocklist.json"
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert sum(f"now on the blocklist {path}" in text for text in notices) == len(hung) > 0
    second = FakeWorker()
    _, events = run(tmp_path, second)
    assert hung.isdisjoint(config for config, _ in second.evaluated)
    last = [event for event in events if isinstance(event, TrialDone)][-1]
    assert last.rejections["blocked"] > 0
    assert last.done == 40, "what is blocked costs no trial"


def test_what_is_blocked_is_not_in_the_finals(tmp_path: Path) -> None:
    """A study that was resumed may hold its time."""
    first = FakeWorker()
    (record,) = run(tmp_path, first, [ONE])[0].records
    assert record.config in first.compared[0]
    why = Rejected(kind="crash", reason="killed by SIGSEGV")
    blocklist = Blocklist(tmp_path / "trials.blocklist.json", H200.key)
    blocklist.add(record.provenance.cubin, TASK.problem, record.config, ONE.shapes[0], why)
    second = FakeWorker()
    result, _ = run(tmp_path, second, [ONE], resume=True)
    assert record.config not in second.compared[0]
    assert result.records[0].config != record.config


def test_what_was_not_timed_on_every_shape_is_not_compared_with(tmp_path: Path) -> None:
    """torch may lack the memory for one of the shapes, the default fail on one."""

    class Partial(FakeWorker):
        def compare(
            self, candidates: Any, problem: Problem, shape: Shape
        ) -> dict[str, list[float]]:
            times = super().compare(candidates, problem, shape)
            if shape.seqlen_q % 2:  # the ragged shape
                del times[TORCH], times[str(default)]
            return times

    default = default_config(ONE.problem, H200)
    result, _ = run(tmp_path, Partial(), tasks=[ONE], effort="full")
    (record,) = result.records
    assert record.config != default
    assert record.result.speedup_over_torch is None
    assert record.result.speedup_over_default is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"effort": "fast"}, "effort: .*'quick' or 'full'"),
        ({"sampler": "oracle"}, "sampler: .*'surrogate', 'tpe'"),
        ({"devices": ()}, "devices"),
        ({"trials": 0}, r"trials: .*greater than 0 \(got 0\)"),
        ({"budget_s": -1.0}, r"budget_s: .*greater than 0 \(got -1.0\)"),
        ({"processes": -1}, r"processes: .*greater than 0 \(got -1\)"),
        ({"trials": "x"}, r"trials: .*valid integer.*\(got 'x'\)"),
        ({"trails": 9}, "no option trails: there are arch, devices, .*trials"),
        ({"devices": "a"}, "devices"),
        ({"tasks": []}, "at least one problem"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=said):
        run(tmp_path, **options)


def test_the_home_folder_has_its_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result, _ = run(tmp_path, tasks=[ONE], out="~/tuned.yaml")
    assert result.path == tmp_path / "tuned.yaml"
    assert load_records(tmp_path / "tuned.yaml").records == result.records


def test_a_prediction_in_a_part_of_the_space_replaces_no_better_one(tmp_path: Path) -> None:
    def predicted(**options: Any) -> float:
        result, _ = run(tmp_path, NoDevice(), [ONE], arch=architecture("sm90"), **options)
        (record,) = load_records(result.path).records
        assert result.records == (record,)
        return record.result.median_us

    best = predicted()
    assert predicted(fixed=FIXED | {"block_n": 32}) == best
    assert predicted(template="forward_sm80", fixed={}) == best


def test_a_prediction_keeps_to_its_budget(tmp_path: Path) -> None:
    result, events = run(tmp_path, NoDevice(), arch=architecture("sm90"), budget_s=1e-9)
    assert len(result.records) == 1, "one is better than none"
    assert not result.interrupted
    said = [event.text for event in events if isinstance(event, Notice)]
    assert any("1 of 2 shapes are left out" in text for text in said)


def test_a_time_that_is_withdrawn_wins_nothing(tmp_path: Path) -> None:
    """The fastest config is well the first time, ruins what follows, and fails the second time."""
    (best,) = {record.config for record in run(tmp_path / "before", tasks=[ONE])[0].records}
    crash = Rejected(kind="crash", reason="killed by SIGABRT")

    class Late(FakeWorker):
        ruined = False

        def evaluate(self, compiled: Any, problem: Any, config: Any, shape: Any, **_: Any) -> Any:
            if self.ruined:
                self.ruined = False
                return crash
            if config == best:
                self.ruined = self.evaluated[config, shape] == 0
                self.evaluated[config, shape] += 1
                return Measured(time_us=1.0, cubin="b") if self.ruined else crash
            return super().evaluate(compiled, problem, config, shape)

    worker = Late()
    result, events = run(tmp_path, worker, tasks=[ONE])
    assert [record.config for record in result.records] != [best]
    assert best not in worker.compared[0]
    trials = [event.trial for event in events if isinstance(event, TrialDone)]
    outcomes = [tried.outcome for tried in trials if tried.config == best]
    assert [type(outcome) for outcome in outcomes] == [Measured, Rejected]
    assert sum(isinstance(tried.outcome, Rejected) for tried in trials) == 1, "only it is to blame"
    (kept,) = read_studies(result.storage, result.studies)
    assert [t.outcome for t in kept.trials if t.config == best] == [outcomes[1]]
    again = FakeWorker()
    run(tmp_path, again, tasks=[ONE], resume=True, trials=50)
    assert (best, ONE.shapes[0]) not in again.evaluated


def test_losers_are_given_up_on(tmp_path: Path) -> None:
    limits: list[tuple[float, float]] = []

    class Watched(FakeWorker):
        def evaluate(self, *arguments: Any, **options: Any) -> Outcome:
            outcome = super().evaluate(*arguments)
            assert isinstance(outcome, Measured)
            limits.append((options["give_up_us"], outcome.time_us))
            return outcome

    run(tmp_path, Watched(), tasks=[ONE])
    assert limits[0][0] == float("inf")
    best_us = limits[0][1]
    for limit, time_us in limits[1:]:
        assert limit == pytest.approx(1.15 * best_us)
        best_us = min(best_us, time_us)


def test_the_share_of_time_that_the_gpu_is_busy_is_told(tmp_path: Path) -> None:
    class Timed(FakeWorker):
        def evaluate(self, *arguments: Any, **options: Any) -> Outcome:
            time.sleep(0.01)
            self.busy_s += 0.01
            return super().evaluate(*arguments, **options)

    _, events = run(tmp_path, Timed(), tasks=[ONE])
    phases = [event for event in events if isinstance(event, PhaseChanged)]
    assert [phase.phase for phase in phases] == ["search", "finish"]
    assert phases[1].gpu_busy is not None
    assert 0.1 < phases[1].gpu_busy < 1


def test_an_incumbent_that_is_no_slower_stays(tmp_path: Path) -> None:
    """Though it is none of what this search may try."""
    default = default_config(TASK.problem, H200)
    old = default.model_copy(update={"lazy_rescale": not default.axes()["lazy_rescale"]})
    path = tmp_path / "tuned.yaml"
    save_records(path, [some_record(TASK.problem, old).model_copy(update={"shape": ONE.shapes[0]})])

    class Equal(FakeWorker):
        old_us = 100.5

        def compare(self, candidates: Any, *_: Any) -> dict[str, list[float]]:
            self.compared.append([config for _, config in candidates])
            return {str(c): [self.old_us if c == old else 100.0] * 3 for _, c in candidates}

    fixed = FIXED | {"lazy_rescale": default.axes()["lazy_rescale"]}
    worker = Equal()
    result, _ = run(tmp_path, worker, [ONE], fixed=fixed)
    (record,) = result.records
    assert record.config == old
    assert record.result.median_us == 100.5, "its time is today's"
    assert record.result.tied == len(worker.compared[0])
    worker.old_us = 102.0
    (record,) = run(tmp_path, worker, [ONE], fixed=fixed)[0].records
    assert record.config != old


def test_one_bad_finalist_does_not_cost_the_record(tmp_path: Path) -> None:
    class Fragile(FakeWorker):
        """The best kernel takes the first comparison with it."""

        bad: AnyConfig | None = None

        def compare(
            self, candidates: Any, problem: Problem, shape: Shape
        ) -> dict[str, list[float]]:
            configs = [config for _, config in candidates]
            self.bad = self.bad or configs[0]
            if self.bad in configs:
                raise DeviceError("GPU 0: the process that ran it was killed by SIGSEGV")
            return super().compare(candidates, problem, shape)

        def evaluate(self, *arguments: Any, **options: Any) -> Outcome:
            if arguments[2] == self.bad:
                return Rejected(kind="crash", reason="killed by SIGSEGV")
            return super().evaluate(*arguments, **options)

    worker = Fragile()
    result, events = run(tmp_path, worker, [ONE])
    (record,) = result.records
    assert record.config != worker.bad
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any("fell out of the finals: crash" in text for text in notices)
    (kept,) = read_studies(tmp_path / "trials.journal")
    (verdict,) = (each.outcome for each in kept.trials if each.config == worker.bad)
    assert isinstance(verdict, Rejected), "its time from the search is void"


def test_static_rejections_never_reach_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(problem: Problem, config: AnyConfig) -> Compiled:
        if config.axes()["block_n"] > 128:
            raise CompileError("NVRTC refused it")
        return fake_kernel(
            problem, config, spill_bytes=192 if config.axes()["block_n"] == 128 else 0
        )

    compile_by(monkeypatch, compiled)
    monkeypatch.setattr(evaluation, "compile_kernel", partial(fake_kernel, spill_bytes=192))
    worker = FakeWorker()
    result, events = run(tmp_path, worker)
    assert all(config.axes()["block_n"] < 128 for config, _ in worker.evaluated)
    last = [event for event in events if isinstance(event, TrialDone)][-1]
    assert {"compile", "resources"} <= set(last.rejections)
    assert last.done == 40
    kept = optuna.load_study(
        study_name=result.studies[0], storage=open_storage(result.storage)
    ).get_trials()
    reasons = {t.user_attrs["kind"]: t.user_attrs["reason"] for t in kept if t.value is None}
    assert reasons["compile"] == "NVRTC refused it"
    assert reasons["resources"] == "spills 192 bytes per thread"


def test_equal_cubins_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alike = {"stages": 2, "q_stages": 1, "overlap": True, "lazy_rescale": False}

    def compiled(problem: Problem, config: AnyConfig) -> Compiled:
        return fake_kernel(problem, config.model_copy(update=alike))

    compile_by(monkeypatch, compiled)
    monkeypatch.setattr(
        "fagen.kernels.forward_sm90.Sm90Forward.smem_bytes", lambda config, problem: 0
    )
    worker = FakeWorker()
    _, events = run(tmp_path, worker)
    unlike = [config.model_copy(update=alike) for config, _ in worker.evaluated]
    assert max(Counter(unlike).values()) == len(TASK.shapes)
    last = [event for event in events if isinstance(event, TrialDone)][-1]
    assert last.rejections["duplicate"] > 0


def test_ctrl_c_saves_the_best_so_far_and_resume_goes_on(tmp_path: Path) -> None:
    class Impatient(FakeWorker):
        def evaluate(self, *arguments: Any, **options: Any) -> Outcome:
            if len(self.evaluated) == 30:
                raise KeyboardInterrupt
            return super().evaluate(*arguments, **options)

    first = Impatient()
    result, _ = run(tmp_path, first)
    assert result.interrupted
    assert len(load_records(result.path).records) == 2
    second = FakeWorker()
    again, events = run(tmp_path, second, resume=True)
    assert again.studies == result.studies
    assert not again.interrupted
    started = next(event for event in events if isinstance(event, TaskStarted))
    assert started.resumed == 15
    both = {config for config, _ in first.evaluated} & {config for config, _ in second.evaluated}
    assert both == {default_config(TASK.problem, H200)}  # what times are relative to, each time
    assert [record.result.trials for record in again.records] == [40, 40]


def test_a_full_effort_counts_a_ragged_shape_as_much(tmp_path: Path) -> None:
    """Tiles of 96 keys suit the usual shape, and are slow where the sequence is ragged."""
    task = Task(TASK.problem, TASK.shapes[:1])
    (shape,) = task.shapes
    (ragged,) = ragged_shapes(shape)

    def fate(config: AnyConfig, at: Shape) -> Outcome:
        factor = {shape: 0.7, ragged: 1.6}[at] if config.axes()["block_n"] == 96 else 1.0
        return Measured(time_us=factor * predict(TASK.problem, at, config, H200))

    fixed = FIXED | {"block_n": (96, 128)}
    quick, full = (
        run(tmp_path / effort, FakeWorker(fate), [task], effort=effort, fixed=fixed)[0]
        for effort in ("quick", "full")
    )
    best = {}
    for result in (quick, full):
        (kept,) = read_studies(result.storage, result.studies)
        measured = [tried for tried in kept.trials if isinstance(tried.outcome, Measured)]
        best[result.path] = min(measured, key=lambda tried: tried.objective)
        default = next(t for t in measured if t.config == default_config(TASK.problem, H200))
        assert default.objective == 1.0
    assert best[quick.path].config.axes()["block_n"] == 96
    tried = best[full.path]
    assert tried.config.axes()["block_n"] != 96
    ratios = [
        predict(TASK.problem, at, tried.config, H200)
        / predict(TASK.problem, at, default_config(TASK.problem, H200), H200)
        for at in (shape, ragged)
    ]
    assert tried.objective == pytest.approx(np.sqrt(np.prod(ratios)))
    assert tried.time_us == predict(TASK.problem, shape, tried.config, H200)


def test_a_loser_is_not_timed_on_the_ragged_shape(tmp_path: Path) -> None:
    worker = FakeWorker()
    run(tmp_path, worker, effort="full")
    default = default_config(TASK.problem, H200)
    for shape in TASK.shapes:
        (ragged,) = ragged_shapes(shape)
        on_usual, on_ragged = (
            [config for config, at in worker.evaluated if at == each] for each in (shape, ragged)
        )
        assert 5 < len(on_ragged) < len(on_usual) == 40
        slowest, base = (
            max(predict(TASK.problem, shape, config, H200) for config in configs)
            for configs in (on_ragged, [default])
        )
        assert slowest <= 1.15 * base


def test_a_default_that_fails_ends_nothing(tmp_path: Path) -> None:
    default = default_config(TASK.problem, H200)
    wrong = Rejected(kind="wrong", reason="output is off by 1")
    worker = FakeWorker(lambda config, shape: wrong if config == default else None)
    result, _ = run(tmp_path, worker, effort="full")
    assert len(result.records) == 2
    assert sum(count for (config, _), count in worker.evaluated.items() if config == default) == 1


def test_the_model_is_judged_at_the_end(tmp_path: Path) -> None:
    """Against times that are its own: the order is right, and is kept."""
    result, events = run(tmp_path)
    judged = [event for event in events if isinstance(event, ModelJudged)]
    assert [event.shape for event in judged] == list(TASK.shapes)
    for event, kept in zip(judged, read_studies(result.storage, result.studies), strict=True):
        assert event.static == pytest.approx(1.0)
        assert event.corrected is not None
        assert event.corrected > 0.95
        assert event.measured == 40
        assert kept.about["spearman"] == {"static": event.static, "corrected": event.corrected}
    assert all(
        event.corrected is None
        for event in run(tmp_path, sampler="random", trials=5)[1]
        if isinstance(event, ModelJudged)
    )


@pytest.mark.parametrize("what", ["device", "ragged_shapes"])
def test_a_study_of_another_card_or_effort_does_not_go_on(tmp_path: Path, what: str) -> None:
    """The card has the same name: one that is clocked lower, say."""

    class Slower(FakeWorker):
        def describe_device(self) -> DeviceReport:
            return DeviceReport(device=H200.model_copy(update={"clock_mhz": 1200}), driver="13.0")

    run(tmp_path, trials=5)
    worker, effort = (Slower(), "quick") if what == "device" else (FakeWorker(), "full")
    with pytest.raises(ArgumentError, match=f"cannot go on: its {what} was"):
        run(tmp_path, worker, trials=10, resume=True, effort=effort)
    run(tmp_path, worker, trials=10, effort=effort)  # a new one


def test_records_seed_other_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other head dims too, as far as they are legal there."""
    out = tmp_path / "tuned.yaml"
    monkeypatch.setenv("FAGEN_CONFIG", str(out))  # no shipped records
    problem = Problem(dtype="fp16", head_dim=64)
    alike = default_config(problem, H200).model_copy(update={"block_n": 96})
    other = default_config(TASK.problem, H200).model_copy(update={"block_n": 80})
    illegal = default_config(problem, H200).model_copy(update={"block_n": 256, "stages": 4})
    shape = standard_shape(128, 512, 512)
    for record in (
        some_record(problem, alike),
        some_record(problem, illegal, seqlen=512),
        some_record(TASK.problem.model_copy(update={"causal": False}), other),
    ):
        save_records(out, [record])
    assert known_configs(TASK.problem, [shape], "forward_sm90", H200, out) == [
        other,
        alike.model_copy(update={"block_k": 128}),
    ]


def test_records_of_another_architecture_seed_a_template_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tuned.yaml"
    monkeypatch.setenv("FAGEN_CONFIG", str(out))
    problem, shape = Problem(dtype="fp16", head_dim=64), standard_shape(64, 512, 512)
    a100 = typical_device(architecture("sm80"))
    config = default_config(problem, a100).model_copy(update={"block_n": 80})
    save_records(out, [some_record(problem, config, card=Card.of(a100))])
    assert known_configs(problem, [shape], "forward_sm80", H200, out) == [config]
    assert known_configs(problem, [shape], "forward_sm90", H200, out) == []


def test_a_callback_ends_the_search_and_keeps_the_best(tmp_path: Path) -> None:
    trials: list[TrialDone] = []

    def enough(event: Event) -> None:
        if isinstance(event, TrialDone):
            trials.append(event)
            if len(trials) == 10:
                raise KeyboardInterrupt

    result, _ = run(tmp_path, on_event=enough)
    assert result.interrupted
    assert [record.result.trials for record in result.records] == [5, 5]
    assert load_records(result.path).records == result.records


def test_two_cards_find_what_one_does(tmp_path: Path) -> None:
    few = {"block_n": 64, "stages": 2, "producer_registers": 24, "lazy_rescale": True}
    options: dict[str, Any] = {"fixed": FIXED | few, "sampler": "brute-force", "trials": 1000}
    one, _ = run(tmp_path / "one", **options)
    workers = [FakeWorker(), FakeWorker()]
    two, _ = run(tmp_path / "two", workers=workers, **options)
    evaluated = workers[0].evaluated + workers[1].evaluated
    default = default_config(TASK.problem, H200)  # which each card is compared with
    assert len(evaluated) > 20
    assert {count for (config, _), count in evaluated.items() if config != default} == {1}
    assert all(worker.evaluated for worker in workers)
    assert not workers[1].compared
    assert [r.config for r in two.records] == [r.config for r in one.records]
    assert [r.result for r in two.records] == [r.result for r in one.records]


def test_records_seed_like_problems_and_are_compared(tmp_path: Path) -> None:
    result, _ = run(tmp_path)
    winners = {record.config for record in result.records}
    sibling = Task(TASK.problem.model_copy(update={"dtype": "fp16"}), TASK.shapes)
    worker = FakeWorker()
    run(tmp_path, worker, [sibling], trials=5)
    assert winners <= {config for config, _ in worker.evaluated}
    again = FakeWorker()
    run(tmp_path, again, trials=5)
    for record, compared in zip(result.records, again.compared, strict=True):
        assert record.config in compared


def test_without_a_device_records_are_predicted_and_say_so(tmp_path: Path) -> None:
    result, events = run(tmp_path, NoDevice(), arch=architecture("sm90"))
    assert not result.measured
    assert result.device == H200
    assert [record.result.kind for record in result.records] == ["predicted", "predicted"]
    assert isinstance(events[0], Notice)
    assert "Nothing will be measured" in events[0].text
    assert "predicted" in events[0].text
    for record in result.records:
        default_us = predict(
            record.problem,
            record.shape,
            default_config(record.problem, H200),
            H200,
            fake_kernel(record.problem, record.config).resources,
        )
        assert record.result.median_us <= default_us
        assert record.provenance.driver is None


def test_narrow_problems_take_the_template_that_can(tmp_path: Path) -> None:
    result, _ = run(tmp_path, tasks=[NARROW], trials=3, fixed=None)
    assert {record.problem for record in result.records} == {NARROW.problem}
    assert {record.config.template for record in result.records} == {"forward_sm80"}


def test_another_card_predicts(tmp_path: Path) -> None:
    result, events = run(tmp_path, arch=architecture("sm86"), fixed=None)
    assert not result.measured
    assert result.device.arch.name == "sm86"
    assert {record.config.template for record in result.records} == {"forward_sm80"}
    assert any("GPU 0 is NVIDIA H200" in e.text for e in events if isinstance(e, Notice))


def test_predictions_never_displace_measurements(tmp_path: Path) -> None:
    measured, _ = run(tmp_path)
    run(tmp_path, NoDevice(), arch=architecture("sm90"))
    assert load_records(measured.path).records == measured.records


def test_without_a_device_an_architecture_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="name an architecture, such as sm90"):
        run(tmp_path, NoDevice())


def test_finalists_that_fail_leave_no_record(tmp_path: Path) -> None:
    class Flaky(FakeWorker):
        def compare(self, *_: Any) -> dict[str, list[float]]:
            raise DeviceError("GPU 0: the process that ran it was killed by SIGKILL")

    result, events = run(tmp_path, Flaky())
    assert result.records == ()
    assert sum("no record" in e.text for e in events if isinstance(e, Notice)) == 2


def test_the_default_storage_is_one_journal_per_card(tmp_path: Path) -> None:
    result, _ = run(tmp_path, storage=None, trials=3)
    assert result.storage == str(default_storage(H200))
    assert Path(result.storage).name == "NVIDIA-H200-132-SMs.journal"
    assert Path(result.storage).is_file()
    assert last_storage() == Path(result.storage)


def test_each_task_gets_its_share_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float] = []

    class Search(JointSearch):
        def __init__(self, *_: Any, budget_s: float, **__: Any) -> None:
            budgets.append(budget_s)
            super().__init__([], trials=1, budget_s=0.0)

    monkeypatch.setattr(tuning, "JointSearch", Search)
    run(tmp_path, tasks=TASKS * 4, budget_s=1000.0)
    assert budgets == pytest.approx([250, 333, 500, 1000], rel=0.2)


def test_what_runs_when_the_budget_ends_still_counts(tmp_path: Path) -> None:
    class Slow(FakeWorker):
        def evaluate(self, *arguments: Any, **options: Any) -> Outcome:
            time.sleep(0.4)
            return super().evaluate(*arguments, **options)

    workers = [Slow(), Slow()]
    result, events = run(tmp_path, workers=workers, tasks=[ONE], budget_s=1.0)
    told = {event.trial.config for event in events if isinstance(event, TrialDone)}
    begun = workers[0].evaluated + workers[1].evaluated
    assert {config for config, _ in begun} == told
    assert 2 <= len(told) < 10
    assert not result.interrupted
    assert len(result.records) == 1


def test_standard_tasks() -> None:
    tasks = standard_tasks()
    assert len({task.problem for task in tasks}) == len(tasks) == 20
    assert tasks[0].problem == Problem(dtype="bf16", head_dim=128, causal=True)
    assert {task.problem.dtype for task in tasks[:10]} == {"bf16"}
    for task in tasks:
        assert [shape.seqlen_q for shape in task.shapes] == [512, 2048, 8192]
        assert len({shape.bucket() for shape in task.shapes}) == 3
        assert {shape.batch * shape.seqlen_q for shape in task.shapes} == {16384}
    grouped = standard_tasks(seqlens=[100, 101, 4096], batch=1, heads=32, heads_kv=8)
    assert [shape.seqlen_q for shape in grouped[0].shapes] == [101, 4096]  # one a bucket
    assert {shape.heads_kv for shape in grouped[0].shapes} == {8}


@pytest.mark.parametrize("seqlen", [1, 2, 7, 100, 512, 700, 3000, 4096, 8192, 65536])
@pytest.mark.parametrize("batch", [1, 2, 3, 32])
def test_ragged_shapes_are_of_the_bucket(seqlen: int, batch: int) -> None:
    for seqlen_q in (1, seqlen):
        shape = Shape(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen, heads_q=16, heads_kv=4)
        found = ragged_shapes(shape)
        assert len(found) == (seqlen > 2)
        for ragged in found:
            assert ragged.bucket() == shape.bucket()
            assert ragged.seqlen_k % 2 == 1
            assert (ragged.seqlen_q == ragged.seqlen_k) == (seqlen_q == seqlen)
            assert 0.6 < ragged.flops(TASK.problem) / shape.flops(TASK.problem) < 1.7


def test_estimates_grow_with_the_work() -> None:
    tasks = standard_tasks()
    assert estimate_seconds(tasks, 100) > 2 * estimate_seconds(tasks[:5], 100)
    assert estimate_seconds(tasks, 100) > estimate_seconds(tasks, 50)
    assert estimate_seconds(tasks) > 1.5 * estimate_seconds(tasks, effort="quick")
    assert estimate_seconds(tasks, measured=False) < estimate_seconds(tasks)


def test_estimates_are_near_what_it_took() -> None:
    """On an H200, in seconds: benchmarks/results/h200_tune_bf16.log and h200_tune_grid_b.log."""
    grid_a = standard_tasks(dtypes=("bf16",), head_dims=HEAD_DIMS, seqlens=SEQLENS)
    assert 0.7 < estimate_seconds(grid_a, effort="quick") / 181 < 1.4
    grid_b = [task for task in tasks_from(GRID_B) if task.problem.dtype == "bf16"]
    assert 0.7 < estimate_seconds(grid_b, 100, effort="quick") / 268 < 1.4


def test_saved_records_are_announced_with_their_file(tmp_path: Path) -> None:
    result, events = run(tmp_path, trials=3)
    saved = [event for event in events if isinstance(event, RecordSaved)]
    assert tuple(event.record for event in saved) == result.records
    assert {event.path for event in saved} == {tmp_path / "tuned.yaml"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"arch": architecture("sm80"), "template": "forward_sm90"}, "allowed are forward_sm80"),
        ({"tasks": standard_tasks(seqlens=[1 << 40])}, "more than any card has"),
        ({"tasks": standard_tasks(seqlens=[0])}, "nothing to compute"),
        ({"tasks": [NARROW], "template": "forward_sm90"}, "narrow has no legal config of forward"),
    ],
)
def test_what_no_trial_could_answer_is_refused_at_once(
    arguments: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(self: Worker) -> DeviceReport:
        raise DeviceError("no usable CUDA driver")

    monkeypatch.setattr(Worker, "describe_device", none)
    given: dict[str, Any] = {"tasks": TASKS, "arch": architecture("sm90")} | arguments
    tasks = given.pop("tasks")
    with pytest.raises(ArgumentError, match=said):
        tune(tasks, TuneOptions(**given, out=tmp_path / "x.yaml"))
    assert not (tmp_path / "x.yaml").exists()
