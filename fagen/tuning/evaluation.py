"""A compiled candidate of a task -> its outcome on each of the task's shapes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from fagen.build.compile import compile_kernel
from fagen.build.compiled import Compiled
from fagen.device import Device
from fagen.errors import CompileError
from fagen.kernels.registry import template_of
from fagen.kernels.template import Config
from fagen.problem import Shape
from fagen.records.store import digest
from fagen.tuning.objective import baseline_us, evaluate_shapes
from fagen.tuning.options import Effort
from fagen.tuning.outcome import Measured, Outcome, Rejected, Trial
from fagen.tuning.runner import Runner
from fagen.tuning.tasks import Task, timed_shapes
from fagen.tuning.worker import Worker

Outcomes = list[tuple[Config, Sequence[Outcome]]]  # of configs, one for each shape


def duplicate_key(cubin: str, task: Task, config: Config, device: Device) -> Hashable:
    """What makes two candidates one: the code, and what is launched on each shape of a task.

    Args:
        cubin: `store.digest` of the code.
    """
    problem = task.problem
    gapless = tuple((0,) * (len(o.dims) - 1) for o in problem.operation.strided)
    plan = template_of(config).plan
    return (cubin, *(plan(problem, config, shape, gapless, device) for shape in task.shapes))


class Evaluation:
    """Judges the candidates of one task, and knows what it has seen of them.

    Args:
        default: the template's default, which times are compared with.
        effort: see `tasks.timed_shapes`.
        runners: what evaluates on each worker.
        earlier: trials of earlier runs, whose duplicates need not be measured.

    Attributes:
        task: the problem and its shapes.
        device: the GPU that every worker has.
    """

    def __init__(
        self,
        task: Task,
        default: Config,
        device: Device,
        effort: Effort,
        runners: Mapping[Worker, Runner],
        earlier: Iterable[Trial] = (),
    ) -> None:
        self.task, self.device = task, device
        self._problem, self._shapes = task.problem, task.shapes
        self._timed = {shape: timed_shapes(shape, effort) for shape in task.shapes}
        self._default = default
        self._runners = runners
        self._first: dict[Hashable, Config] = {}  # of those that are duplicates of each other
        self._baselines: dict[Worker, Mapping[Shape, float]] = {}
        self._outcomes: dict[tuple[Worker, Config, Shape], Outcome] = {}
        for trial in earlier:
            if isinstance(trial.outcome, Measured):
                key = duplicate_key(trial.outcome.cubin, task, trial.config, device)
                self._first[key] = trial.config

    def reject_unmeasured(self, config: Config, compiled: Compiled) -> Rejected | None:
        """Why a candidate need not be measured; None if it has to be."""
        if bad := compiled.resources.why_bad():
            return Rejected(kind="resources", reason=bad)
        key = duplicate_key(digest(compiled.cubin), self.task, config, self.device)
        first = self._first.setdefault(key, config)
        if first != config:
            return Rejected(kind="duplicate", reason=f"the same cubin as {first}")
        return None

    def judge(
        self, worker: Worker, config: Config, compiled: Compiled, best: Sequence[float]
    ) -> Outcomes:
        """The outcomes of a candidate, and before it of those whose times turn out to be void.

        A kernel that fails on one shape fails on all. May run in a thread of each worker.

        Args:
            best: the best objective so far, for each shape.
        """
        runner = self._runners[worker]
        if worker not in self._baselines:
            self._baselines[worker] = self._baseline(worker)
        outcomes = self._on_shapes(worker, config, compiled, best)
        everywhere = len(self._shapes)
        withdrawn = runner.withdrawn(self._problem)
        return [*((c, [why] * everywhere) for c, why in withdrawn), (config, outcomes)]

    def _on_shapes(
        self, worker: Worker, config: Config, compiled: Compiled, best: Sequence[float]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for shape, best_so_far in zip(self._shapes, best, strict=True):
            outcome = evaluate_shapes(
                self._timed[shape],
                self._baselines[worker],
                partial(self._evaluate, worker, compiled, config),
                best_so_far,
            )
            if isinstance(outcome, Rejected):
                return [outcome] * len(self._shapes)
            outcomes.append(outcome)
        return outcomes

    def _baseline(self, worker: Worker) -> dict[Shape, float]:
        """What times are compared with: those of the default, by this worker, today."""
        shapes = [shape for timed in self._timed.values() for shape in timed]
        outcomes: dict[Shape, Outcome] = {}
        with suppress(CompileError):
            compiled = compile_kernel(self._problem, self._default, self.device.arch)
            for shape in shapes if compiled.resources.why_bad() is None else ():
                outcomes[shape] = self._evaluate(worker, compiled, self._default, shape)
                if isinstance(outcomes[shape], Rejected):
                    break
        return baseline_us(outcomes, shapes, self._problem, self._default, self.device)

    def _evaluate(
        self,
        worker: Worker,
        compiled: Compiled,
        config: Config,
        shape: Shape,
        give_up_us: float = math.inf,
    ) -> Outcome:
        """What the worker says, once: the default is the baseline first, and a candidate later."""
        key = worker, config, shape
        if key not in self._outcomes:
            self._outcomes[key] = self._runners[worker].evaluate(
                compiled, self._problem, config, shape, give_up_us=give_up_us
            )
        return self._outcomes[key]
