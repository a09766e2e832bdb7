"""The table of architectures and cards."""

from __future__ import annotations

from typing import Any

import pytest

from fagen.device import (
    ARCHITECTURES,
    KNOWN_DEVICES,
    architecture,
    device_from_capability,
    typical_device,
)
from fagen.errors import ArgumentError, UnsupportedError
from fagen.kernels.registry import TEMPLATES, templates_for


@pytest.mark.parametrize("name", ["sm90", "sm_90", "sm_90a", "SM90a", " 9.0 ", "90"])
def test_an_architecture_has_many_spellings(name: str) -> None:
    assert architecture(name) is ARCHITECTURES["sm90"]


def test_an_architecture_of_an_earlier_study_is_read() -> None:
    """It named the templates that run there."""
    sm90 = architecture("sm90")
    kept = sm90.model_dump() | {"templates": ["forward_sm90", "forward_sm80"]}
    assert type(sm90).model_validate(kept) == sm90


def test_every_architecture_is_found_by_its_own_names() -> None:
    for arch in ARCHITECTURES.values():
        assert architecture(arch.name) is architecture(arch.target) is arch
        assert templates_for("forward", arch)
        assert typical_device(arch).arch is arch
    assert architecture("12.0").name == "sm120"
    assert all(set(template.ARCHS) <= set(ARCHITECTURES) for template in TEMPLATES.values())


@pytest.mark.parametrize("name", ["", "sm75", "hopper", "sm9", "9", "sm90x"])
def test_other_names_are_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ArgumentError, match="allowed are sm80, sm86"):
        architecture(name)


def test_a_known_card_keeps_its_data_sheet_and_says_what_the_driver_counts() -> None:
    sheet = KNOWN_DEVICES["NVIDIA H200"]
    numbers: dict[str, Any] = {
        "sm_count": 66,
        "clock_mhz": 1,
        "l2_bytes": 30 << 20,
        "memory_gbps": 1.0,
    }
    card = device_from_capability("NVIDIA H200", (9, 0), **numbers)  # half of one
    assert (card.sm_count, card.l2_bytes) == (66, 30 << 20)
    assert (card.clock_mhz, card.memory_gbps) == (sheet.clock_mhz, sheet.memory_gbps)
    assert card.key != sheet.key
    other = device_from_capability("A card of tomorrow", (9, 0), **numbers)
    assert (other.clock_mhz, other.memory_gbps) == (1, 1.0)
    with pytest.raises(UnsupportedError, match=r"compute capability 7\.5: fagen knows sm80"):
        device_from_capability("Tesla T4", (7, 5), **numbers)
