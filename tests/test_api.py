"""attention, load and explain: on a fake driver, and (marked gpu) on a real one."""

from __future__ import annotations

import ctypes
import inspect
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_driver import (
    BFLOAT16,
    FLOAT16,
    FakeDriver,
    FakeTensor,
    Parcel,
    compiled,
    fake_torch,
    forget_frameworks,
)
from records import some_record

import fagen
from fagen import api
from fagen import call as calling
from fagen.build.compile import compile_kernel
from fagen.errors import ArgumentError, ConfigError, CudaError, UnsupportedError
from fagen.judge import reference
from fagen.kernels import Sm80Forward, Sm90Forward
from fagen.kernels.forward import PARAMS, ForwardConfig
from fagen.records.store import save_records
from fagen.tuning.options import TuneOptions

# ---- the package ----


def test_the_package_exports_what_it_names() -> None:
    assert set(fagen.__all__) <= set(dir(fagen))
    for name in fagen.__all__:
        assert getattr(fagen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        fagen.attend  # noqa: B018


def test_errors_of_the_driver_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(CudaError("an illegal memory access", 700)))
    assert (type(error), str(error), error.code) == (CudaError, "an illegal memory access", 700)


def test_every_error_is_exported() -> None:
    from fagen import errors

    public = {n for n, v in vars(errors).items() if isinstance(v, type) and n.endswith("Error")}
    assert public <= set(fagen.__all__)


def test_importing_fagen_loads_nothing() -> None:
    code = "import sys, fagen; print(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"optuna", "torch", "jinja2", "cupy", "pydantic", "numpy", "cuda", "yaml"}
    assert not heavy & set(done.stdout.split())


def test_the_run_time_path_loads_no_template_engine_and_no_search() -> None:
    code = (
        "import sys, fagen; fagen.attention; print(*sorted(m.split('.')[0] for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"optuna", "scipy", "torch", "jinja2", "cupy", "typer", "rich"} & set(
        done.stdout.split()
    )


# ---- tuning ----


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each call of `fagen.tuning.tuner.tune`, which does nothing."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "fagen.tuning.tuner.tune",
        lambda tasks, options, **others: calls.append({"tasks": tasks} | dict(options) | others),
    )
    return calls


def test_tune_takes_what_the_command_line_does(tuned: list[dict[str, Any]]) -> None:
    fagen.tune(dtype="bf16", head_dim=64, causal=True, seqlen=(512, 4096), arch="sm90", trials=9)
    fagen.tune(head_dim=(64, 96), heads=8, on_event=print)
    fagen.tune([fagen.Task(fagen.Problem(dtype="fp16", head_dim=8), ())])
    one, many, given = (call["tasks"] for call in tuned)
    assert [str(task.problem) for task in one] == ["forward_bf16_d64_causal"]
    assert [shape.seqlen_q for shape in one[0].shapes] == [512, 4096]
    assert (tuned[0]["arch"].name, tuned[0]["trials"]) == ("sm90", 9)
    assert {(t.problem.dtype, t.problem.head_dim, t.problem.causal) for t in many} == {
        (dtype, head_dim, causal)
        for dtype in ("fp16", "bf16")
        for head_dim in (64, 96)
        for causal in (True, False)
    }
    assert {shape.heads_q for task in many for shape in task.shapes} == {8}
    assert tuned[1]["on_event"] is print
    assert given[0].problem.head_dim == 8


@pytest.mark.parametrize("name", ["heads_kv", "kv_heads"])
def test_tune_takes_heads_kv_by_its_old_name_too(tuned: list[dict[str, Any]], name: str) -> None:
    sizes: dict[str, Any] = {"heads": 8, name: 2}
    fagen.tune(head_dim=64, **sizes)
    (call,) = tuned
    assert {(s.heads_q, s.heads_kv) for task in call["tasks"] for s in task.shapes} == {(8, 2)}
    assert name not in call


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": "fp8"}, "dtype"),
        ({"head_dim": 7}, "head_dim"),
        ({"seqlen": -1}, "seqlen"),
        ({"tasks": [], "dtype": "bf16"}, "not both"),
        ({"arch": "volta"}, "sm90"),
        ({"arch": 7.5}, "sm90"),
        ({"head_dim": "64"}, "head_dim"),
        ({"head_dim": []}, "head_dim"),
        ({"seqlen": [512, "a"]}, "seqlen"),
        ({"heads_kv": 2, "kv_heads": 2}, "give only one"),
        ({"trials": 0}, "trials: Input should be greater than 0"),
        ({"trails": 9}, "no option trails: there are arch, devices"),
    ],
)
def test_tune_refuses_what_is_not_allowed(
    tuned: list[dict[str, Any]], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ArgumentError, match=said) as caught:
        fagen.tune(**arguments)
    assert "\n" not in str(caught.value)
    assert not tuned


