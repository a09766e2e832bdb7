"""The end of a search: who wins, who is tied, and who stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fagen.build.compiled import Compiled, Resources
from fagen.errors import DeviceError
from fagen.kernels import Sm90Forward
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem, Shape
from fagen.tuning.blocklist import Blocklist
from fagen.tuning.finals import FINALISTS, finalists, paired_ratio, pick_winner, side_by_side
from fagen.tuning.outcome import Measured, Rejected, Trial
from fagen.tuning.runner import Runner
from fagen.tuning.worker import Worker
from fagen.tuning.worker_child import Candidate

PROBLEM = Problem(dtype="bf16", head_dim=128)
ROUNDS = 11


def config(block_n: int, stages: int = 2) -> AnyConfig:
    return Sm90Forward(block_m=128, block_n=block_n, block_k=128, stages=stages)


def kernels(*configs: AnyConfig, code: Sequence[int] = ()) -> dict[AnyConfig, Compiled]:
    """Kernels with these bytes of code."""
    resources = Resources(registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=0)
    sizes = code or [100] * len(configs)
    return {
        c: Compiled("sm90", str(c), bytes(size), {"kernel": resources}, "13.0", str(c))
        for c, size in zip(configs, sizes, strict=True)
    }


def rounds(seed: int, *times: tuple[AnyConfig, float], noise: float = 0.002) -> dict[str, Any]:
    """Times around a mean; a round that is slow is slow for all, by up to half."""
    rng = np.random.default_rng(seed)
    common = rng.uniform(1, 1.5, ROUNDS)
    return {
        str(c): list(us * common * (1 + noise * rng.standard_normal(ROUNDS))) for c, us in times
    }


A, B, C = config(64), config(96), config(128)


def test_ratios_are_paired() -> None:
    """What slows a round does not blur the difference of two that ran in it."""
    times = rounds(0, (A, 103.0), (B, 100.0))
    ratio = paired_ratio([times], str(A), str(B))
    assert ratio.median == pytest.approx(1.03, abs=0.004)
    assert 1.02 < ratio.low <= ratio.median <= ratio.high < 1.04
    assert not ratio.no_slower
    assert paired_ratio([times], str(A), str(B)) == ratio, "the same each time"
    assert paired_ratio([times], str(B), str(B)) == (1, 1, 1)
    assert paired_ratio([times], str(B), str(A)).no_slower, "it is faster"
    shorter = {name: us[:7] for name, us in rounds(1, (A, 100.0), (B, 103.0)).items()}
    twice = paired_ratio([times, shorter], str(A), str(B))
    assert twice.median == pytest.approx(1, abs=0.004)


@pytest.mark.parametrize(
    ("slower", "noise", "tie"), [(1.008, 0.001, True), (1.03, 0.002, False), (1.03, 0.2, True)]
)
def test_what_cannot_be_told_apart_is_a_tie(slower: float, noise: float, tie: bool) -> None:
    times = rounds(3, (A, 100.0 * slower), (B, 100.0), noise=noise)
    assert paired_ratio([times], str(A), str(B)).no_slower == tie


def test_the_fastest_wins() -> None:
    finish = pick_winner(kernels(A, B, C), PROBLEM, [rounds(0, (A, 110.0), (B, 100.0), (C, 103.0))])
    assert finish == (B, (B,))


@pytest.mark.parametrize("seed", range(20))
def test_the_tie_break_is_the_same_whatever_the_noise(seed: int) -> None:
    times = [rounds(seed, (A, 100.3), (B, 100.0), (C, 100.4))]
    assert pick_winner(kernels(C, B, A), PROBLEM, times) == (A, (C, B, A)), "least shared memory"
    equal = config(64).model_copy(update={"lazy_rescale": True})
    times = [rounds(seed, (A, 100.3), (equal, 100.0))]
    assert pick_winner(kernels(A, equal, code=[90, 100]), PROBLEM, times).config == A, "least code"
    assert pick_winner(kernels(A, equal, code=[100, 90]), PROBLEM, times).config == equal
    first = min(A, equal, key=str)
    assert pick_winner(kernels(A, equal), PROBLEM, times).config == first
    assert pick_winner(kernels(equal, A), PROBLEM, times).config == first


def test_a_tie_over_several_shapes_goes_to_the_better_worst_one() -> None:
    times = [
        rounds(0, (A, 95.0), (B, 105.0), (C, 100.0), noise=0.001),
        rounds(1, (A, 105.0), (B, 95.0), (C, 100.0), noise=0.001),
    ]
    assert pick_winner(kernels(A, B, C), PROBLEM, times) == (C, (A, B, C))


def test_what_is_on_record_stays_unless_it_is_slower() -> None:
    tied = [rounds(0, (A, 100.0), (C, 100.5))]
    assert pick_winner(kernels(A, C), PROBLEM, tied, [C]).config == C
    assert pick_winner(kernels(A, C), PROBLEM, tied, [C, A]).config == C
    assert pick_winner(kernels(A, C), PROBLEM, tied, [B]).config == A, "it could not be timed"
    slower = [rounds(0, (A, 100.0), (C, 103.0))]
    assert pick_winner(kernels(A, C), PROBLEM, slower, [C]).config == A
    faster = [rounds(0, (A, 103.0), (C, 100.0))]
    assert pick_winner(kernels(A, C), PROBLEM, faster, [C]).config == C


def test_who_is_in_the_finals() -> None:
    many = [config(16 * n) for n in range(1, 15)]
    trials = [Trial(c, Measured(time_us=100 - i)) for i, c in enumerate(many)]
    duplicate, wrong, absent = config(240), config(256), config(64, stages=1)
    trials.append(Trial(duplicate, Rejected(kind="duplicate", reason="the same cubin")))
    trials.append(Trial(wrong, Rejected(kind="wrong", reason="output is off")))
    top = many[: -FINALISTS - 1 : -1]
    assert finalists(trials, []) == top
    must = [many[0], top[3], duplicate, wrong, absent]
    assert finalists(trials, must) == [*top, many[0], duplicate, absent]


class Together(Worker):
    """Real processes for one kernel at a time; all of them together crash if a bad one is there."""

    def compare(
        self, candidates: Sequence[Candidate], problem: Problem, shape: Shape
    ) -> dict[str, list[float]]:
        if any(compiled.source.startswith("abort") for compiled, _ in candidates):
            raise DeviceError("GPU 0: the process that ran it was killed by SIGABRT")
        return {str(c): [100.0] * 5 for _, c in candidates}


def test_a_finalist_whose_fault_shows_late_falls_out_and_not_the_next_one(tmp_path: Path) -> None:
    resources = Resources(registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=0)
    mix = {
        c: Compiled("sm90", what, what.encode(), {"kernel": resources}, "13.0", what)
        for c, what in ((A, f"abort-later {tmp_path / 'mark'}"), (B, "nap"), (C, "well"))
    }
    shape = Shape(batch=1, seqlen_q=512, seqlen_k=512, heads_q=16, heads_kv=16)
    with Together(0, evaluator="bad_evaluators:act_on_source") as worker:
        blocklist = Blocklist(tmp_path / "blocklist.json", "NVIDIA H200 (132 SMs)")
        runner = Runner(worker, blocklist)
        (times,), failed = side_by_side(runner, mix, PROBLEM, [shape])
    assert times.keys() == {str(B), str(C)}
    assert failed.keys() == {A}
    assert failed[A].kind == "crash"
