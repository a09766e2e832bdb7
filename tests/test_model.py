"""The static model against times that were measured on an H200 on 2026-11-29 and -30.

The files are the searches' own Optuna studies, of 16384 tokens and 2048 / head_dim heads but for
"grid_b", which has other head dims and shapes. Those of the current kernel ("seen", "unseen",
"fp16", "fp16_d256", "grid_b") are guided by the model, so most of their configs are near the best;
the "table" is complete, and those of the "older" kernel range widely. The kernels of these two did
not yet skip the blocks of keys that only other warpgroups see, as the model believes.
"""

from __future__ import annotations

import gzip
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import pytest
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import FrozenTrial, TrialState

from fagen.build.compiled import Resources
from fagen.device import KNOWN_DEVICES, architecture, typical_device
from fagen.kernels import Sm80Forward, Sm90Forward, forward_cost, forward_sm90_cost
from fagen.kernels.cost import STATIC_TILE_KEYS, Steps, static_imbalance, steps_of_head
from fagen.kernels.registry import AnyConfig, default_config, templates_for
from fagen.mask import Mask
from fagen.problem import Problem, Shape
from fagen.tuning.model import memory_us, predict

H200 = KNOWN_DEVICES["NVIDIA H200"]
TESTS = Path(__file__).parent
RESULTS = TESTS.parent / "benchmarks" / "results"
FILES = {
    "bf16": RESULTS / "h200_forward_sm90_bf16.journal.gz",
    "fp16": RESULTS / "h200_forward_sm90_fp16.journal.gz",
    "grid_b": RESULTS / "h200_forward_sm90_bf16_grid_b.journal.gz",
    "table": TESTS / "tables" / "h200_forward_sm90_bf16_d128_causal_2k.journal.gz",
    "older": RESULTS / "h200_forward_sm90_fp16_older_kernel.journal.gz",
}
# What the constants were fitted to: these lengths of "bf16", half of "table", half of "older".
SEEN_LENGTHS = (512, 2048, 8192)
# Studies of each set, those last that came when the model was finished.
SETS = {
    "seen": 18,
    "unseen": 18,
    "fp16": 24,
    "table": 1,
    "older": 18,
    "fp16_d256": 12,
    "grid_b": 72,
}
LATE = ("fp16_d256", "grid_b")
SMALL = {"ping_pong": False, "producer_registers": 0}


class Study(NamedTuple):
    """One search: what it was for, and its measured configs."""

    name: str
    problem: Problem
    shape: Shape
    trials: list[FrozenTrial]
    configs: list[Sm90Forward]
    measured: np.ndarray[Any, Any]  # microseconds
    predicted: np.ndarray[Any, Any]


def shape_of(seqlen: int, head_dim: int) -> Shape:
    heads = 2048 // head_dim
    return Shape(
        batch=16384 // seqlen, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=heads, heads_kv=heads
    )


def same_kernel(problem: Problem, config: Sm90Forward) -> bool:
    """Whether the older kernel dealt out tiles in the order of today's."""
    return not (config.persistent and problem.causal and not config.head_grouping)


