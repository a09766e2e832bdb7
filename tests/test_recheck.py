"""Records against their runners-up; times come from a table in place of a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from records import some_record

from fagen.build.compiled import Compiled
from fagen.device import KNOWN_DEVICES, Device
from fagen.errors import ArgumentError, DeviceError
from fagen.kernels.registry import AnyConfig, default_config
from fagen.problem import Problem, Shape
from fagen.records.store import Card, TunedConfig
from fagen.show.recheck import Rechecked, recheck
from fagen.tuning.outcome import Measured, Outcome, Rejected
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.storage import open_storage, study_name
from fagen.tuning.search.study import Study
from fagen.tuning.worker import Worker
from fagen.tuning.worker_child import Candidate, DeviceReport

H200 = KNOWN_DEVICES["NVIDIA H200"]
PROBLEM = Problem(dtype="bf16", head_dim=64)
DEFAULT = default_config(PROBLEM, H200)


def config(block_n: int) -> AnyConfig:
    return DEFAULT.model_copy(update={"block_n": block_n})


OWN, TRIED, NEIGHBOUR = config(64), config(96), config(80)
RECORD = some_record(PROBLEM, OWN, seqlen=4096, median_us=100.0)
NEAR = some_record(PROBLEM, NEIGHBOUR, seqlen=8192, median_us=400.0)


class Table(Worker):
    """An H200 whose kernels take the times of a table, 100 us if they are not in it."""

    def __init__(self, times: dict[AnyConfig, float] | None = None, device: Device = H200) -> None:
        super().__init__(0)
        self.times, self.device = times or {}, device
        self.bad: dict[AnyConfig, Rejected] = {}
        self.compared: list[set[AnyConfig]] = []

    def describe_device(self) -> DeviceReport:
        return DeviceReport(device=self.device, driver="13.0")

    def evaluate(
        self, compiled: Compiled, problem: Problem, config: AnyConfig, shape: Shape, **_: Any
    ) -> Outcome:
        assert compiled.cubin
        return self.bad.get(config) or Measured(time_us=self.times.get(config, 100.0))

    def compare(
        self, candidates: Sequence[Candidate], problem: Problem, shape: Shape
    ) -> dict[str, list[float]]:
        configs = {config for _, config in candidates}
        self.compared.append(configs)
        if configs & self.bad.keys():
            raise DeviceError("GPU 0: the process that ran it was killed by SIGSEGV")
        return {str(c): [self.times.get(c, 100.0)] * 5 for c in configs}


def run(
    worker: Worker, records: Sequence[TunedConfig] = (RECORD,), **options: Any
) -> list[Rechecked]:
    return list(recheck(records, worker, processes=1, **options))


def test_a_record_that_nothing_beats_holds() -> None:
    worker = Table({OWN: 95.0, DEFAULT: 120.0})
    (found,) = run(worker)
    assert (found.state, found.reason, found.faster) == ("holds", "", None)
    assert (found.recorded_us, found.median_us, found.rivals) == (100.0, 95.0, 1)
    assert worker.compared == [{OWN, DEFAULT}]
    (found,) = run(Table({OWN: 100.0, DEFAULT: 99.2}))
    assert found.state == "holds", "within 1 %"


def test_a_neighbour_that_is_faster_makes_it_stale() -> None:
    worker = Table({OWN: 103.0, NEIGHBOUR: 100.0, DEFAULT: 120.0})
    here, there = run(worker, [RECORD, NEAR])
    assert worker.compared == [{OWN, NEIGHBOUR, DEFAULT}] * 2
    assert (here.state, here.faster) == ("stale", str(NEIGHBOUR))
    assert here.ratio == pytest.approx(1.03)
    assert "is 3.0% faster" in here.reason
    assert there.state == "holds"


def test_the_runners_up_of_the_kept_study_are_tried(tmp_path: Path) -> None:
    storage = tmp_path / "trials.journal"
    fixed = {axis: value for axis, value in OWN.axes().items() if axis != "block_n"}
    legal = LegalSet(PROBLEM, H200, OWN.template, fixed=fixed)
    for shape in (RECORD.shape, NEAR.shape):
        name = study_name(H200, PROBLEM, shape, OWN.template)
        study = Study(name, legal, seeds=[OWN, TRIED], storage=open_storage(storage))
        outcomes = [Measured(time_us=1.0), Measured(time_us=2.0)]
        if shape == NEAR.shape:
            outcomes.reverse()
        for outcome in outcomes:
            asked = study.ask()
            assert asked is not None
            study.tell(asked, outcome)
    worker = Table({TRIED: 90.0, DEFAULT: 120.0})
    (found,) = run(worker, storage=storage)
    assert worker.compared == [{OWN, TRIED, DEFAULT}]
    assert (found.state, found.faster) == ("stale", str(TRIED))
    with pytest.raises(ArgumentError, match="no such storage"):
        run(worker, storage=tmp_path / "none.journal")


def test_a_kernel_that_is_refused_is_wrong(tmp_path: Path) -> None:
    worker = Table()
    worker.bad[OWN] = Rejected(kind="wrong", reason="output is off")
    wrong, fine = run(worker, [RECORD, NEAR])
    assert (wrong.state, wrong.reason) == ("wrong", "wrong: output is off")
    assert (wrong.median_us, wrong.rivals) == (None, 0)
    assert fine.state == "holds", "a rival that is wrong is no rival"
    assert fine.rivals == 1


def test_what_is_illegal_here_is_wrong() -> None:
    big = DEFAULT.model_copy(update={"block_n": 256, "stages": 9})
    (found,) = run(Table(), [some_record(PROBLEM, big)])
    assert found.state == "wrong"
    assert "illegal on this device" in found.reason


def test_records_of_other_cards_and_predictions_are_left_out() -> None:
    other = some_record(PROBLEM, OWN, card=Card(name="NVIDIA H100 PCIe", sm_count=114, arch="sm90"))
    guess = some_record(PROBLEM, OWN, seqlen=512, kind="predicted")
    assert len(run(Table(), [RECORD, other, guess])) == 1
    with pytest.raises(
        ArgumentError, match="no record that was chosen was measured on NVIDIA H200"
    ):
        run(Table(), [other, guess])


@pytest.mark.gpu
def test_on_a_device() -> None:
    from fagen.run.driver import query_device

    device = query_device(0)
    best = default_config(PROBLEM, device)
    slow = best.model_copy(update={"block_n": 16})
    records = [
        some_record(PROBLEM, config, seqlen=seqlen, card=Card.of(device))
        for config, seqlen in ((best, 2048), (slow, 4096))
    ]
    holds, stale = recheck(records, Worker(0))
    assert holds.state == "holds", holds
    assert stale.state == "stale", stale
    assert stale.faster == str(best)
    assert stale.ratio is not None
    assert stale.ratio > 1.1
