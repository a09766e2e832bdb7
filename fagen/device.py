"""The GPU: what an architecture allows, what a card has.

The table makes every stage but timing work on a machine with no GPU: sm90 kernels can be
rendered, compiled, checked and ranked on a laptop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from fagen.errors import ArgumentError, UnsupportedError

KIB = 1024
RESERVED_SMEM_PER_BLOCK = 1 * KIB  # what the driver takes from the SM's shared memory per block


class Architecture(BaseModel):
    """Limits and rates of one compute capability (CUDA C++ Programming Guide, appendix
    "Compute Capabilities"; rates from the vendor's architecture white papers).

    Attributes:
        name: "sm80", "sm90", ...
        target: NVRTC's spelling, "a" included where templates need it.
        smem_per_block, smem_per_sm: bytes of shared memory, the first with opt-in.
        registers_per_sm, threads_per_sm, blocks_per_sm: limits of one multiprocessor.
        mma_flops: dense 16-bit tensor FLOP per clock and SM of the fastest instruction.
        mma_sync_flops: the same for mma.sync.
        exp2_rate: ex2.approx results per clock and SM.
        fma_rate: float32 FMA per clock and SM.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    target: str
    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int = 65536
    threads_per_sm: int
    blocks_per_sm: int
    mma_flops: int
    mma_sync_flops: int
    exp2_rate: int = 16
    fma_rate: int = 128

    @model_validator(mode="before")
    @classmethod
    def _without_templates(cls, fields: Any) -> Any:
        """Earlier studies keep the names of an architecture's templates in it."""
        if isinstance(fields, Mapping):
            return {name: value for name, value in fields.items() if name != "templates"}
        return fields


class Device(BaseModel):
    """One card.

    Attributes:
        name: the driver's name, such as "NVIDIA H200".
        arch: its architecture.
        sm_count: multiprocessors.
        clock_mhz: SM clock under load, in MHz.
        l2_bytes: L2 cache in bytes.
        memory_gbps: peak device-memory bandwidth in GB/s.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arch: Architecture
    sm_count: int
    clock_mhz: int
    l2_bytes: int
    memory_gbps: float

    @property
    def key(self) -> str:
        """What tuned records are filed under: the name and the SM count."""
        return device_key(self.name, self.sm_count)

    def __str__(self) -> str:
        return f"{self.key}, {self.arch.name}"


def device_key(name: str, sm_count: int) -> str:
    """What tells cards apart, such as "NVIDIA H200 (132 SMs)"."""
    return f"{name} ({sm_count} SMs)"


def _architecture(
    name: str,
    target: str,
    smem_kib: tuple[int, int],
    threads_and_blocks: tuple[int, int],
    mma: tuple[int, int],
    fma_rate: int = 128,
) -> Architecture:
    return Architecture(
        name=name,
        target=target,
        smem_per_block=smem_kib[0] * KIB,
        smem_per_sm=smem_kib[1] * KIB,
        threads_per_sm=threads_and_blocks[0],
        blocks_per_sm=threads_and_blocks[1],
        mma_flops=mma[0],
        mma_sync_flops=mma[1],
        fma_rate=fma_rate,
    )


ARCHITECTURES: dict[str, Architecture] = {
    arch.name: arch
    for arch in (
        _architecture("sm80", "sm_80", (163, 164), (2048, 32), (2048, 2048), fma_rate=64),
        _architecture("sm86", "sm_86", (99, 100), (1536, 16), (1024, 1024)),
        _architecture("sm89", "sm_89", (99, 100), (1536, 24), (1024, 1024)),
        _architecture("sm90", "sm_90a", (227, 228), (2048, 32), (4096, 2560)),
        _architecture("sm100", "sm_100a", (227, 228), (2048, 32), (2048, 2048)),
        _architecture("sm103", "sm_103a", (227, 228), (2048, 32), (2048, 2048)),
        _architecture("sm120", "sm_120a", (99, 100), (1536, 24), (1024, 1024)),
    )
}

# name: (architecture, SMs, boost clock in MHz, L2 in MiB, memory in GB/s), from data sheets.
# The first card of an architecture is the one that stands in where none is present.
_CARDS: dict[str, tuple[str, int, int, int, int]] = {
    "NVIDIA A100-SXM4-80GB": ("sm80", 108, 1410, 40, 2039),
    "NVIDIA A100-PCIE-40GB": ("sm80", 108, 1410, 40, 1555),
    "NVIDIA A30": ("sm80", 56, 1440, 24, 933),
    "NVIDIA RTX A6000": ("sm86", 84, 1800, 6, 768),
    "NVIDIA A10": ("sm86", 72, 1695, 6, 600),
    "NVIDIA GeForce RTX 3090": ("sm86", 82, 1695, 6, 936),
    "NVIDIA L40S": ("sm89", 142, 2520, 96, 864),
    "NVIDIA L4": ("sm89", 58, 2040, 48, 300),
    "NVIDIA GeForce RTX 4090": ("sm89", 128, 2520, 72, 1008),
    "NVIDIA H200": ("sm90", 132, 1980, 60, 4800),
    "NVIDIA H100 80GB HBM3": ("sm90", 132, 1980, 50, 3350),
    "NVIDIA H100 PCIe": ("sm90", 114, 1755, 50, 2039),
    "NVIDIA H20": ("sm90", 78, 1980, 60, 4000),
    "NVIDIA B200": ("sm100", 148, 1965, 126, 8000),
    "NVIDIA B300": ("sm103", 148, 2032, 126, 8000),
    "NVIDIA GeForce RTX 5090": ("sm120", 170, 2407, 96, 1792),
    "NVIDIA RTX PRO 6000 Blackwell": ("sm120", 188, 2617, 128, 1792),
}

KNOWN_DEVICES: dict[str, Device] = {
    name: Device(
        name=name,
        arch=ARCHITECTURES[arch],
        sm_count=sms,
        clock_mhz=clock,
        l2_bytes=l2_mib * KIB * KIB,
        memory_gbps=memory,
    )
    for name, (arch, sms, clock, l2_mib, memory) in _CARDS.items()
}


def architecture(name: str) -> Architecture:
    """The architecture of that name: "sm90", "sm_90", "sm_90a" and "9.0" are the same.

    Raises:
        ArgumentError: for any other spelling or an architecture that fagen does not know.
    """
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3})[af]?|(\d{1,2})\.(\d)", name.strip().lower())
    if match:
        digits = match[1] or match[2] + match[3]
        if f"sm{digits}" in ARCHITECTURES:
            return ARCHITECTURES[f"sm{digits}"]
    raise ArgumentError(
        f"unknown architecture {name!r}: allowed are {', '.join(ARCHITECTURES)}. "
        "`fagen doctor` shows the architecture of the card that is present"
    )


def typical_device(arch: Architecture) -> Device:
    """The card that stands in for an architecture where none of it is present."""
    return next(device for device in KNOWN_DEVICES.values() if device.arch == arch)


def device_from_capability(
    name: str,
    capability: tuple[int, int],
    *,
    sm_count: int,
    clock_mhz: int,
    l2_bytes: int,
    memory_gbps: float,
) -> Device:
    """The `Device` of a card that the driver describes.

    Args:
        name: the driver's name of the card.
        capability: (major, minor) compute capability.

    Raises:
        UnsupportedError: for a compute capability that fagen does not know.
    """
    major, minor = capability
    arch = ARCHITECTURES.get(f"sm{major}{minor}")
    if arch is None:
        raise UnsupportedError(
            f"{name} has compute capability {major}.{minor}: fagen knows {', '.join(ARCHITECTURES)}"
        )
    known = KNOWN_DEVICES.get(name)
    return Device(
        name=name,
        arch=arch,
        sm_count=sm_count,
        clock_mhz=known.clock_mhz if known else clock_mhz,
        l2_bytes=l2_bytes,
        memory_gbps=known.memory_gbps if known else memory_gbps,
    )
