"""The six tiers, on made-up stores."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import H200, some_record

from fagen.device import KNOWN_DEVICES, Device, architecture, typical_device
from fagen.errors import ConfigError
from fagen.kernels import Sm80Forward, Sm90Forward
from fagen.kernels.registry import AnyConfig, default_config
from fagen.kernels.space import why_illegal
from fagen.problem import Problem, Shape
from fagen.records import dispatch, store
from fagen.records.dispatch import Choice, Tier, choose, tier_table
from fagen.records.store import Card, Store, TunedConfig, digest, save_records

H100 = KNOWN_DEVICES["NVIDIA H100 80GB HBM3"]
H20 = KNOWN_DEVICES["NVIDIA H20"]
PROBLEM = Problem(dtype="bf16", head_dim=128, causal=True)
SHAPE = Shape(batch=4, seqlen_q=4096, seqlen_k=4096, heads_q=16, heads_kv=16)


def sm90(block_n: int, **axes: Any) -> Sm90Forward:
    return Sm90Forward(block_m=128, block_n=block_n, block_k=64, stages=2, **axes)


def text_of(problem: Problem, config: AnyConfig) -> str:
    return f"{problem} {config}"


def make_record(
    config: AnyConfig,
    seqlen: int = 4096,
    device: Device = H200,
    kind: Any = "measured",
    *,
    problem: Problem = PROBLEM,
    fresh: bool = True,
) -> TunedConfig:
    return some_record(
        problem,
        config,
        seqlen=seqlen,
        card=Card.of(device),
        kind=kind,
        text=digest(text_of(problem, config)) if fresh else "older",
    )


@pytest.fixture(autouse=True)
def _stub_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "render", text_of)
    dispatch.is_stale.cache_clear()


ChooseFrom = Callable[..., Choice]


@pytest.fixture
def choose_from(tmp_path: Path) -> ChooseFrom:
    """Chooses among these records."""

    def choose_from(
        *records: TunedConfig, problem: Problem = PROBLEM, device: Device = H200
    ) -> Choice:
        path = tmp_path / "records.yaml"
        save_records(path, records)
        return choose(problem, SHAPE, device, store=Store(path))

    return choose_from


# ---- each tier wins over all below it ----

EXACT = make_record(sm90(128))
NEAR = make_record(sm90(112), 2048)
FAR = make_record(sm90(96), 512)
ELSEWHERE = make_record(sm90(80), device=H100)
PREDICTED = make_record(sm90(64), kind="predicted")


@pytest.mark.parametrize(
    ("records", "tier", "block_n", "reason"),
    [
        ([PREDICTED, ELSEWHERE, FAR, NEAR, EXACT], Tier.MEASURED_HERE, 128, "this device, best"),
        ([ELSEWHERE, FAR, NEAR], Tier.MEASURED_NEAR, 112, "nearest to q4096"),
        ([PREDICTED, ELSEWHERE], Tier.MEASURED_ELSEWHERE, 80, "on NVIDIA H100 80GB HBM3"),
        ([PREDICTED], Tier.PREDICTED, 64, "static model expects"),
        ([], Tier.DEFAULT, None, "fagen tune --arch sm90"),
    ],
)
def test_tiers(
    choose_from: ChooseFrom,
    records: list[TunedConfig],
    tier: Tier,
    block_n: int | None,
    reason: str,
) -> None:
    choice = choose_from(*records)
    assert choice.tier is tier
    assert reason in choice.reason
    if block_n is None:
        assert choice.config == default_config(PROBLEM, H200)
        assert (choice.record, choice.path) == (None, None)
    else:
        assert choice.config.axes()["block_n"] == block_n
        assert choice.record is not None
        assert choice.record.config == choice.config


def test_a_given_config_wins_and_has_to_be_legal(choose_from: ChooseFrom) -> None:
    choice = choose(PROBLEM, SHAPE, H200, config=sm90(96))
    assert (choice.config, choice.tier) == (sm90(96), Tier.GIVEN)
    with pytest.raises(ConfigError, match="illegal for forward_bf16_d128_causal on NVIDIA H200: "):
        choose(PROBLEM, SHAPE, H200, config=sm90(256))


def test_records_of_other_problems_and_architectures_do_not_count(choose_from: ChooseFrom) -> None:
    other = Problem(dtype="fp16", head_dim=128, causal=True)
    assert choose_from(EXACT, problem=other).tier is Tier.DEFAULT
    a100 = typical_device(architecture("sm80"))
    assert choose_from(EXACT, device=a100).tier is Tier.DEFAULT


def test_a_narrow_problem_takes_the_default_of_the_sm80_class(choose_from: ChooseFrom) -> None:
    narrow = PROBLEM.model_copy(update={"alignment": 2})
    choice = choose_from(EXACT, problem=narrow)
    assert choice.tier is Tier.DEFAULT
    assert isinstance(choice.config, Sm80Forward)
    assert "narrow" in choice.describe().replace(str(narrow), "")


def test_of_other_devices_the_most_similar_counts(choose_from: ChooseFrom) -> None:
    pcie = KNOWN_DEVICES["NVIDIA H100 PCIe"]  # its SM count is nearer to the H20's
    choice = choose_from(
        make_record(sm90(80), device=H100), make_record(sm90(64), 512, device=pcie), device=H20
    )
    assert choice.config.axes()["block_n"] == 80  # the right bucket is worth more
    choice = choose_from(make_record(sm90(96), device=pcie), device=H20)  # added to the same file
    assert choice.config.axes()["block_n"] == 96


def test_every_length_of_a_bucket_gets_the_same_object(choose_from: ChooseFrom) -> None:
    opened = Store(choose_from(EXACT).path)
    longer = SHAPE.model_copy(update={"seqlen_q": 4100, "seqlen_k": 3900})
    assert choose(PROBLEM, longer, H200, store=opened) is choose(PROBLEM, SHAPE, H200, store=opened)


# ---- what is passed over ----


def test_an_illegal_record_is_passed_over_and_named(choose_from: ChooseFrom) -> None:
    illegal = sm90(256)
    rule = why_illegal(illegal, PROBLEM, H200)
    assert rule
    choice = choose_from(make_record(illegal), NEAR)
    assert choice.config == NEAR.config
    assert rule in choice.reason


def test_a_record_of_a_card_with_more_shared_memory_is_passed_over(choose_from: ChooseFrom) -> None:
    rtx, ada = KNOWN_DEVICES["NVIDIA RTX A6000"], KNOWN_DEVICES["NVIDIA A10"]
    big = Sm80Forward(block_m=128, block_n=128, block_k=128, warps=8, stages=3)
    assert why_illegal(big, PROBLEM, ada)
    choice = choose_from(make_record(big, device=rtx), device=ada)
    assert choice.tier is Tier.DEFAULT
    assert "shared memory" in choice.reason


def test_an_unusable_record_of_a_named_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "edited.yaml"
    save_records(path, [EXACT])
    path.write_text(path.read_text().replace("block_n: 128", "block_n: 1000"))
    choice = choose(PROBLEM, SHAPE, H200, store=Store(path))
    assert choice.tier is Tier.DEFAULT
    assert re.search(r"edited.yaml are unusable: line \d+: config.block_n: .*1000", choice.reason)


# ---- the user's records, the shipped ones, and older texts ----


def choose_between(
    own: TunedConfig, shipped: TunedConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Choice:
    monkeypatch.delenv(store.CONFIG_VARIABLE, raising=False)
    monkeypatch.setattr(store, "user_overlay_path", lambda arch: folder / f"own-{arch}.yaml")
    monkeypatch.setattr(store, "shipped_path", lambda arch: folder / f"shipped-{arch}.yaml")
    save_records(folder / "own-sm90.yaml", [own])
    save_records(folder / "shipped-sm90.yaml", [shipped])
    return choose(PROBLEM, SHAPE, H200)


@pytest.mark.parametrize(
    ("own_fresh", "shipped_fresh", "block_n"),
    [(True, True, 96), (True, False, 96), (False, False, 96), (False, True, 112)],
)
def test_the_users_record_goes_first_unless_only_it_is_stale(
    own_fresh: bool,
    shipped_fresh: bool,
    block_n: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = make_record(sm90(96), fresh=own_fresh)
    shipped = make_record(sm90(112), fresh=shipped_fresh)
    assert choose_between(own, shipped, tmp_path, monkeypatch).config.axes()["block_n"] == block_n


def test_a_stale_record_is_still_better_than_a_lower_tier(choose_from: ChooseFrom) -> None:
    choice = choose_from(make_record(sm90(96), fresh=False), NEAR)
    assert choice.config.axes()["block_n"] == 96
    assert choice.stale
    assert "not the text that was tuned" in choice.describe()


def test_nothing_is_rendered_to_choose(
    choose_from: ChooseFrom, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*_: object) -> str:
        raise AssertionError("rendered")

    monkeypatch.setattr(dispatch, "render", render)
    choice = choose_from(EXACT, NEAR, FAR, ELSEWHERE, PREDICTED)
    with pytest.raises(AssertionError, match="rendered"):
        _ = choice.stale


FIRST_LANDING = Path(__file__).parent / "data" / "first_landing.yaml"


def test_records_that_the_first_version_wrote_are_still_chosen() -> None:
    opened = Store(FIRST_LANDING)
    records = opened.records()
    assert len(records) == 6
    assert {record.config.template for record in records} == {"forward_sm80", "forward_sm90"}
    for record in records:
        device = KNOWN_DEVICES[record.device.name]
        choice = choose(record.problem, record.shape, device, store=opened)
        assert choice.record == record
        assert choice.path == FIRST_LANDING
        assert choice.tier == (Tier.MEASURED_HERE if record.measured else Tier.PREDICTED)


# ---- what people see and do ----


def test_editing_block_n_in_a_copied_file_changes_the_choice(
    choose_from: ChooseFrom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = choose_from(EXACT).path
    assert original is not None
    copy = tmp_path / "copy.yaml"
    copy.write_text(original.read_text().replace("block_n: 128", "block_n: 96"))
    monkeypatch.setenv(store.CONFIG_VARIABLE, str(original))
    assert choose(PROBLEM, SHAPE, H200).config.axes()["block_n"] == 128
    monkeypatch.setenv(store.CONFIG_VARIABLE, str(copy))
    choice = choose(PROBLEM, SHAPE, H200)
    assert choice.config == EXACT.config.model_copy(update={"block_n": 96})
    assert str(copy) in choice.describe()
    assert choice.stale  # what was measured is not what runs


def test_describe_and_names(choose_from: ChooseFrom) -> None:
    choice = choose_from(ELSEWHERE)
    assert choice.tier_name == "measured on another sm90 device"
    text = choice.describe()
    assert "4 of 6, measured on another sm90 device" in text
    assert str(choice.config) in text
    assert "not the text" not in text


def test_the_tier_table_shows_every_offer(tmp_path: Path) -> None:
    path = tmp_path / "records.yaml"
    save_records(path, [EXACT, FAR, NEAR, ELSEWHERE, PREDICTED, make_record(sm90(256), 8192)])
    table = tier_table(PROBLEM, SHAPE, H200, store=Store(path))
    assert {tier: [offer.config.axes()["block_n"] for offer in table[tier]] for tier in table} == {
        Tier.MEASURED_HERE: [128],
        Tier.MEASURED_NEAR: [112, 256, 96],  # 2048 and 8192 are as near; the file's order counts
        Tier.MEASURED_ELSEWHERE: [80],
        Tier.PREDICTED: [],  # a measured record has its key
        Tier.DEFAULT: [default_config(PROBLEM, H200).axes()["block_n"]],
    }
    assert [offer.illegal is None for offer in table[Tier.MEASURED_NEAR]] == [True, False, True]


def test_a_choice_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "records.yaml"
    save_records(path, [EXACT])
    opened = Store(path)
    with caplog.at_level(logging.INFO, logger="fagen.records.dispatch"):
        for _ in range(3):
            choose(PROBLEM, SHAPE, H200, store=opened)
    [message] = [r.getMessage() for r in caplog.records if r.name == "fagen.records.dispatch"]
    assert "measured for this device" in message


def test_choosing_imports_neither_jinja2_nor_optuna(tmp_path: Path) -> None:
    path = tmp_path / "records.yaml"
    save_records(path, [EXACT])
    code = (
        "import sys; from fagen import problem, device; from fagen.records import dispatch;"
        "p = problem.Problem(dtype='bf16', head_dim=128, causal=True);"
        "s = problem.Shape(batch=4, seqlen_q=4096, seqlen_k=4096, heads_q=16, heads_kv=16);"
        "c = dispatch.choose(p, s, device.KNOWN_DEVICES['NVIDIA H200']);"
        "print(c.config.block_n, {'jinja2', 'optuna', 'torch', 'cupy'} & set(sys.modules))"
    )
    environment = os.environ | {store.CONFIG_VARIABLE: str(path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert out == "128 set()\n"
