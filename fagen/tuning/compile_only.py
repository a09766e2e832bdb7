"""A host without a card helps those that tune: it fills the cache of cubins that they share.

The cache is content-addressed, so this takes no part in their studies: it compiles what a search
is likely to ask for, and a tuning with the same FAGEN_CACHE finds it there.
"""

from __future__ import annotations

from collections.abc import Sequence

from fagen.build.compile import compile_many
from fagen.device import Device
from fagen.errors import CompileError
from fagen.tuning.candidates import likely_candidates
from fagen.tuning.clock import Budget, Phases
from fagen.tuning.events import Notice, OnEvent, TaskDone, TaskStarted
from fagen.tuning.options import TuneOptions
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.tasks import Task


def fill_cache(
    tasks: Sequence[Task], options: TuneOptions, device: Device, on_event: OnEvent
) -> bool:
    """Compiles the likely candidates of each task, as far as the budget goes.

    Returns:
        False if Ctrl-C ended it.
    """
    budget = Budget(options.budget_s)
    try:
        for number, task in enumerate(tasks):
            share = Budget(budget.share(len(tasks) - number))
            phases = Phases()
            legal = LegalSet.of(task.problem, device, options.template, fixed=options.fixed)
            on_event(TaskStarted.of(task, legal, number + 1, len(tasks)))
            candidates = likely_candidates(legal, task, options)
            phases.end("enumerate")
            done = refused = 0
            jobs = ((task.problem, config) for config in candidates)
            for _, _, compiled in compile_many(jobs, device.arch, processes=options.processes):
                done += 1
                refused += isinstance(compiled, CompileError)
                if share.is_spent:
                    break
            phases.end("compile")
            on_event(
                Notice(
                    f"{task.problem}: {done - refused} of {len(candidates)} likely candidates are "
                    f"in the cache{f'; {refused} do not compile' if refused else ''}."
                )
            )
            on_event(TaskDone(task.problem, phases.seconds))
    except KeyboardInterrupt:
        return False
    return True
