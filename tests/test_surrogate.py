"""The corrected static model on functions whose best config is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fagen.device import KNOWN_DEVICES
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem, standard_shape
from fagen.tuning.model import predict
from fagen.tuning.outcome import Measured, Outcome, Rejected
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.surrogate import Surrogate

PROBLEM = Problem(dtype="bf16", head_dim=128, causal=True)
SHAPE = standard_shape(128, 4096, 4096)
H200 = KNOWN_DEVICES["NVIDIA H200"]
SPILLS = Rejected(kind="resources", reason="spills 8 bytes per thread")


@pytest.fixture(scope="module")
def legal() -> LegalSet:
    fixed = {"block_k": 128, "producer_registers": 24, "lazy_rescale": False, "exp2_fma_every": 0}
    return LegalSet(PROBLEM, H200, "forward_sm90", fixed=fixed)


def static(config: AnyConfig) -> float:
    return predict(PROBLEM, SHAPE, config, H200)


def surrogate(legal: LegalSet) -> Surrogate:
    return Surrogate(legal, static, np.random.default_rng(0))


def tell(model: Surrogate, row: int, outcome: Outcome) -> None:
    model.claim(row)
    model.tell(row, outcome)


def test_it_starts_with_the_static_model(legal: LegalSet) -> None:
    model = surrogate(legal)
    times = [static(legal.config(row)) for row in range(len(legal))]
    assert len(legal) > 1000
    assert model.expect(7) == pytest.approx(times[7])
    assert times[model.ask(np.zeros(len(legal), dtype=bool))] == min(times)


def test_what_the_static_model_misses_is_learned(legal: LegalSet) -> None:
    """On this card, all takes twice as long, and without ping_pong a tenth more."""

    def truth(row: int) -> float:
        config = legal.config(row)
        return 2 * static(config) * (1.0 if getattr(config, "ping_pong", False) else 1.1)

    model = surrogate(legal)
    rows = np.random.default_rng(1).permutation(len(legal))
    for row in rows[:60]:
        tell(model, int(row), Measured(time_us=truth(row)))
    errors = [math.log(model.expect(int(row)) / truth(row)) for row in rows[60:160]]
    assert np.abs(errors).mean() < 0.03


def test_asks_that_are_pending_differ(legal: LegalSet) -> None:
    """Sixteen asks in a row, without their outcomes, are less alike than the sixteen best."""
    model, taken = surrogate(legal), np.zeros(len(legal), dtype=bool)
    order = np.argsort([static(legal.config(row)) for row in range(len(legal))])
    tell(model, int(order[0]), Measured(time_us=static(legal.config(int(order[0])))))
    taken[order[0]] = True
    asked = []
    for _ in range(16):
        row = model.ask(taken)
        taken[row] = True
        model.claim(row)
        asked.append(row)

    def differences(rows: Any) -> float:
        places = legal.positions[rows]
        return float((places[:, None] != places).sum(axis=2).mean())

    assert len(set(asked)) == 16
    assert differences(asked) > 1.1 * differences(order[1:17])


def test_rejections_push_away(legal: LegalSet) -> None:
    """Wide tiles, of which many look good to the static model, are asked for less where they never
    work: in three searches together, since noise decides how often where they do.
    """

    def wide_asks(wide_ones_work: bool, seed: int) -> int:
        noise = np.random.default_rng(seed).lognormal(0.0, 0.05, len(legal))
        model, taken = surrogate(legal), np.zeros(len(legal), dtype=bool)
        count = 0
        for _ in range(60):
            row = model.ask(taken)
            taken[row] = True
            wide = legal.config(row).axes()["block_n"] > 112
            count += wide
            works = wide_ones_work or not wide
            time_us = static(legal.config(row)) * noise[row]
            tell(model, row, Measured(time_us=time_us) if works else SPILLS)
        return count

    avoided, wanted = (sum(wide_asks(work, seed) for seed in (2, 3, 4)) for work in (False, True))
    assert avoided < 0.8 * wanted


def test_what_is_dropped_may_be_learned_again(legal: LegalSet) -> None:
    model, other = surrogate(legal), surrogate(legal)
    for each in (model, other):
        tell(each, 5, Measured(time_us=100.0))
    model.claim(9)
    model.drop([9])
    taken = np.zeros(len(legal), dtype=bool)
    assert model.ask(taken) == other.ask(taken)
    tell(model, 9, Measured(time_us=100.0))
    assert model.expect(9) == pytest.approx(100.0, rel=0.02)


def test_a_time_that_is_withdrawn_is_forgotten(legal: LegalSet) -> None:
    """Far too short, it would draw the search to its like."""
    model, other = surrogate(legal), surrogate(legal)
    for each in (model, other):
        tell(each, 5, Measured(time_us=100.0))
    tell(model, 9, Measured(time_us=1.0))
    assert model.expect(10) < 0.5 * other.expect(10)
    model.tell(9, SPILLS)
    tell(other, 9, SPILLS)
    assert model.expect(10) == pytest.approx(other.expect(10))
    taken = np.zeros(len(legal), dtype=bool)
    taken[[5, 9]] = True
    assert model.ask(taken) == other.ask(taken)


def test_every_row_is_asked_once(legal: LegalSet) -> None:
    part = LegalSet(PROBLEM, H200, "forward_sm90", fixed={"block_n": 64, "block_m": 64})
    model, taken = surrogate(part), np.zeros(len(part), dtype=bool)
    taken[model._rows] = True  # what is not in the pool has its turn, too
    assert not taken.all()
    row = model.ask(taken)
    assert not taken[row]
