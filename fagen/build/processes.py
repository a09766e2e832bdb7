"""Child processes that may crash or hang: one at a time (`Child`), or a pool of them.

`concurrent.futures.ProcessPoolExecutor` cannot stop a call that hangs and gives up the whole pool
when one process dies. Here a call that hangs or dies fails alone.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Self, TypeVar

from fagen.errors import FagenError

START_SECONDS = 60.0  # for a new process to import what it needs
STOP_SECONDS = 30.0  # the driver lets a killed process go when it has stopped its kernel
PR_SET_PDEATHSIG = 1  # linux/prctl.h

Job = TypeVar("Job", bound=tuple[Any, ...])
Result = TypeVar("Result")
Failure = TypeVar("Failure", bound=FagenError)

_starting = threading.Lock()


class ProcessLost(Exception):  # noqa: N818  (callers turn it into an error or a rejection)
    """A process hung or died over a request.

    Attributes:
        hung: whether it was killed because it did not answer in time.
    """

    def __init__(self, reason: str, *, hung: bool = False) -> None:
        super().__init__(reason)
        self.hung = hung


class Child:
    """A spawned process that answers one request at a time.

    It ends with its parent, however that dies. Ctrl-C does not reach it: that is for the parent,
    which then ends it.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self._is_ready = False
        with _starting:
            # Children inherit the signal mask. The tracker's own start would lift it, so it
            # comes first.
            resource_tracker.ensure_running()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that its end reads as the end of the process

    @property
    def is_alive(self) -> bool:
        """Whether the process can take a request."""
        return not self._connection.closed and self._process.is_alive()

    def ask(self, function: Callable[..., Result], *arguments: Any, deadline_s: float) -> Result:
        """`function(*arguments)`, run by the process.

        Args:
            function: of a module, since the process imports it anew.
            deadline_s: seconds after which the process is killed. Its start does not count, nor do
                the imports of its first function.

        Raises:
            ProcessLost: if it hangs or dies. It takes no more requests then.
            FagenError: if the function raises one.
            RuntimeError: if it raises anything else; its traceback is on stderr.
        """
        try:
            if not self._is_ready:
                self._connection.send(function)  # which the process has to import
                self._receive(START_SECONDS)
                self._is_ready = True
            self._connection.send((function, arguments))
            answer = self._receive(deadline_s)
        except (EOFError, OSError):
            raise self._death() from None
        except KeyboardInterrupt:
            self.close()  # otherwise its answer would be taken for that of the next request
            raise
        if isinstance(answer, FagenError):
            raise answer
        result: Result = answer
        return result

    def kill(self) -> None:
        """Ends the process; a thread that waits for its answer gets a `ProcessLost`."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process and waits until it is gone. For the thread that asks."""
        self._process.kill()
        self._process.join(timeout=STOP_SECONDS)
        self._connection.close()

    def _receive(self, deadline_s: float) -> Any:
        if not self._connection.poll(deadline_s):
            self.close()
            raise ProcessLost(
                f"no answer within {deadline_s:g} s; the process was killed", hung=True
            )
        return self._connection.recv()

    def _death(self) -> Exception:
        """Why the process is gone."""
        self._process.join(timeout=5)
        code = self._process.exitcode
        self.close()
        if code == 1:  # what Python exits with after a traceback
            return RuntimeError(
                "a child process met a Python error: its traceback is above. If it speaks of "
                'the bootstrapping phase, guard your script with `if __name__ == "__main__":`'
            )
        if code is not None and code < 0:
            return ProcessLost(f"was killed by {signal.Signals(-code).name}")
        return ProcessLost(f"exited with code {code}")


def _serve(connection: Connection, parent: int) -> None:
    """Runs in the child: answers requests until the parent hangs up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected here
    connection.recv()  # a first function, and with it what that imports
    connection.send(None)
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        answer: Any
        try:
            answer = function(*arguments)
        except FagenError as error:
            answer = error
        connection.send(answer)


class ProcessPool:
    """Calls of functions in child processes, as futures. A context manager, which ends them.

    Processes start when there is work for them.

    Args:
        processes: how many at most.
        timeout: seconds after which a call is stopped, its process killed.
        failure: the error of a call that was stopped or whose process died.
    """

    def __init__(self, processes: int, *, timeout: float, failure: type[FagenError]) -> None:
        self.processes = processes
        self._timeout, self._failure = timeout, failure
        self._lock = threading.Lock()
        self._is_open = True
        self._children: list[Child] = []
        self._mine = threading.local()  # .child: that of a thread
        # The threads outlive the processes that they start: the kernel ends those with them.
        self._threads = ThreadPoolExecutor(processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._is_open = False
            for child in self._children:
                child.kill()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.close()

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """`function(*arguments)` in one of the processes; errors are those of `Child.ask`."""
        return self._threads.submit(self._call, function, *arguments)

    def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return self._child().ask(function, *arguments, deadline_s=self._timeout)
        except ProcessLost as lost:
            reason = f"stopped after {self._timeout:g} s" if lost.hung else f"the process {lost}"
            raise self._failure(reason) from None

    def _child(self) -> Child:
        """This thread's process."""
        child: Child | None = getattr(self._mine, "child", None)
        if child is None or not child.is_alive:
            with self._lock:
                if not self._is_open:
                    raise ProcessLost("was not started: its pool is closed")
                if child is not None:
                    self._children.remove(child)
                child = self._mine.child = Child()
                self._children.append(child)
        return child


def in_processes(
    function: Callable[..., Result],
    jobs: Iterable[Job],
    *,
    processes: int,
    timeout: float,
    failure: type[Failure],
) -> Iterator[tuple[Job, Result | Failure]]:
    """Calls `function(*job)` for each job, in a `ProcessPool` that ends with the iteration.

    Args:
        failure: the error that is an answer, raised by the function or made by the pool.

    Yields:
        (job, result or error), in the order of completion.

    Raises:
        FagenError: any other of fagen's errors that the function raises.
        RuntimeError: if a process fails otherwise (its traceback is on stderr).
    """
    with ProcessPool(processes, timeout=timeout, failure=failure) as pool:
        futures = {pool.submit(function, *job): job for job in jobs}
        for future in as_completed(futures):
            answer: Result | Failure
            try:
                answer = future.result()
            except failure as error:
                answer = error
            yield futures.pop(future), answer
