"""problems -> records: for each problem and class of shapes, the fastest config that is right.

With a device of the architecture: candidates are compiled ahead in processes, filtered by what
the compiler says, verified and timed by the worker on every shape of the problem (the text of a
kernel does not depend on lengths, so one compilation and one verdict serve all), and the best
are timed again side by side with the template's default. Without one: the static model ranks.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fagen import model
from fagen.compile import Compiled, compile_kernel
from fagen.config import TEMPLATES, AnyConfig, Sm90Forward
from fagen.device import Architecture, Device, typical_device
from fagen.errors import ArgumentError, CompileError, DeviceError, UnsupportedError
from fagen.measure import median_and_spread
from fagen.outcome import Measured, Outcome, Rejected
from fagen.problem import Dtype, Problem, Shape, standard_shape
from fagen.processes import in_processes
from fagen.published import published_configs
from fagen.search import LegalSet, Results, Study, Tried, open_storage, search
from fagen.space import default_config, why_illegal
from fagen.store import (
    Calls,
    Card,
    Provenance,
    Record,
    Result,
    Store,
    check_can_save,
    digest,
    load_calls,
    save_records,
    user_overlay_path,
)
from fagen.worker import TORCH, DeviceReport, Worker

# The standard list, common ones first.
STANDARD_DTYPES: tuple[Dtype, ...] = ("bf16", "fp16")
STANDARD_HEAD_DIMS = (128, 64, 256, 96, 192)
STANDARD_CAUSAL = (True, False)
STANDARD_SEQLENS = (512, 2048, 8192)

TRIALS = 100
FINALISTS = 3  # timed again, beside the default and what was on record
KNOWN_SEEDS = 6  # records of like problems that are tried first
TRIALS_PER_PICK = 8  # of so many trials, one is a pick of the static model, tried first
MODEL_SAMPLE = 8000  # legal configs that the static model looks at, 25 us each
PICKS_PER_TILE = 2  # of one block_m and block_n, so that picks differ in what matters
PREDICTED_FINALISTS = 8  # best predictions that are compiled, to see their registers
COMPILE_SECONDS = 60.0
MAX_SHAPE_BYTES = 1 << 40

# For `estimate_seconds`.
TASK_SECONDS = 8.0  # enumeration, start of the compile processes, final comparison
CANDIDATE_SECONDS = 0.2  # loading and verifying
SHAPE_SECONDS = 0.18  # timing
PREDICTED_SHAPE_SECONDS = 4.0


@dataclass(frozen=True)
class Task:
    """A problem, and the shapes that it is tuned for, one for each bucket."""

    problem: Problem
    shapes: tuple[Shape, ...]


def standard_tasks(
    *,
    dtypes: Sequence[Dtype] = STANDARD_DTYPES,
    head_dims: Sequence[int] = STANDARD_HEAD_DIMS,
    causal: Sequence[bool] = STANDARD_CAUSAL,
    seqlens: Sequence[int] = STANDARD_SEQLENS,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> list[Task]:
    """The problems of these values; what is left out is the standard list.

    Args:
        seqlens: lengths of queries and keys alike.
        batch, heads, kv_heads: those of `standard_shape` if None.
    """
    tasks = []
    for dtype, head_dim, mask in itertools.product(dtypes, head_dims, causal):
        problem = Problem(dtype=dtype, head_dim=head_dim, causal=mask)
        shapes = [
            standard_shape(head_dim, seqlen, seqlen, batch=batch, heads=heads, heads_kv=kv_heads)
            for seqlen in seqlens
        ]
        one_a_bucket = {shape.bucket(): shape for shape in shapes}
        tasks.append(Task(problem, tuple(one_a_bucket.values())))
    return tasks


def tasks_from(path: str | Path) -> list[Task]:
    """The problems that a program called, as `fagen.record` wrote them; the most called first.

    Of each bucket of shapes, the task has the shape that was seen most often.

    Raises:
        StoreError: if the file cannot be read, or is no file of recorded calls.
        ArgumentError: if it holds no call.
    """
    by_problem: dict[Problem, list[Calls]] = {}
    for entry in sorted(load_calls(path), key=lambda entry: -entry.calls):
        by_problem.setdefault(entry.problem, []).append(entry)
    if not by_problem:
        raise ArgumentError(
            f"{path} holds no calls: call fagen.attention inside `with fagen.record(...):`"
        )
    ranked = sorted(by_problem.items(), key=lambda item: -sum(entry.calls for entry in item[1]))
    return [Task(problem, tuple(entry.shape for entry in calls)) for problem, calls in ranked]


def estimate_seconds(
    tasks: Sequence[Task], trials: int = TRIALS, *, measured: bool = True
) -> float:
    """Roughly how long `tune` takes, in seconds."""
    shapes = sum(len(task.shapes) for task in tasks)
    if not measured:
        return PREDICTED_SHAPE_SECONDS * shapes
    per_shape = SHAPE_SECONDS * trials * shapes
    return (TASK_SECONDS + CANDIDATE_SECONDS * trials) * len(tasks) + per_shape


# ---- events ----


@dataclass(frozen=True)
class Notice:
    """Something that the user should read, as one sentence."""

    text: str


@dataclass(frozen=True)
class TaskStarted:
    """A problem is next: the `number`-th of `total`.

    Attributes:
        configs: size of its legal set.
        resumed: configs that earlier runs have tried, per shape.
    """

    task: Task
    number: int
    total: int
    template: str
    device: Device
    configs: int
    resumed: int


@dataclass(frozen=True)
class PhaseChanged:
    """What happens to the problem now: "search", or "finish" (the final comparison)."""

    problem: Problem
    phase: Literal["search", "finish"]


@dataclass(frozen=True)
class TrialDone:
    """A config was tried on one shape.

    Attributes:
        tried: the config and its outcome.
        best: the fastest so far; is_best if that is new.
        done, trials: configs that have passed the static filter on this shape, of how many.
        rejections: how many fell at each hurdle, by kind.
    """

    problem: Problem
    shape: Shape
    tried: Tried
    best: Tried | None
    is_best: bool
    done: int
    trials: int
    rejections: Mapping[str, int]


@dataclass(frozen=True)
class RecordSaved:
    """An answer was written."""

    record: Record
    path: Path


Event = Notice | TaskStarted | PhaseChanged | TrialDone | RecordSaved
OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class TuneResult:
    """What came of it.

    Attributes:
        records: the answers, all of them saved.
        path: the file that they are in.
        device: what was measured on, or predicted for.
        measured: whether there was such a device.
        storage: where the studies are; "" for a prediction.
        studies: their names.
        interrupted: Ctrl-C ended it; `resume=True` goes on.
    """

    records: tuple[Record, ...]
    path: Path
    device: Device
    measured: bool
    storage: str = ""
    studies: tuple[str, ...] = ()
    interrupted: bool = False


def default_storage(device: Device) -> Path:
    """The journal file of a card's studies."""
    slug = re.sub(r"\W+", "-", device.key).strip("-")
    return _studies_folder() / f"{slug}.journal"


