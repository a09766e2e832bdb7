"""A kernel -> its time, as a caller with cold caches and a busy stream sees it.

Each sample: the L2 is flushed, a gate holds the stream until event, call and event are queued
behind it, the gate opens. So the host's time is outside, and so is the flush. What is left beside
the kernel is the events' own microsecond or two. Work comes in bursts of a few milliseconds with
pauses between them, since sustained tensor work makes a GPU lower its clock.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from fagen.errors import DeviceError
from fagen.judge.bench import Bench
from fagen.judge.inputs import timing_tensors
from fagen.problem import Shape

if TYPE_CHECKING:
    from fagen.run.executor import Executor

Call = Callable[[int], object]  # takes the CUDA stream's handle and only queues work on it

BURST_US = 5_000.0
LONG_BURST_US = 50_000.0  # of one call in a comparison
PAUSE_S = 0.002
MAX_BURST = 32  # samples
FLUSH_US = 100.0  # about what flush and gate add to a sample
SHORTEST_GATE_NS = 10_000
LONGEST_GATE_NS = 500_000_000  # a call that waits for the device would wait for ever
MIN_SAMPLES, MAX_SAMPLES = 5, 200
MIN_ROUNDS = 5  # of a comparison
FEW_SAMPLES = 3  # enough to see that a candidate is hopeless
PRECISION = 0.003  # stop at this relative standard error of the median


class Timing(BaseModel):
    """What was measured.

    Attributes:
        median_us: microseconds.
        spread: the interquartile range over the median.
        samples: how many.
        policy: cold L2, queued behind a gate.
        clock_mhz: the SM clock just before the calls, in MHz.
        stopped: whether it ended early, since even the quickest sample was too slow.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    median_us: float
    spread: float
    samples: int
    policy: Literal["cold-queued"] = "cold-queued"
    clock_mhz: float
    stopped: bool = False


def measure(
    kernel: Executor,
    shape: Shape,
    bench: Bench,
    *,
    budget_s: float = 0.15,
    give_up_us: float | None = None,
) -> Timing:
    """The time of a kernel on that shape, on random normal inputs, without the LSE.

    Args:
        budget_s: wall time after which no further sample is begun.
        give_up_us: stop as soon as the time is known to be above this, in microseconds.

    Raises:
        CudaError: if a CUDA call failed, the kernel's own faults included.
    """
    call = call_of(kernel, shape, bench)
    return time_call(call, bench, budget_s=budget_s, give_up_us=give_up_us)


def call_of(kernel: Executor, shape: Shape, bench: Bench) -> Call:
    """A launch of the kernel on `inputs.timing_tensors` of that shape."""
    at = timing_tensors(bench, kernel.problem, shape)  # and so kept as long as the call is

    def call(stream: int) -> None:
        bench.launch(kernel, shape, at.views, stream)

    return call


def time_call(
    call: Call,
    bench: Bench,
    *,
    budget_s: float = 0.15,
    give_up_us: float | None = None,
) -> Timing:
    """The time of what `call(stream)` queues.

    Stops when the median is known to `PRECISION`, or the budget is spent, or the call is
    clearly slower than `give_up_us`.
    """
    timer = timer_of(bench)
    deadline = time.perf_counter() + budget_s
    timer.warm_up([call])
    estimate = timer.burst([call])[0]
    count = _burst_size(estimate, MAX_BURST)
    samples: list[float] = []
    clock_mhz = 0.0
    stopped = False
    while len(samples) < MAX_SAMPLES and not _is_known(samples) and not stopped:
        if samples and time.perf_counter() > deadline:
            break
        time.sleep(PAUSE_S)
        samples += timer.burst([call] * count)
        clock_mhz = timer.clock_mhz
        stopped = give_up_us is not None and _is_hopeless(samples, give_up_us)
    median_us, spread = median_and_spread(samples)
    return Timing(
        median_us=median_us,
        spread=spread,
        samples=len(samples),
        clock_mhz=clock_mhz,
        stopped=stopped,
    )


def _burst_size(estimate_us: float, most: int, burst_us: float = BURST_US) -> int:
    """How many samples of a call make a burst."""
    return min(max(int(burst_us / (estimate_us + FLUSH_US)), 1), most)


def median_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """The median, and the interquartile range over the median."""
    low, median, high = np.percentile(samples, (25, 50, 75))
    return float(median), float((high - low) / median)


