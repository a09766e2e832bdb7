"""Timing: its statistics here, the clock itself on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from fagen.build.compile import compile_source
from fagen.build.render import fold
from fagen.device import architecture
from fagen.errors import DeviceError
from fagen.judge import measure
from fagen.judge.bench import Bench, bench_of
from fagen.judge.inputs import timing_tensors
from fagen.problem import Problem, Shape


def test_spread_is_the_middle_half_over_the_median() -> None:
    assert measure.median_and_spread([70.0, 90.0, 100.0, 120.0, 500.0]) == (100.0, 0.3)


def test_when_a_median_is_known() -> None:
    steady = [100.0, 100.1, 99.9, 100.0, 100.1]
    assert measure._is_known(steady)
    assert not measure._is_known(steady[:4])
    assert not measure._is_known([100.0, 110.0, 95.0, 100.0, 120.0])
    assert measure._is_known([100.0, 101.0] * 500)


BENCH: Bench = object.__new__(Bench)  # of no GPU: nothing here asks it


class NoisyTimer:
    """A clock that reads 100 us at best, and every other time half as much again."""

    clock_mhz = 1500.0

    def __init__(self) -> None:
        self.taken = 0

    def warm_up(self, calls: Iterable[measure.Call]) -> None:
        pass

    def burst(self, calls: Sequence[measure.Call]) -> list[float]:
        self.taken += len(calls)
        return [100.0 + 50 * (i % 2) for i in range(len(calls))]


@pytest.mark.parametrize(("give_up_us", "stopped"), [(99.0, True), (110.0, False), (None, False)])
def test_what_is_clearly_slower_is_not_timed_to_the_end(
    give_up_us: float | None, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = NoisyTimer()
    monkeypatch.setattr(measure, "timer_of", lambda bench: timer)
    timing = measure.time_call(lambda stream: None, BENCH, give_up_us=give_up_us)
    assert timing.stopped == stopped
    assert (timing.samples < 30) == stopped
    assert timing.samples < timer.taken


@pytest.mark.parametrize(("budget_s", "rounds"), [(60.0, 9), (0.0, measure.MIN_ROUNDS)])
def test_a_comparison_of_long_calls_ends(
    budget_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Timer(NoisyTimer):
        def burst(self, calls: Sequence[measure.Call]) -> list[float]:
            sizes.append(len(calls))
            return [1e5 if calls[0] is slow else 100.0] * len(calls)

    def slow(stream: int) -> None:
        pass

    def fast(stream: int) -> None:
        pass

    sizes: list[int] = []
    timer = Timer()
    monkeypatch.setattr(measure, "timer_of", lambda bench: timer)
    times = measure.compare({"slow": slow, "fast": fast}, BENCH, rounds=9, budget_s=budget_s)
    assert times == {"slow": [1e5] * rounds, "fast": [100.0] * rounds}
    assert sizes[:2] == [1, 1], "to know how long they take"
    assert sorted(sizes[2:]) == [1] * rounds + [5] * rounds


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("name", ["gate", "fill_normal"])
def test_kernels_compile(name: str, arch: str) -> None:
    compiled = compile_source(fold("tools/measure.cu"), architecture(arch), name)
    assert compiled.resources.why_bad() is None


SPIN = r"""
extern "C" __global__ void spin(unsigned long long ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
"""


def spinner(microseconds: int) -> measure.Call:
    """A call that takes so long on the device."""
    import cupy

    module = cupy.cuda.Module()
    module.load(compile_source(SPIN, bench_of(0).device.arch, "spin").cubin)
    function = module.get_function("spin")

    def call(stream: int) -> None:
        with cupy.cuda.Stream.from_external(_Handle(stream)) as external:
            function((1,), (1,), (np.uint64(1000 * microseconds),), stream=external)

    return call


class _Handle:
    """A raw stream, as `cupy.cuda.Stream.from_external` takes it."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._stream)


@pytest.mark.gpu
def test_time_is_the_device_s_alone() -> None:
    import time

    spin = spinner(200)

    def slow_host(stream: int) -> None:
        time.sleep(0.001)
        spin(stream)

    for call in (spin, slow_host):
        timing = measure.time_call(call, bench_of(0))
        assert 198 < timing.median_us < 215, timing
        assert timing.samples >= measure.MIN_SAMPLES
        assert 300 < timing.clock_mhz < 4000


@pytest.mark.gpu
def test_a_slow_call_is_given_up_early() -> None:
    spin = spinner(200)
    hopeless = measure.time_call(spin, bench_of(0), give_up_us=150)
    assert hopeless.stopped
    assert 198 < hopeless.median_us < 215
    assert not measure.time_call(spin, bench_of(0), give_up_us=230).stopped


@pytest.mark.gpu
def test_compare_orders_by_time() -> None:
    bench = bench_of(0)
    times = measure.compare({"slow": spinner(220), "fast": spinner(200)}, bench, rounds=5)
    assert [len(rounds) for rounds in times.values()] == [5, 5]
    ratios = [slow / fast for slow, fast in zip(times["slow"], times["fast"], strict=True)]
    assert 1.05 < np.median(ratios) < 1.15
    assert 300 < measure.read_clock(bench) < 4000
    assert measure.read_clock(bench) == 0, "nothing ran since"


@pytest.mark.gpu
def test_a_call_that_waits_is_an_error() -> None:
    import cupy

    def waits(stream: int) -> None:
        with bench_of(0).use():
            cupy.cuda.runtime.streamSynchronize(stream)

    with pytest.raises(DeviceError, match="waited for the device"):
        measure.time_call(waits, bench_of(0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_inputs_are_standard_normal(dtype: str) -> None:
    problem = Problem.model_validate({"dtype": dtype, "head_dim": 64})
    shape = Shape(batch=1, seqlen_q=512, seqlen_k=256, heads_q=8, heads_kv=4)
    made = timing_tensors(bench_of(0), problem, shape)
    assert (list(made.views), made.lead) == (["q", "k", "v", "o"], 0)
    q, k = (made.arrays[name].get().view(problem.element.numpy).astype(float) for name in "qk")
    assert q.size == 512 * 8 * 64
    assert abs(q.mean()) < 0.01
    assert abs(q.std() - 1) < 0.01
    assert 0.303 < (abs(q) > 1).mean() < 0.332
    assert abs(np.corrcoef(q[:-1], q[1:])[0, 1]) < 0.01
    assert not np.array_equal(q[: k.size], k)


@pytest.mark.gpu
def test_measure_a_kernel() -> None:
    from fagen.build.compile import compile_kernel
    from fagen.kernels.registry import default_config
    from fagen.run.executor import Executor

    device = bench_of(0).device
    problem = Problem(dtype="bf16", head_dim=64)
    config = default_config(problem, device)
    kernel = Executor(compile_kernel(problem, config, device.arch), problem, config)
    small, large = (
        Shape(batch=4, seqlen_q=n, seqlen_k=n, heads_q=16, heads_kv=16) for n in (1024, 4096)
    )
    times = [measure.measure(kernel, shape, bench_of(0)) for shape in (small, large)]
    assert 8 < times[1].median_us / times[0].median_us < 24  # 16 times the work
    assert times[1].spread < 0.1


@pytest.mark.gpu
def test_helper_kernels_are_loaded_once() -> None:
    bench = bench_of(0)
    assert bench_of(0) is bench
    with bench.use():
        gates = [bench.kernel("gate", "tools/measure.cu") for _ in range(2)]
    assert gates[0].ptr == gates[1].ptr