def read_study(study: optuna.Study, older: bool) -> Study:
    name = re.search(r"forward_(\w+)_d(\d+)_(causal|full) q(\d+)_", study.study_name)
    assert name is not None
    problem = Problem(dtype=name[1], head_dim=int(name[2]), causal=name[3] == "causal")
    kept = study.user_attrs.get("shape")  # the oldest studies have none
    shape = Shape.model_validate(kept) if kept else shape_of(int(name[4]), problem.head_dim)
    trials = study.get_trials(deepcopy=False)
    good = [
        (Sm90Forward.model_validate(trial.params), trial.user_attrs["time_us"])
        for trial in trials
        if trial.state == TrialState.COMPLETE
    ]
    if older:
        good = [(config, time) for config, time in good if same_kernel(problem, config)]
    configs = [config for config, _ in good]
    measured = np.array([time for _, time in good])
    predicted = np.array([predict(problem, shape, config, H200) for config in configs])
    return Study(study.study_name, problem, shape, trials, configs, measured, predicted)


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Study]]:
    """The studies of each set, read as anybody would: with `optuna.load_study`."""
    found = {}
    for name, packed in FILES.items():
        path = tmp_path_factory.mktemp("journals") / f"{name}.journal"
        path.write_bytes(gzip.decompress(packed.read_bytes()))
        storage = JournalStorage(JournalFileBackend(str(path)))
        found[name] = [
            read_study(optuna.load_study(study_name=study_name, storage=storage), name == "older")
            for study_name in optuna.get_all_study_names(storage)
        ]
    bf16 = found.pop("bf16")
    found["seen"] = [study for study in bf16 if study.shape.seqlen_q in SEEN_LENGTHS]
    found["unseen"] = [study for study in bf16 if study.shape.seqlen_q not in SEEN_LENGTHS]
    fp16 = found["fp16"]
    found["fp16"] = [study for study in fp16 if study.problem.head_dim < 256]
    found["fp16_d256"] = [study for study in fp16 if study.problem.head_dim == 256]
    return found


