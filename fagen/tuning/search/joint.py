"""Studies that are searched side by side, one for each class of shapes, on the same candidates.

Who evaluates the candidates asks for them and tells what came of them, so a recorded table stands
in for a GPU::

    with JointSearch([study], trials=100) as search:
        while (config := search.ask()) is not None:
            search.tell(config, [table[config]])
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Self

from fagen.kernels.template import Config
from fagen.tuning.options import ASKS_PER_TRIAL
from fagen.tuning.outcome import Outcome, Rejected, Trial
from fagen.tuning.search.study import Study

WAIT_SECONDS = 0.05  # between looks at what other processes still evaluate

OnTrial = Callable[[Study, Trial], None]


class JointSearch:
    """Studies that ask in turn and are told the outcomes of each other's candidates.

    Where they are kept, other processes may search them at the same time: no config is evaluated
    twice, and each process ends when it knows the outcomes of all. A context manager; at its end
    what was asked for and not told is given up, so that others may take it.

    Args:
        trials: configs that have to pass the static filter, per study, those of the runs before
            included. The whole legal set is tried where it is no larger.
        budget_s: seconds after which nothing more is asked or waited for.
        on_trial: called after each outcome.
    """

    def __init__(
        self,
        studies: Sequence[Study],
        *,
        trials: int,
        budget_s: float | None = None,
        on_trial: OnTrial | None = None,
    ) -> None:
        self._studies = tuple(studies)
        self._trials = trials
        self._deadline = time.monotonic() + (math.inf if budget_s is None else budget_s)
        self._on_trial = on_trial
        self._asked = 0
        for study in studies:
            if len(study.legal) <= trials:
                study.walk_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for study in self._studies:
            study.release()

    @property
    def is_late(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() >= self._deadline

    @property
    def best(self) -> list[float]:
        """The best objective of each study so far, infinite where there is none."""
        return [study.best.objective if study.best else math.inf for study in self._studies]

    def ask(self) -> Config | None:
        """A config for this process to evaluate; None if there is none, at least for now.

        Some may come later: for those that fall to the static filter, or that another process
        gives up.
        """
        while True:
            self._read()
            asking = [study for study in self._studies if self._wants_more(study)]
            if self.is_late or not asking:
                return None
            config = asking[self._asked % len(asking)].ask()
            assert config is not None, "an exhausted study was asked"
            self._asked += 1
            for study in self._studies:
                study.join(config)
            if self._claim(config):
                return config

    def tell(self, config: Config, outcomes: Sequence[Outcome]) -> None:
        """What became of a config, for each study; a rejection may withdraw an earlier time."""
        # The first study last, since it may have the claim: whoever reads it reads the rest.
        for study, outcome in reversed([*zip(self._studies, outcomes, strict=True)]):
            if study.tell(config, outcome) and self._on_trial is not None:
                self._on_trial(study, study.trials[-1])

    def reject(self, config: Config, why: Rejected) -> None:
        """Tells every study the same."""
        self.tell(config, [why] * len(self._studies))

    def must_wait(self) -> bool:
        """Whether other processes evaluate configs; it takes a moment to say so.

        For whoever got None from `ask` and has nothing left to tell. What is found, or given up,
        the next `ask` reads.
        """
        if self.is_late or not any(study.waits for study in self._studies):
            return False
        time.sleep(WAIT_SECONDS)
        return True

    def _wants_more(self, study: Study) -> bool:
        return (
            not study.exhausted
            and study.on_gpu < self._trials
            and study.asked < ASKS_PER_TRIAL * self._trials
        )

    def _read(self) -> None:
        """Takes in what other processes have done to the studies."""
        rows: set[int] = set().union(*(study.read() for study in self._studies))
        for study in self._studies:
            study.leave(rows)

    def _claim(self, config: Config) -> bool:
        """Claims a config for this process in the first study that lacks it, and so in all."""
        pending = [study for study in self._studies if study.is_pending(config)]
        if pending[0].claim(config):
            return True
        for study in pending:
            study.drop(config)
        return False
