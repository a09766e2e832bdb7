"""Runs kernels on a worker, and finds out which one is to blame for a crash or a hang.

A GPU reports a fault late, and what one kernel broke may show in the next. So after a crash or a
hang both are run again, each in a new process: first the kernel before, whose time is withdrawn if
it fails, then the one that failed. What fails twice goes on the blocklist, and later runs reject
it without running it.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from fagen.build.compiled import Compiled
from fagen.errors import StoreError
from fagen.kernels.template import Config
from fagen.problem import Problem, Shape
from fagen.records.store import digest
from fagen.tuning.blocklist import Blocklist
from fagen.tuning.events import Notice
from fagen.tuning.outcome import Outcome, Rejected
from fagen.tuning.worker import Worker


class _Run(NamedTuple):
    """The arguments of `Worker.evaluate`."""

    compiled: Compiled
    problem: Problem
    config: Config
    shape: Shape


class Runner:
    """Evaluates on a worker, and finds out which kernel is to blame when its process is lost.

    Attributes:
        worker: where the kernels run.
    """

    def __init__(self, worker: Worker, blocklist: Blocklist) -> None:
        self.worker = worker
        self._blocklist = blocklist
        self._before: tuple[_Run, Outcome] | None = None  # what ran last in this process
        self._withdrawn: list[tuple[_Run, Rejected]] = []

    def evaluate(
        self,
        compiled: Compiled,
        problem: Problem,
        config: Config,
        shape: Shape,
        *,
        give_up_us: float | None = None,
    ) -> Outcome:
        """As `Worker.evaluate`, but what is on the blocklist is not run, and what fails twice is
        put there.

        A kernel that fails once is rejected too, even if it works the second time.
        """
        blocked = self.why_blocked(compiled, shape)
        if blocked is not None:
            return blocked
        run = _Run(compiled, problem, config, shape)
        outcome = self.worker.evaluate(*run, give_up_us=give_up_us)
        if _is_lost(outcome):
            before, self._before = self._before, None
            if before is not None and before[0].config != config and self._was_bad(*before):
                # It may be fine after all.
                outcome = self.worker.evaluate(*run, give_up_us=give_up_us)
        if _is_lost(outcome):
            self._retry(run)
        else:
            self._before = run, outcome
        return outcome

    def why_blocked(self, compiled: Compiled, shape: Shape) -> Rejected | None:
        """The rejection of a kernel that is on the list."""
        entry = self._blocklist.find(digest(compiled.cubin), shape)
        if entry is None:
            return None
        reason = f"on the blocklist since {entry.date}: {entry.kind}: {entry.reason}"
        return Rejected(kind="blocked", reason=reason)

    def withdrawn(self, problem: Problem) -> list[tuple[Config, Rejected]]:
        """Configs whose earlier outcomes for a problem turned out to be worthless; each told once.

        Those for other problems are forgotten: their records are written.
        """
        withdrawn, self._withdrawn = self._withdrawn, []
        return [(run.config, why) for run, why in withdrawn if run.problem == problem]

    def _was_bad(self, run: _Run, earlier: Outcome) -> bool:
        """Whether a kernel was found bad, or is so now, in a new process."""
        if isinstance(earlier, Rejected):
            return True
        outcome = self.worker.evaluate(*run)
        if not isinstance(outcome, Rejected):
            return False
        why = outcome.model_copy(update={"reason": f"on its second run: {outcome.reason}"})
        self._withdrawn.append((run, why))
        if _is_lost(outcome):
            self._retry(run)
        return True

    def _retry(self, run: _Run) -> None:
        """The second try of a kernel that failed, in a new process."""
        self.worker.close()
        again = self.worker.evaluate(*run)
        if not _is_lost(again):
            self.worker.close()  # it failed once: what it left behind is not trusted
            return
        why = cast(Rejected, again)
        blocklist = self._blocklist
        try:
            blocklist.add(digest(run.compiled.cubin), *run[1:], why)
        except StoreError as error:
            what = f"but {error}"
        else:
            what = f"now on the blocklist {blocklist.path}"
        blocklist.on_notice(Notice(f"{run.config}: {why.kind} twice, {what}."))


def _is_lost(outcome: Outcome) -> bool:
    return isinstance(outcome, Rejected) and outcome.kind in ("crash", "hang")