def rank_correlation(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def hopper(block_m: int, block_n: int, head_dim: int, **axes: Any) -> Sm90Forward:
    return Sm90Forward(
        block_m=block_m, block_n=block_n, block_k=min(head_dim, 64), **{"stages": 2, **axes}
    )


def tflops(head_dim: int, causal: bool, config: AnyConfig, seqlen: int) -> float:
    problem = Problem(dtype="bf16", head_dim=head_dim, causal=causal)
    shape = shape_of(seqlen, head_dim)
    return shape.flops(problem) / predict(problem, shape, config, H200) * 1e-6


@pytest.mark.parametrize("name", SETS)
def test_a_study_lists_each_trial_with_axes_state_time_and_reason(
    studies: dict[str, list[Study]], name: str
) -> None:
    assert len(studies[name]) == SETS[name]
    for study in studies[name]:
        assert len(study.configs) >= 34
        for trial in study.trials:
            assert trial.params.keys() <= set(Sm90Forward.axis_names())
            assert trial.datetime_complete is not None
            if trial.state == TrialState.COMPLETE:
                assert trial.value is not None
                assert trial.value > 0
                assert trial.user_attrs["time_us"] > 0
            else:
                assert trial.state == TrialState.FAIL
                assert trial.value is None
                kind = trial.user_attrs["kind"]
                assert kind in ("illegal", "resources", "claim")
                assert kind == "claim" or trial.user_attrs["reason"]  # nobody came back to it


@pytest.mark.parametrize(
    ("name", "worst", "mean"),
    [
        ("seen", 0.74, 0.91),
        ("unseen", 0.74, 0.885),
        ("fp16", 0.78, 0.91),
        ("table", 0.9, 0.9),
        ("older", 0.75, 0.9),
        ("fp16_d256", 0.68, 0.83),
        ("grid_b", 0.53, 0.885),
    ],
)
def test_configs_are_predicted_in_the_order_of_their_times(
    studies: dict[str, list[Study]], name: str, worst: float, mean: float
) -> None:
    """Means: 0.92 of the guided searches that the fit has seen, 0.89 and 0.91 of those that it has
    not (half of their configs are within 6 and 9 %), 0.91 of the older kernels; 0.84 and 0.89 of
    the late ones.
    """
    correlations = {s.name: rank_correlation(s.predicted, s.measured) for s in studies[name]}
    assert min(correlations.values()) > worst, min(correlations, key=lambda s: correlations[s])
    assert np.mean(list(correlations.values())) > mean


@pytest.mark.parametrize(
    ("name", "worst", "mean"),
    [
        ("seen", 1.04, 1.015),
        ("unseen", 1.07, 1.02),
        ("fp16", 1.08, 1.015),
        ("table", 1.02, 1.02),
        ("older", 1.15, 1.03),  # head dim 64, causal, 512: blocks of which it skipped none
        ("fp16_d256", 1.04, 1.015),
        ("grid_b", 1.16, 1.02),  # head dim 96, causal, 512
    ],
)
def test_the_first_choice_is_nearly_the_best(
    studies: dict[str, list[Study]], name: str, worst: float, mean: float
) -> None:
    losses = {s.name: s.measured[np.argmin(s.predicted)] / s.measured.min() for s in studies[name]}
    assert max(losses.values()) < worst, max(losses, key=lambda s: losses[s])
    assert np.mean(list(losses.values())) < mean


@pytest.mark.parametrize("name", SETS)
def test_predictions_are_near_the_size_of_measurements(
    studies: dict[str, list[Study]], name: str
) -> None:
    """Those of grid B less so: 17 us of a GPU with 8 heads of 1024 queries are foreseen as 13."""
    least, most, spread = (0.74, 1.11, 0.24) if name == "grid_b" else (0.92, 1.08, 0.12)
    for study in studies[name]:
        ratios = study.predicted / study.measured
        assert least < np.median(ratios) < most, study.name
        assert np.quantile(np.abs(np.log(ratios / np.median(ratios))), 0.9) < spread, study.name


@pytest.mark.parametrize(
    "axis",
    [
        "cluster",
        "dynamic_tiles",
        "exp2_fma_every",
        "head_grouping",
        "lazy_rescale",
        "overlap",
        "p_in_smem",
        "persistent",
        "ping_pong",
        "q_stages",
    ],
)
def test_an_axis_has_the_measured_effect(studies: dict[str, list[Study]], axis: str) -> None:
    """Pairs of configs that differ in nothing else: what turning it on costs, in logarithms.

    Turns cost or gain 1.5 % in the mean. Under `overlap` they gain 2 to 3 % at head dim 64 and
    nothing at the others, and the model foresees nothing: it is hardly better than none. The late
    studies are not counted: of head dims 128 and 256 it is no better there for `cluster` either.
    """
    effects = []
    same = {axis: Sm90Forward.model_fields[axis].default, "producer_registers": 24}
    counted = (found for name, found in studies.items() if name not in LATE)
    for study in itertools.chain.from_iterable(counted):
        groups: dict[AnyConfig, list[int]] = {}
        for i, config in enumerate(study.configs):
            groups.setdefault(config.model_copy(update=same), []).append(i)
        for members in groups.values():
            for a, b in itertools.permutations(members, 2):
                if getattr(study.configs[a], axis) < getattr(study.configs[b], axis):
                    times = (study.predicted, study.measured)
                    effects.append([np.log(values[b] / values[a]) for values in times])
    predicted, measured = np.array(effects).T
    assert len(effects) > 15
    left = 0.97 if axis == "ping_pong" else 0.7
    assert np.abs(predicted - measured).mean() < left * np.abs(measured).mean()


# What forward_sm80 reached on that H200, bf16, full, 2048 keys.
SM80_MEASURED = [
    # head dim, block_m, block_n, warps, min_blocks_per_sm, TFLOP/s
    (64, 128, 128, 4, 1, 300),
    (128, 128, 64, 4, 1, 348),
    (128, 128, 32, 4, 2, 335),
    (128, 64, 64, 4, 2, 318),
    (128, 128, 64, 8, 1, 296),
    (256, 64, 64, 4, 1, 332),
    (256, 128, 64, 8, 1, 311),
    (256, 64, 32, 4, 1, 285),
]


def test_ampere_template_is_as_fast_as_measured() -> None:
    for head_dim, block_m, block_n, warps, min_blocks, measured in SM80_MEASURED:
        config = Sm80Forward(
            block_m=block_m,
            block_n=block_n,
            block_k=64,
            stages=1,
            warps=warps,
            min_blocks_per_sm=min_blocks,
        )
        assert tflops(head_dim, False, config, 2048) == pytest.approx(measured, rel=0.15)


def test_flash_attention_2_remarks_on_warps() -> None:
    """Its remark at head dim 128: eight warps are 28 % slower than four."""
    slow, fast = (
        Sm80Forward(block_m=128, block_n=64, block_k=128, stages=1, warps=warps) for warps in (8, 4)
    )
    assert tflops(128, False, slow, 4096) < 0.9 * tflops(128, False, fast, 4096)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1000, 1000), (300, 70), (70, 300), (64, 64)])
