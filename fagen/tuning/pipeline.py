"""The loop of a search: ask, compile ahead, judge on a free worker, tell.

Configs are compiled in processes while the GPUs are busy with earlier ones. What is under way is a
future, and the loop waits for the next one that is done.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from fagen.build.compile import compile_kernel
from fagen.build.compiled import Compiled
from fagen.build.processes import ProcessPool
from fagen.errors import CompileError
from fagen.kernels.template import Config
from fagen.tuning.evaluation import Evaluation, Outcomes
from fagen.tuning.outcome import Rejected
from fagen.tuning.search.joint import JointSearch
from fagen.tuning.workers import WorkerPool

COMPILE_SECONDS = 60.0  # for one kernel


def compile_processes(processes: int | None) -> ProcessPool:
    """Processes that compile; one per available CPU but one, if None."""
    count = processes or max(1, len(os.sched_getaffinity(0)) - 1)
    return ProcessPool(count, timeout=COMPILE_SECONDS, failure=CompileError)


@dataclass
class Pipeline:
    """The search of one task; `run` it once.

    Attributes:
        search: what asks and is told.
        evaluation: judges the candidates.
        compilers: of `compile_processes`.
        workers: where candidates run.
    """

    search: JointSearch
    evaluation: Evaluation
    compilers: ProcessPool
    workers: WorkerPool
    _compiling: dict[Future[Compiled], Config] = field(default_factory=dict)
    _compiled: deque[tuple[Config, Compiled]] = field(default_factory=deque)  # not judged yet
    _judging: set[Future[Outcomes]] = field(default_factory=set)

    def run(self) -> bool:
        """Searches until the trials or the budget are spent.

        Returns:
            False if Ctrl-C ended it: the studies hold what was known by then.
        """
        with self.search:
            try:
                while self._judging or not self.search.is_late:
                    self._judge()
                    self._ask()
                    under_way: list[Future[Any]] = [*self._compiling, *self._judging]
                    if under_way:
                        wait(under_way, return_when=FIRST_COMPLETED)
                        self._tell()
                        self._filter()
                    elif not self.search.must_wait():
                        break
            except KeyboardInterrupt:
                return False
            finally:
                for future in self._compiling:
                    future.cancel()
                if self._judging:
                    self.workers.stop()
        return True

    def _judge(self) -> None:
        """Gives free workers what is compiled."""
        free = len(self.workers) - len(self._judging)
        for _ in range(min(free, len(self._compiled)) if not self.search.is_late else 0):
            candidate = self._compiled.popleft()
            judged = self.workers.submit(self.evaluation.judge, *candidate, self.search.best)
            self._judging.add(judged)

    def _ask(self) -> None:
        """Keeps the processes busy, as long as few kernels wait for a worker."""
        problem, arch = self.evaluation.task.problem, self.evaluation.device.arch
        most = self.compilers.processes
        while len(self._compiling) < most and len(self._compiled) < most:
            config = self.search.ask()
            if config is None:
                break
            self._compiling[self.compilers.submit(compile_kernel, problem, config, arch)] = config

    def _tell(self) -> None:
        """Tells the search what has been judged."""
        for judged in [future for future in self._judging if future.done()]:
            self._judging.remove(judged)
            for config, outcomes in judged.result():
                self.search.tell(config, outcomes)

    def _filter(self) -> None:
        """Rejects what is compiled and need not be measured."""
        for done in [future for future in self._compiling if future.done()]:
            config = self._compiling.pop(done)
            try:
                compiled = done.result()
            except CompileError as error:
                self.search.reject(config, Rejected(kind="compile", reason=str(error)))
                continue
            if rejected := self.evaluation.reject_unmeasured(config, compiled):
                self.search.reject(config, rejected)
            else:
                self._compiled.append((config, compiled))
