"""Parameters, tensor maps, grids and threads of a launch, as a fake driver sees them."""

from __future__ import annotations

import ctypes
import math
import re
import threading
import time
from types import SimpleNamespace

import pytest
from fake_driver import CONTEXT, KERNEL, FakeDriver, compiled

from fagen.build.render import template_folder
from fagen.errors import ArgumentError, CudaError, DeviceError, UnsupportedError
from fagen.kernels.config import Sm80Forward, Sm90Forward
from fagen.problem import Problem
from fagen.run import counters, driver
from fagen.run.launch import (
    PARAMS,
    SCALE_OFFSET,
    Lengths,
    LoadedKernel,
    TensorView,
    heads_per_group,
    scale_log2,
)

BF16_128 = Problem(dtype="bf16", head_dim=128)
SM90 = Sm90Forward(block_m=128, block_n=176, block_k=64, stages=2)
SM80 = Sm80Forward(block_m=64, block_n=32, block_k=32, stages=2)


class Strides(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_longlong) for name in ("batch", "row", "head"))


class ForwardParams(ctypes.Structure):
    """templates/params.cuh, laid out by the C rules that ctypes follows."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("q", "k", "v", "o", "lse")),
        *((f"{name}_strides", Strides) for name in "qkvo"),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("batch", "heads_q", "heads_kv", "seqlen_q")),
        *((name, ctypes.c_int) for name in ("seqlen_k", "heads_per_group", "tiles")),
    )


def view(pointer: int, batch: int, seqlen: int, heads: int, head_dim: int = 128) -> TensorView:
    return TensorView.contiguous(pointer, (batch, seqlen, heads, head_dim))


def launch(
    kernel: LoadedKernel,
    *,
    batch: int = 2,
    seqlen_q: int = 300,
    seqlen_k: int = 500,
    heads_q: int = 8,
    heads_kv: int = 2,
    base: int = 1 << 20,
    scale: float = 0.5,
    device_index: int = 0,
) -> None:
    """One launch with Q, K, V, O and LSE at 1, 2, 3, 4 and 5 times `base`."""
    d = kernel.problem.head_dim
    kernel.launch(
        view(base, batch, seqlen_q, heads_q, d),
        view(2 * base, batch, seqlen_k, heads_kv, d),
        view(3 * base, batch, seqlen_k, heads_kv, d),
        view(4 * base, batch, seqlen_q, heads_q, d),
        5 * base,
        scale,
        device_index=device_index,
        stream=99,
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver.install(monkeypatch)


@pytest.fixture
def sm90(fake: FakeDriver) -> LoadedKernel:
    return LoadedKernel(compiled(BF16_128), BF16_128, SM90)


@pytest.fixture
def sm80(fake: FakeDriver) -> LoadedKernel:
    return LoadedKernel(compiled(BF16_128), BF16_128, SM80)


def params_of(fake: FakeDriver, index: int = -1) -> ForwardParams:
    return ForwardParams.from_buffer_copy(fake.launches[index].params)


def test_the_packed_parameters_are_those_of_params_cuh() -> None:
    text = (template_folder() / "params.cuh").read_text()
    body = re.search(r"struct ForwardParams \{(.*?)\n\};", text, re.DOTALL)
    assert body
    code = re.sub(r"//.*", "", body[1])
    declared = re.findall(r"(\w+)(?=[,;])", code)
    assert declared == [name for name, *_ in ForwardParams._fields_]
    assert ctypes.sizeof(ForwardParams) == PARAMS.size == 168
    assert ForwardParams.scale_log2.offset == SCALE_OFFSET


def test_every_parameter_arrives(fake: FakeDriver, sm80: LoadedKernel) -> None:
    launch(sm80)
    params = params_of(fake)
    base = 1 << 20
    pointers = (params.q, params.k, params.v, params.o, params.lse)
    assert pointers == (base, 2 * base, 3 * base, 4 * base, 5 * base)
    q, k = params.q_strides, params.k_strides
    assert (q.batch, q.row, q.head) == (300 * 8 * 128, 8 * 128, 128)
    assert (k.batch, k.row, k.head) == (500 * 2 * 128, 2 * 128, 128)
    assert (params.v_strides.batch, params.o_strides.batch) == (k.batch, q.batch)
    assert params.scale_log2 == pytest.approx(0.5 * math.log2(math.e))
    assert (params.batch, params.heads_q, params.heads_kv) == (2, 8, 2)
    assert (params.seqlen_q, params.seqlen_k) == (300, 500)
    assert params.tiles == 2 * 8 * math.ceil(300 / 64)
    (call,) = fake.launches
    assert (call.grid, call.block) == ((params.tiles, 1, 1), (SM80.threads, 1, 1))
    assert (call.smem_bytes, call.stream) == (SM80.smem_bytes(BF16_128), 99)
    assert call.kernel == KERNEL


def test_tensor_maps_say_dims_strides_box_and_swizzle(fake: FakeDriver, sm90: LoadedKernel) -> None:
    launch(sm90)
    q, o, k, v = fake.encoded
    base = 1 << 20
    tail = (0, 3, 3, 0)  # not interleaved, 128-byte swizzle, 256-byte promotion, zeros
    steps = (1, 1, 1, 1)
    queries = ((128, 300, 8, 2), (8 * 256, 256, 300 * 8 * 256))
    keys = ((128, 500, 2, 2), (2 * 256, 256, 500 * 2 * 256))
    assert q == (9, 4, base, *queries, (64, 128, 1, 1), steps, *tail)
    assert k == (9, 4, 2 * base, *keys, (64, 176, 1, 1), steps, *tail)
    assert v == (9, 4, 3 * base, *keys, (64, 176, 1, 1), steps, *tail)
    assert o == (9, 4, 4 * base, *queries, (64, 64, 1, 1), steps, *tail)


def test_narrow_chunks_take_the_64_byte_swizzle_and_fp16_its_own_type(fake: FakeDriver) -> None:
    problem = Problem(dtype="fp16", head_dim=40)
    config = Sm90Forward(block_m=64, block_n=64, block_k=32, stages=2, ping_pong=False)
    launch(LoadedKernel(compiled(problem), problem, config))
    dtype, _, _, dims, _, box, _, _, swizzle, *_ = fake.encoded[0]
    assert (dtype, dims[0], box[0], swizzle) == (6, 40, 32, 2)


def test_strides_of_dimensions_of_size_one_become_legal(
    fake: FakeDriver, sm90: LoadedKernel
) -> None:
    tensor = TensorView(1 << 20, (1, 64, 1, 128), (7, 128, 3))
    sm90.launch(tensor, tensor, tensor, tensor, 0, 1.0, device_index=0, stream=0)
    assert {strides for _, _, _, _, strides, *_ in fake.encoded} == {(256, 256, 256)}


def test_expanded_heads_keep_stride_zero(fake: FakeDriver, sm90: LoadedKernel) -> None:
    tensor = TensorView(1 << 20, (2, 64, 4, 128), (64 * 128, 128, 0))
    sm90.launch(tensor, tensor, tensor, tensor, 0, 1.0, device_index=0, stream=0)
    assert fake.encoded[0][4] == (256, 0, 64 * 256)


def test_a_repeated_call_only_points_the_maps_elsewhere(
    fake: FakeDriver, sm90: LoadedKernel
) -> None:
    launch(sm90)
    launch(sm90, base=1 << 24, scale=2.0)
    base = 1 << 24
    assert len(fake.encoded) == 4
    assert sorted(fake.replaced) == [base, 2 * base, 3 * base, 4 * base]
    maps = [int.from_bytes(data[:8], "little") for data in fake.launches[1].arguments[:4]]
    assert maps == [base, 2 * base, 3 * base, 4 * base]
    params = params_of(fake)
    assert (params.q, params.k, params.v, params.o) == tuple(maps)
    assert params.scale_log2 == pytest.approx(2 * math.log2(math.e))
    assert len(fake.prepared) == 1


def test_another_geometry_makes_another_plan(fake: FakeDriver, sm90: LoadedKernel) -> None:
    launch(sm90)
    launch(sm90, seqlen_k=501)
    launch(sm90)
    assert len(fake.encoded) == 8
    assert [params_of(fake, i).seqlen_k for i in range(3)] == [500, 501, 500]


def test_without_keys_k_and_v_have_no_map(fake: FakeDriver, sm90: LoadedKernel) -> None:
    launch(sm90, seqlen_k=0)
    launch(sm90, seqlen_k=0)
    assert [dims[1] for _, _, _, dims, *_ in fake.encoded] == [300, 300]
    assert len(fake.replaced) == 2
    q, k, v, o, *_ = fake.launches[1].arguments
    assert k == v == bytes(128)
    base = 1 << 20
    assert [int.from_bytes(data[:8], "little") for data in (q, o)] == [base, 4 * base]


@pytest.mark.parametrize("empty", [{"seqlen_q": 0}, {"batch": 0}])
def test_nothing_to_do_launches_nothing(
    fake: FakeDriver, sm90: LoadedKernel, empty: dict[str, int]
) -> None:
    launch(sm90, **empty)
    assert not fake.launches
    assert not fake.encoded


def test_persistent_kernels_get_as_many_blocks_as_fit(fake: FakeDriver) -> None:
    config = SM90.model_copy(update={"persistent": True, "min_blocks_per_sm": 2})
    kernel = LoadedKernel(compiled(BF16_128), BF16_128, config)
    launch(kernel, batch=64, heads_q=64)
    launch(kernel, batch=1)
    assert [call.grid[0] for call in fake.launches] == [2 * 132, 8 * 3]
    assert params_of(fake, 0).tiles == 64 * 64 * 3


def test_a_cluster_has_a_block_for_each_share_of_a_tile(fake: FakeDriver) -> None:
    """300 queries are two tiles of 2 x 128, 132 SMs take 66 clusters; K and V come in halves."""
    config = SM90.model_copy(update={"cluster": 2})
    launch(LoadedKernel(compiled(BF16_128), BF16_128, config))
    assert fake.launches[0].grid[0] == 2 * 2 * 8 * 2
    assert params_of(fake).tiles == 2 * 8 * 2
    assert [box for *_, box, _, _, _, _, _ in fake.encoded] == [
        (64, 128, 1, 1),
        (64, 64, 1, 1),
        (64, 88, 1, 1),
        (64, 88, 1, 1),
    ]
    persistent = config.model_copy(update={"persistent": True})
    launch(LoadedKernel(compiled(BF16_128), BF16_128, persistent), batch=64)
    assert fake.launches[1].grid[0] == 132
    fake.device = fake.device.model_copy(update={"sm_count": 131})
    launch(LoadedKernel(compiled(BF16_128), BF16_128, persistent), batch=64)
    assert fake.launches[2].grid[0] == 130


def test_each_stream_and_each_captured_launch_has_its_own_tile_counter(fake: FakeDriver) -> None:
    config = SM90.model_copy(update={"persistent": True, "dynamic_tiles": True})
    kernel = LoadedKernel(compiled(BF16_128), BF16_128, config)

    def counter(stream: int, device_index: int = 0) -> int:
        tensor = view(1 << 20, 1, 64, 1)
        kernel.launch(
            tensor, tensor, tensor, tensor, 0, 1.0, device_index=device_index, stream=stream
        )
        return int.from_bytes(fake.launches[-1].arguments[-1], "little")

    first = counter(5)
    assert first == counter(5) != 0
    fake.capturing = True
    captured = [counter(5), counter(5)]
    fake.capturing = False
    others = [*captured, counter(6), counter(5, device_index=1)]
    assert len({first, *others}) == 5
    assert counter(5) == first
    assert fake.slabs == 2  # one for each device
    fake.capturing = True
    many = {counter(5) for _ in range(counters.SLAB_BYTES // counters.WORD_BYTES)}
    assert len(many | {first, *others}) == len(many) + 5
    assert fake.slabs == 3


def test_kernels_that_draw_no_tiles_get_no_counter(fake: FakeDriver, sm90: LoadedKernel) -> None:
    launch(sm90)
    assert len(fake.launches[0].arguments) == 5  # the maps and the parameters
    assert fake.slabs == 0


def test_too_many_tiles_and_too_long_sequences_are_refused(sm90: LoadedKernel) -> None:
    with pytest.raises(UnsupportedError, match="2,147,483,648 tiles"):
        launch(sm90, batch=1 << 20, heads_q=1 << 11, seqlen_q=1)
    clusters = LoadedKernel(compiled(BF16_128), BF16_128, SM90.model_copy(update={"cluster": 2}))
    with pytest.raises(UnsupportedError, match="up to 1,073,741,823;"):
        launch(clusters, batch=1 << 20, heads_q=1 << 10, seqlen_q=1)
    with pytest.raises(UnsupportedError, match="1,073,741,824"):
        launch(sm90, seqlen_k=1 << 30)


def test_scale_zero_becomes_tiny() -> None:
    assert scale_log2(0.0) == 2.0**-100
    assert scale_log2(1.0) == math.log2(math.e)


@pytest.mark.parametrize("scale", [-0.1, math.nan, math.inf, -math.inf])
def test_a_scale_that_no_kernel_takes_is_refused(scale: float) -> None:
    with pytest.raises(ArgumentError, match="softmax_scale"):
        scale_log2(scale)


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        (Lengths(4, 4096, 16384, 16, 16), 4),  # 8 MiB of K and V per head: four fit 32 MiB
        (Lengths(4, 4096, 16384, 16, 4), 16),  # the same four K/V heads, four query heads each
        (Lengths(1, 4096, 1 << 20, 16, 4), 4),  # not even one fits
        (Lengths(2, 100, 64, 8, 8), 16),  # all of them
        (Lengths(2, 100, 0, 8, 8), 16),
        (Lengths(0, 0, 0, 0, 0), 1),
    ],
)
def test_heads_that_share_the_l2(lengths: Lengths, heads: int) -> None:
    assert heads_per_group(BF16_128, lengths) == heads


def test_another_device_is_made_current_for_the_launch_only(
    fake: FakeDriver, sm90: LoadedKernel
) -> None:
    launch(sm90, device_index=1)
    assert fake.launches[0].context == CONTEXT + 1
    assert fake.context == CONTEXT
    fake.context = None  # a thread that has used no device yet
    launch(sm90)
    assert fake.launches[1].context == CONTEXT
    assert fake.context is None
    assert [index for _, index in fake.prepared] == [1, 0]


def test_threads_share_no_plan(fake: FakeDriver, sm90: LoadedKernel) -> None:
    get_context = fake.get_context

    def slow_get_context(out: ctypes.c_void_p) -> int:
        time.sleep(0.001)  # between writing the arguments and launching: others run here
        return get_context(out)

    fake.get_context = slow_get_context  # type: ignore[method-assign]

    def work(base: int) -> None:
        for _ in range(20):
            launch(sm90, base=base)

    workers = [threading.Thread(target=work, args=((i + 1) << 20,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seen: dict[int, int] = {}
    for index, call in enumerate(fake.launches):
        params = params_of(fake, index)
        base = params.q
        maps = [int.from_bytes(data[:8], "little") for data in call.arguments[:4]]
        assert maps == [base, 2 * base, 3 * base, 4 * base]
        assert params.lse == 5 * base
        seen[base] = seen.get(base, 0) + 1
    assert seen == {(i + 1) << 20: 20 for i in range(8)}


def test_a_failed_launch_names_the_error(fake: FakeDriver, sm90: LoadedKernel) -> None:
    fake.status = 719
    with pytest.raises(CudaError, match=r"CUDA_ERROR_LAUNCH_FAILED \(719\).*new process") as caught:
        launch(sm90)
    assert caught.value.code == 719


# ---- driver.py ----


def test_without_a_driver_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as cu

    def absent(flags: int) -> tuple[object]:
        raise RuntimeError('"cuda" is an NVIDIA driver library. Ensure that it is installed.')

    monkeypatch.setattr(cu, "cuInit", absent)
    driver._cu.cache_clear()
    with pytest.raises(DeviceError, match="install an NVIDIA driver") as caught:
        driver.device_count()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(cu, "cuInit", lambda flags: (cu.CUresult.CUDA_ERROR_NO_DEVICE,))
    with pytest.raises(DeviceError, match="CUDA_ERROR_NO_DEVICE"):
        driver.device_count()
    ok = cu.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(cu, "cuInit", lambda flags: (ok,))
    monkeypatch.setattr(cu, "cuDriverGetVersion", lambda: (ok, 12020))
    with pytest.raises(DeviceError, match=r"it is for CUDA 12\.2.*12\.4 or newer"):
        driver.device_count()


def test_a_library_that_is_no_driver_is_refused() -> None:
    with pytest.raises(DeviceError, match="install an NVIDIA driver"):
        driver.HotCalls("libcuda-that-is-not-there.so")
    with pytest.raises(DeviceError, match="cuTensorMapEncodeTiled"):
        driver.HotCalls("libc.so.6")


def test_the_launch_config_is_laid_out_as_cuda_h_says() -> None:
    fields = ("grid", "block", "smem_bytes", "stream", "attributes", "attribute_count")
    offsets = [getattr(driver.LaunchConfig, field).offset for field in fields]
    assert offsets == [0, 12, 24, 32, 40, 48]


def test_query_device_reads_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as cu

    ok = cu.CUresult.CUDA_SUCCESS
    values = {
        "GLOBAL_MEMORY_BUS_WIDTH": 384,
        "COMPUTE_CAPABILITY_MAJOR": 8,
        "COMPUTE_CAPABILITY_MINOR": 6,
        "MULTIPROCESSOR_COUNT": 82,
        "CLOCK_RATE": 1_695_000,
        "L2_CACHE_SIZE": 6 << 20,
        "MEMORY_CLOCK_RATE": 9_751_000,
    }
    fake = SimpleNamespace(
        CUdevice_attribute=cu.CUdevice_attribute,
        cuDeviceGetCount=lambda: (ok, 1),
        cuDeviceGet=lambda index: (ok, index),
        cuDeviceGetName=lambda size, device: (ok, b"A Card\0\0\0"),
        cuDeviceGetAttribute=lambda key, device: (
            ok,
            values[key.name.removeprefix("CU_DEVICE_ATTRIBUTE_")],
        ),
    )
    monkeypatch.setattr(driver, "_cu", lambda: fake)
    query_device = driver.query_device.__wrapped__  # past the cache
    device = query_device(0)
    assert (device.name, device.arch.name, device.sm_count) == ("A Card", "sm86", 82)
    assert device.memory_gbps == pytest.approx(936, rel=0.01)
    with pytest.raises(ArgumentError, match="no CUDA device 3: allowed are 0 to 0"):
        query_device(3)
