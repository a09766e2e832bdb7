"""The process that owns a GPU while tuning, and that a bad kernel may kill.

The parent never touches CUDA. It sends one request at a time and waits until a deadline: a kernel
that hangs is killed with its process, one that ruins the CUDA context ends it, and the next
request starts a new one (a second or two, no part of a deadline). The worker dies with its
parent, however that dies.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from fagen.build.compiled import Compiled
from fagen.build.processes import spawn
from fagen.device import Device
from fagen.errors import CudaError, DeviceError, FagenError
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem, Shape
from fagen.records.store import digest
from fagen.tuning.outcome import Measured, Outcome, Rejected

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from fagen.judge.measure import Call
    from fagen.judge.verify import Verdict
    from fagen.run.executor import Executor

START_SECONDS = 60.0  # of a new process: imports, CUDA context, helper kernels
DEADLINE_SECONDS = 20.0  # of one request
COMPARE_SECONDS = 120.0
COMPARE_ROUNDS = 15
STOP_SECONDS = 30.0  # the driver lets a killed process go when it has stopped its kernel
MEASURE_SECONDS = 0.08  # of a candidate on a shape; the finalists are compared for longer
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TORCH = "torch SDPA"  # its name in `compare`

Candidate = tuple[Compiled, AnyConfig]
Reply = TypeVar("Reply")


class DeviceReport(BaseModel):
    """What the worker says of its GPU.

    Attributes:
        device: the card.
        driver: the newest CUDA version that the driver knows, such as "13.0".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Device
    driver: str


class _Lost(Exception):  # noqa: N818  (it never leaves this module)
    """The worker is gone; `rejection` says how."""

    def __init__(self, rejection: Rejected) -> None:
        super().__init__(rejection.reason)
        self.rejection = rejection


