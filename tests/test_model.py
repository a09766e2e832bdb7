"""The static model against times that were measured on an H200."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fagen.compile import Resources
from fagen.config import Sm80Forward, Sm90Forward
from fagen.device import KNOWN_DEVICES, architecture, typical_device
from fagen.model import explain_prediction, predict, resident_blocks, steps_of_head
from fagen.problem import Problem, Shape
from fagen.space import AnyConfig, default_config

H200 = KNOWN_DEVICES["NVIDIA H200"]
SEQLENS = (1024, 4096, 16384)


def hopper(block_m: int, block_n: int, head_dim: int, **axes: Any) -> Sm90Forward:
    return Sm90Forward(
        block_m=block_m, block_n=block_n, block_k=min(head_dim, 64), **{"stages": 2, **axes}
    )


LAZY = {"lazy_rescale": True}
SMALL = {"ping_pong": False, "producer_registers": 0}
# A plain hand-written kernel of the same design, bf16, 16k tokens, hidden size 2048:
# head dim, causal, config, TFLOP/s at sequences of 1k, 4k and 16k.
MEASURED: list[tuple[int, bool, AnyConfig, tuple[int, int, int]]] = [
    (128, False, hopper(128, 128, 128), (556, 680, 641)),
    (128, False, hopper(128, 128, 128, ping_pong=False), (557, 641, 641)),
    (128, False, hopper(128, 160, 128), (533, 680, 668)),
    (128, False, hopper(128, 176, 128), (550, 671, 670)),
    (128, False, hopper(192, 112, 128), (412, 507, 527)),
    (128, False, hopper(64, 64, 128, min_blocks_per_sm=2, **SMALL), (497, 530, 518)),
    (128, True, hopper(128, 128, 128), (393, 561, 620)),
    (128, True, hopper(128, 160, 128), (370, 573, 630)),
    (64, False, hopper(192, 128, 64), (375, 444, 454)),
    (64, False, hopper(192, 128, 64, **LAZY), (375, 483, 501)),
    (64, False, hopper(192, 192, 64), (219, 301, 316)),
    (64, False, hopper(64, 80, 64, min_blocks_per_sm=3, **SMALL), (431, 426, 434)),
    (256, False, hopper(128, 80, 256), (644, 704, 753)),
    (256, False, hopper(128, 80, 256, **LAZY), (644, 752, 760)),
    (256, True, hopper(128, 80, 256, **LAZY), (449, 633, 728)),
]


def shape_of(seqlen: int, head_dim: int) -> Shape:
    heads = 2048 // head_dim
    return Shape(
        batch=16384 // seqlen, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=heads, heads_kv=heads
    )


def tflops(head_dim: int, causal: bool, config: AnyConfig, seqlen: int) -> float:
    problem = Problem(dtype="bf16", head_dim=head_dim, causal=causal)
    shape = shape_of(seqlen, head_dim)
    return shape.flops(problem) / predict(problem, shape, config, H200) * 1e-6


def rank_correlation(a: list[float], b: list[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_predictions_are_in_the_order_and_near_the_size_of_measurements() -> None:
    predicted, measured = [], []
    for head_dim, causal, config, numbers in MEASURED:
        for seqlen, number in zip(SEQLENS, numbers, strict=True):
            predicted.append(tflops(head_dim, causal, config, seqlen))
            measured.append(float(number))
    assert rank_correlation(predicted, measured) > 0.85
    ratios = np.array(predicted) / np.array(measured)
    assert np.exp(np.abs(np.log(ratios)).mean()) < 1.15
    assert ratios.min() > 0.7
    assert ratios.max() < 1.3


def test_ampere_template_is_as_fast_as_flash_attention_2() -> None:
    """FlashAttention-2's own tiles on that H200: 356 TFLOP/s at head dim 128, 303 at 64."""
    for head_dim, block_n, measured in ((128, 64, 356), (64, 128, 303)):
        config = Sm80Forward(
            block_m=128, block_n=block_n, block_k=head_dim, stages=1, min_blocks_per_sm=2
        )
        assert tflops(head_dim, False, config, 4096) == pytest.approx(measured, rel=0.15)


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
        steps = steps_of_head(shape, causal, block_m, block_n)
        assert steps.tiles == len(blocks)
        assert steps.total == sum(visited)
        assert steps.longest == max(visited)


def test_resident_blocks_follow_shared_memory_registers_and_threads() -> None:
    problem = Problem(dtype="bf16", head_dim=64)
    small = hopper(64, 80, 64, min_blocks_per_sm=3, **SMALL)
    assert resident_blocks(small, problem, H200) == 3
    resources = Resources(registers=96, spill_bytes=0, stack_bytes=0, smem_bytes=0)
    assert resident_blocks(small, problem, H200, resources) == 4
    deep = small.model_copy(update={"stages": 4})
    assert resident_blocks(deep, problem, H200, resources) == 2
    assert resident_blocks(hopper(128, 128, 64), problem, H200) == 1


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


def test_a_prediction_is_explained() -> None:
    problem, shape = Problem(dtype="bf16", head_dim=128, causal=True), shape_of(4096, 128)
    terms = explain_prediction(problem, shape, hopper(128, 128, 128), H200)
    assert all(value >= 0 for value in terms.values())
    assert terms["total"] == predict(problem, shape, hopper(128, 128, 128), H200)
    assert max(terms["tensor"], terms["exp2"], terms["memory"]) < terms["total"]
    least = shape.flops(problem) / (H200.sm_count * H200.arch.mma_flops * H200.clock_mhz)
    assert terms["total"] > least


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120"])
def test_every_architecture_has_predictions(arch: str) -> None:
    device = typical_device(architecture(arch))
    for head_dim, template in itertools.product((8, 64, 256), device.arch.templates):
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