def _is_known(samples: Sequence[float]) -> bool:
    """Whether the median's relative standard error, were the noise normal, is small enough."""
    if len(samples) < MIN_SAMPLES:
        return False
    _, spread = median_and_spread(samples)
    return 1.2533 * spread / 1.349 / math.sqrt(len(samples)) <= PRECISION


def _is_hopeless(samples: Sequence[float], give_up_us: float) -> bool:
    """Whether even the quickest of a few samples is too slow; noise only ever adds."""
    return len(samples) >= FEW_SAMPLES and min(samples) > give_up_us


def compare(
    calls: Mapping[str, Call],
    bench: Bench,
    *,
    rounds: int = 7,
    samples_per_round: int = 5,
    budget_s: float = 60.0,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Times several calls side by side: in each round each of them, in random order.

    Args:
        samples_per_round: of each call, fewer if they took over `LONG_BURST_US`.
        budget_s: wall time after which no further round is begun, but for the first few.

    Returns:
        For each name, its median of each round in microseconds. What slows a round slows all its
        entries.
    """
    timer = timer_of(bench)
    shuffle = random.Random(seed).shuffle
    timer.warm_up(calls.values())
    bursts = {
        name: [call] * _burst_size(timer.burst([call])[0], samples_per_round, LONG_BURST_US)
        for name, call in calls.items()
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.perf_counter() + budget_s
    for done in range(rounds):
        if done >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        order = list(calls)
        shuffle(order)
        for name in order:
            time.sleep(PAUSE_S)
            times[name].append(float(np.median(timer.burst(bursts[name]))))
    return times


def read_clock(bench: Bench) -> float:
    """The SM clock in MHz that this process's samples have seen since the last reading."""
    return timer_of(bench).clock_mhz


class Timer:
    """A stream of its own, a gate on it, and memory to flush the L2 with."""

    def __init__(self, bench: Bench) -> None:
        import cupy

        self._bench = bench
        self._ticket = 0
        with bench.use():
            self._gate = bench.kernel("gate", "tools/measure.cu")
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._scratch = cupy.empty(2 * bench.device.l2_bytes, np.uint8)
            self._pinned = cupy.cuda.alloc_pinned_memory(4)
            self._opened = np.frombuffer(self._pinned, np.int32, 1)
            self._opened[0] = 0
            self._totals = cupy.zeros(3, np.uint64)  # clocks, ns, gates that timed out
            cupy.cuda.get_current_stream().synchronize()

    @property
    def clock_mhz(self) -> float:
        """The SM clock that the gates saw, since the last time this was asked."""
        with self._bench.use():
            clocks, nanoseconds, _ = self._totals.get()
            self._totals.data.memset(0, self._totals.nbytes)
        return 1e3 * float(clocks) / max(float(nanoseconds), 1.0)

    def warm_up(self, calls: Iterable[Call]) -> None:
        """Each call once with no gate: the first one may load code, which waits for the device."""
        with self._bench.use():
            for call in calls:
                call(self._stream.ptr)
            self._stream.synchronize()

    def burst(self, calls: Sequence[Call]) -> list[float]:
        """One sample of each call, in microseconds."""
        import cupy

        events = []
        with self._bench.use():
            for call in calls:
                start, stop = cupy.cuda.Event(), cupy.cuda.Event()
                events.append((start, stop))
                self._scratch.data.memset_async(0, self._scratch.nbytes, self._stream)
                self._ticket += 1
                arguments = (
                    np.uint64(self._pinned.ptr),
                    np.int32(self._ticket),
                    np.uint64(SHORTEST_GATE_NS),
                    np.uint64(LONGEST_GATE_NS),
                    self._totals,
                )
                self._gate((1,), (1,), arguments, stream=self._stream)
                try:
                    start.record(self._stream)
                    call(self._stream.ptr)
                    stop.record(self._stream)
                finally:
                    self._opened[0] = self._ticket
            self._stream.synchronize()
            if self._totals[2:].get()[0]:
                self._totals.data.memset(0, self._totals.nbytes)
                raise DeviceError(
                    "a timed call waited for the device: it may only queue work on its stream"
                )
            return [1e3 * cupy.cuda.get_elapsed_time(*pair) for pair in events]


timer_of = cache(Timer)  # made, and so set up, once for each bench
