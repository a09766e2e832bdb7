"""What runs in the process of a `Worker`, the only one of a tuning that touches CUDA."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from fagen.build.compiled import Compiled
from fagen.device import Device
from fagen.errors import CudaError, FagenError
from fagen.kernels.template import Config
from fagen.problem import Problem, Shape
from fagen.records.store import digest
from fagen.tuning.outcome import Measured, Outcome, Rejected

if TYPE_CHECKING:
    from fagen.judge.measure import Call
    from fagen.judge.verify import Verdict
    from fagen.run.executor import Executor

COMPARE_ROUNDS = 15
MEASURE_SECONDS = 0.08  # for a candidate on a shape; the finalists are compared for longer
TORCH = "torch SDPA"  # its name in `compare`

Candidate = tuple[Compiled, Config]


class DeviceReport(BaseModel):
    """What the worker says of its GPU.

    Attributes:
        device: the card.
        driver: the newest CUDA version that the driver knows, such as "13.0".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Device
    driver: str


def describe(device_index: int) -> DeviceReport:
    """The GPU and its driver.

    Raises:
        DeviceError: if there is none.
    """
    from fagen.run import driver

    return DeviceReport(device=driver.query_device(device_index), driver=driver.driver_version())


def warm_up(evaluator: str, device_index: int) -> None:
    """Does what the first request would wait for; what fails here fails there, and says why."""
    _named(evaluator)
    with suppress(FagenError, ImportError):
        from fagen.judge.bench import bench_of
        from fagen.judge.measure import timer_of

        timer_of(bench_of(device_index))


def evaluate(evaluator: str, *arguments: Any) -> object:
    """Calls an evaluator, "module:function", which takes what `evaluate_on_device` does."""
    return _named(evaluator)(*arguments)


def _named(path: str) -> Callable[..., object]:
    module, _, name = path.partition(":")
    function: Callable[..., object] = getattr(importlib.import_module(module), name)
    return function


def evaluate_on_device(
    compiled: Compiled,
    problem: Problem,
    config: Config,
    shape: Shape,
    device_index: int,
    give_up_us: float | None = None,
) -> Outcome:
    """One candidate on one shape: loaded and verified once, then checked and timed there.

    Args:
        give_up_us: as for `Worker.evaluate`.

    Raises:
        DeviceError: if the device's memory is full.
    """
    from fagen.judge.bench import bench_of
    from fagen.judge.measure import measure
    from fagen.judge.verify import check_sample
    from fagen.run.driver import FATAL

    bench = bench_of(device_index)
    try:
        kernel = _load(compiled, problem, config)
        verdict = _verdict(compiled, problem, config, device_index)
        if verdict.ok:
            verdict = check_sample(kernel, shape, bench)
        if not verdict.ok:
            return Rejected(kind="stray" if verdict.stray else "wrong", reason=verdict.reason)
        timing = measure(
            kernel,
            shape,
            bench,
            budget_s=MEASURE_SECONDS,
            give_up_us=give_up_us,
        )
        after = check_sample(kernel, shape, bench, rows=8)
    except CudaError as error:
        return Rejected(kind="crash" if error.code in FATAL else "launch", reason=str(error))
    if not after.ok:
        return Rejected(kind="wrong", reason=f"after timing: {after.reason}")
    return Measured(
        time_us=timing.median_us,
        cubin=digest(compiled.cubin),
        **timing.model_dump(exclude={"median_us"}),
    )


@lru_cache(maxsize=64)
def _load(compiled: Compiled, problem: Problem, config: Config) -> Executor:
    from fagen.run.executor import Executor

    return Executor(compiled, problem, config)


@lru_cache(maxsize=4096)
def _verdict(compiled: Compiled, problem: Problem, config: Config, device_index: int) -> Verdict:
    from fagen.judge.bench import bench_of
    from fagen.judge.verify import verify

    return verify(_load(compiled, problem, config), bench_of(device_index))


def compare(
    candidates: Sequence[Candidate], problem: Problem, shape: Shape, device_index: int
) -> dict[str, list[float]]:
    """Times kernels side by side: see `Worker.compare`."""
    from fagen.judge import measure
    from fagen.judge.bench import bench_of
    from fagen.judge.verify import check_sample
    from fagen.show.peers import torch_baseline

    bench = bench_of(device_index)
    kernels = {
        str(config): _load(compiled, problem, config)
        for compiled, config in candidates
        if _verdict(compiled, problem, config, device_index)
    }
    calls: dict[str, Call] = {
        name: measure.call_of(kernel, shape, bench) for name, kernel in kernels.items()
    }
    torch_call = torch_baseline(problem, shape, device_index)
    if torch_call is not None:
        calls[TORCH] = torch_call
    times = measure.compare(calls, bench, rounds=COMPARE_ROUNDS)
    for name, kernel in kernels.items():
        if not check_sample(kernel, shape, bench):
            del times[name]
    return times