def test_the_help_of_tune_lists_every_option() -> None:
    parameters = inspect.signature(fagen.tune).parameters
    assert {"tasks", "head_dim", "on_event", *TuneOptions.model_fields} <= parameters.keys()
    assert "options" not in parameters
    assert parameters["seed"].default == 0


# ---- on a fake driver ----

Q, K = (2, 300, 8, 128), (2, 500, 2, 128)


class Fake(SimpleNamespace):
    driver: FakeDriver
    torch: SimpleNamespace
    compiles: list[tuple[Any, Any]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    torch = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    compiles: list[tuple[Any, Any]] = []

    def compile_kernel(problem: Any, config: Any, arch: Any) -> Any:
        compiles.append((problem, config))
        return compiled(problem, arch.name)

    for module in (api, calling):
        monkeypatch.setattr(module, "compile_kernel", compile_kernel)
    fresh_caches(monkeypatch)
    yield Fake(driver=FakeDriver.install(monkeypatch), torch=torch, compiles=compiles)
    fresh_caches(monkeypatch)


def fresh_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "_kernels", {})
    monkeypatch.setattr(calling, "_thread", threading.local())
    forget_frameworks()


def qkv(**options: Any) -> tuple[FakeTensor, FakeTensor, FakeTensor]:
    return FakeTensor(Q, **options), FakeTensor(K, **options), FakeTensor(K, **options)


def pointers(fake: Fake) -> tuple[int, ...]:
    data = fake.driver.launches[-1].params
    return tuple(int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(5))


def scale(fake: Fake) -> float:
    place = PARAMS.offsets["scale_log2"]
    return ctypes.c_float.from_buffer_copy(fake.driver.launches[-1].params, place).value


def test_a_call_launches_on_the_callers_stream_and_returns_its_framework(fake: Fake) -> None:
    q, k, v = qkv()
    out, lse = fagen.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype, lse.shape) == (Q, BFLOAT16, (2, 8, 300))
    assert pointers(fake) == tuple(t.data_ptr() for t in (q, k, v, out, lse))
    assert fake.driver.launches[0].stream == 77
    assert scale(fake) == pytest.approx(math.log2(math.e) / math.sqrt(128))
    fake.torch.current = 78
    out = fagen.attention(q, k, v, causal=True, softmax_scale=0.25)
    assert pointers(fake) == (*(t.data_ptr() for t in (q, k, v, out)), 0)
    assert fake.driver.launches[1].stream == 78
    assert scale(fake) == pytest.approx(math.log2(math.e) / 4)


def test_out_is_written_and_returned(fake: Fake) -> None:
    q, k, v = qkv()
    out = FakeTensor(Q)
    assert fagen.attention(q, k, v, out=out) is out
    assert pointers(fake)[3] == out.data_ptr()
    with pytest.raises(ArgumentError, match="out is q, k or v itself"):
        fagen.attention(q, k, v, out=q)


def test_lengths_of_one_bucket_compile_once_and_repeated_calls_plan_nothing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(seqlen: int) -> None:
        q = FakeTensor((2, seqlen, 8, 128))
        fagen.attention(q, FakeTensor(q.shape), FakeTensor(q.shape))

    for seqlen in range(1000, 1050):
        call(seqlen)
    assert len(fake.compiles) == 1
    assert len(fake.driver.encoded) == 4 * 50
    monkeypatch.setattr(calling, "ask", None)  # a known geometry builds no model
    monkeypatch.setattr(calling, "choose", None)
    for seqlen in range(1000, 1050):
        call(seqlen)
    assert len(fake.driver.launches) == 100
    assert len(fake.driver.encoded) == 4 * 50


