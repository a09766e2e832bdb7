"""The space of configs: one statement of what is legal, walked in two ways, and what it holds."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fagen.build import render
from fagen.build.compile import compile_many, compile_source
from fagen.build.compiled import Compiled
from fagen.device import ARCHITECTURES, Architecture, Device, architecture, typical_device
from fagen.errors import ArgumentError, CompileError
from fagen.kernels import Sm80Forward, Sm90Forward
from fagen.kernels.forward import ForwardConfig
from fagen.kernels.registry import (
    TEMPLATES,
    AnyConfig,
    default_config,
    parse_config,
    templates_for,
)
from fagen.kernels.space import axes, legal_configs, why_illegal
from fagen.kernels.template import round_up, symbol
from fagen.problem import Problem
from fagen.tuning.search.legal import LegalSet

SEED = 20
HEAD_DIMS = (64, 96, 128, 192, 256)


def _device(arch: str) -> Device:
    return typical_device(architecture(arch))


def _problem(head_dim: int, **fields: Any) -> Problem:
    return Problem(dtype="bf16", head_dim=head_dim, **fields)


def _templates(arch: Architecture) -> list[str]:
    """The names of the templates that run there."""
    return [template.NAME for template in templates_for("forward", arch)]


# ---- the tiles that FlashAttention ships are points of the space ----


def _fa3_hopper(
    head_dim: int, block_m: int, block_n: int, *, p_in_smem: bool = False
) -> tuple[str, int, AnyConfig]:
    """FlashAttention-3's forward: two stages, overlap, a producer that gives registers up, and
    turns of the warpgroups up to head dim 128.
    """
    config = Sm90Forward(
        block_m=block_m,
        block_n=block_n,
        block_k=head_dim,
        stages=2,
        producer_registers=24 if block_m == 128 else 32,
        ping_pong=head_dim <= 128,
        p_in_smem=p_in_smem,
    )
    return "sm90", head_dim, config


def _ampere(
    arch: str, head_dim: int, tile: tuple[int, int, int], stages: int = 1, **fields: Any
) -> tuple[str, int, AnyConfig]:
    """A tile (block_m, block_n, warps) of FlashAttention-2 or -3 for the sm80 class."""
    block_m, block_n, warps = tile
    config = Sm80Forward(
        block_m=block_m, block_n=block_n, block_k=head_dim, warps=warps, stages=stages, **fields
    )
    return arch, head_dim, config


SHIPPED: dict[str, list[tuple[str, int, AnyConfig]]] = {
    "FlashAttention-3 on sm90": [
        _fa3_hopper(64, 192, 192, p_in_smem=True),
        _fa3_hopper(64, 192, 128),
        _fa3_hopper(96, 192, 144, p_in_smem=True),
        _fa3_hopper(128, 128, 176),
        _fa3_hopper(128, 128, 128),
        _fa3_hopper(192, 128, 112),
        _fa3_hopper(256, 128, 80),
    ],
    "FlashAttention-3 on sm80": [
        _ampere("sm80", 64, (128, 112, 4)),
        _ampere("sm80", 96, (128, 64, 4)),
        _ampere("sm80", 128, (128, 64, 4)),
        _ampere("sm80", 192, (128, 96, 8), stages=2, q_in_registers=True),
        _ampere("sm80", 192, (128, 64, 8), stages=2),
        _ampere("sm80", 256, (128, 96, 8)),
    ],
    "FlashAttention-3 on sm86 and sm89": [
        tile
        for arch in ("sm86", "sm89")
        for tile in (
            _ampere(arch, 64, (128, 112, 4)),
            _ampere(arch, 96, (128, 64, 4)),
            _ampere(arch, 128, (128, 128, 8), q_in_registers=True),
            _ampere(arch, 192, (128, 96, 8), q_in_registers=True),
            _ampere(arch, 256, (128, 64, 8), q_in_registers=True),
        )
    ],
    "FlashAttention-2 on sm80 and sm90": [
        tile
        for arch in ("sm80", "sm90")
        for tile in (
            _ampere(arch, 32, (128, 128, 4)),
            _ampere(arch, 64, (128, 128, 4)),
            _ampere(arch, 96, (128, 64, 4)),
            _ampere(arch, 128, (128, 64, 4)),
            _ampere(arch, 192, (128, 64, 8)),
            _ampere(arch, 256, (128, 64, 8)),
        )
    ]
    + [_ampere("sm90", 256, (64, 64, 4), min_blocks_per_sm=2)],
    "FlashAttention-2 on sm86 and sm89": [
        tile
        for arch in ("sm86", "sm89")
        for tile in (
            _ampere(arch, 64, (128, 128, 4)),
            _ampere(arch, 96, (128, 64, 4)),
            _ampere(arch, 96, (64, 64, 4)),
            _ampere(arch, 128, (128, 32, 4), min_blocks_per_sm=2),
            _ampere(arch, 128, (64, 64, 4)),
            _ampere(arch, 256, (64, 64, 4)),
        )
    ],
}


@pytest.mark.parametrize(
    ("arch", "head_dim", "config"),
    [
        pytest.param(*tile, id=f"{source}, {tile[0]}: {tile[1]}, {tile[2]}")
        for source, tiles in SHIPPED.items()
        for tile in tiles
    ],
)
def test_shipped_tiles_are_in_the_space(arch: str, head_dim: int, config: AnyConfig) -> None:
    problem = _problem(head_dim)
    values = axes(config.template, problem)
    assert {name: value in values[name] for name, value in config.axes().items()} == dict.fromkeys(
        config.axis_names(), True
    )
    assert why_illegal(config, problem, _device(arch)) is None


# ---- two ways to walk it ----


@pytest.mark.parametrize(
    ("template", "arch", "head_dim"),
    [
        ("forward_sm80", "sm80", 64),
        ("forward_sm80", "sm86", 128),
        ("forward_sm80", "sm90", 72),
        ("forward_sm90", "sm90", 256),
        ("forward_sm90", "sm90", 96),
        ("forward_sm90", "sm80", 128),
    ],
)
def test_walk_agrees_with_rules(template: str, arch: str, head_dim: int) -> None:
    """On sub-spaces of six free axes, the others held at a random value."""
    problem, device = _problem(head_dim), _device(arch)
    dice = random.Random(SEED)
    values = axes(template, problem)
    outcomes: Counter[bool] = Counter()
    for _ in range(30):
        fixed = {name: dice.choice(choices) for name, choices in values.items()}
        for free in dice.sample(list(values), 6):
            del fixed[free]
        choices = [(fixed[name],) if name in fixed else values[name] for name in values]
        points = [
            parse_config({"template": template, **dict(zip(values, point, strict=True))})
            for point in itertools.product(*choices)
        ]
        legal = [point for point in points if why_illegal(point, problem, device) is None]
        walked = list(legal_configs(template, problem, device, fixed=fixed))
        assert sorted(map(str, walked)) == sorted(map(str, legal))
        assert set(walked) == set(legal)
        outcomes += Counter({True: len(legal), False: len(points) - len(legal)})
    assert outcomes[False] > 100
    assert outcomes[True] > 100 or template not in _templates(device.arch)


@pytest.mark.parametrize(("arch", "head_dim"), [("sm80", 128), ("sm86", 256), ("sm90", 256)])
def test_walk_accounts_for_every_point(arch: str, head_dim: int) -> None:
    problem, device = _problem(head_dim), _device(arch)
    for template in _templates(device.arch):
        rejections: Counter[str] = Counter()
        accepted = sum(1 for _ in legal_configs(template, problem, device, rejections=rejections))
        points = math.prod(len(values) for values in axes(template, problem).values())
        assert accepted > 1000
        assert {"smem", "accumulators"} <= set(rejections)
        assert accepted + rejections.total() == points


def test_walked_configs_are_what_a_file_would_give() -> None:
    for config in itertools.islice(
        legal_configs("forward_sm80", _problem(64), _device("sm80")), 50
    ):
        assert parse_config(config.model_dump()) == config
        assert parse_config({"template": config.template, **config.axes()}) == config


# ---- rules and their reasons ----

HOPPER = Sm90Forward(block_m=128, block_n=128, block_k=128, stages=2)
AMPERE = Sm80Forward(block_m=128, block_n=64, block_k=128, warps=4, stages=1)


@pytest.mark.parametrize(
    ("config", "change", "arch", "problem", "reason"),
    [
        (HOPPER, {}, "sm80", {}, "does not answer forward on sm80: forward_sm80 does"),
        (HOPPER, {}, "sm120", {}, "forward_sm90 does not answer forward on sm120"),
        (HOPPER, {}, "sm90", {"alignment": 2}, "TMA needs .* 16 bytes: take forward_sm80"),
        (HOPPER, {"block_k": 48}, "sm90", {}, "block_k=48 is not a multiple of 32"),
        (HOPPER, {"block_k": 256}, "sm90", {}, "more than head_dim 128"),
        (HOPPER, {"block_m": 256}, "sm90", {}, "block_m=256 is not 64, 128 or 192"),
        (HOPPER, {"block_m": 96}, "sm90", {}, "block_m=96 is not"),
        (HOPPER, {"block_m": 64}, "sm90", {}, "ping_pong needs two consumer warpgroups"),
        (HOPPER, {"stages": 4}, "sm90", {}, r"shared memory: 29\d,\d{3} bytes of 232,448"),
        (HOPPER, {"min_blocks_per_sm": 6}, "sm90", {}, "2304 threads of the 2048"),
        (HOPPER, {"min_blocks_per_sm": 2}, "sm90", {}, "wgmma needs 94 .* enters with 80"),
        (HOPPER, {"block_n": 256}, "sm90", {}, "accumulators take 256 of 240"),
        (HOPPER, {"producer_registers": 16}, "sm90", {}, "at least 24 registers, not 16"),
        (HOPPER, {"producer_registers": 200}, "sm90", {}, "cannot give up to 200"),
        (HOPPER, {"block_m": 192, "block_n": 192}, "sm90", {}, "accumulators take 208 of 160"),
        (AMPERE, {"block_k": 24}, "sm80", {}, "block_k"),
        (AMPERE, {"warps": 16}, "sm80", {}, "block_m=128 does not split into 16-row tiles"),
        (AMPERE, {"warps": 3}, "sm80", {}, "does not split"),
        (AMPERE, {"block_n": 192, "warps": 8}, "sm86", {}, r"131,072 bytes of 101,376"),
        (AMPERE, {"warps": 2}, "sm80", {}, "accumulators take 384 of"),
        (AMPERE, {"min_blocks_per_sm": 3}, "sm80", {}, "accumulators|needs .* bytes"),
    ],
)
def test_reasons(
    config: AnyConfig, change: dict[str, Any], arch: str, problem: dict[str, Any], reason: str
) -> None:
    question = _problem(128, **problem)
    if not problem and config.template in _templates(architecture(arch)):
        assert why_illegal(config, question, _device(arch)) is None, "the change breaks it alone"
    changed = config.model_copy(update=change)
    assert re.search(reason, str(why_illegal(changed, question, _device(arch))))


@pytest.mark.parametrize(
    ("block_m", "min_blocks_per_sm", "producer", "consumer"),
    [(128, 1, 24, 240), (192, 1, 32, 160), (64, 2, 56, 200)],
)
def test_pool_of_registers(
    block_m: int, min_blocks_per_sm: int, producer: int, consumer: int
) -> None:
    """The first two are FlashAttention-3's; all warpgroups together fit the register file."""
    config = Sm90Forward(
        block_m=block_m,
        block_n=64,
        block_k=64,
        stages=2,
        ping_pong=False,
        producer_registers=producer,
        min_blocks_per_sm=min_blocks_per_sm,
    )
    assert why_illegal(config, _problem(64), _device("sm90")) is None
    assert config.consumer_registers(65536) == consumer
    assert 128 * (block_m // 64 * consumer + producer) * min_blocks_per_sm <= 65536


def test_other_values_are_refused_in_one_line() -> None:
    fields = {"template": "forward_sm90", **HOPPER.axes()}
    for change in ({"block_m": 100}, {"warp_groups": 3}, {"stages": 0}, {"template": "sm90"}):
        with pytest.raises(ArgumentError, match="bad config") as caught:
            parse_config(fields | change)
        assert "\n" not in str(caught.value)
        assert next(iter(change)) in str(caught.value)


# ---- the default ----


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_default_is_always_legal(arch: str) -> None:
    device = _device(arch)
    for head_dim, causal, alignment in itertools.product(range(8, 257, 8), (False, True), (2, 16)):
        problem = _problem(head_dim, causal=causal, alignment=alignment)
        for template in (None, "forward_sm80", *_templates(device.arch)[alignment < 16 :]):
            config = default_config(problem, device, template)
            assert why_illegal(config, problem, device) is None, f"{problem} {config}"
            assert parse_config(config.model_dump()) == config
            values = axes(config.template, problem)
            outside = {n: v for n, v in config.axes().items() if v not in values[n]}
            assert outside == {}, f"{problem} {config}"


def test_default_takes_the_native_template_where_it_can() -> None:
    hopper = _device("sm90")
    assert default_config(_problem(64), hopper).template == "forward_sm90"
    assert default_config(_problem(64, alignment=2), hopper).template == "forward_sm80"
    assert default_config(_problem(64), _device("sm120")).template == "forward_sm80"


@pytest.mark.parametrize(("head_dim", "block_n", "fits"), [(72, 48, True), (64, 80, False)])
def test_compiler_agrees_on_what_one_wgmma_needs(head_dim: int, block_n: int, fits: bool) -> None:
    """62 of 64 registers compile, 66 do not."""
    config = Sm90Forward(
        block_m=64,
        block_n=block_n,
        block_k=64,
        stages=1,
        min_blocks_per_sm=4,
        ping_pong=False,
        overlap=False,
        p_in_smem=True,
    )
    reason = why_illegal(config, _problem(head_dim), _device("sm90"))
    assert (reason is None) is fits
    source = render.render(_problem(head_dim), config)
    name = symbol(_problem(head_dim))
    if fits:
        compile_source(source, _device("sm90").arch, name, cached=False)
    else:
        with pytest.raises(CompileError, match=r"Insufficient registers \(64\)") as caught:
            compile_source(source, _device("sm90").arch, name, cached=False)
        assert "66 or higher" in caught.value.log


# ---- accepted configs compile, within the limits that the rules promise ----


def _jobs(
    device: Device, count: int, head_dims: tuple[int, ...]
) -> Iterator[tuple[Problem, AnyConfig]]:
    """`count` accepted configs or a few more, spread over templates, head dims and problems."""
    dice = random.Random(SEED)
    share = math.ceil(count / len(head_dims) / len(_templates(device.arch)))
    for template, head_dim in itertools.product(_templates(device.arch), head_dims):
        legal = LegalSet(_problem(head_dim), device, template)
        for row in dice.sample(range(len(legal)), share):
            problem = Problem(
                dtype=dice.choice(("bf16", "fp16")),
                head_dim=head_dim,
                causal=dice.random() < 0.5,
                alignment=dice.choice((2, 16)) if template == "forward_sm80" else 16,
            )
            yield problem, legal.config(row)


def _compile_within_limits(arch: str, count: int, head_dims: tuple[int, ...]) -> None:
    device = _device(arch)
    jobs = _jobs(device, count, head_dims)
    compiled = 0
    for problem, config, answer in compile_many(jobs, device.arch, timeout=600):
        # A CompileError would be a static_assert too: Python and C++ disagree on a size.
        assert isinstance(answer, Compiled), f"{problem} {config}: {answer}"
        resources = answer.resources
        block = config.threads
        assert isinstance(config, ForwardConfig)
        cap = config.register_cap(device.arch.registers_per_sm)
        assert resources.registers <= cap, f"{problem} {config}"
        warps = round_up(config.min_blocks_per_sm * math.ceil(block / 32), 4)
        registers = round_up(resources.registers, 8) * 32 * warps
        assert registers <= device.arch.registers_per_sm, f"{problem} {config}"
        smem = config.smem_bytes(problem) + resources.smem_bytes
        assert smem <= device.arch.smem_per_block, f"{problem} {config}"
        assert block <= 1024
        compiled += 1
    assert compiled >= count


@pytest.fixture
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_private_cache")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_sample_of_accepted_configs_compiles(arch: str) -> None:
    """The same ones at each run: one of each template and head dim."""
    count = len(_templates(architecture(arch))) * (1 + len(HEAD_DIMS))
    _compile_within_limits(arch, count, head_dims=(40, *HEAD_DIMS))


@pytest.mark.slow
@pytest.mark.usefixtures("_private_cache")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_accepted_configs_compile(arch: str) -> None:
    """Hundreds of each architecture: `pytest -m slow`."""
    _compile_within_limits(arch, 300, head_dims=(40, *HEAD_DIMS))


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_legal_set_is_what_the_walk_yields(template: str) -> None:
    """Rows, size of the space and what each rule removes, on a part that keeps free axes."""
    problem, device = _problem(128), _device("sm90")
    fixed = {"block_n": (64, 128, 176), "stages": (1, 2), "exp2_fma_every": (0,)}
    removed: Counter[str] = Counter()
    walked = set(legal_configs(template, problem, device, fixed=fixed, rejections=removed))
    legal = LegalSet(problem, device, template, fixed=fixed)
    assert {legal.config(row) for row in range(len(legal))} == walked
    assert len(legal) == len(walked) > 1000
    assert legal.removed == removed
    assert legal.points == len(legal) + removed.total()