class Worker:
    """A process that runs kernels on one GPU. A context manager; one thread at a time.

    Args:
        device_index: the GPU, as CUDA counts.
        evaluator: "module:function" with the arguments and result of `evaluate_on_device`, for
            tests that have no GPU.
        deadline_s: seconds after which a request is a hang.

    Attributes:
        busy_s: seconds that the process has spent on requests: loading, verifying and timing
            kernels. What is missing to the wall time, the GPU waited.
    """

    def __init__(
        self,
        device_index: int = 0,
        *,
        evaluator: str = "fagen.tuning.worker:evaluate_on_device",
        deadline_s: float = DEADLINE_SECONDS,
    ) -> None:
        self.device_index = device_index
        self.deadline_s = deadline_s
        self.busy_s = 0.0
        self._evaluator = evaluator
        self._interrupted = False
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, in the middle of a kernel if need be."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join(timeout=STOP_SECONDS)
        self._process = self._connection = None

    def interrupt(self) -> None:
        """Ends what another thread waits for, which gets a KeyboardInterrupt until `resume`."""
        self._interrupted = True
        process = self._process
        if process is not None:
            process.kill()

    def resume(self) -> None:
        """Takes requests again."""
        self._interrupted = False

    def describe_device(self) -> DeviceReport:
        """The GPU and its driver.

        Raises:
            DeviceError: if there is none, or it does not answer.
        """
        return self._demand(DeviceReport, "fagen.tuning.worker:_describe", self.device_index)

    def evaluate(
        self,
        compiled: Compiled,
        problem: Problem,
        config: AnyConfig,
        shape: Shape,
        *,
        give_up_us: float | None = None,
    ) -> Outcome:
        """Verifies a kernel (once for all shapes) and times it on one shape.

        Args:
            give_up_us: a time in microseconds; one that is slower, beyond noise, is not worth a
                precise answer.
        """
        arguments = (compiled, problem, config, shape, self.device_index, give_up_us)
        try:
            outcome: object = self._request(self.deadline_s, self._evaluator, *arguments)
        except _Lost as lost:
            return lost.rejection
        if not isinstance(outcome, Measured | Rejected):
            raise TypeError(f"{self._evaluator} returned {outcome!r}, which is no outcome")
        if isinstance(outcome, Rejected) and outcome.kind in ("crash", "stray"):
            self.close()  # the CUDA context is lost, or what lies in its memory
        return outcome

    def compare(
        self, candidates: Sequence[Candidate], problem: Problem, shape: Shape
    ) -> dict[str, list[float]]:
        """Times kernels side by side: their medians of each round, in microseconds.

        Returns:
            By `str(config)`, without those that are wrong, before timing or after; and by `TORCH`
            where torch is installed and covers the problem.

        Raises:
            DeviceError: if one cannot be launched, crashes or hangs.
        """
        arguments = (tuple(candidates), problem, shape, self.device_index)
        try:
            times: dict[str, list[float]] = self._demand(
                dict, "fagen.tuning.worker:_compare", *arguments, deadline_s=COMPARE_SECONDS
            )
        except DeviceError:
            self.close()  # its CUDA context may be lost
            raise
        return times

    def _demand(
        self, kind: type[Reply], function: str, *arguments: Any, deadline_s: float | None = None
    ) -> Reply:
        """A request whose failure is an error."""
        try:
            reply = self._request(deadline_s or self.deadline_s, function, *arguments)
        except _Lost as lost:
            raise DeviceError(f"GPU {self.device_index}: {lost}") from None
        if not isinstance(reply, kind):
            raise TypeError(f"{function} returned {reply!r}, not {kind.__name__}")
        return reply

    def _request(self, deadline_s: float, function: str, *arguments: Any) -> Any:
        """What `function(*arguments)` returns in the worker.

        Raises:
            _Lost: the worker hung or died.
            FagenError: the function did.
            RuntimeError: the worker met another Python error, a fault of fagen; its traceback is
                on stderr.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        if self._process is None or not self._process.is_alive():
            self._start()
        reply, seconds = self._ask(deadline_s, function, *arguments)
        self.busy_s += seconds
        return reply

    def _start(self) -> None:
        """A new process, that has done what its first request would wait for."""
        self.close()
        self._process, self._connection = spawn(_serve, os.getpid())
        try:
            self._ask(
                START_SECONDS, "fagen.tuning.worker:_warm_up", self._evaluator, self.device_index
            )
        except _Lost as lost:
            raise DeviceError(f"GPU {self.device_index} cannot be set up: {lost}") from None

    def _ask(self, deadline_s: float, function: str, *arguments: Any) -> tuple[Any, float]:
        """The reply of the process, and the seconds that it took over it."""
        assert self._connection is not None
        try:
            self._connection.send((function, arguments))
            if not self._connection.poll(deadline_s):
                self.close()
                reason = f"no answer within {deadline_s:g} s; the process was killed"
                raise _Lost(Rejected(kind="hang", reason=reason))
            reply, seconds = self._connection.recv()
        except (EOFError, OSError):
            if self._interrupted:
                self.close()
                raise KeyboardInterrupt from None
            raise self._death() from None
        except KeyboardInterrupt:
            self.close()  # else its answer would be taken for the next one's
            raise
        if isinstance(reply, FagenError):
            raise reply
        return reply, seconds

    def _death(self) -> Exception:
        """Why the worker is gone."""
        assert self._process is not None
        self._process.join(timeout=5)
        code = self._process.exitcode
        self.close()
        if code == 1:  # what Python exits with after a traceback
            return RuntimeError(
                "the tuning process met a Python error: its traceback is above. If it speaks of "
                'the bootstrapping phase, guard your script with `if __name__ == "__main__":`'
            )
        died = f"exited with code {code}"
        if code is not None and code < 0:
            died = f"was killed by {signal.Signals(-code).name}"
        return _Lost(Rejected(kind="crash", reason=f"the process that ran it {died}"))


# ---- what runs in the worker ----


def _serve(connection: Connection, parent: int) -> None:
    """Answers requests until the parent hangs up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are daily business here
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        reply: Any
        start = time.perf_counter()
        try:
            reply = _named(function)(*arguments)
        except FagenError as error:
            reply = error
        connection.send((reply, time.perf_counter() - start))


def _warm_up(evaluator: str, device_index: int) -> None:
    """What takes its time on the first request; what fails here fails there, and says why."""
    from fagen.run.driver import query_device

    _named(evaluator)
    with suppress(FagenError, ImportError):
        query_device(device_index)
        from fagen.judge.bench import bench_of
        from fagen.judge.measure import timer_of

        timer_of(bench_of(device_index))


