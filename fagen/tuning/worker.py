"""The parent's side of the process that owns a GPU while tuning, and that a bad kernel may kill.

The parent never touches CUDA. It sends one request at a time and waits until a deadline: a kernel
that hangs is killed with its process, one that ruins the CUDA context ends it, and the next
request starts a new one (a second or two, which no deadline counts). The process runs
`worker_child`, and dies with its parent, however that dies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from fagen.build.compiled import Compiled
from fagen.build.processes import START_SECONDS, Child, ProcessLost
from fagen.errors import DeviceError
from fagen.kernels.template import Config
from fagen.problem import Problem, Shape
from fagen.tuning import worker_child
from fagen.tuning.outcome import Measured, Outcome, Rejected
from fagen.tuning.worker_child import Candidate, DeviceReport

DEADLINE_SECONDS = 20.0  # for one request
COMPARE_SECONDS = 120.0

Reply = TypeVar("Reply")


class Worker:
    """A process that runs kernels on one GPU. A context manager; one thread at a time.

    Args:
        device_index: the GPU, as CUDA counts.
        evaluator: "module:function" with the arguments and result of
            `worker_child.evaluate_on_device`, for tests that have no GPU.
        deadline_s: seconds after which a request is a hang.

    Attributes:
        busy_s: seconds that the process has spent on requests: loading, verifying and timing
            kernels. For the rest of the wall time the GPU waited.
    """

    def __init__(
        self,
        device_index: int,
        *,
        evaluator: str = "fagen.tuning.worker_child:evaluate_on_device",
        deadline_s: float = DEADLINE_SECONDS,
    ) -> None:
        self.device_index = device_index
        self.deadline_s = deadline_s
        self.busy_s = 0.0
        self._evaluator = evaluator
        self._interrupted = False
        self._child: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, in the middle of a kernel if need be."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def interrupt(self) -> None:
        """Ends what another thread waits for, which gets a KeyboardInterrupt until `resume`."""
        self._interrupted = True
        child = self._child
        if child is not None:
            child.kill()

    def resume(self) -> None:
        """Takes requests again."""
        self._interrupted = False

    def describe_device(self) -> DeviceReport:
        """The GPU and its driver.

        Raises:
            DeviceError: if there is none, or it does not answer.
        """
        return self._demand(self.deadline_s, worker_child.describe, self.device_index)

    def evaluate(
        self,
        compiled: Compiled,
        problem: Problem,
        config: Config,
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
            outcome = self._request(
                self.deadline_s, worker_child.evaluate, self._evaluator, *arguments
            )
        except ProcessLost as lost:
            return Rejected(kind="hang" if lost.hung else "crash", reason=_explained(lost))
        if not isinstance(outcome, Measured | Rejected):
            raise TypeError(f"{self._evaluator} returned {outcome!r}, which is not an outcome")
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
            return self._demand(COMPARE_SECONDS, worker_child.compare, *arguments)
        except DeviceError:
            self.close()  # its CUDA context may be lost
            raise

    def _demand(self, deadline_s: float, function: Callable[..., Reply], *arguments: Any) -> Reply:
        """A request whose failure is an error."""
        try:
            return self._request(deadline_s, function, *arguments)
        except ProcessLost as lost:
            raise DeviceError(f"GPU {self.device_index}: {_explained(lost)}") from None

    def _request(self, deadline_s: float, function: Callable[..., Reply], *arguments: Any) -> Reply:
        """What `function(*arguments)` returns in the worker; errors are those of `Child.ask`."""
        if self._interrupted:
            raise KeyboardInterrupt
        try:
            child = self._running()
            start = time.perf_counter()
            reply = child.ask(function, *arguments, deadline_s=deadline_s)
        except ProcessLost:
            if self._interrupted:
                raise KeyboardInterrupt from None
            raise
        self.busy_s += time.perf_counter() - start
        return reply

    def _running(self) -> Child:
        """The process; a new one has done what its first request would wait for."""
        if self._child is None or not self._child.is_alive:
            self.close()
            child = self._child = Child()
            if self._interrupted:  # before there was a process to end
                child.kill()
            try:
                child.ask(
                    worker_child.warm_up,
                    self._evaluator,
                    self.device_index,
                    deadline_s=START_SECONDS,
                )
            except ProcessLost as lost:
                if self._interrupted:
                    raise
                raise DeviceError(
                    f"GPU {self.device_index} cannot be set up: {_explained(lost)}"
                ) from None
        return self._child


def _explained(lost: ProcessLost) -> str:
    return str(lost) if lost.hung else f"the process that ran it {lost}"
