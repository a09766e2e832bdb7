"""`tuner.tune` with all of it real but the GPU, whose place a recorded table takes.

Run as `python tuning.py OPTIONS`, OPTIONS being JSON for `tune_recorded`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from fagen.device import KNOWN_DEVICES, architecture
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem, Shape
from fagen.tuning.options import TuneOptions
from fagen.tuning.outcome import Measured, Outcome
from fagen.tuning.tasks import Task
from fagen.tuning.tuner import TuneResult, tune
from fagen.tuning.worker import Worker
from fagen.tuning.worker_child import TORCH, DeviceReport

A100 = KNOWN_DEVICES["NVIDIA A100-SXM4-80GB"]
SHAPE = Shape(batch=1, seqlen_q=512, seqlen_k=512, heads_q=4, heads_kv=4)
TASK = Task(Problem(dtype="bf16", head_dim=16), (SHAPE,))
# 11 configs, quick to compile.
FIXED = {
    "block_m": 64,
    "block_k": 16,
    "warps": 4,
    "stages": 1,
    "min_blocks_per_sm": 1,
    "q_in_registers": False,
    "lazy_rescale": False,
    "head_grouping": False,
    "exp2_fma_every": 0,
}


def recorded(config: AnyConfig) -> float:
    """The table: microseconds."""
    axes = config.axes()
    return float(100 + (axes["block_n"] - 67) ** 2 / 100 + abs(axes["block_m"] - 64))


def evaluate(compiled: Any, problem: Problem, config: AnyConfig, *rest: Any) -> Outcome:
    """Runs in the worker: notes its process and the config, and takes its time."""
    if config.axes()["block_m"] != FIXED["block_m"]:  # the default, which times are compared with
        return Measured(time_us=recorded(config))
    with Path(os.environ["TUNING_LOG"]).open("a") as file:
        file.write(f"{os.getpid()} {config}\n")
    time.sleep(float(os.environ.get("TUNING_SECONDS", "0")))
    return Measured(time_us=recorded(config), policy="recorded", cubin=compiled.key[:16])


class RecordedWorker(Worker):
    """A real process, whose evaluator and card are made up."""

    def __init__(self, device_index: int) -> None:
        super().__init__(device_index, evaluator="tuning:evaluate")

    def describe_device(self) -> DeviceReport:
        return DeviceReport(device=A100, driver="13.0")

    def compare(self, candidates: Any, problem: Problem, shape: Shape) -> dict[str, list[float]]:
        return {str(c): [recorded(c)] * 5 for _, c in candidates} | {TORCH: [300.0] * 5}


def tune_recorded(folder: Path, *, seqlen: int = 512, **options: Any) -> TuneResult:
    """Tunes `TASK`, or the like for another length, by brute force; its files are in `folder`."""
    shape = SHAPE.model_copy(update={"seqlen_q": seqlen, "seqlen_k": seqlen})
    with RecordedWorker(0) as worker:
        defaults: dict[str, Any] = {
            "fixed": FIXED,
            "template": "forward_sm80",
            "sampler": "brute-force",
            "storage": folder / "trials.journal",
            "out": folder / "tuned.yaml",
            "resume": True,
            "processes": 1,
            "effort": "quick",
        }
        tasks = [Task(TASK.problem, (shape,))]
        return tune(tasks, TuneOptions(**defaults | options), workers=[worker])


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    if "arch" in arguments:
        arguments["arch"] = architecture(arguments["arch"])
    result = tune_recorded(Path(arguments.pop("folder")), **arguments)
    sys.exit(130 if result.interrupted else 0)
