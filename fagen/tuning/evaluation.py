"""A compiled candidate of a task -> its outcome on each of the task's shapes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from fagen.build.compile import Compiled, compile_kernel
from fagen.device import Device
from fagen.errors import CompileError
from fagen.kernels.config import AnyConfig
from fagen.problem import Problem, Shape
from fagen.records.store import digest
from fagen.tuning.objective import baseline_us, evaluate_shapes
from fagen.tuning.options import Effort
from fagen.tuning.outcome import Measured, Outcome, Rejected, Trial
from fagen.tuning.runner import Runner
from fagen.tuning.tasks import Task, timed_shapes
from fagen.tuning.worker import Worker

Outcomes = list[tuple[AnyConfig, Sequence[Outcome]]]  # of configs, one for each shape


def duplicate_key(cubin: str, problem: Problem, config: AnyConfig, device: Device) -> Hashable:
    """What makes two candidates one: the code, and all that the launch takes from the config.

    Args:
        cubin: `store.digest` of the code.
    """
    return (
        cubin,
        config.block_m,
        config.block_n,
        config.threads,
        config.smem_bytes(problem),
        config.min_blocks_per_sm if config.is_persistent else 0,
    )


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
        default: AnyConfig,
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
        self._first: dict[Hashable, AnyConfig] = {}  # of those that are duplicates of each other
        self._baselines: dict[Worker, Mapping[Shape, float]] = {}
        self._outcomes: dict[tuple[Worker, AnyConfig, Shape], Outcome] = {}
        for trial in earlier:
            if isinstance(trial.outcome, Measured):
                key = duplicate_key(trial.outcome.cubin, self._problem, trial.config, device)
                self._first[key] = trial.config

    def reject_unmeasured(self, config: AnyConfig, compiled: Compiled) -> Rejected | None:
        """Why a candidate need not be measured, if so."""
        if bad := compiled.resources.why_bad():
            return Rejected(kind="resources", reason=bad)
        key = duplicate_key(digest(compiled.cubin), self._problem, config, self.device)
        first = self._first.setdefault(key, config)
        if first != config:
            return Rejected(kind="duplicate", reason=f"the same cubin as {first}")
        return None

    def judge(
        self, worker: Worker, config: AnyConfig, compiled: Compiled, best: Sequence[float]
    ) -> Outcomes:
        """The outcomes of a candidate, after those that earlier ones turn out to have.

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
        self, worker: Worker, config: AnyConfig, compiled: Compiled, best: Sequence[float]
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
        config: AnyConfig,
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