def _named(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _describe(device_index: int) -> DeviceReport:
    from fagen.run import driver

    return DeviceReport(device=driver.query_device(device_index), driver=driver.driver_version())


def evaluate_on_device(
    compiled: Compiled,
    problem: Problem,
    config: AnyConfig,
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

    try:
        kernel = _load(compiled, problem, config)
        verdict = _verdict(compiled, problem, config, device_index)
        if verdict.ok:
            verdict = check_sample(kernel, shape, bench_of(device_index))
        if not verdict.ok:
            return Rejected(kind="stray" if verdict.stray else "wrong", reason=verdict.reason)
        timing = measure(
            kernel,
            shape,
            bench_of(device_index),
            budget_s=MEASURE_SECONDS,
            give_up_us=give_up_us,
        )
        after = check_sample(kernel, shape, bench_of(device_index), rows=8)
    except CudaError as error:
        return Rejected(kind="crash" if error.code in FATAL else "launch", reason=str(error))
    if not after.ok:
        return Rejected(kind="wrong", reason=f"after timing: {after.reason}")
    return Measured(
        time_us=timing.median_us,
        spread=timing.spread,
        samples=timing.samples,
        policy=timing.policy,
        cubin=digest(compiled.cubin),
        clock_mhz=timing.clock_mhz,
        stopped=timing.stopped,
    )


@lru_cache(maxsize=64)
def _load(compiled: Compiled, problem: Problem, config: AnyConfig) -> Executor:
    from fagen.run.executor import Executor

    return Executor(compiled, problem, config)


@lru_cache(maxsize=4096)
def _verdict(compiled: Compiled, problem: Problem, config: AnyConfig, device_index: int) -> Verdict:
    from fagen.judge.bench import bench_of
    from fagen.judge.verify import verify

    return verify(_load(compiled, problem, config), bench_of(device_index))


def _compare(
    candidates: Sequence[Candidate], problem: Problem, shape: Shape, device_index: int
) -> dict[str, list[float]]:
    from fagen.judge.bench import bench_of
    from fagen.judge.measure import call_of, compare
    from fagen.judge.verify import check_sample

    kernels = {
        str(config): _load(compiled, problem, config)
        for compiled, config in candidates
        if _verdict(compiled, problem, config, device_index)
    }
    calls: dict[str, Call] = {
        name: call_of(kernel, shape, bench_of(device_index)) for name, kernel in kernels.items()
    }
    torch_call = _torch_call(problem, shape, device_index)
    if torch_call is not None:
        calls[TORCH] = torch_call
    times = compare(calls, bench_of(device_index), rounds=COMPARE_ROUNDS)
    for name, kernel in kernels.items():
        if not check_sample(kernel, shape, bench_of(device_index)):
            del times[name]
    return times


def _torch_call(problem: Problem, shape: Shape, device_index: int) -> Call | None:
    """torch's own attention on random inputs, with the backend that it picks; None if it fails."""
    if problem.causal and shape.seqlen_q != shape.seqlen_k:
        return None  # its mask is aligned top-left
    try:
        import torch
    except (ImportError, OSError):  # OSError: its library was built for another CUDA
        return None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]

    def random(seqlen: int, heads: int) -> Any:
        dims = (shape.batch, seqlen, heads, problem.head_dim)
        x = torch.randn(dims, dtype=dtype, device=f"cuda:{device_index}")
        return x.transpose(1, 2)

    options: dict[str, Any] = {"is_causal": problem.causal}
    if shape.heads_q != shape.heads_kv:
        options["enable_gqa"] = True

    def external(stream: int) -> Any:
        return torch.cuda.ExternalStream(stream, device=device_index)

    def call(stream: int) -> None:
        with torch.no_grad(), torch.cuda.stream(external(stream)):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    try:
        q = random(shape.seqlen_q, shape.heads_q)
        k, v = (random(shape.seqlen_k, shape.heads_kv) for _ in range(2))
        torch.cuda.synchronize(device_index)
        call(torch.cuda.Stream(device_index).cuda_stream)
        torch.cuda.synchronize(device_index)
    except (RuntimeError, TypeError):
        # RuntimeError: its fallback keeps all scores, for which no memory suffices on long
        # sequences. TypeError: before 2.5 it has no grouped heads.
        return None
    return call
