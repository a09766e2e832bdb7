"""Configs that are known to be good somewhere: a search tries them before it learns anything.

Tiles of FlashAttention-2 (`flash_fwd_launch_template.h`) and FlashAttention-3 (`tile_size.h`), and
the small blocks, several to an SM, that beat them on short sequences (`benchmarks/README.md`).
"""

from __future__ import annotations

from typing import Any

from fagen.device import Device
from fagen.kernels.config import TEMPLATES, AnyConfig, round_up
from fagen.kernels.space import axes, default_config, why_illegal
from fagen.problem import Problem

_SMALL_BLOCK: dict[str, Any] = {"block_m": 64, "producer_registers": 0, "ping_pong": False}
_THREE_WARPGROUPS: dict[str, Any] = {"block_m": 192, "producer_registers": 32}
_TWO_QS: dict[str, Any] = {"persistent": True, "q_stages": 2, "head_grouping": False}
_CLUSTER: dict[str, Any] = {"cluster": 2, "producer_registers": 40}
_DRAWN_TILES: dict[str, Any] = {"persistent": True, "q_stages": 2, "dynamic_tiles": True}

# By template: (head dims up to, axes beside the template's defaults).
_KNOWN: dict[str, tuple[tuple[int, dict[str, Any]], ...]] = {
    "forward_sm90": (
        (64, _THREE_WARPGROUPS | {"block_n": 128}),
        (64, _THREE_WARPGROUPS | {"block_n": 128} | _TWO_QS),
        (64, _THREE_WARPGROUPS | {"block_n": 128} | _DRAWN_TILES),
        (64, _THREE_WARPGROUPS | {"block_n": 192, "p_in_smem": True}),
        (64, _SMALL_BLOCK | {"block_n": 80, "min_blocks_per_sm": 3}),
        (96, _THREE_WARPGROUPS | {"block_n": 144, "p_in_smem": True}),
        (96, _THREE_WARPGROUPS | {"block_n": 128, "p_in_smem": True}),
        (128, {"block_n": 128}),
        (128, {"block_n": 128, "head_grouping": False}),
        (128, {"block_n": 128} | _TWO_QS),
        (128, {"block_n": 160} | _DRAWN_TILES),
        (128, {"block_n": 128} | _DRAWN_TILES | {"head_grouping": False}),
        (128, {"block_n": 176}),
        (128, {"block_n": 176} | _CLUSTER),
        (128, {"block_n": 128} | _CLUSTER | _TWO_QS),
        (128, _SMALL_BLOCK | {"block_n": 64, "min_blocks_per_sm": 2}),
        (192, {"block_n": 112}),
        (192, {"block_n": 112, "ping_pong": False}),
        (256, {"block_n": 80, "lazy_rescale": True}),
        (256, {"block_n": 80, "lazy_rescale": True} | _CLUSTER),
        (256, {"block_n": 80, "lazy_rescale": True, "ping_pong": False}),
        (256, {"block_n": 64, "lazy_rescale": True, "persistent": True}),
    ),
    "forward_sm80": (
        (64, {"block_m": 128, "block_n": 128, "warps": 4}),
        (64, {"block_m": 128, "block_n": 112, "warps": 4}),
        (64, {"block_m": 128, "block_n": 64, "warps": 4, "min_blocks_per_sm": 2}),
        (96, {"block_m": 128, "block_n": 64, "warps": 4}),
        (128, {"block_m": 128, "block_n": 64, "warps": 4}),
        (128, {"block_m": 128, "block_n": 32, "warps": 4, "min_blocks_per_sm": 2}),
        (128, {"block_m": 128, "block_n": 128, "warps": 8, "q_in_registers": True}),
        (192, {"block_m": 128, "block_n": 96, "warps": 8, "stages": 2, "q_in_registers": True}),
        (256, {"block_m": 128, "block_n": 64, "warps": 8}),
        (256, {"block_m": 64, "block_n": 64, "warps": 4}),
    ),
}
_SMALLEST = {64: 0, 96: 64, 128: 96, 192: 128, 256: 192}  # head dims above this one


def published_configs(template: str, problem: Problem, device: Device) -> list[AnyConfig]:
    """The known configs of a template for this head dim that are legal on the device."""
    slices = axes(template, problem)["block_k"]
    whole = max(slices, key=lambda block_k: (-round_up(problem.head_dim, block_k), block_k))
    default = default_config(problem, device, template).axes() | {"block_k": whole}
    configs = [
        TEMPLATES[template](**default | known)
        for largest, known in _KNOWN[template]
        if _SMALLEST[largest] < problem.head_dim <= largest
    ]
    return [config for config in configs if why_illegal(config, problem, device) is None]
