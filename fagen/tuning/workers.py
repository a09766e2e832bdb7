"""The workers of the GPUs of a host that tune together, each fed by a thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, Self, TypeVar

from fagen.errors import ArgumentError
from fagen.tuning.worker import Worker
from fagen.tuning.worker_child import DeviceReport

Result = TypeVar("Result")


class WorkerPool:
    """Workers for equal GPUs. A context manager, which ends them.

    Args:
        workers: one for each GPU; the first also runs what one GPU does alone.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = tuple(workers)
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._end = ExitStack()
        for worker in self._workers:
            self._end.enter_context(worker)
            self._free.put(worker)
        # The threads outlive every process that they start: the kernel ends those with them.
        self._threads = self._end.enter_context(ThreadPoolExecutor(len(self._workers)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end.close()

    @property
    def first(self) -> Worker:
        """The worker of the first GPU."""
        return self._workers[0]

    @property
    def busy_s(self) -> float:
        """Seconds that a GPU was at work, in the mean."""
        return sum(worker.busy_s for worker in self._workers) / len(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def describe(self) -> DeviceReport:
        """The GPU that all of them are like, and their driver.

        Raises:
            DeviceError: if one does not answer.
            ArgumentError: if they differ.
        """
        reports = [worker.describe_device() for worker in self._workers]
        for worker, report in zip(self._workers, reports, strict=True):
            if report.device.key != reports[0].device.key:
                raise ArgumentError(
                    f"GPU {worker.device_index} is {report.device}, GPU {self.first.device_index} "
                    f"is {reports[0].device}: only equal cards tune together; name them in --device"
                )
        return reports[0]

    def submit(self, judge: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """`judge(worker, *arguments)` in a thread, on the worker that is free first."""
        return self._threads.submit(self._run, judge, *arguments)

    def _run(self, judge: Callable[..., Result], *arguments: Any) -> Result:
        worker = self._free.get()
        try:
            return judge(worker, *arguments)
        finally:
            self._free.put(worker)

    def stop(self) -> None:
        """Ends what the workers do, in the middle of a kernel if need be; then they serve again.

        Each of those futures gets a KeyboardInterrupt.
        """
        stopped: list[Worker] = []
        with suppress(queue.Empty):
            while True:
                stopped.append(self._free.get_nowait())
        for worker in self._workers:
            if worker not in stopped:
                worker.interrupt()
        while len(stopped) < len(self._workers):
            stopped.append(self._free.get())
        for worker in stopped:
            worker.resume()
            self._free.put(worker)