def test_steps_are_the_blocks_that_hold_a_visible_key(
    causal: bool, seqlen_q: int, seqlen_k: int
) -> None:
    shape = Shape(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=1, heads_kv=1)
    row, key = np.ogrid[:seqlen_q, :seqlen_k]
    visible = (key <= row + seqlen_k - seqlen_q) if causal else np.ones((seqlen_q, seqlen_k), bool)
    for block_m, block_n in itertools.product((64, 128), (48, 128)):
        blocks = [
            [visible[m : m + block_m, n : n + block_n] for n in range(0, seqlen_k, block_n)]
            for m in range(0, seqlen_q, block_m)
        ]
        visited = [sum(bool(block.any()) for block in tile) for tile in blocks]
        steps = steps_of_head(shape, Mask(causal), block_m, block_n)
        assert steps.tiles == len(blocks)
        assert steps.total == sum(visited)
        assert steps.longest == max(visited)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1000, 1000), (300, 70), (70, 300), (64, 64)])
def test_a_warpgroup_computes_the_blocks_that_hold_a_key_of_its_rows(
    seqlen_q: int, seqlen_k: int
) -> None:
    shape = Shape(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=1, heads_kv=1)
    for block_m, block_n in itertools.product((64, 128, 192), (48, 128)):
        steps = steps_of_head(shape, Mask(causal=True), block_m, block_n, rows=64)
        whole = steps_of_head(shape, Mask(causal=True), block_m, block_n)
        warpgroups = steps_of_head(shape, Mask(causal=True), 64, block_n)
        assert (steps.total, steps.longest) == (whole.total, whole.longest)
        assert whole.seen == whole.total
        assert steps.seen == pytest.approx(warpgroups.total * 64 / block_m)
        assert steps.masked == pytest.approx(warpgroups.masked * 64 / block_m)
    full = steps_of_head(shape, Mask(causal=False), 128, 48, rows=64)
    assert full.seen == full.total


def test_each_warpgroup_masks_the_keys_that_not_all_its_rows_see() -> None:
    """A tile of 128 rows on 128 keys, in blocks of 16: its second half sees the first 64 whole, its
    first half nothing of the others.
    """
    shape = Shape(batch=1, seqlen_q=128, seqlen_k=128, heads_q=1, heads_kv=1)
    assert steps_of_head(shape, Mask(causal=True), 128, 16).masked == 8
    halves = steps_of_head(shape, Mask(causal=True), 128, 16, rows=64)
    assert halves.seen == (4 + 8) / 2
    assert halves.masked == (4 + 4) / 2


def test_skipped_steps_leave_the_pipes_idle_but_not_the_loads() -> None:
    problem = Problem(dtype="bf16", head_dim=64, causal=True)
    config = hopper(192, 64, 64)
    whole = Steps(tiles=1, total=4, longest=4, seen=4, masked=1)
    skipping = whole._replace(seen=3)
    all_seen, part_seen = (
        forward_sm90_cost._step(problem, config, H200, s, None) for s in (whole, skipping)
    )
    for pipe in ("tensor", "exp2", "issue", "smem"):
        assert getattr(part_seen, pipe) < getattr(all_seen, pipe)
    assert part_seen.tensor == 0.75 * all_seen.tensor
    assert part_seen.l2 == all_seen.l2


Residents = Callable[..., int]


@pytest.fixture
def residents(monkeypatch: pytest.MonkeyPatch) -> Residents:
    """How many blocks of a config the model believes to share an SM, with tiles for all of them."""
    shape = shape_of(1024, 64)
    total = forward_cost.total
    seen: list[int] = []

    def watched(*arguments: Any, residents: int, **options: Any) -> Any:
        seen.append(residents)
        return total(*arguments, residents=residents, **options)

    def count(config: AnyConfig, problem: Problem, resources: Resources | None = None) -> int:
        predict(problem, shape, config, H200, resources)
        return seen.pop()

    monkeypatch.setattr(forward_cost, "total", watched)
    return count