def last_storage() -> Path:
    """The journal file, of all cards', that was written last.

    Raises:
        ArgumentError: if there is none.
    """
    journals = list(_studies_folder().glob("*.journal"))
    if not journals:
        raise ArgumentError(
            f"{_studies_folder()} holds no studies: `fagen tune` makes some, or name a --storage"
        )
    return max(journals, key=lambda path: path.stat().st_mtime)


def _studies_folder() -> Path:
    from platformdirs import user_state_path

    return user_state_path("fagen", appauthor=False) / "studies"


def study_name(device: Device, problem: Problem, shape: Shape, template: str) -> str:
    """The name of a kept study, without what `search.Study` adds; report.py takes it apart."""
    version = TEMPLATES[template].axes_version
    return f"{device.key} {problem} {shape.bucket()} {template} v{version}"


# ---- the verb ----


def tune(
    tasks: Sequence[Task],
    *,
    arch: Architecture | None = None,
    device_index: int = 0,
    template: str | None = None,
    fixed: dict[str, Any] | None = None,
    trials: int = TRIALS,
    budget_s: float | None = None,
    sampler: str = "tpe",
    seed: int = 0,
    storage: str | Path | None = None,
    resume: bool = False,
    out: str | Path | None = None,
    processes: int | None = None,
    on_event: OnEvent = lambda event: None,
    worker: Worker | None = None,
) -> TuneResult:
    """Finds a config for each shape of each task, and saves it.

    Args:
        arch: the architecture to tune for; that of the device if None. Where device
            `device_index` is another one, or there is none, records are predicted.
        template: the template to search; the architecture's native one that fits, if None.
        fixed: axes held at one value.
        trials: configs per shape that reach the GPU, those of resumed runs included.
        budget_s: seconds for all tasks together; each gets its share.
        sampler: one of `search.SAMPLERS`.
        storage: a database URL or a journal file of studies; `default_storage` if None.
        resume: go on with the studies of an earlier run.
        out: the YAML file to write; the user's overlay if None.
        processes: that compile; one per available CPU but one, if None.
        worker: that evaluates, instead of one for `device_index`.

    Raises:
        DeviceError: if there is no device and `arch` is None.
        FagenError: what concerns every candidate (a damaged file, a missing package). A
            candidate that fails is a trial that failed.
    """
    with worker or Worker(device_index) as running:
        report = _report(running, arch, on_event)
        if report is not None:
            device = report.device
        else:
            assert arch is not None, "without a device, an architecture was asked for"
            device = typical_device(arch)
        path = Path(out) if out is not None else user_overlay_path(device.arch.name)
        _check(tasks, template, device)
        check_can_save(path)
        if report is None:
            return _Prediction(device, template, fixed, seed, path, processes, on_event).run(tasks)
        where = storage if storage is not None else default_storage(device)
        tuning = _Tuning(
            worker=running,
            report=report,
            template=template,
            fixed=fixed,
            trials=trials,
            sampler=sampler,
            seed=seed,
            storage=open_storage(where),
            resume=resume,
            out=path,
            processes=processes,
            on_event=on_event,
        )
        records, studies, finished = tuning.run(tasks, budget_s)
    return TuneResult(
        records=tuple(records),
        path=path,
        device=device,
        measured=True,
        storage=str(where),
        studies=tuple(studies),
        interrupted=not finished,
    )


