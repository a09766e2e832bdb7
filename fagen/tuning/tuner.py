"""problems -> records: for each problem and class of shapes, the fastest config that is right.

With a device of the architecture: candidates are compiled ahead in processes, filtered by what
the compiler says, verified and timed by the worker on every shape of the problem (the text of a
kernel does not depend on lengths, so one compilation and one verdict serve all), and the best
are timed again side by side with the template's default. Without one: the static model ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fagen.build.compile import compile_kernel
from fagen.build.compiled import Compiled
from fagen.device import Architecture, Device, typical_device
from fagen.errors import ArgumentError, CompileError, DeviceError, UnsupportedError
from fagen.kernels.registry import AnyConfig, default_config, template_of, templates_for
from fagen.kernels.space import seeds, why_illegal
from fagen.problem import Problem, Shape
from fagen.records.store import Record, check_can_save, digest, save_records, user_overlay_path
from fagen.tuning.blocklist import Blocklist, Guard, blocklist_path
from fagen.tuning.candidates import compiled_ahead, incumbents, known_configs, model_picks
from fagen.tuning.cards import Cards
from fagen.tuning.events import (
    ModelJudged,
    Notice,
    OnEvent,
    PhaseChanged,
    RecordSaved,
    TaskDone,
    TaskStarted,
    TrialDone,
    one_at_a_time,
)
from fagen.tuning.finals import crown
from fagen.tuning.objective import baseline_us, evaluate_shapes, predicted
from fagen.tuning.outcome import Measured, Outcome, Rejected, Tried
from fagen.tuning.prediction import Prediction
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.loop import SAMPLERS, Results, Study, search
from fagen.tuning.search.studies import close_storage, default_storage, open_storage, study_name
from fagen.tuning.tasks import Task, companions
from fagen.tuning.worker import DeviceReport, Worker

TRIALS = {"quick": 60, "full": 100}  # by effort
TRIALS_PER_PICK = 8  # of so many trials, one is a pick of the static model, tried first
MAX_SHAPE_BYTES = 1 << 40

# For `estimate_seconds`: on an H200 and 16 cores.
TASK_SECONDS = 6.0  # enumeration, start of the compile processes
CANDIDATE_SECONDS = 0.08  # loading and verifying
TIMING_SECONDS = 0.045  # of a candidate on a shape
FINALS_SECONDS = 1.8  # of a record's final comparison
PREDICTED_SHAPE_SECONDS = 4.0


def estimate_seconds(
    tasks: Sequence[Task],
    trials: int | None = None,
    *,
    effort: str = "full",
    measured: bool = True,
) -> float:
    """Roughly how long `tune` takes, in seconds."""
    trials = trials or TRIALS[effort]
    effort = effort if measured else "quick"
    records = sum(len(task.shapes) for task in tasks)
    shapes = sum(len(_timed_on(shape, effort)) for task in tasks for shape in task.shapes)
    if not measured:
        return PREDICTED_SHAPE_SECONDS * shapes
    search = (CANDIDATE_SECONDS * len(tasks) + TIMING_SECONDS * shapes) * trials
    return TASK_SECONDS * len(tasks) + search + FINALS_SECONDS * records


def _timed_on(shape: Shape, effort: str) -> tuple[Shape, ...]:
    """The shapes that stand for a bucket, the one that its record names first."""
    return (shape, *companions(shape)) if effort == "full" else (shape,)


# ---- the result ----


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


# ---- the verb ----


def tune(
    tasks: Sequence[Task],
    *,
    arch: Architecture | None = None,
    devices: Sequence[int] = (0,),
    template: str | None = None,
    fixed: dict[str, Any] | None = None,
    effort: str = "full",
    trials: int | None = None,
    budget_s: float | None = None,
    sampler: str = "surrogate",
    seed: int = 0,
    storage: str | Path | None = None,
    resume: bool = False,
    out: str | Path | None = None,
    processes: int | None = None,
    compile_only: bool = False,
    on_event: OnEvent = lambda event: None,
    workers: Sequence[Worker] = (),
) -> TuneResult:
    """Finds a config for each shape of each task, and saves it.

    Args:
        arch: the architecture to tune for; that of the device if None. Where the first of
            `devices` is another one, or there is none, records are predicted.
        devices: the GPUs to measure on, as CUDA counts: equal ones, which share the candidates.
        template: the template to search; the architecture's native one that fits, if None.
        fixed: axes held at one value, or at the values of a tuple.
        effort: "full" times each candidate on a ragged shape, too, beside each shape of a task;
            "quick" does not, and tries fewer.
        trials: configs per shape that reach the GPU, those of resumed runs included; what
            `TRIALS` says of the effort if None.
        budget_s: seconds for all tasks together; each gets its share.
        sampler: one of `search.SAMPLERS`.
        storage: a database URL or a journal file of studies; `default_storage` if None.
        resume: go on with the studies of an earlier run.
        out: the YAML file to write; the user's overlay if None.
        processes: that compile; one per available CPU but one, if None.
        compile_only: compile for those that measure on other hosts, with the same `storage` and
            FAGEN_CACHE, on the typical card of `arch`. What is rejected unmeasured is kept.
        workers: that evaluate, instead of one for each of `devices`.

    Where records are predicted, the arguments about trials and studies mean nothing.

    Raises:
        ArgumentError: for a value that is not allowed, devices that differ, and what no trial
            could answer.
        DeviceError: if there is no device and `arch` is None.
        FagenError: what concerns every candidate (a damaged file, a missing package). A
            candidate that fails is a trial that failed.
    """
    check_options(
        devices=devices,
        effort=effort,
        trials=trials,
        budget_s=budget_s,
        sampler=sampler,
        processes=processes,
    )
    on_event = one_at_a_time(on_event)
    with Cards(workers or [Worker(index) for index in devices]) as cards:
        report: DeviceReport | None
        if compile_only:
            if arch is None or storage is None or not resume:
                raise ArgumentError(
                    "to compile only is to join a search: name its arch and storage, and resume it"
                )
            report = DeviceReport(device=typical_device(arch), driver="")
            on_event(
                Notice(
                    "Only compiled here: this goes on until hosts that measure, with the same "
                    "storage, have all they want, or until Ctrl-C or the budget ends it."
                )
            )
        else:
            report = _report(cards, arch, on_event)
        if report is not None:
            device = report.device
        else:
            assert arch is not None, "without a device, an architecture was asked for"
            device = typical_device(arch)
        path = user_overlay_path(device.arch.name) if out is None else Path(out).expanduser()
        _check(tasks, template, device)
        if not compile_only:
            check_can_save(path)
        if report is None:
            prediction = Prediction(device, template, fixed, seed, path, processes, on_event)
            records, finished = prediction.run(tasks, budget_s)
            return TuneResult(
                tuple(records), path, device, measured=False, interrupted=not finished
            )
        where = storage if storage is not None else default_storage(device)
        kept = open_storage(where)
        blocklist = Blocklist(blocklist_path(where, device), device.key, on_event)
        tuning = _Tuning(
            cards=cards,
            compile_only=compile_only,
            report=report,
            template=template,
            fixed=fixed,
            effort=effort,
            trials=trials or TRIALS[effort],
            sampler=sampler,
            seed=seed,
            storage=kept,
            resume=resume,
            out=path,
            processes=processes,
            on_event=on_event,
            guards={worker: Guard(worker, blocklist) for worker in cards},
        )
        try:
            records, studies, finished = tuning.run(tasks, budget_s)
        finally:
            close_storage(kept)
    return TuneResult(
        records=tuple(records),
        path=path,
        device=device,
        measured=True,
        storage=str(where),
        studies=tuple(studies),
        interrupted=not finished,
    )


def check_options(
    *,
    devices: Sequence[int] = (0,),
    effort: str = "full",
    trials: int | None = None,
    budget_s: float | None = None,
    sampler: str = "surrogate",
    processes: int | None = None,
) -> None:
    """Refuses values of `tune` that are not allowed, with an ArgumentError."""
    if not devices or not all(isinstance(index, int) and index >= 0 for index in devices):
        raise ArgumentError(f"devices {devices!r}: give the numbers of one or more, as (0,)")
    if effort not in TRIALS:
        raise ArgumentError(f"effort {effort!r}: allowed are {', '.join(TRIALS)}")
    if sampler not in SAMPLERS:
        raise ArgumentError(f"sampler {sampler!r}: allowed are {', '.join(SAMPLERS)}")
    numbers = {"trials": trials, "budget_s": budget_s, "processes": processes}
    for name, value in numbers.items():
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise ArgumentError(f"{name} is {value!r}: give a number above 0, or leave it out")


def _check(tasks: Sequence[Task], template: str | None, device: Device) -> None:
    """Refuses what no trial could answer."""
    if not tasks:
        raise ArgumentError("there is nothing to tune: name at least one problem")
    allowed = {t.NAME for task in tasks for t in templates_for(task.problem.op, device.arch)}
    if template is not None and template not in allowed:
        raise ArgumentError(
            f"template {template} does not run on {device.arch.name}: allowed are "
            f"{', '.join(sorted(allowed, reverse=True))}"
        )
    for task in tasks:
        fitting = template or default_config(task.problem, device).template
        default = default_config(task.problem, device, fitting)
        if broken := why_illegal(default, task.problem, device):
            raise UnsupportedError(
                f"{task.problem} has no legal config of {fitting}: {broken}. Name no template, "
                "and each problem gets the one that fits"
            )
        for shape in task.shapes:
            if shape.flops(task.problem) == 0:
                raise ArgumentError(
                    f"{task.problem}, {shape}: nothing to compute: name lengths > 0"
                )
            size = shape.bytes(task.problem)
            if size > MAX_SHAPE_BYTES:
                raise UnsupportedError(
                    f"{task.problem}, {shape}: its tensors take {size / 1e9:,.0f} GB, more than "
                    "any card has. Take a smaller batch or length"
                )


def _report(cards: Cards, arch: Architecture | None, on_event: OnEvent) -> DeviceReport | None:
    """The device to measure on, or None where only prediction is left."""
    try:
        report = cards.describe()
    except (DeviceError, UnsupportedError) as error:
        if arch is None:
            raise DeviceError(
                f"{error}. To predict configs without a device, name an architecture, as sm90"
            ) from None
        why = str(error)
    else:
        if arch is None or arch == report.device.arch:
            return report
        why = f"GPU {cards.first.device_index} is {report.device}"
    on_event(
        Notice(
            f"Nothing will be measured: {why}. The configs for {arch.name} are chosen by "
            f"the static model, for {typical_device(arch).name}, and marked as predicted."
        )
    )
    return None


# ---- with a device ----


@dataclass
class _Tuning:
    """One run on a device; the fields are the arguments of `tune`."""

    cards: Cards
    compile_only: bool
    report: DeviceReport
    template: str | None
    fixed: dict[str, Any] | None
    effort: str
    trials: int
    sampler: str
    seed: int
    storage: Any
    resume: bool
    out: Path
    processes: int | None
    on_event: OnEvent
    guards: Mapping[Worker, Guard]
    outcomes: dict[tuple[Guard, Problem, AnyConfig, Shape], Outcome] = field(default_factory=dict)

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
            start = time.monotonic()
            legal, studies = self._open(task, number, len(tasks))
            names += [study.name for study in studies]
            self.on_event(PhaseChanged(task.problem, "search"))
            opened, busy_s = time.monotonic(), self.cards.busy_s
            finished = self._search(task, studies, share)
            searched, busy_s = time.monotonic(), self.cards.busy_s - busy_s
            if self.compile_only:
                if not finished:
                    return records, names, False
                continue
            busy = busy_s / max(searched - opened, 1e-9)
            for shape, study in zip(task.shapes, studies, strict=True):
                judged = study.judge_model()
                self.on_event(ModelJudged(task.problem, shape, *judged, len(study.measured)))
            self.on_event(PhaseChanged(task.problem, "finish", gpu_busy=busy))
            found = [
                record
                for shape, study in zip(task.shapes, studies, strict=True)
                if (record := self._crown(task.problem, shape, study, legal.template))
            ]
            save_records(self.out, found)
            for record in found:
                self.on_event(RecordSaved(record, self.out))
            seconds = {
                "enumerate": opened - start,
                "compile wait": searched - opened - busy_s,
                "gpu": busy_s,
                "finals": time.monotonic() - searched,
            }
            self.on_event(TaskDone(task.problem, seconds))
            records += found
            if not finished:
                return records, names, False
        return records, names, True

    def _open(self, task: Task, number: int, total: int) -> tuple[LegalSet, list[Study]]:
        problem, device = task.problem, self.report.device
        template = self.template or default_config(problem, device).template
        legal = LegalSet(problem, device, template, fixed=self.fixed)
        default = default_config(problem, device, template)
        known = known_configs(problem, task.shapes, template, device, self.out)
        studies = [
            Study(
                study_name(device, problem, shape, template),
                legal,
                sampler=self.sampler,
                seed=self.seed + index,
                seeds=[
                    default,
                    *known,
                    *seeds(template, problem, device),
                    *model_picks(legal, shape, self.trials // TRIALS_PER_PICK, self.seed),
                ],
                predict=predicted(problem, _timed_on(shape, self.effort), default, device),
                storage=self.storage,
                resume=self.resume,
                measures=not self.compile_only,
                about={}  # the very card is known to those that measure
                if self.compile_only
                else {
                    "shape": shape.model_dump(),
                    "ragged_shapes": [
                        ragged.model_dump() for ragged in _timed_on(shape, self.effort)[1:]
                    ],
                    "device": device.model_dump(),
                },
            )
            for index, shape in enumerate(task.shapes)
        ]
        resumed = max(study.resumed for study in studies)
        self.on_event(
            TaskStarted(
                task,
                number + 1,
                total,
                template,
                device,
                legal.points,
                legal.removed,
                len(legal),
                resumed,
            )
        )
        return legal, studies

    def _search(self, task: Task, studies: list[Study], budget_s: float | None) -> bool:
        twins: dict[tuple[Any, ...], str] = {}
        for tried in studies[0].measured:
            if isinstance(tried.outcome, Measured):
                twins[_twin_key(tried.outcome.cubin, tried.config, task, self.report.device)] = str(
                    tried.config
                )

        baselines: dict[Guard, Mapping[Shape, float]] = {}

        def evaluate(configs: Iterator[AnyConfig]) -> Results:
            jobs = ((task.problem, config, self.report.device.arch) for config in configs)
            with closing(compiled_ahead(jobs, self.processes)) as answers:
                if self.compile_only:
                    yield from offered(answers)
                    return
                with closing(self.cards.each(answers, judge)) as judged:
                    for outcomes in judged:
                        yield from outcomes

        def offered(answers: Iterable[tuple[AnyConfig, Compiled | CompileError]]) -> Results:
            for config, compiled in answers:
                if rejected := _reject_unmeasured(
                    task, self.report.device, config, compiled, twins
                ):
                    yield config, [rejected] * len(studies)
                for study in studies:
                    if study.is_pending(config):
                        study.offer(config)

        def judge(
            worker: Worker, answer: tuple[AnyConfig, Compiled | CompileError]
        ) -> list[tuple[AnyConfig, Sequence[Outcome]]]:
            guard = self.guards[worker]
            if guard not in baselines:
                baselines[guard] = self._baseline(guard, task, studies[0].legal.template)
            outcomes = self._judge(guard, task, *answer, twins, studies, baselines[guard])
            withdrawn = [(c, [why] * len(studies)) for c, why in guard.withdrawn(task.problem)]
            return [*withdrawn, (answer[0], outcomes)]

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

    def _baseline(self, guard: Guard, task: Task, template: str) -> dict[Shape, float]:
        """What times are compared with: those of the default, by this worker, today."""
        problem, device = task.problem, self.report.device
        default = default_config(problem, device, template)
        shapes = [each for shape in task.shapes for each in _timed_on(shape, self.effort)]
        outcomes: dict[Shape, Outcome] = {}
        with suppress(CompileError):
            compiled = compile_kernel(problem, default, device.arch)
            for shape in shapes if compiled.resources.why_bad() is None else ():
                outcomes[shape] = self._evaluate(guard, compiled, problem, default, shape)
                if isinstance(outcomes[shape], Rejected):
                    break
        return baseline_us(outcomes, shapes, problem, default, device)

    def _evaluate(
        self,
        guard: Guard,
        compiled: Compiled,
        problem: Problem,
        config: AnyConfig,
        shape: Shape,
        give_up_us: float = math.inf,
    ) -> Outcome:
        """What the worker says, once: the default is the baseline first, and a candidate later."""
        key = guard, problem, config, shape
        if key not in self.outcomes:
            self.outcomes[key] = guard.evaluate(
                compiled, problem, config, shape, give_up_us=give_up_us
            )
        return self.outcomes[key]

    def _judge(
        self,
        guard: Guard,
        task: Task,
        config: AnyConfig,
        compiled: Compiled | CompileError,
        twins: dict[tuple[Any, ...], str],
        studies: Sequence[Study],
        baseline: Mapping[Shape, float],
    ) -> list[Outcome]:
        """The outcome for each shape; a kernel that fails on one of them fails on all."""
        if rejected := _reject_unmeasured(task, self.report.device, config, compiled, twins):
            return [rejected] * len(task.shapes)
        assert isinstance(compiled, Compiled)
        outcomes: list[Outcome] = []
        for shape, study in zip(task.shapes, studies, strict=True):
            outcome = evaluate_shapes(
                _timed_on(shape, self.effort),
                baseline,
                partial(self._evaluate, guard, compiled, task.problem, config),
                best=study.best.objective if study.best else math.inf,
            )
            if isinstance(outcome, Rejected):
                return [outcome] * len(task.shapes)
            outcomes.append(outcome)
        return outcomes

    def _crown(self, problem: Problem, shape: Shape, study: Study, template: str) -> Record | None:
        device = self.report.device
        first = self.cards.first
        return crown(
            first,
            self.guards[first],
            self.report,
            problem,
            _timed_on(shape, self.effort),
            study.tried,
            default=default_config(problem, device, template),
            incumbents=incumbents(problem, shape, device, self.out),
            on_event=self.on_event,
            withdraw=study.tell,
        )


def _reject_unmeasured(
    task: Task,
    device: Device,
    config: AnyConfig,
    compiled: Compiled | CompileError,
    twins: dict[tuple[Any, ...], str],
) -> Rejected | None:
    """Why a candidate need not be measured, if so. `twins` are the first of their cubins."""
    if isinstance(compiled, CompileError):
        return Rejected(kind="compile", reason=str(compiled))
    if bad := compiled.resources.why_bad():
        return Rejected(kind="resources", reason=bad)
    twin = twins.setdefault(_twin_key(digest(compiled.cubin), config, task, device), str(config))
    if twin != str(config):
        return Rejected(kind="duplicate", reason=f"the same cubin as {twin}")
    return None


def _twin_key(cubin: str, config: AnyConfig, task: Task, device: Device) -> tuple[Any, ...]:
    """What makes two candidates one: the code, and what is launched for each shape."""
    problem = task.problem
    strides = tuple((0,) * (len(o.dims) - 1) for o in problem.operation.strided)
    plan = template_of(config).plan
    return (cubin, *(plan(problem, config, shape, strides, device) for shape in task.shapes))
