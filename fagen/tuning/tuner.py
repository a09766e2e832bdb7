"""problems -> records: for each problem and class of shapes, the fastest config that is right.

With a device of the architecture: candidates are compiled ahead in processes, filtered by what
the compiler says, verified and timed by the workers on every shape of the problem (the text of a
kernel does not depend on lengths, so one compilation and one verdict serve all), and the best
are timed again side by side with the template's default. Without one: the static model ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optuna.storages import BaseStorage

from fagen.build.processes import ProcessPool
from fagen.device import Architecture, Device, typical_device
from fagen.errors import ArgumentError, DeviceError, UnsupportedError
from fagen.kernels.registry import TEMPLATES, default_config, templates_for
from fagen.kernels.space import seeds, why_illegal
from fagen.records.store import TunedConfig, check_can_save, save_records, user_overlay_path
from fagen.tuning.blocklist import Blocklist, blocklist_path
from fagen.tuning.candidates import incumbents, known_configs, model_picks
from fagen.tuning.clock import Budget, Phases
from fagen.tuning.compile_only import fill_cache
from fagen.tuning.evaluation import Evaluation
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
from fagen.tuning.finals import FinalComparison
from fagen.tuning.objective import predicted
from fagen.tuning.options import TRIALS, Effort, TuneOptions
from fagen.tuning.outcome import Trial
from fagen.tuning.pipeline import Pipeline, compile_processes
from fagen.tuning.prediction import predict_records
from fagen.tuning.runner import Runner
from fagen.tuning.search.joint import JointSearch
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.storage import close_storage, default_storage, open_storage, study_name
from fagen.tuning.search.study import Study
from fagen.tuning.tasks import Task, timed_shapes
from fagen.tuning.worker import Worker
from fagen.tuning.worker_child import DeviceReport
from fagen.tuning.workers import WorkerPool

TRIALS_PER_PICK = 8  # one in this many trials is a pick of the static model, tried first
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
    effort: Effort = "full",
    measured: bool = True,
) -> float:
    """Roughly how long `tune` takes, in seconds."""
    trials = trials or TRIALS[effort]
    effort = effort if measured else "quick"
    records = sum(len(task.shapes) for task in tasks)
    shapes = sum(len(timed_shapes(shape, effort)) for task in tasks for shape in task.shapes)
    if not measured:
        return PREDICTED_SHAPE_SECONDS * shapes
    search = (CANDIDATE_SECONDS * len(tasks) + TIMING_SECONDS * shapes) * trials
    return TASK_SECONDS * len(tasks) + search + FINALS_SECONDS * records


@dataclass(frozen=True)
class TuneResult:
    """What a tuning found.

    Attributes:
        records: the answers, all of them saved.
        path: the file that they are in.
        device: what was measured on, or predicted or compiled for.
        measured: whether there was such a device.
        storage: where the studies are; "" where nothing was measured.
        studies: their names.
        interrupted: Ctrl-C ended it; `resume=True` goes on.
    """

    records: tuple[TunedConfig, ...]
    path: Path
    device: Device
    measured: bool
    storage: str = ""
    studies: tuple[str, ...] = ()
    interrupted: bool = False


# ---- the verb ----


def tune(
    tasks: Sequence[Task],
    options: TuneOptions,
    *,
    on_event: OnEvent = lambda event: None,
    workers: Sequence[Worker] = (),
) -> TuneResult:
    """Finds a config for each shape of each task, and saves it.

    Args:
        on_event: called with what happens meanwhile.
        workers: that evaluate, instead of one for each of `options.devices`.

    Raises:
        ArgumentError: for devices that differ, and for what no trial could answer.
        DeviceError: if there is no device and `options.arch` is None.
        FagenError: what concerns every candidate (a damaged file, a missing package). A
            candidate that fails is a trial that failed.
    """
    on_event = one_at_a_time(on_event)
    if options.compile_only:
        return _compile_only(tasks, options, on_event)
    pool = WorkerPool(workers or [Worker(index) for index in options.devices])
    with pool, compile_processes(options.processes) as compilers:
        report, device = _device(pool, options.arch, on_event)
        path = _path(options, device)
        _check(tasks, options.template, device)
        check_can_save(path)
        if report is None:
            records, finished = predict_records(tasks, options, device, path, on_event)
            return TuneResult(
                tuple(records), path, device, measured=False, interrupted=not finished
            )
        storage = options.storage if options.storage is not None else default_storage(device)
        blocklist = Blocklist(blocklist_path(storage, device), device.key, on_event)
        runners = {worker: Runner(worker, blocklist) for worker in pool}
        kept = open_storage(storage)
        try:
            tuning = _Tuning(options, report, pool, runners, compilers, kept, path, on_event)
            return tuning.run(tasks, str(storage))
        finally:
            close_storage(kept)


def _compile_only(tasks: Sequence[Task], options: TuneOptions, on_event: OnEvent) -> TuneResult:
    if options.arch is None:
        raise ArgumentError("to compile only, name the architecture to compile for, such as sm90")
    device = typical_device(options.arch)
    _check(tasks, options.template, device)
    on_event(
        Notice(
            "Only compiled here: what those that tune with the same FAGEN_CACHE are likely to try."
        )
    )
    finished = fill_cache(tasks, options, device, on_event)
    path = _path(options, device)
    return TuneResult((), path, device, measured=False, interrupted=not finished)


def _path(options: TuneOptions, device: Device) -> Path:
    """The file that records go to."""
    if options.out is None:
        return user_overlay_path(device.arch.name)
    return Path(options.out).expanduser()


def _check(tasks: Sequence[Task], template: str | None, device: Device) -> None:
    """Refuses what no trial could answer."""
    if not tasks:
        raise ArgumentError("there is nothing to tune: name at least one problem")
    allowed = {t.NAME for task in tasks for t in templates_for(task.problem.op, device.arch)}
    if template is not None and template not in allowed:
        raise ArgumentError(
            f"template {template} does not run on {device.arch.name}: allowed are "
            f"{', '.join(sorted(allowed))}"
        )
    for task in tasks:
        default = default_config(task.problem, device, template)
        if broken := why_illegal(default, task.problem, device):
            raise UnsupportedError(
                f"{task.problem} has no legal config of {default.template}: {broken}. "
                "Name no template, and each problem gets the one that fits"
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


def _device(
    pool: WorkerPool, arch: Architecture | None, on_event: OnEvent
) -> tuple[DeviceReport | None, Device]:
    """The device to measure on with its report, or one to predict for, with None."""
    try:
        report = pool.describe()
    except (DeviceError, UnsupportedError) as error:
        if arch is None:
            raise DeviceError(
                f"{error}. To predict configs without a device, name an architecture, such as sm90"
            ) from None
        why = str(error)
    else:
        if arch is None or arch == report.device.arch:
            return report, report.device
        why = f"GPU {pool.first.device_index} is {report.device}"
    typical = typical_device(arch)
    on_event(
        Notice(
            f"Nothing will be measured: {why}. The configs for {arch.name} are chosen by "
            f"the static model, for {typical.name}, and marked as predicted."
        )
    )
    return None, typical


# ---- with a device ----


@dataclass(frozen=True)
class _Tuning:
    """One run on a device."""

    options: TuneOptions
    report: DeviceReport
    workers: WorkerPool
    runners: dict[Worker, Runner]
    compilers: ProcessPool
    storage: BaseStorage
    out: Path
    on_event: OnEvent

    def run(self, tasks: Sequence[Task], storage: str) -> TuneResult:
        """Tunes one task after the other, until Ctrl-C."""
        budget = Budget(self.options.budget_s)
        records: list[TunedConfig] = []
        names: list[str] = []
        interrupted = False
        for number, task in enumerate(tasks):
            phases = Phases()
            share_s = budget.share(len(tasks) - number)
            legal, studies = self._open(task)
            names += [study.name for study in studies]
            resumed = max(study.resumed for study in studies)
            self.on_event(TaskStarted.of(task, legal, number + 1, len(tasks), resumed=resumed))
            self.on_event(PhaseChanged(task.problem, "search"))
            phases.end("enumerate")
            busy_s = self.workers.busy_s
            interrupted = not self._search(task, legal, studies, share_s)
            busy_s = self.workers.busy_s - busy_s
            searched_s = phases.end("search")
            for shape, study in zip(task.shapes, studies, strict=True):
                judged = study.judge_model()
                self.on_event(ModelJudged(task.problem, shape, *judged, len(study.measured)))
            busy = busy_s / max(searched_s, 1e-9)
            self.on_event(PhaseChanged(task.problem, "finish", gpu_busy=busy))
            records += self._finish(task, legal, studies)
            phases.end("finals")
            seconds = {
                "enumerate": phases.seconds["enumerate"],
                "compile wait": searched_s - busy_s,
                "gpu": busy_s,
                "finals": phases.seconds["finals"],
            }
            self.on_event(TaskDone(task.problem, seconds))
            if interrupted:
                break
        return TuneResult(
            records=tuple(records),
            path=self.out,
            device=self.report.device,
            measured=True,
            storage=storage,
            studies=tuple(names),
            interrupted=interrupted,
        )

    def _open(self, task: Task) -> tuple[LegalSet, list[Study]]:
        """The legal set of a task, and a study for each of its shapes."""
        problem, device, options = task.problem, self.report.device, self.options
        legal = LegalSet.of(problem, device, options.template, fixed=options.fixed)
        first = [
            legal.default,
            *known_configs(problem, task.shapes, legal.template, device, self.out),
            *seeds(legal.template, problem, device),
        ]
        picks = options.trials_per_shape // TRIALS_PER_PICK
        studies = []
        for index, shape in enumerate(task.shapes):
            timed = timed_shapes(shape, options.effort)
            study = Study(
                study_name(device, problem, shape, legal.template),
                legal,
                sampler=options.sampler,
                seed=options.seed + index,
                seeds=[*first, *model_picks(legal, shape, picks, options.seed)],
                predict=predicted(problem, timed, legal.default, device),
                storage=self.storage,
                resume=options.resume,
                about={
                    "problem": problem.model_dump(exclude_defaults=True),
                    "template": legal.template,
                    "axes_version": TEMPLATES[legal.template].AXES_VERSION,
                    "shape": shape.model_dump(),
                    "ragged_shapes": [ragged.model_dump() for ragged in timed[1:]],
                    "device": device.model_dump(),
                },
            )
            studies.append(study)
        return legal, studies

    def _search(
        self, task: Task, legal: LegalSet, studies: Sequence[Study], budget_s: float | None
    ) -> bool:
        """Whether the search came to its end; False after Ctrl-C."""
        trials = self.options.trials_per_shape

        def on_trial(study: Study, trial: Trial) -> None:
            self.on_event(
                TrialDone(
                    problem=task.problem,
                    shape=task.shapes[studies.index(study)],
                    trial=trial,
                    best=study.best,
                    is_best=study.best is trial,
                    done=study.done,
                    trials=min(trials, len(legal)),
                    rejections=study.rejections,
                )
            )

        search = JointSearch(studies, trials=trials, budget_s=budget_s, on_trial=on_trial)
        evaluation = Evaluation(
            task,
            legal.default,
            self.report.device,
            self.options.effort,
            self.runners,
            earlier=studies[0].measured,
        )
        return Pipeline(search, evaluation, self.compilers, self.workers).run()

    def _finish(self, task: Task, legal: LegalSet, studies: Sequence[Study]) -> list[TunedConfig]:
        """The records of a task, saved."""
        found = []
        for shape, study in zip(task.shapes, studies, strict=True):
            final = FinalComparison(
                problem=task.problem,
                shapes=timed_shapes(shape, self.options.effort),
                runner=self.runners[self.workers.first],
                report=self.report,
                default=legal.default,
                incumbents=incumbents(task.problem, shape, self.report.device, self.out),
                on_event=self.on_event,
            )
            if record := final.record(study.trials, withdraw=study.tell):
                found.append(record)
        save_records(self.out, found)
        for record in found:
            self.on_event(RecordSaved(record, self.out))
        return found
