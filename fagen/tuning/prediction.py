"""Tuning for a card that is not there: the static model ranks, and the best that compiles wins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fagen.build.compile import compile_many
from fagen.build.compiled import Compiled
from fagen.device import Device
from fagen.errors import CompileError
from fagen.kernels.template import Config
from fagen.problem import Shape
from fagen.records.store import Card, Provenance, Result, TunedConfig, save_records
from fagen.tuning import model
from fagen.tuning.candidates import incumbents, ranked_by_model
from fagen.tuning.clock import Budget
from fagen.tuning.events import Notice, OnEvent, RecordSaved, TaskStarted
from fagen.tuning.options import TuneOptions
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.tasks import Task

FINALISTS = 8  # best predictions that are compiled, to see their registers


def predict_records(
    tasks: Sequence[Task], options: TuneOptions, device: Device, out: Path, on_event: OnEvent
) -> tuple[list[TunedConfig], bool]:
    """The records, all saved in the file `out`, and False if Ctrl-C ended it.

    What is not begun within the budget is left out; the first record always comes.
    """
    budget = Budget(options.budget_s)
    shapes = sum(len(task.shapes) for task in tasks)
    records: list[TunedConfig] = []
    try:
        for number, task in enumerate(tasks, start=1):
            legal = LegalSet.of(task.problem, device, options.template, fixed=options.fixed)
            on_event(TaskStarted.of(task, legal, number, len(tasks)))
            for shape in task.shapes:
                if records and budget.is_spent:
                    left = f"{shapes - len(records)} of {shapes} shapes are left out"
                    on_event(Notice(f"The budget of {budget.seconds:g} s is spent: {left}."))
                    return records, True
                record = _predict(legal, shape, options, out)
                save_records(out, [record])
                on_event(RecordSaved(record, out))
                records.append(record)
    except KeyboardInterrupt:
        return records, False
    return records, True


def _predict(legal: LegalSet, shape: Shape, options: TuneOptions, out: Path) -> TunedConfig:
    """The best prediction among those that compile well, the default included."""
    problem, device, default = legal.problem, legal.device, legal.default
    ranked = ranked_by_model(legal, shape, options.seed)
    on_record = incumbents(problem, shape, device, out)
    finalists = dict.fromkeys([default, *on_record, *(c for _, c in ranked[:FINALISTS])])
    jobs = [(problem, config) for config in finalists]
    times: dict[Config, float] = {}
    kernels: dict[Config, Compiled] = {}
    for _, config, compiled in compile_many(jobs, device.arch, processes=options.processes):
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
    return TunedConfig(
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
