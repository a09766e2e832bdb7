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

from fagen.build.compiled import Compiled, Resources
from fagen.device import KNOWN_DEVICES, Device
from fagen.kernels import plan
from fagen.kernels.template import symbol
from fagen.problem import Problem
from fagen.run import arrays, counters, driver, executor

CONTEXT = 0xC0
KERNEL = 0xBEEF  # the first one; each has a number of its own


class Launch(NamedTuple):
    """One cuLaunchKernelEx.

    Attributes:
        entry: the kernel's symbol.
        arguments: the bytes of the kernel's parameters.
        place: which of them is the struct; after the maps, before the counter.
        attributes: CUlaunchAttributeID and the value's words.
        context: the one that was current.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    stream: int
    arguments: tuple[bytes, ...]
    place: int
    attributes: tuple[tuple[int, tuple[int, ...]], ...]
    context: int | None

    @property
    def maps(self) -> tuple[bytes, ...]:
        """The tensor maps."""
        return self.arguments[: self.place]

    @property
    def params(self) -> bytes:
        """The struct that the kernel takes by value."""
        return self.arguments[self.place]

    @property
    def counter(self) -> int | None:
        """The address of the tile counter; None if the kernel is given none."""
        last = self.arguments[self.place + 1 :]
        return int.from_bytes(last[0], "little") if last else None


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
        self.zeroed: list[tuple[int, int, int]] = []  # (address, bytes, stream)
        self.capturing = False
        self.slabs = 0
        self._kernels: dict[str, int] = {}
        self._plans: dict[int, plan.Launch] = {}  # by the address of the launch's config

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

    def set_memory(self, address: int, byte: int, size: int, stream: int) -> int:
        assert byte == 0
        self.zeroed.append((address, size, stream))
        return 0

    def launch(self, config_at: Any, kernel: Any, parameters: Any, extra: None) -> int:
        config = driver.LaunchConfig.from_address(config_at.value)
        planned = self._plans[config_at.value]
        place = len(planned.maps)
        # What the kernel takes: more or fewer parameters are an error here.
        sizes = [executor.MAP_BYTES] * place + [planned.layout.size] + [8] * planned.draws_tiles
        arguments = tuple(
            ctypes.string_at(at, size) for at, size in zip(parameters, sizes, strict=True)
        )
        attributes = (driver.LaunchAttribute * config.attribute_count).from_address(
            config.attributes or ctypes.addressof(config)
        )
        (entry,) = (name for name, number in self._kernels.items() if number == kernel.value)
        self.launches.append(
            Launch(
                entry=entry,
                grid=tuple(config.grid),
                block=tuple(config.block),
                smem_bytes=config.smem_bytes,
                stream=config.stream or 0,
                arguments=arguments,
                place=place,
                attributes=tuple((each.id, tuple(each.value)) for each in attributes),
                context=self.context,
            )
        )
        return self.status

    def get_kernel(self, library: int, name: str) -> int:
        return self._kernels.setdefault(name, KERNEL + len(self._kernels))

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

        class Watched(executor._PreparedLaunch):
            """Tells the fake which arguments the kernel takes."""

            def __init__(self, launch: plan.Launch, *rest: Any) -> None:
                super().__init__(launch, *rest)
                fake._plans[ctypes.addressof(self._config)] = launch

        monkeypatch.setattr(executor, "_PreparedLaunch", Watched)
        monkeypatch.setattr(driver, "hot_calls", lambda: fake)
        monkeypatch.setattr(driver, "query_device", lambda index: fake.device)
        monkeypatch.setattr(driver, "current_device", lambda: 0)
        monkeypatch.setattr(driver, "primary_context", lambda index: CONTEXT + index)
        monkeypatch.setattr(driver, "use_device", fake.use_device)
        monkeypatch.setattr(driver, "allocate_zeros", fake.allocate_zeros)
        monkeypatch.setattr(counters, "_words", {})
        monkeypatch.setattr(counters, "_free", {})
        monkeypatch.setattr(driver, "load_library", lambda cubin: 1)
        monkeypatch.setattr(driver, "get_kernel", fake.get_kernel)
        monkeypatch.setattr(
            driver,
            "prepare_kernel",
            lambda kernel, smem, index: fake.prepared.append((smem, index)),
        )
        return fake


def compiled(problem: Problem, arch: str = "sm90") -> Compiled:
    """What the compiler gives, with nothing in it."""
    return Compiled(
        arch=arch,
        source="// kernel",
        cubin=b"cubin",
        entries={
            symbol(problem): Resources(registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=0)
        },
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


FLOAT16, BFLOAT16, FLOAT32, UINT8 = (
    FakeDtype(name) for name in ("float16", "bfloat16", "float32", "uint8")
)


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
    torch = SimpleNamespace(Tensor=FakeTensor, float32=FLOAT32, uint8=UINT8, grad=True, current=77)
    torch.is_grad_enabled = lambda: torch.grad
    torch.empty_like = FakeTensor.like
    torch.empty = FakeTensor.empty
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: torch.current)
    return torch


def forget_frameworks() -> None:
    """What was loaded as "torch" before is forgotten."""
    caches: tuple[Any, ...] = (arrays._torch, arrays.framework_of)
    for cached in caches:
        cached.cache_clear()
