"""One of several processes that search one kept study, on a recorded table: see test_studies.py.

Run as `python recorded.py STORAGE LOG OPTIONS`, OPTIONS being JSON for `search_recorded`. Prints
what it knows at the end, as `known` reads it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from fagen.device import KNOWN_DEVICES
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem
from fagen.tuning.outcome import Measured, Outcome, Rejected
from fagen.tuning.search.joint import JointSearch
from fagen.tuning.search.legal import LegalSet
from fagen.tuning.search.storage import open_storage
from fagen.tuning.search.study import Study

NAME = "recorded"
TRIALS = 1000  # more than the legal set has

Known = tuple[set[tuple[str, str]], str | None]  # (config, outcome), and the winner


def legal_set() -> LegalSet:
    """77 configs."""
    fixed = {
        "block_m": 128,
        "warps": 4,
        "block_k": 64,
        "exp2_fma_every": 0,
        "lazy_rescale": False,
        "head_grouping": True,
        "q_in_registers": False,
    }
    problem = Problem(dtype="bf16", head_dim=64)
    device = KNOWN_DEVICES["NVIDIA A100-SXM4-80GB"]
    return LegalSet(problem, device, "forward_sm80", fixed=fixed)


def recorded(config: AnyConfig) -> Outcome:
    """The table: a time for most, all of them different, and a rejection for some."""
    if config.axes()["block_n"] == 96:
        return Rejected(kind="resources", reason="spills 8 bytes per thread")
    if config.axes()["block_n"] == 112:
        return Rejected(kind="wrong", reason="output is off by 1")
    place = legal_set_rows().index(str(config))
    return Measured(time_us=100.0 + (place * 37 + 5) % 211)


_rows: list[str] = []


def legal_set_rows() -> list[str]:
    if not _rows:
        legal = legal_set()
        _rows.extend(str(legal.config(row)) for row in range(len(legal)))
    return _rows


def known(study: Study) -> Known:
    """What a study knows: the outcome of each config, and the best one."""
    outcomes = {(str(trial.config), str(trial.outcome)) for trial in study.trials}
    assert len(outcomes) == len(study.trials)
    return outcomes, str(study.best.config) if study.best else None


def search_recorded(
    storage: str,
    log: Path,
    *,
    sampler: str = "brute-force",
    seconds: float = 0.0,
    ahead: int = 3,
    studies: int = 1,
) -> list[Study]:
    """Joins the search.

    Args:
        log: gets one line for each evaluation.
        seconds: what an evaluation takes.
        ahead: configs that are asked for before the first is evaluated.
        studies: that are searched side by side.
    """

    legal, opened = legal_set(), open_storage(storage)
    joined = [
        Study(f"{NAME} {number}", legal, sampler=sampler, storage=opened, resume=True)
        for number in range(studies)
    ]
    waiting: list[AnyConfig] = []
    with JointSearch(joined, trials=TRIALS) as search:
        while True:
            config = search.ask()
            if config is not None:
                waiting.append(config)
            if waiting and (config is None or len(waiting) > ahead):
                oldest = waiting.pop(0)
                with log.open("a") as file:
                    file.write(f"{oldest}\n")
                time.sleep(seconds)
                search.tell(oldest, [recorded(oldest)] * studies)
            elif config is None and not search.must_wait():
                return joined


if __name__ == "__main__":
    results = [
        known(study)
        for study in search_recorded(sys.argv[1], Path(sys.argv[2]), **json.loads(sys.argv[3]))
    ]
    print(json.dumps([[sorted(outcomes), best] for outcomes, best in results]))
