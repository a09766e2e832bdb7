"""Who is blamed for a crash or a hang, in a real worker; plain functions stand in for kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fagen.build.compiled import Compiled, Resources
from fagen.device import KNOWN_DEVICES
from fagen.errors import StoreError
from fagen.kernels import Sm90Forward
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem, Shape
from fagen.records.store import digest
from fagen.tuning.blocklist import Blocklist, blocklist_path
from fagen.tuning.events import Event, Notice
from fagen.tuning.outcome import Measured, Outcome, Rejected
from fagen.tuning.runner import Runner
from fagen.tuning.worker import Worker

PROBLEM = Problem(dtype="bf16", head_dim=128)
SHORT, LONG = (Shape(batch=1, seqlen_q=n, seqlen_k=n, heads_q=16, heads_kv=16) for n in (512, 8192))
CARD = "NVIDIA H200 (132 SMs)"


class Recorded(Worker):
    """A worker that remembers what it was asked to run."""

    ran: list[str]

    def evaluate(self, compiled: Compiled, *arguments: Any, **options: Any) -> Outcome:
        self.ran.append(compiled.source.split()[0])
        return super().evaluate(compiled, *arguments, **options)


class Bench:
    """A runner whose list is in a folder."""

    def __init__(self, folder: Path, worker: Recorded, card: str = CARD) -> None:
        self.events: list[Event] = []
        self.worker = worker
        self.worker.ran = []
        self.list = Blocklist(folder / "blocklist.json", card, self.events.append)
        self.runner = Runner(worker, self.list)

    def run(self, what: str, shape: Shape = SHORT) -> Outcome:
        return self.runner.evaluate(kernel(what), PROBLEM, config(what), shape)

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]


def kernel(what: str) -> Compiled:
    """A kernel that does what `bad_evaluators.act` does on these words."""
    resources = Resources(registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=0)
    return Compiled("sm90", what, what.encode(), {"kernel": resources}, "13.0", digest(what))


def config(what: str) -> AnyConfig:
    """One for each kernel."""
    names = ["well", "abort", "abort-once", "abort-later", "hang", "scribble", "trusting", "nap"]
    place = names.index(what.split(maxsplit=1)[0])
    return Sm90Forward(block_m=128, block_n=16 * (1 + place), block_k=128, stages=2)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Recorded(0, evaluator="bad_evaluators:act_on_source", deadline_s=5) as worker:
        yield Bench(tmp_path, worker)


def test_what_crashes_twice_is_listed_and_never_run_again(bench: Bench, tmp_path: Path) -> None:
    well = bench.run("well")
    crashed = bench.run("abort")
    assert isinstance(well, Measured)
    assert crashed == Rejected(kind="crash", reason="the process that ran it was killed by SIGABRT")
    # The one before is run again, and then the one at fault, in a process of its own.
    assert bench.worker.ran == ["well", "abort", "well", "abort"]
    assert bench.runner.withdrawn(PROBLEM) == []
    assert len(bench.notices) == 1
    assert str(tmp_path / "blocklist.json") in bench.notices[0]

    later = Bench(tmp_path, bench.worker)
    another = Runner(bench.worker, later.list)  # of another card, say
    assert another.why_blocked(kernel("abort"), SHORT) is not None
    for shape in (SHORT, LONG):
        refused = later.run("abort", shape)
        assert isinstance(refused, Rejected)
        assert refused.kind == "blocked"
        assert "on the blocklist since 20" in refused.reason
        assert "SIGABRT" in refused.reason
    assert later.worker.ran == []
    assert len(later.notices) == 1
    assert str(tmp_path / "blocklist.json") in later.notices[0]
    assert isinstance(later.run("well"), Measured)

    elsewhere = Bench(tmp_path, bench.worker, card="NVIDIA A100")
    assert elsewhere.list.find(digest(kernel("abort").cubin), SHORT) is None


def test_what_crashes_once_is_rejected_and_not_listed(bench: Bench, tmp_path: Path) -> None:
    crashed = bench.run(f"abort-once {tmp_path / 'mark'}")
    assert isinstance(crashed, Rejected)
    assert crashed.kind == "crash"
    assert bench.worker.ran == ["abort-once", "abort-once"]
    assert not bench.list.path.exists()


def test_a_hang_is_listed_for_its_lengths_only(bench: Bench) -> None:
    bench.worker.deadline_s = 0.3
    hung = bench.run("hang", LONG)
    assert hung == Rejected(kind="hang", reason="no answer within 0.3 s; the process was killed")
    cubin = digest(kernel("hang").cubin)
    for blocklist in (bench.list, Blocklist(bench.list.path, CARD)):
        assert blocklist.find(cubin, LONG) is not None
        assert blocklist.find(cubin, SHORT) is None


def test_a_fault_that_shows_late_is_blamed_on_the_kernel_before(
    bench: Bench, tmp_path: Path
) -> None:
    guilty = f"abort-later {tmp_path / 'mark'}"
    assert isinstance(bench.run(guilty), Measured)
    assert isinstance(bench.run("nap"), Measured), "it was innocent"
    ((blamed, why),) = bench.runner.withdrawn(PROBLEM)
    assert blamed == config(guilty)
    assert why.kind == "crash"
    assert "on its second run" in why.reason
    assert bench.runner.withdrawn(PROBLEM) == []
    assert bench.list.find(digest(kernel(guilty).cubin), SHORT) is not None
    assert bench.list.find(digest(kernel("nap").cubin), SHORT) is None


def test_a_late_fault_is_not_told_to_the_search_for_another_problem(
    bench: Bench, tmp_path: Path
) -> None:
    bench.run(f"abort-later {tmp_path / 'mark'}")
    bench.run("nap")
    assert bench.runner.withdrawn(Problem(dtype="bf16", head_dim=64)) == []
    assert bench.runner.withdrawn(PROBLEM) == []


def test_after_a_kernel_that_was_refused_the_next_one_gets_a_second_chance(bench: Bench) -> None:
    assert bench.run("scribble") == Rejected(kind="wrong", reason="wrote outside of the output")
    assert isinstance(bench.run("trusting"), Measured)
    assert bench.worker.ran == ["scribble", "trusting", "trusting"]
    assert bench.runner.withdrawn(PROBLEM) == [], "it has no time to withdraw"


@pytest.mark.parametrize("text", ["{", "[1]", '[{"card": "x"}]', "\x00"])
def test_a_damaged_list_is_a_warning(text: str, tmp_path: Path) -> None:
    path = tmp_path / "blocklist.json"
    path.write_text(text)
    with Recorded(0, evaluator="bad_evaluators:act_on_source") as worker:
        bench = Bench(tmp_path, worker)
        assert "is not a blocklist of fagen: mend it or remove it" in bench.notices[0]
        assert bench.list.find("0" * 16, SHORT) is None
    why = Rejected(kind="crash", reason="killed")
    with pytest.raises(StoreError, match="mend it or remove it"):
        bench.list.add("0" * 16, PROBLEM, config("well"), SHORT, why)
    assert bench.list.find("0" * 16, SHORT) is not None
    assert path.read_text() == text


def test_cards_and_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "blocklist.json"
    why = Rejected(kind="crash", reason="killed")
    lists = [Blocklist(path, card) for card in (CARD, CARD, "NVIDIA A100")]
    for i, blocklist in enumerate(lists):
        for _ in range(2):
            blocklist.add(f"cubin {i}", PROBLEM, config("well"), SHORT, why)
    here, there = Blocklist(path, CARD), Blocklist(path, "NVIDIA A100")
    assert [here.find(f"cubin {i}", LONG) is not None for i in range(3)] == [True, True, False]
    assert [there.find(f"cubin {i}", LONG) is not None for i in range(3)] == [False, False, True]


def test_the_list_lies_beside_the_studies(tmp_path: Path) -> None:
    h200 = KNOWN_DEVICES["NVIDIA H200"]
    assert blocklist_path(tmp_path / "a.journal", h200) == tmp_path / "a.blocklist.json"
    in_a_database = blocklist_path("sqlite:///trials.db", h200)
    assert in_a_database.name == "NVIDIA-H200-132-SMs.blocklist.json"
    assert in_a_database.parent.name == "studies"