def test_a_record_that_is_saved_meanwhile_counts_from_then_on(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.yaml"
    save_records(path, [])
    monkeypatch.setenv("FAGEN_CONFIG", str(path))
    tensors = FakeTensor(Q), FakeTensor(Q), FakeTensor(Q)
    fagen.attention(*tensors)
    problem, default = fake.compiles[-1]
    other = default.model_copy(update={"block_n": 80})
    save_records(path, [some_record(problem, other)])
    fagen.attention(*tensors)
    assert [config for _, config in fake.compiles] == [default, other]
    assert fagen.explain(*tensors).config == other


def test_each_static_question_has_its_own_kernel(fake: Fake) -> None:
    fagen.attention(*qkv())
    fagen.attention(*qkv(), causal=True)
    fagen.attention(*qkv(dtype=FLOAT16))
    assert len({problem for problem, _ in fake.compiles}) == 3


def test_unaligned_pointers_take_narrow_loads(fake: Fake) -> None:
    q, k, v = qkv()
    fagen.attention(q, k, v)
    for shift in (2, 8):
        odd = FakeTensor(K, pointer=v.data_ptr() + shift)
        fagen.attention(q, k, odd)
        assert fagen.explain(q, k, odd).problem.alignment == 2
    (wide, _), (narrow, config), *_ = fake.compiles
    assert (wide.alignment, narrow.alignment) == (16, 2)
    assert isinstance(config, Sm80Forward)
    assert [len(call.arguments) for call in fake.driver.launches[1:]] == [1, 1]  # no tensor maps


def test_bhsd_is_the_same_call_with_other_strides(fake: Fake) -> None:
    q, k, v = (FakeTensor((t[0], t[2], t[1], t[3])) for t in (Q, K, K))
    out, lse = fagen.attention(q, k, v, layout="bhsd", return_lse=True)
    assert (out.shape, lse.shape) == ((2, 8, 300, 128), (2, 8, 300))
    dims, strides = fake.driver.encoded[0][3:5]
    assert dims == (128, 300, 8, 2)
    assert strides == (256, 300 * 256, 8 * 300 * 256)


def test_a_config_can_be_given_as_a_model_or_as_its_fields(fake: Fake) -> None:
    fields = {"template": "forward_sm90", "block_m": 128, "block_n": 64, "block_k": 64, "stages": 3}
    fagen.attention(*qkv(), config=fields)
    fagen.attention(*qkv(), config=Sm90Forward(**fields))
    assert [config for _, config in fake.compiles] == [Sm90Forward(**fields)]
    with pytest.raises(ConfigError, match=r"illegal .* accumulators take 256 of 240 registers"):
        fagen.attention(*qkv(), config={**fields, "block_n": 256, "stages": 4})
    with pytest.raises(ArgumentError, match="block_x"):
        fagen.attention(*qkv(), config={**fields, "block_x": 1})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_errors_name_the_tensor(fake: Fake, name: str) -> None:
    tensors: dict[str, Any] = dict(zip("qkv", qkv(), strict=True))
    tensors[name] = FakeTensor(tensors[name].shape, device=Parcel("cpu", None))
    with pytest.raises(ArgumentError, match=f"^{name} is not on a CUDA device"):
        fagen.attention(**tensors)
    assert not fake.driver.launches


def test_gradients_are_not_dropped_in_silence(fake: Fake) -> None:
    q, k, _ = qkv()
    with pytest.raises(UnsupportedError, match="gradients"):
        fagen.attention(q, k, FakeTensor(K, requires_grad=True))
    fake.torch.grad = False
    fagen.attention(q, k, FakeTensor(K, requires_grad=True))
    assert len(fake.driver.launches) == 1


def test_arrays_of_two_frameworks_are_refused(fake: Fake) -> None:
    q, k, _ = qkv()
    with pytest.raises(ArgumentError, match="type ndarray: all arrays have to be of one framework"):
        fagen.attention(q, k, np.zeros(K, np.float16))
    with pytest.raises(ArgumentError, match="q is of type list"):
        fagen.attention([1.0], k, k)


def test_a_bad_scale_launches_nothing(fake: Fake) -> None:
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ArgumentError, match="softmax_scale"):
            fagen.attention(*qkv(), softmax_scale=bad)
    assert not fake.driver.launches