def _check(tasks: Sequence[Task], template: str | None, device: Device) -> None:
    """Refuses what no trial could answer."""
    allowed = device.arch.templates
    if template is not None and template not in allowed:
        raise ArgumentError(
            f"template {template} does not run on {device.arch.name}: allowed are "
            f"{', '.join(allowed)}"
        )
    for task in tasks:
        fitting = _template(template, task.problem, device)
        default = default_config(task.problem, device, fitting)
        if broken := why_illegal(default, task.problem, device):
            raise UnsupportedError(
                f"{task.problem} has no legal config of {fitting}: {broken}. Name no template, "
                "and each problem gets the one that fits"
            )
        for shape in task.shapes:
            size = shape.bytes(task.problem)
            if size > MAX_SHAPE_BYTES:
                raise UnsupportedError(
                    f"{task.problem}, {shape}: its tensors take {size / 1e9:,.0f} GB, more than "
                    "any card has. Take a smaller batch or length"
                )


def _report(worker: Worker, arch: Architecture | None, on_event: OnEvent) -> DeviceReport | None:
    """The device to measure on, or None where only prediction is left."""
    try:
        report = worker.describe_device()
    except (DeviceError, UnsupportedError) as error:
        if arch is None:
            raise DeviceError(
                f"{error}. To predict configs without a device, name one: --arch sm90"
            ) from None
        why = str(error)
    else:
        if arch is None or arch == report.device.arch:
            return report
        why = f"GPU {worker.device_index} is {report.device}"
    on_event(
        Notice(
            f"Nothing will be measured: {why}. The configs for {arch.name} are chosen by "
            f"the static model, for {typical_device(arch).name}, and marked as predicted."
        )
    )
    return None


def _template(template: str | None, problem: Problem, device: Device) -> str:
    return template or default_config(problem, device).template


# ---- with a device ----


