"""What compiling gives: a cubin, and what each of its kernels takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class Resources(BaseModel):
    """What ptxas says one kernel takes.

    Attributes:
        registers: per thread, at entry.
        spill_bytes: bytes of spill stores and loads, per thread.
        stack_bytes: stack frame in bytes, per thread.
        smem_bytes: static shared memory in bytes, per block.
        warnings: the compiler's warnings and remarks on lost speed, one line each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    registers: int = Field(ge=0)
    spill_bytes: int = Field(ge=0)
    stack_bytes: int = Field(ge=0)
    smem_bytes: int = Field(ge=0)
    warnings: tuple[str, ...] = ()

    def why_bad(self) -> str | None:
        """Why the kernel cannot be fast, in a few words, or None."""
        for warning in self.warnings:
            if "wgmma.mma_async instructions are serialized" in warning:
                return f"the compiler serialised wgmma: {warning}"
            if "'setmaxnreg' ignored" in warning:
                return f"the compiler ignored setmaxnreg: {warning}"
        if self.spill_bytes:
            return f"spills {self.spill_bytes} bytes per thread"
        if self.stack_bytes:
            return f"keeps {self.stack_bytes} bytes per thread in a stack frame"
        return None


@dataclass(frozen=True)
class Compiled:
    """The kernels of one text for one architecture.

    Attributes:
        arch: the architecture's name, such as "sm90".
        source: the CUDA text.
        cubin: what NVRTC made of it.
        entries: what ptxas says that each kernel takes, by its symbol.
        nvrtc: the compiler's version, such as "13.0".
        key: SHA-256, in hex, of everything that decides the cubin.
        path: the cache folder with kernel.cu and kernel.cubin; None if it is not cached.
    """

    arch: str
    source: str
    cubin: bytes
    entries: Mapping[str, Resources]
    nvrtc: str
    key: str
    path: Path | None = None

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def resources(self) -> Resources:
        """Of all kernels together: the most of each number, and every warning."""
        every = list(self.entries.values())
        return Resources(
            registers=max(one.registers for one in every),
            spill_bytes=max(one.spill_bytes for one in every),
            stack_bytes=max(one.stack_bytes for one in every),
            smem_bytes=max(one.smem_bytes for one in every),
            warnings=tuple(dict.fromkeys(line for one in every for line in one.warnings)),
        )