def test_each_thread_has_its_own_plans(fake: Fake) -> None:
    barrier = threading.Barrier(2)

    def call(_: int) -> None:
        barrier.wait()
        fagen.attention(*qkv())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, range(2)))
    assert len(fake.compiles) == 1
    assert len(fake.driver.encoded) == 8


def test_load_gives_the_kernel_to_look_at_and_to_call(fake: Fake) -> None:
    kernel = fagen.load(
        dtype="bf16", head_dim=128, causal=True, seqlen_q=300, seqlen_k=500, batch=2, heads=8,
        heads_kv=2,
    )  # fmt: skip
    assert isinstance(kernel.config, Sm90Forward)
    assert (kernel.source, kernel.cubin) == ("// kernel", b"cubin")
    assert kernel.resources.registers == 168
    assert kernel.explanation.config == kernel.config
    q, k, v = qkv()
    out, lse = kernel(q, k, v, return_lse=True)
    assert pointers(fake) == tuple(t.data_ptr() for t in (q, k, v, out, lse))
    with pytest.raises(ArgumentError, match="this kernel is for forward_bf16_d128_causal"):
        kernel(q, k, v, causal=False)
    with pytest.raises(ArgumentError, match="multiples of 16 bytes"):
        kernel(q, k, FakeTensor(K, pointer=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "fp64"}, "'fp16' or 'bf16'"),
        ({"head_dim": 12}, "multiple of 8"),
        ({"head_dim": 512}, "256"),
        ({"heads_kv": 3}, "heads_q has to be a multiple"),
    ],
)
def test_load_says_what_is_allowed(fake: Fake, change: dict[str, Any], message: str) -> None:
    wanted = {"dtype": "bf16", "head_dim": 64, "seqlen_q": 1, "seqlen_k": 1, "batch": 1, "heads": 4}
    arguments: dict[str, Any] = wanted | change
    with pytest.raises(ArgumentError, match=message):
        fagen.load(**arguments)


def test_explain_names_the_kernel_and_launches_nothing(fake: Fake) -> None:
    q, k, v = qkv()
    config = Sm90Forward(block_m=128, block_n=64, block_k=64, stages=3)
    explanation = fagen.explain(q, k, v, causal=True, config=config)
    assert (explanation.config, explanation.tier) == (config, 1)
    assert explanation.problem.causal
    assert explanation.bucket.seqlen_q == 256
    text = str(explanation)
    for part in ("fagen_forward_bf16_d128_causal", "NVIDIA H200", str(config), "168 registers"):
        assert part in text
    narrow = fagen.explain(q, k, FakeTensor(K, pointer=2))
    assert narrow.problem.alignment == 2
    assert not fake.driver.launches


# ---- on a real one ----


