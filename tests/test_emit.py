"""Emitted files: what they say, and that they compile, link and pass their own check."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from records import H200, some_record

from fagen import __version__
from fagen.build.compile import compile_kernel
from fagen.build.emit import emit, emit_all
from fagen.build.render import render
from fagen.device import architecture, typical_device
from fagen.errors import ArgumentError, ConfigError
from fagen.files import write_files
from fagen.kernels.registry import AnyConfig, default_config
from fagen.kernels.template import symbol
from fagen.problem import Problem
from fagen.records.store import Card, TunedConfig

SM90 = architecture("sm90")
PROBLEM = Problem(dtype="bf16", head_dim=128, causal=True)
CONFIG = default_config(PROBLEM, H200)
NAME = "forward_bf16_d128_causal_sm90"


def record(
    *,
    seqlen: int = 4096,
    device: str = "NVIDIA H200",
    config: AnyConfig = CONFIG,
    arch: str = "sm90",
) -> TunedConfig:
    return some_record(
        PROBLEM,
        config,
        seqlen=seqlen,
        card=Card(name=device, sm_count=132, arch=arch),
        median_us=412.5,
        tflops=633.0,
        trials=117,
        speedup_over_default=1.08,
    )


def text(files: dict[str, str | bytes], name: str) -> str:
    content = files[name]
    assert isinstance(content, str)
    return content


# ---- the files ----


def test_cu_is_four_files_and_the_kernel_comes_first() -> None:
    files = emit(PROBLEM, CONFIG, SM90)
    assert list(files) == [f"{NAME}.cu", f"{NAME}.h", f"{NAME}_host.cu", f"{NAME}_main.cu"]


def test_kernel_is_what_runs_in_python_under_a_comment() -> None:
    kernel = text(emit(PROBLEM, CONFIG, SM90), f"{NAME}.cu")
    header = kernel.removesuffix(render(PROBLEM, CONFIG))
    assert header != kernel
    assert all(line.startswith("//") for line in header.splitlines() if line)


def test_header_of_a_default_config() -> None:
    kernel = text(emit(PROBLEM, CONFIG, SM90), f"{NAME}.cu")
    for words in (
        f"written by fagen {__version__} for sm90",
        str(CONFIG),
        "default config, not tuned",
        "-arch=sm_90a",
    ):
        assert words in kernel


def test_header_of_a_config_that_was_set_by_hand() -> None:
    config = CONFIG.model_copy(update={"block_n": 96})
    kernel = text(emit(PROBLEM, config, SM90), f"{NAME}.cu")
    assert "config chosen by hand, not tuned" in kernel
    assert "constexpr int kBlockN = 96;" in kernel


def test_header_of_a_record_tells_where_it_comes_from() -> None:
    kernel = text(emit(PROBLEM, CONFIG, SM90, record=record()), f"{NAME}.cu")
    for words in (
        "measured on NVIDIA H200 (132 SMs), 2026-01-02, 117 configs",
        "412.5 us, 633 TFLOP/s at b4 q4096 k4096 h16/16",
        "1.08 times the speed of the default config",
        "fagen 0.1.0, NVRTC 13.0, driver 13.0",
    ):
        assert words in kernel
    assert "not tuned" not in kernel


def test_header_of_a_prediction_does_not_claim_a_device() -> None:
    measured = record()
    result = measured.result.model_copy(update={"kind": "predicted", "policy": "model"})
    predicted = measured.model_copy(update={"result": result})
    kernel = text(emit(PROBLEM, CONFIG, SM90, record=predicted), f"{NAME}.cu")
    assert "predicted for NVIDIA H200 (132 SMs)" in kernel


def test_name_is_given_to_files_and_launcher() -> None:
    files = emit(PROBLEM, CONFIG, SM90, name="attention")
    assert list(files)[:2] == ["attention.cu", "attention.h"]
    assert "attention_launch(" in text(files, "attention_host.cu")


def test_tensor_maps_need_no_driver_library() -> None:
    host = text(emit(PROBLEM, CONFIG, SM90), f"{NAME}_host.cu")
    assert "cudaGetDriverEntryPointByVersion" in host
    sm80 = default_config(PROBLEM, H200, "forward_sm80")
    assert "cuTensorMap" not in text(emit(PROBLEM, sm80, SM90), f"{NAME}_host.cu")


def test_hopper_kernel_holds_no_instruction_of_ampere() -> None:
    for axes in ({}, {"persistent": True, "dynamic_tiles": True}, {"p_in_smem": True}):
        files = emit(PROBLEM, CONFIG.model_copy(update=axes), SM90)
        kernel = text(files, f"{NAME}.cu")
        assert not re.search(r"cp\.async\.cg|ldmatrix|mma\.sync", kernel)


def test_nothing_but_the_kernel_is_outside_of_its_namespace() -> None:
    for config in (CONFIG, default_config(PROBLEM, H200, "forward_sm80")):
        kernel = text(emit(PROBLEM, config, SM90), f"{NAME}.cu")
        code = re.sub(r"//.*", "", kernel).strip()
        name = symbol(PROBLEM)
        assert code.startswith(f"namespace {name} {{")
        assert re.search(r"\n#undef DEVICE\s*\}$", code)
        assert len(re.findall(r'extern "C"', code)) == 1


# ---- what is refused ----


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ArgumentError, match="unknown format 'sass': allowed are cu, ptx, cubin"):
        emit(PROBLEM, CONFIG, SM90, format="sass")


def test_name_that_is_no_identifier_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'\.\./x' is no C identifier"):
        emit(PROBLEM, CONFIG, SM90, name="../x")


def test_illegal_config_is_refused_with_its_rule() -> None:
    with pytest.raises(ConfigError, match="forward_sm90 does not answer forward on sm80"):
        emit(PROBLEM, CONFIG, architecture("sm80"))


# ---- all records of an architecture ----


def test_records_that_share_a_problem_get_their_bucket_and_device() -> None:
    records = [
        record(seqlen=512),
        record(),
        record(device="NVIDIA H100 PCIe"),
        record(arch="sm80"),
    ]
    files = emit_all(SM90, records)
    assert [name for name in files if name.endswith(".h")] == [
        f"{NAME}_q512_k512_bh64_g1.h",
        f"{NAME}_q4096_k4096_bh64_g1_nvidia_h200_132_sms.h",
        f"{NAME}_q4096_k4096_bh64_g1_nvidia_h100_pcie_132_sms.h",
    ]


def test_first_of_two_records_of_one_bucket_counts() -> None:
    own = record(config=CONFIG.model_copy(update={"block_n": 96}))
    files = emit_all(SM90, [own, record()])
    assert "kBlockN = 96;" in text(files, f"{NAME}.cu")
    assert len(files) == 4


def test_architecture_without_records_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="fagen tune --arch sm120"):
        emit_all(architecture("sm120"), [record()])


# ---- NVRTC's formats ----


def test_cubin_is_the_one_that_runs_in_python() -> None:
    files = emit(PROBLEM, CONFIG, SM90, format="cubin")
    assert files == {f"{NAME}.cubin": compile_kernel(PROBLEM, CONFIG, SM90).cubin}


def test_ptx_is_text_for_the_architecture() -> None:
    files = emit(PROBLEM, CONFIG, SM90, format="ptx")
    ptx = text(files, f"{NAME}.ptx")
    assert ".target sm_90a" in ptx
    assert f".entry {symbol(PROBLEM)}" in ptx


# ---- nvcc ----

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
BUILT = [
    pytest.param("sm90", PROBLEM, {}, id="sm90"),
    pytest.param("sm90", Problem(dtype="fp16", head_dim=40), {"persistent": True}, id="persistent"),
    pytest.param("sm90", PROBLEM, {"persistent": True, "cluster": 2, "block_n": 80}, id="cluster"),
    pytest.param(
        "sm90", PROBLEM, {"persistent": True, "dynamic_tiles": True, "q_stages": 2}, id="dynamic"
    ),
    pytest.param("sm80", Problem(dtype="fp16", head_dim=40, alignment=2), {}, id="sm80-narrow"),
]


def nvcc(folder: Path, target: str, *arguments: str) -> None:
    """Runs nvcc in `folder`; any warning fails."""
    line = ["nvcc", "-std=c++17", f"-arch={target}", "-Werror", "all-warnings"]
    line += ["-Xcompiler", "-Wall,-Wextra,-Werror", *arguments]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "warpgroup" not in said, said  # of ptxas, which had to help wgmma (C7519)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "problem", "axes"), BUILT)
def test_each_file_compiles_alone_and_all_of_them_link(
    arch: str, problem: Problem, axes: dict[str, object], tmp_path: Path
) -> None:
    device = typical_device(architecture(arch))
    config = default_config(problem, device).model_copy(update=axes)
    write_files(emit(problem, config, device.arch, name="x"), tmp_path)
    for file in ("x.cu", "x_host.cu", "x_main.cu"):
        nvcc(tmp_path, device.arch.target, "-c", file)
    nvcc(tmp_path, device.arch.target, "x.o", "x_host.o", "x_main.o", "-o", "all")


@needs_nvcc
@pytest.mark.slow
def test_kernels_of_two_buckets_link_into_one_program(tmp_path: Path) -> None:
    sm80 = default_config(PROBLEM, H200, "forward_sm80")
    written = write_files(
        emit_all(SM90, [record(config=sm80), record(seqlen=512, config=sm80)]), tmp_path
    )
    hosts = [path.name for path in written if path.name.endswith("_host.cu")]
    nvcc(tmp_path, "sm_90", "-shared", "-Xcompiler", "-fPIC", *hosts, "-o", "two.so")


@needs_nvcc
def test_kernels_of_one_problem_link_into_one_program_with_device_linking(tmp_path: Path) -> None:
    """Two that differ in every type and function, and whose symbols are in one device program."""
    narrow = CONFIG.model_copy(update={"block_n": 64, "persistent": True, "dynamic_tiles": True})
    hosts = []
    for name, config in (("wide", CONFIG), ("narrow", narrow)):
        write_files(emit(PROBLEM, config, SM90, name=name), tmp_path)
        hosts.append(f"{name}_host.cu")
    (tmp_path / "main.cu").write_text(
        '#include "wide.h"\n#include "narrow.h"\n'
        "int main() { return wide_launch == narrow_launch; }\n"
    )
    nvcc(tmp_path, SM90.target, "-rdc=true", *hosts, "main.cu", "-o", "both")
    assert (tmp_path / "both").is_file()


@needs_nvcc
@pytest.mark.slow
def test_declaration_is_plain_c(tmp_path: Path) -> None:
    write_files(emit(PROBLEM, CONFIG, SM90, name="x"), tmp_path)
    (tmp_path / "user.c").write_text(
        '#include "x.h"\nvoid *user(void) { return (void *)x_launch; }\n'
    )
    nvcc(tmp_path, "sm_90", "-x", "c", "-c", "user.c")


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "problem", "axes"), BUILT)
def test_one_line_builds_a_check_that_passes(
    arch: str, problem: Problem, axes: dict[str, object], tmp_path: Path
) -> None:
    device = typical_device(architecture(arch))
    config = default_config(problem, device).model_copy(update=axes)
    write_files(emit(problem, config, device.arch, name="x"), tmp_path)
    nvcc(tmp_path, device.arch.target, "x_main.cu", "-o", "check")
    done = subprocess.run(["./check"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("PASS\n")
