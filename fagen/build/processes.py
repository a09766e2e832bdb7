"""Processes that may crash or hang: one, or many calls of one function.

`concurrent.futures` cannot stop a call that hangs, and gives up its whole pool when one process
dies; here only the one call fails.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from fagen.errors import FagenError

Job = TypeVar("Job", bound=tuple[Any, ...])
Result = TypeVar("Result")
Failure = TypeVar("Failure", bound=FagenError)

STARTUP_SECONDS = 30.0  # what a fresh process may need before its first job


def in_processes(
    function: Callable[..., Result],
    jobs: Iterable[Job],
    *,
    processes: int,
    timeout: float,
    failure: type[Failure],
) -> Iterator[tuple[Job, Result | Failure]]:
    """Calls `function(*job)` for each job, in spawned processes.

    The processes end with the iteration (its close and Ctrl-C included), and with this process,
    however it dies.

    Args:
        function: of a module, since the processes import it anew.
        jobs: read one at a time, when a process is free.
        processes: how many at most.
        timeout: seconds after which a call is stopped, its process killed.
        failure: the error that is an answer: raised by the function, or made here for a call
            that was stopped or whose process died.

    Yields:
        (job, result or error), in the order of completion.

    Raises:
        FagenError: any other of fagen's errors that the function raises.
        RuntimeError: if a process fails otherwise (its traceback is on stderr).
    """
    source = iter(jobs)
    job = next(source, None)
    children: list[_Child] = []
    answers: deque[tuple[Any, Any]] = deque()
    try:
        while True:
            while job is not None:
                child = next((child for child in children if child.job is None), None)
                if child is None:
                    if len(children) == processes:
                        break
                    child = _Child(function)
                    children.append(child)
                child.start(job, timeout)
                job = next(source, None)
            if answers:  # every process that can be busy is busy while the caller looks at it
                done, answer = answers.popleft()
                if isinstance(answer, FagenError) and not isinstance(answer, failure):
                    raise answer
                yield done, answer
                continue
            busy = [child for child in children if child.job is not None]
            if not busy:
                return
            patience = min(child.deadline for child in busy) - time.monotonic()
            wait([child.connection for child in busy], timeout=max(patience, 0))
            for child in busy:
                if child.connection.poll():
                    answers.append((child.job, child.answer(failure)))
                elif time.monotonic() > child.deadline:
                    answers.append((child.job, failure(f"stopped after {timeout:g} s")))
                    child.kill()
            # One that died over its job in the meantime still has to be asked for the answer.
            children = [c for c in children if c.job is not None or c.process.is_alive()]
    finally:
        for child in children:
            child.kill()


def spawn(target: Callable[..., None], *arguments: Any) -> tuple[SpawnProcess, Connection]:
    """A new process that runs `target(connection, *arguments)`, and this end of the connection.

    Ctrl-C does not reach it: that is for this process, which then ends it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    # Children inherit the signal mask. The tracker's own start would lift it, so it comes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()  # so that its end reads as the end of the process
    return process, ours


class _Child:
    """A process that serves one job after the other; `job` is the one it has."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.process, self.connection = spawn(_serve, function)
        self.job: Any = None
        self.deadline = 0.0
        self._allowance = STARTUP_SECONDS

    def start(self, job: Any, timeout: float) -> None:
        self.job = job
        self.deadline = time.monotonic() + timeout + self._allowance
        self._allowance = 0.0
        with suppress(BrokenPipeError):  # it died meanwhile: the answer will be that
            self.connection.send(job)

    def answer(self, failure: type[FagenError]) -> Any:
        """The answer that has arrived, or a failure if the process died over it."""
        self.job = None
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            pass
        self.process.join(timeout=1)
        self.kill()
        code = self.process.exitcode or 0
        if code >= 0:
            raise RuntimeError(
                f"a process of {__name__} ended with code {code}: its traceback is above. If it "
                "speaks of the bootstrapping phase, guard your script with "
                '`if __name__ == "__main__":`'
            )
        return failure(f"the process was killed by {signal.Signals(-code).name}")

    def kill(self) -> None:
        self.job = None
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, function: Callable[..., Any]) -> None:
    """Runs in the child: answers jobs until the parent hangs up."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        answer: Any
        try:
            answer = function(*job)
        except FagenError as error:
            answer = error
        connection.send(answer)


def _end_with_parent() -> None:
    """Ends this process when its parent has died, in the middle of a call if need be."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