def assert_close(got: Any, wanted: Any) -> None:
    """16-bit results against float64."""
    np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def random_qkv(
    torch: Any,
    batch: int = 2,
    seqlen_q: int = 130,
    seqlen_k: int = 200,
    heads_q: int = 4,
    heads_kv: int = 2,
    head_dim: int = 64,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> tuple[Any, Any, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        values = torch.randn(*shape, generator=generator, device="cuda")
        return values.to(getattr(torch, dtype))

    keys = (batch, seqlen_k, heads_kv, head_dim)
    return normal(batch, seqlen_q, heads_q, head_dim), normal(*keys), normal(*keys)


def host(tensor: Any) -> Any:
    """A torch tensor as float64 NumPy."""
    return tensor.double().cpu().numpy()


def check(torch: Any, q: Any, k: Any, v: Any, causal: bool = False, **options: Any) -> Any:
    """Calls attention and compares; returns the output."""
    out, lse = fagen.attention(q, k, v, causal=causal, return_lse=True, **options)
    wanted, wanted_lse = reference.attention(host(q), host(k), host(v), causal=causal)
    assert type(out) is torch.Tensor
    assert (out.dtype, out.device, out.shape) == (q.dtype, q.device, q.shape)
    assert_close(host(out), wanted)
    np.testing.assert_allclose(host(lse), wanted_lse, rtol=0, atol=2e-3)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_round_trip(torch: Any, dtype: str, causal: bool) -> None:
    check(torch, *random_qkv(torch, dtype=dtype), causal)


@pytest.mark.gpu
def test_bhsd_equals_bshd_transposed(torch: Any) -> None:
    q, k, v = random_qkv(torch)
    wanted = fagen.attention(q, k, v, causal=True)
    views = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    got = fagen.attention(*views, causal=True, layout="bhsd")
    assert got.shape == (2, 4, 130, 64)
    assert torch.equal(got.transpose(1, 2), wanted)
    copies = [tensor.contiguous() for tensor in views]
    got = fagen.attention(*copies, causal=True, layout="bhsd")
    assert torch.equal(got.transpose(1, 2), wanted)


@pytest.mark.gpu
def test_out_may_have_strides_of_its_own(torch: Any) -> None:
    q, k, v = random_qkv(torch)
    wanted = fagen.attention(q, k, v)
    buffer = torch.full((2, 130, 7, 64), 7.0, dtype=q.dtype, device="cuda")
    out = buffer[:, :, 2:6]
    assert fagen.attention(q, k, v, out=out) is out
    assert torch.equal(out, wanted)
    assert torch.all(buffer[:, :, :2] == 7)
    assert torch.all(buffer[:, :, 6:] == 7)


@pytest.mark.gpu
def test_scale_zero_is_the_mean_of_the_visible_values(torch: Any) -> None:
    q, k, v = random_qkv(torch)
    out = fagen.attention(q, k, v, causal=True, softmax_scale=0.0)
    wanted, _ = reference.attention(host(q), host(k), host(v), causal=True, softmax_scale=0.0)
    assert_close(host(out), wanted)


@pytest.mark.gpu
def test_gradients_are_refused_but_not_under_no_grad(torch: Any) -> None:
    q, k, v = random_qkv(torch)
    wanted = fagen.attention(q, k, v)
    q.requires_grad_()
    with pytest.raises(UnsupportedError, match="gradients"):
        fagen.attention(q, k, v)
    with torch.no_grad():
        assert torch.equal(fagen.attention(q, k, v), wanted)


@pytest.mark.gpu
def test_cupy_round_trip() -> None:
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    shapes = ((2, 130, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64))
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    out, lse = fagen.attention(
        cupy.asarray(q), cupy.asarray(k), cupy.asarray(v), causal=True, return_lse=True
    )
    assert isinstance(out, cupy.ndarray)
    assert (out.dtype, out.shape, lse.dtype) == (np.float16, q.shape, np.float32)
    wanted, wanted_lse = reference.attention(q, k, v, causal=True)
    assert_close(cupy.asnumpy(out), wanted)
    np.testing.assert_allclose(cupy.asnumpy(lse), wanted_lse, rtol=0, atol=2e-3)


@pytest.mark.gpu
def test_cupy_takes_bf16_and_its_own_stream() -> None:
    cupy = pytest.importorskip("cupy")
    import ml_dtypes

    rng = np.random.default_rng(0)
    shape = (2, 130, 4, 64)
    q, k, v = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in range(3))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = fagen.attention(cupy.asarray(q), cupy.asarray(k), cupy.asarray(v))
        assert out.dtype == ml_dtypes.bfloat16
        got = cupy.asnumpy(out, stream=stream).astype(np.float64)
    assert_close(got, reference.attention(q, k, v)[0])


@pytest.mark.gpu
def test_negative_strides_of_cupy_views() -> None:
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 130, 4, 64)).astype(np.float16) for _ in range(3))
    views = [cupy.asarray(array)[:, ::-1] for array in (q, k, v)]
    assert fagen.explain(*views).problem.alignment == 2
    out = fagen.attention(*views, causal=True)
    wanted, _ = reference.attention(q[:, ::-1], k[:, ::-1], v[:, ::-1], causal=True)
    assert_close(cupy.asnumpy(out), wanted)


class ByDlpack:
    """An array of a third framework, which gives and takes DLPack."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()  # type: ignore[no-any-return]

    def __array_namespace__(self) -> Any:
        import torch

        return SimpleNamespace(from_dlpack=lambda array: ByDlpack(torch.from_dlpack(array)))


class ByCudaArrayInterface:
    """An array that has nothing but `__cuda_array_interface__`."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor  # keeps the memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.tensor.__cuda_array_interface__  # type: ignore[no-any-return]


