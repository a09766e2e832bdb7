"""Tuning for a card that is not there: the static model ranks, and the best that compiles wins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fagen.build.compiled import Compiled
from fagen.device import Device
from fagen.errors import CompileError
from fagen.kernels.registry import AnyConfig, default_config
from fagen.problem import Shape
from fagen.records.store import Card, Provenance, Record, Result, save_records
from fagen.tuning import model
from fagen.tuning.candidates import compiled_ahead, incumbents, ranked_by_model
from fagen.tuning.events import Notice, OnEvent, RecordSaved, TaskStarted
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.tasks import Task

FINALISTS = 8  # best predictions that are compiled, to see their registers


@dataclass
class Prediction:
    """One run where nothing can be measured; the fields are arguments of `tune`."""

    device: Device
    template: str | None
    fixed: dict[str, Any] | None
    seed: int
    out: Path
    processes: int | None
    on_event: OnEvent

    def run(self, tasks: Sequence[Task], budget_s: float | None) -> tuple[list[Record], bool]:
        """The records, all saved, and False if Ctrl-C ended it.

        What is not begun within `budget_s` is left out; the first record always comes.
        """
        deadline = None if budget_s is None else time.monotonic() + budget_s
        shapes = sum(len(task.shapes) for task in tasks)
        records: list[Record] = []
        try:
            for number, task in enumerate(tasks, start=1):
                template = self.template or default_config(task.problem, self.device).template
                legal = LegalSet(task.problem, self.device, template, fixed=self.fixed)
                self.on_event(
                    TaskStarted(
                        task,
                        number,
                        len(tasks),
                        template,
                        self.device,
                        legal.points,
                        legal.removed,
                        len(legal),
                        resumed=0,
                    )
                )
                for shape in task.shapes:
                    if deadline is not None and records and time.monotonic() > deadline:
                        left = f"{shapes - len(records)} of {shapes} shapes are left out"
                        self.on_event(Notice(f"The budget of {budget_s:g} s is spent: {left}."))
                        return records, True
                    record = self._predict(legal, shape)
                    save_records(self.out, [record])
                    self.on_event(RecordSaved(record, self.out))
                    records.append(record)
        except KeyboardInterrupt:
            return records, False
        return records, True

    def _predict(self, legal: LegalSet, shape: Shape) -> Record:
        """The best prediction among those that compile well, the default included."""
        problem, device = legal.problem, legal.device
        default = default_config(problem, device, legal.template)
        ranked = ranked_by_model(legal, shape, self.seed)
        on_record = incumbents(problem, shape, device, self.out)
        finalists = dict.fromkeys([default, *on_record, *(c for _, c in ranked[:FINALISTS])])
        jobs = ((problem, config, device.arch) for config in finalists)
        times: dict[AnyConfig, float] = {}
        kernels: dict[AnyConfig, Compiled] = {}
        for config, compiled in compiled_ahead(jobs, self.processes):
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