@dataclass
class _Tuning:
    """One run on a device; the fields are the arguments of `tune`."""

    worker: Worker
    report: DeviceReport
    template: str | None
    fixed: dict[str, Any] | None
    trials: int
    sampler: str
    seed: int
    storage: Any
    resume: bool
    out: Path
    processes: int | None
    on_event: OnEvent

    def run(
        self, tasks: Sequence[Task], budget_s: float | None
    ) -> tuple[list[Record], list[str], bool]:
        """The records, the names of the studies, and False if Ctrl-C ended it."""
        deadline = None if budget_s is None else time.monotonic() + budget_s
        records: list[Record] = []
        names: list[str] = []
        for number, task in enumerate(tasks):
            share = None
            if deadline is not None:
                share = max(deadline - time.monotonic(), 0.0) / (len(tasks) - number)
            legal, studies = self._open(task, number, len(tasks))
            names += [study.name for study in studies]
            self.on_event(PhaseChanged(task.problem, "search"))
            finished = self._search(task, studies, share)
            self.on_event(PhaseChanged(task.problem, "finish"))
            found = [
                record
                for shape, study in zip(task.shapes, studies, strict=True)
                if (record := self._finish(task.problem, shape, study, legal))
            ]
            save_records(self.out, found)
            for record in found:
                self.on_event(RecordSaved(record, self.out))
            records += found
            if not finished:
                return records, names, False
        return records, names, True

    def _open(self, task: Task, number: int, total: int) -> tuple[LegalSet, list[Study]]:
        problem, device = task.problem, self.report.device
        template = _template(self.template, problem, device)
        legal = LegalSet(problem, device, template, fixed=self.fixed)
        known = _known_configs(problem, template, device, self.out)
        studies = [
            Study(
                study_name(device, problem, shape, template),
                legal,
                sampler=self.sampler,
                seed=self.seed + index,
                seeds=[
                    default_config(problem, device, template),
                    *known,
                    *published_configs(template, problem, device),
                    *model_picks(legal, shape, self.trials // TRIALS_PER_PICK, self.seed),
                ],
                storage=self.storage,
                resume=self.resume,
                about={"shape": shape.model_dump(), "device": device.model_dump()},
            )
            for index, shape in enumerate(task.shapes)
        ]
        resumed = max(study.resumed for study in studies)
        self.on_event(TaskStarted(task, number + 1, total, template, device, len(legal), resumed))
        return legal, studies

    def _search(self, task: Task, studies: list[Study], budget_s: float | None) -> bool:
        twins: dict[tuple[Any, ...], str] = {}
        for tried in studies[0].measured:
            if isinstance(tried.outcome, Measured):
                twins[_twin_key(tried.outcome.cubin, tried.config, task.problem)] = str(
                    tried.config
                )

        def evaluate(configs: Iterator[AnyConfig]) -> Results:
            jobs = ((task.problem, config, self.report.device.arch) for config in configs)
            with closing(_compiled(jobs, self.processes)) as answers:
                for config, compiled in answers:
                    yield config, self._judge(task, config, compiled, twins)

        def on_outcome(study: Study, tried: Tried) -> None:
            self.on_event(
                TrialDone(
                    problem=task.problem,
                    shape=task.shapes[studies.index(study)],
                    tried=tried,
                    best=study.best,
                    is_best=study.best is tried,
                    done=study.done,
                    trials=min(self.trials, len(study.legal)),
                    rejections=study.rejections,
                )
            )

        return search(
            studies, evaluate, trials=self.trials, budget_s=budget_s, on_outcome=on_outcome
        )

    def _judge(
        self,
        task: Task,
        config: AnyConfig,
        compiled: Compiled | CompileError,
        twins: dict[tuple[Any, ...], str],
    ) -> list[Outcome]:
        """The outcome for each shape; a kernel that fails on one of them fails on all."""
        rejected: Rejected | None = None
        if isinstance(compiled, CompileError):
            rejected = Rejected(kind="compile", reason=str(compiled))
        elif bad := compiled.resources.why_bad():
            rejected = Rejected(kind="resources", reason=bad)
        else:
            key = _twin_key(digest(compiled.cubin), config, task.problem)
            twin = twins.setdefault(key, str(config))
            if twin != str(config):
                rejected = Rejected(kind="duplicate", reason=f"the same cubin as {twin}")
        outcomes: list[Outcome] = []
        for shape in task.shapes:
            if rejected is None:
                assert isinstance(compiled, Compiled)
                outcome = self.worker.evaluate(compiled, task.problem, config, shape)
                if isinstance(outcome, Measured):
                    outcomes.append(outcome)
                    continue
                rejected = outcome
            break
        return outcomes if rejected is None else [rejected] * len(task.shapes)

    def _finish(
        self, problem: Problem, shape: Shape, study: Study, legal: LegalSet
    ) -> Record | None:
        """Times the finalists side by side; the fastest is the record."""
        device = self.report.device
        ranked = sorted(study.measured, key=lambda tried: tried.time_us)
        if not ranked:
            rejections = ", ".join(f"{n} {kind}" for kind, n in study.rejections.items())
            self.on_event(Notice(f"{problem}, {shape}: nothing was measured ({rejections})."))
            return None
        default = default_config(problem, device, legal.template)
        must = [default, *_incumbents(problem, shape, device, self.out)]
        measured = [tried.config for tried in ranked]
        finalists = list(
            dict.fromkeys(
                [*measured[:FINALISTS], *(config for config in must if config in measured)]
            )
        )
        kernels = {c: compile_kernel(problem, c, device.arch) for c in finalists}
        candidates = [(compiled, config) for config, compiled in kernels.items()]
        try:
            times = self.worker.compare(candidates, problem, shape)
        except DeviceError as error:
            self.on_event(Notice(f"{problem}, {shape}: no record, since the finalists: {error}."))
            return None
        medians = {name: median_and_spread(values) for name, values in times.items()}
        winner = min(finalists, key=lambda config: medians[str(config)][0])
        won, spread = medians[str(winner)]

        def speedup_over(name: str) -> float | None:
            return medians[name][0] / won if name in medians else None

        outcome = ranked[measured.index(winner)].outcome
        assert isinstance(outcome, Measured)
        kernel = kernels[winner]
        return Record(
            problem=problem,
            shape=shape,
            device=Card.of(device),
            config=winner,
            result=Result(
                kind="measured",
                median_us=won,
                spread=spread,
                tflops=shape.tflops(problem, won),
                trials=len(ranked),
                speedup_over_default=speedup_over(str(default)),
                speedup_over_torch=speedup_over(TORCH),
                policy=outcome.policy,
            ),
            provenance=Provenance.of(
                kernel.source, kernel.cubin, nvrtc=kernel.nvrtc, driver=self.report.driver
            ),
        )


def _twin_key(cubin: str, config: AnyConfig, problem: Problem) -> tuple[Any, ...]:
    """What makes two candidates one: the code, and all that the launch takes from the config."""
    persistent = isinstance(config, Sm90Forward) and config.persistent
    return (
        cubin,
        config.block_m,
        config.block_n,
        config.threads,
        config.smem_bytes(problem),
        config.min_blocks_per_sm if persistent else 0,
    )


def _compiled(
    jobs: Iterator[tuple[Problem, AnyConfig, Architecture]], processes: int | None
) -> Generator[tuple[AnyConfig, Compiled | CompileError], None, None]:
    """Compiles ahead, in processes that end with the iteration."""
    count = processes or max(1, len(os.sched_getaffinity(0)) - 1)
    answers = in_processes(
        compile_kernel, jobs, processes=count, timeout=COMPILE_SECONDS, failure=CompileError
    )
    for (_, config, _), compiled in answers:
        yield config, compiled


# ---- what is known before the first trial ----


def _records(device: Device, out: Path) -> list[Record]:
    """Every record of the architecture, those of the file to be written first."""
    stores = [*([Store(out)] if out.exists() else []), Store.open()]
    return [record for store in stores for record in store.records(device.arch.name)]


def _known_configs(problem: Problem, template: str, device: Device, out: Path) -> list[AnyConfig]:
    """Configs on record for problems of this head dim, the most alike first."""
    alike = [
        record
        for record in _records(device, out)
        if record.config.template == template and record.problem.head_dim == problem.head_dim
    ]
    alike.sort(
        key=lambda record: (
            record.device.key != device.key,
            not record.measured,
            record.problem.causal != problem.causal,
            record.problem.dtype != problem.dtype,
        )
    )
    return list(dict.fromkeys(record.config for record in alike))[:KNOWN_SEEDS]


def _incumbents(problem: Problem, shape: Shape, device: Device, out: Path) -> list[AnyConfig]:
    """What is on record for this very device, problem and bucket."""
    key = (device.key, problem, shape.bucket())
    return [record.config for record in _records(device, out) if record.key == key]


def ranked_by_model(legal: LegalSet, shape: Shape, seed: int) -> list[tuple[float, AnyConfig]]:
    """A sample of the legal set, or all of it if small, with predicted times, fastest first."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(legal))[:MODEL_SAMPLE]
    configs = [legal.config(int(row)) for row in rows]
    ranked = [
        (model.predict(legal.problem, shape, config, legal.device), config) for config in configs
    ]
    return sorted(ranked, key=lambda pair: pair[0])


def model_picks(legal: LegalSet, shape: Shape, count: int, seed: int) -> list[AnyConfig]:
    """The configs that the static model finds best, few of each tile."""
    tiles: Counter[tuple[int, int]] = Counter()
    picks: list[AnyConfig] = []
    for _, config in ranked_by_model(legal, shape, seed) if count > 0 else ():
        tiles[config.block_m, config.block_n] += 1
        if tiles[config.block_m, config.block_n] <= PICKS_PER_TILE:
            picks.append(config)
        if len(picks) == count:
            break
    return picks


# ---- without a device ----


@dataclass
class _Prediction:
    """One run where nothing can be measured; the fields are arguments of `tune`."""

    device: Device
    template: str | None
    fixed: dict[str, Any] | None
    seed: int
    out: Path
    processes: int | None
    on_event: OnEvent

    def run(self, tasks: Sequence[Task]) -> TuneResult:
        records: list[Record] = []
        interrupted = False
        try:
            for number, task in enumerate(tasks):
                template = _template(self.template, task.problem, self.device)
                legal = LegalSet(task.problem, self.device, template, fixed=self.fixed)
                self.on_event(
                    TaskStarted(task, number + 1, len(tasks), template, self.device, len(legal), 0)
                )
                for shape in task.shapes:
                    record = self._predict(legal, shape)
                    save_records(self.out, [record])
                    self.on_event(RecordSaved(record, self.out))
                    records.append(record)
        except KeyboardInterrupt:
            interrupted = True
        return TuneResult(
            tuple(records), self.out, self.device, measured=False, interrupted=interrupted
        )

    def _predict(self, legal: LegalSet, shape: Shape) -> Record:
        """The best prediction among those that compile well, the default included."""
        problem, device = legal.problem, legal.device
        default = default_config(problem, device, legal.template)
        ranked = ranked_by_model(legal, shape, self.seed)
        finalists = dict.fromkeys([default, *(c for _, c in ranked[:PREDICTED_FINALISTS])])
        jobs = ((problem, config, device.arch) for config in finalists)
        times: dict[AnyConfig, float] = {}
        kernels: dict[AnyConfig, Compiled] = {}
        for config, compiled in _compiled(jobs, self.processes):
            if isinstance(compiled, CompileError):
                if config == default:
                    raise compiled
                continue
            kernels[config] = compiled
            if config == default or compiled.resources.why_bad() is None:
                times[config] = model.predict(problem, shape, config, device, compiled.resources)
        # The default wins a tie; the order of arrival decides nothing.
        winner = min(times, key=lambda config: (times[config], config != default, str(config)))
        kernel, won = kernels[winner], times[winner]
        return Record(
            problem=problem,
            shape=shape,
            device=Card.of(device),
            config=winner,
            result=Result(
                kind="predicted",
                median_us=won,
                tflops=shape.tflops(problem, won),
                trials=len(ranked),
                speedup_over_default=times[default] / won,
                policy="model",
            ),
            provenance=Provenance.of(kernel.source, kernel.cubin, nvrtc=kernel.nvrtc),
        )