@pytest.mark.gpu
def test_other_frameworks_get_their_own_arrays_back(torch: Any) -> None:
    cupy = pytest.importorskip("cupy")
    q, k, v = random_qkv(torch, dtype="float16")
    torch.cuda.synchronize()
    wanted, wanted_lse = fagen.attention(q, k, v, return_lse=True)
    theirs = [ByDlpack(tensor) for tensor in (q, k, v)]
    out, lse = fagen.attention(*theirs, return_lse=True)
    torch.cuda.synchronize()
    assert torch.equal(out.tensor, wanted)
    assert torch.equal(lse.tensor, wanted_lse)
    buffer = ByDlpack(torch.zeros_like(q))
    torch.cuda.synchronize()
    assert fagen.attention(*theirs, out=buffer) is buffer
    torch.cuda.synchronize()
    assert torch.equal(buffer.tensor, wanted)
    out = fagen.attention(*(ByCudaArrayInterface(tensor) for tensor in (q, k, v)))
    assert isinstance(out, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(out), wanted.cpu().numpy())


@pytest.mark.gpu
def test_the_current_stream_orders_the_call(torch: Any) -> None:
    q, k, v = random_qkv(torch)
    wanted = fagen.attention(q, k, v)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        late.copy_(q)
        got = fagen.attention(late, k, v)
    torch.cuda.synchronize()
    assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_new_values(torch: Any) -> None:
    q, k, v = random_qkv(torch)
    fagen.attention(q, k, v, causal=True, return_lse=True)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fagen.attention(q, k, v, causal=True, return_lse=True)
    # Calls in between reuse the plan that the graph was captured from.
    for seed in (1, 2):
        fagen.attention(*random_qkv(torch, seed=seed + 10), causal=True)
        for tensor, fresh in zip((q, k, v), random_qkv(torch, seed=seed), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        wanted, wanted_lse = fagen.attention(q, k, v, causal=True, return_lse=True)
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse)


@pytest.mark.gpu
def test_even_a_first_call_can_be_captured(torch: Any) -> None:
    q, k, v = random_qkv(torch)
    wanted = fagen.attention(q, k, v)
    fields = {"template": "forward_sm80", "block_m": 64, "block_n": 32, "block_k": 32}
    config = {**fields, "stages": 1, "warps": 4, "lazy_rescale": True}  # loaded by nothing else
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fagen.attention(q, k, v, config=config)
    graph.replay()
    assert_close(host(out), host(wanted))


@pytest.mark.gpu
def test_eight_threads_get_their_own_answers(torch: Any) -> None:
    inputs = [random_qkv(torch, seed=seed) for seed in range(8)]
    wanted = [fagen.attention(*tensors, causal=True) for tensors in inputs]
    torch.cuda.synchronize()
    barrier = threading.Barrier(8)

    def work(index: int) -> bool:
        barrier.wait()
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            results = [fagen.attention(*inputs[index], causal=True) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
            return all(torch.equal(result, wanted[index]) for result in results)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.gpu
def test_a_thread_without_a_context_can_call(torch: Any) -> None:
    q, k, v = random_qkv(torch)
    wanted = fagen.attention(q, k, v)
    out = torch.empty_like(q)
    torch.cuda.synchronize()
    thread = threading.Thread(target=fagen.attention, args=(q, k, v), kwargs={"out": out})
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_fifty_lengths_compile_once(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles: list[Any] = []

    def counting(*arguments: Any) -> Any:
        compiles.append(arguments)
        return compile_kernel(*arguments)

    monkeypatch.setattr(calling, "compile_kernel", counting)
    fresh_caches(monkeypatch)
    for seqlen in range(200, 250):
        check(torch, *random_qkv(torch, batch=1, seqlen_q=seqlen, seqlen_k=seqlen), True)
    assert len(compiles) == 1


@pytest.mark.gpu
def test_expanded_keys_and_values(torch: Any) -> None:
    q, k, v = random_qkv(torch, heads_kv=1)
    k, v = (tensor.expand(2, 200, 4, 64) for tensor in (k, v))
    assert k.stride(2) == 0
    check(torch, q, k, v)
    batch = [tensor[:1].expand(2, 200, 4, 64) for tensor in (k, v)]
    check(torch, q, *batch)


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [1, 4])
def test_unaligned_bases(torch: Any, shift: int) -> None:
    tensors = []
    for tensor in random_qkv(torch):
        storage = torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device="cuda")
        view = storage[shift:].view(tensor.shape)
        view.copy_(tensor)
        tensors.append(view)
    assert fagen.explain(*tensors).problem.alignment == 2
    q, k, v = tensors
    check(torch, q, k, v, True)


