"""The GPUs of a host that tune together, each with its worker and a thread that feeds it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TypeVar

from fagen.errors import ArgumentError
from fagen.tuning.worker import DeviceReport, Worker

Item = TypeVar("Item")
Result = TypeVar("Result")


class Cards:
    """Workers for equal GPUs. A context manager, which ends them.

    Args:
        workers: one for each GPU; the first also runs what one GPU does alone.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = tuple(workers)
        self._end = ExitStack()
        for worker in self._workers:
            self._end.enter_context(worker)
        # The threads outlive every process that they start: the kernel ends those with them.
        self._threads = self._end.enter_context(ThreadPoolExecutor(len(self._workers)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.close()

    @property
    def first(self) -> Worker:
        """The worker of the first GPU."""
        return self._workers[0]

    @property
    def busy_s(self) -> float:
        """Seconds that a GPU was at work, in the mean."""
        return sum(worker.busy_s for worker in self._workers) / len(self._workers)

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

    def each(
        self, items: Iterable[Item], judge: Callable[[Worker, Item], Result]
    ) -> Generator[Result, None, None]:
        """`judge(worker, item)` for each item, on the worker that is free first.

        Yields:
            In the order of completion. With one worker, `judge` runs in this thread.
        """
        if len(self._workers) == 1:
            for item in items:
                yield judge(self.first, item)
            return
        free = list(self._workers)
        busy: dict[Future[Result], Worker] = {}
        try:
            for item in items:
                worker = free.pop()
                busy[self._threads.submit(judge, worker, item)] = worker
                done, _ = wait(busy, None if not free else 0, FIRST_COMPLETED)
                for future in done:
                    free.append(busy.pop(future))
                    yield future.result()
            while busy:
                done, _ = wait(busy, return_when=FIRST_COMPLETED)
                for future in done:
                    del busy[future]
                    yield future.result()
        finally:
            for future, worker in busy.items():
                if not future.done():
                    worker.interrupt()
            wait(busy)
            for worker in busy.values():
                worker.resume()
