"""A CUDA driver and a torch that are not there: what a call would have done is written down."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from fagen.build.compile import Compiled, Resources
from fagen.device import KNOWN_DEVICES, Device
from fagen.problem import Problem
from fagen.run import counters, driver, launch

CONTEXT = 0xC0
KERNEL = 0xBEEF


class Launch(NamedTuple):
    """One cuLaunchKernelEx: `arguments` are the bytes of the kernel's parameters."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    stream: int
    kernel: int
    arguments: tuple[bytes, ...]
    context: int | None

    @property
    def params(self) -> bytes:
        """Those of params.cuh."""
        (found,) = (each for each in self.arguments if len(each) == launch.PARAMS.size)
        return found


class FakeDriver:
    """Stands in for `driver.HotCalls` and for the cold calls that a launch needs."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.context: int | None = CONTEXT
        self.status = 0
        self.encoded: list[tuple[Any, ...]] = []
        self.replaced: list[int] = []
        self.launches: list[Launch] = []
        self.prepared: list[tuple[int, int]] = []
        self.capturing = False
        self.slabs = 0

    def encode_tensor_map(self, place: Any, dtype: int, rank: int, address: int, *rest: Any) -> int:
        dims, strides, box, steps, interleave, swizzle, promotion, fill = rest
        assert place.value % 128 == 0
        ctypes.c_uint64.from_address(place.value).value = address
        self.encoded.append(
            (
                *(dtype, rank, address),
                *(tuple(dims), tuple(strides), tuple(box), tuple(steps)),
                *(interleave, swizzle, promotion, fill),
            )
        )
        return 0

    def replace_address(self, place: Any, address: int) -> int:
        ctypes.c_uint64.from_address(place.value).value = address
        self.replaced.append(address)
        return 0

    def get_context(self, out: Any) -> int:
        ctypes.c_void_p.from_address(out.value).value = self.context
        return 0

    def launch(self, config_at: Any, kernel: Any, parameters: Any, extra: None) -> int:
        config = driver.LaunchConfig.from_address(config_at.value)
        sizes = [launch.PARAMS.size]
        if len(parameters) > 1:
            sizes = [*[launch.MAP_BYTES] * 4, *sizes, 8][: len(parameters)]
        arguments = tuple(
            ctypes.string_at(place, size) for place, size in zip(parameters, sizes, strict=True)
        )
        shape = tuple(config.grid), tuple(config.block), config.smem_bytes
        stream = config.stream or 0
        self.launches.append(Launch(*shape, stream, kernel.value, arguments, self.context))
        return self.status

    def is_capturing(self, stream: int, out: Any) -> int:
        out._obj.value = self.capturing
        return 0

    def get_stream_id(self, stream: int, out: Any) -> int:
        out._obj.value = stream + 1000
        return 0

    def allocate_zeros(self, size: int) -> int:
        self.slabs += 1
        return self.slabs << 40

    @contextmanager
    def use_device(self, index: int) -> Iterator[None]:
        before, self.context = self.context, CONTEXT + index
        yield
        self.context = before

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch, card: str = "NVIDIA H200") -> FakeDriver:
        fake = cls(KNOWN_DEVICES[card])
        monkeypatch.setattr(driver, "hot_calls", lambda: fake)
        monkeypatch.setattr(driver, "query_device", lambda index: fake.device)
        monkeypatch.setattr(driver, "current_device", lambda: 0)
        monkeypatch.setattr(driver, "primary_context", lambda index: CONTEXT + index)
        monkeypatch.setattr(driver, "use_device", fake.use_device)
        monkeypatch.setattr(driver, "allocate_zeros", fake.allocate_zeros)
        monkeypatch.setattr(counters, "_words", {})
        monkeypatch.setattr(counters, "_free", {})
        monkeypatch.setattr(driver, "load_library", lambda cubin: 1)
        monkeypatch.setattr(driver, "get_kernel", lambda library, name: KERNEL)
        monkeypatch.setattr(
            driver,
            "prepare_kernel",
            lambda kernel, smem, index: fake.prepared.append((smem, index)),
        )
        return fake


def compiled(problem: Problem, arch: str = "sm90") -> Compiled:
    """What the compiler gives, with nothing in it."""
    return Compiled(
        kernel_name=f"fagen_{problem.name}",
        arch=arch,
        source="// kernel",
        cubin=b"cubin",
        resources=Resources(registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=0),
        nvrtc="13.0",
        key="0" * 64,
    )


# ---- torch ----


class FakeDtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class Parcel:
    """torch.device."""

    type: str
    index: int | None


FLOAT16, BFLOAT16, FLOAT32 = (FakeDtype(name) for name in ("float16", "bfloat16", "float32"))


class FakeTensor:
    """As much of torch.Tensor as fagen reads. `pointer` may be given; else it is a fresh one."""

    next_pointer = 1 << 30

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: FakeDtype = BFLOAT16,
        device: Parcel | str = "cuda",
        strides: tuple[int, ...] | None = None,
        pointer: int | None = None,
        requires_grad: bool = False,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device if isinstance(device, Parcel) else Parcel(device, 0)
        self.requires_grad = requires_grad
        self._strides = strides or tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        self._pointer = FakeTensor.next_pointer if pointer is None else pointer
        FakeTensor.next_pointer += 1 << 20

    def data_ptr(self) -> int:
        return self._pointer

    def stride(self) -> tuple[int, ...]:
        return self._strides

    @classmethod
    def like(cls, other: FakeTensor) -> FakeTensor:
        return cls(other.shape, other.dtype, other.device)

    @classmethod
    def empty(cls, shape: tuple[int, ...], *, dtype: FakeDtype, device: Parcel) -> FakeTensor:
        return cls(shape, dtype, device)


def fake_torch() -> SimpleNamespace:
    """A module to put into sys.modules as "torch"; `.grad` and `.current` steer it."""
    torch = SimpleNamespace(Tensor=FakeTensor, float32=FLOAT32, grad=True, current=77)
    torch.is_grad_enabled = lambda: torch.grad
    torch.empty_like = FakeTensor.like
    torch.empty = FakeTensor.empty
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: torch.current)
    return torch