@pytest.mark.gpu
def test_unaligned_rows_and_packed_qkv(torch: Any) -> None:
    packed = torch.randn(2, 100, 3, 4, 68, device="cuda").bfloat16()
    q, k, v = packed[..., :64].unbind(2)
    assert q.stride(1) * 2 % 16 == 0
    assert q.stride(2) * 2 % 16 != 0
    check(torch, q, k, v)
    packed = torch.randn(2, 100, 3, 4, 64, device="cuda").bfloat16()
    q, k, v = packed.unbind(2)
    assert fagen.explain(q, k, v).problem.alignment == 16
    check(torch, q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_gives_zeros_and_no_queries_nothing(torch: Any, causal: bool) -> None:
    q, k, v = random_qkv(torch, seqlen_k=0)
    out = torch.full_like(q, 7.0)
    out, lse = fagen.attention(q, k, v, causal=causal, return_lse=True, out=out)
    assert torch.all(out == 0)
    assert torch.all(lse == -math.inf)
    q, k, v = random_qkv(torch, seqlen_q=0)
    out, lse = fagen.attention(q, k, v, causal=causal, return_lse=True)
    assert (tuple(out.shape), tuple(lse.shape)) == ((2, 0, 4, 64), (2, 4, 0))


@pytest.mark.gpu
def test_more_heads_than_a_grid_dimension_has_blocks(torch: Any) -> None:
    batch = 70_000
    q, k, v = random_qkv(torch, batch, seqlen_q=5, seqlen_k=9, heads_q=1, heads_kv=1)
    out = fagen.attention(q, k, v)
    for first in (0, 65_530, batch - 10):
        part = slice(first, first + 10)
        wanted, _ = reference.attention(host(q[part]), host(k[part]), host(v[part]))
        assert_close(host(out[part]), wanted)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31_elements(torch: Any) -> None:
    far = 1 << 31
    try:
        memory = torch.zeros(far + (1 << 20), dtype=torch.bfloat16, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pytest.skip("needs 4.3 GB of device memory")
    sources = random_qkv(torch)
    tensors = []
    for index, source in enumerate((*sources, torch.empty_like(sources[0]))):
        _, seqlen, heads, head_dim = source.shape
        strides = (far, heads * head_dim, head_dim, 1)
        view = memory.as_strided(source.shape, strides, storage_offset=index << 17)
        assert seqlen * heads * head_dim <= 1 << 17
        view.copy_(source)
        tensors.append(view)
    q, k, v, out = tensors
    check(torch, q, k, v, True, out=out)
    assert torch.equal(out, fagen.attention(*sources, causal=True))


@pytest.mark.gpu
def test_tensors_on_the_second_gpu_while_the_first_is_current(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = random_qkv(torch)
    wanted = fagen.attention(*tensors)
    assert torch.cuda.current_device() == 0
    out = fagen.attention(*(tensor.to("cuda:1") for tensor in tensors))
    assert out.device.index == 1
    assert torch.equal(out.to("cuda:0"), wanted)
    with pytest.raises(ArgumentError, match="q is on device 0 and k on device 1"):
        fagen.attention(tensors[0], *(tensor.to("cuda:1") for tensor in tensors[1:]))


@pytest.mark.gpu
def test_load_and_explain_agree_with_the_call(torch: Any) -> None:
    q, k, v = random_qkv(torch)
    kernel = fagen.load(
        dtype="bf16", head_dim=64, seqlen_q=130, seqlen_k=200, batch=2, heads=4, heads_kv=2
    )
    explanation = fagen.explain(q, k, v)
    assert explanation.config == kernel.config
    assert explanation.resources == kernel.resources
    assert isinstance(kernel.config, ForwardConfig)
    assert f"kBlockN = {kernel.config.block_n}" in kernel.source
    assert torch.equal(kernel(q, k, v), fagen.attention(q, k, v))