def test_resident_blocks_follow_shared_memory_registers_and_threads(residents: Residents) -> None:
    problem = Problem(dtype="bf16", head_dim=64)
    small = hopper(64, 80, 64, min_blocks_per_sm=3, **SMALL)
    assert residents(small, problem) == 3
    resources = Resources(registers=96, spill_bytes=0, stack_bytes=0, smem_bytes=0)
    assert residents(small, problem, resources) == 4
    deep = small.model_copy(update={"stages": 4})
    assert residents(deep, problem, resources) == 2
    assert residents(hopper(128, 128, 64), problem) == 1


def test_a_persistent_grid_has_the_blocks_that_it_asks_for(residents: Residents) -> None:
    problem = Problem(dtype="bf16", head_dim=64)
    small = hopper(64, 64, 64, **SMALL)
    assert residents(small, problem) > 1
    assert residents(small.model_copy(update={"persistent": True}), problem) == 1


def test_static_imbalance_is_that_of_the_schedule() -> None:
    """Two heads of four tiles, 64 to 256 keys long and what a tile costs beside, three blocks."""
    problem = Problem(dtype="bf16", head_dim=64, causal=True)
    shape = Shape(batch=1, seqlen_q=256, seqlen_k=256, heads_q=2, heads_kv=2)
    lengths = {True: [4, 4, 3, 3, 2, 2, 1, 1], False: [4, 3, 2, 1, 4, 3, 2, 1]}
    for grouped, blocks_of_keys in lengths.items():
        tiles = [64 * blocks + STATIC_TILE_KEYS for blocks in blocks_of_keys]
        waves = [tiles[first : first + 3] for first in range(0, 8, 3)]
        if not grouped:  # every other one backwards
            waves[1].reverse()
        work = [sum(wave[block] for wave in waves if block < len(wave)) for block in range(3)]
        expected = max(work) / (sum(work) / 3)
        together = forward_cost.grouped_heads(problem, shape) if grouped else 0
        assert static_imbalance(problem, shape, 64, 3, together) == pytest.approx(expected)


def test_spills_and_serialised_wgmma_cost_time() -> None:
    problem, shape, config = (
        Problem(dtype="bf16", head_dim=128),
        shape_of(4096, 128),
        hopper(128, 128, 128),
    )
    clean = Resources(registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=0)
    warning = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    times = [
        predict(problem, shape, config, H200, clean.model_copy(update=update))
        for update in ({}, {"spill_bytes": 192}, {"warnings": (warning,)})
    ]
    assert times[1] > 1.2 * times[0]
    assert times[2] > 1.2 * times[0]


def test_no_prediction_is_faster_than_the_card() -> None:
    problem, shape = Problem(dtype="bf16", head_dim=128, causal=True), shape_of(4096, 128)
    time = predict(problem, shape, hopper(128, 128, 128), H200)
    assert time > shape.flops(problem) / (H200.sm_count * H200.arch.mma_flops * H200.clock_mhz)
    assert time > memory_us(problem, shape, H200)


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120"])
def test_every_architecture_has_predictions(arch: str) -> None:
    device = typical_device(architecture(arch))
    templates = [template.NAME for template in templates_for("forward", device.arch)]
    for head_dim, template in itertools.product((8, 64, 256), templates):
        problem = Problem(dtype="fp16", head_dim=head_dim, causal=True)
        config = default_config(problem, device, template)
        lengths = [(0, 5), (5, 0), (1, 1), (1, 8192), (8192, 1), (8192, 8192)]
        times = [
            predict(
                problem,
                Shape(batch=2, seqlen_q=q, seqlen_k=k, heads_q=4, heads_kv=2),
                config,
                device,
            )
            for q, k in lengths
        ]
        assert all(0 < t < 1e6 for t in times)
        assert times[-1] == max(times)
