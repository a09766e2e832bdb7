"""NVRTC, the resource report, and compilation in processes."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from alive import is_alive, wait_until_dead

from fagen.build import cache, nvrtc
from fagen.build.compile import compile_kernel, compile_many, compile_source, to_ptx
from fagen.build.compiled import Compiled, Resources
from fagen.build.processes import in_processes
from fagen.device import ARCHITECTURES, architecture
from fagen.errors import CacheError, CompileError, MissingDependencyError
from fagen.kernels import Sm80Forward
from fagen.kernels.registry import AnyConfig
from fagen.problem import DTYPE_NAMES, Problem

SM80 = architecture("sm80")
SM90 = architecture("sm90")
SCALE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 2.0f; }
"""


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_compiles(name: str) -> None:
    compiled = compile_source(SCALE, architecture(name), "scale")
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.arch == name
    assert 0 < compiled.resources.registers <= 32
    assert compiled.resources.why_bad() is None


def test_report_of_shared_memory_stack_and_spills() -> None:
    source = """
    extern "C" __global__ void __launch_bounds__(1024, 2) greedy(float* x) {
      __shared__ float staging[256];
      float a[64];
      for (int i = 0; i < 64; ++i) a[i] = x[i * 32];
      staging[threadIdx.x % 256] = a[0];
      __syncthreads();
      for (int i = 0; i < 64; ++i) x[i * 77] = a[i] * x[i + 9] + a[63 - i] + staging[i];
    }
    extern "C" __global__ void modest(float* x) { x[0] = 1.0f; }
    """
    greedy = compile_source(source, SM90, "greedy").resources
    assert greedy.registers == 32
    assert greedy.smem_bytes == 1024
    assert greedy.spill_bytes > 0
    assert greedy.stack_bytes > 0
    assert "spills" in str(greedy.why_bad())
    modest = compile_source(source, SM90, "modest").resources  # same text, its own report
    assert modest.registers < 32
    assert modest.spill_bytes == modest.stack_bytes == modest.smem_bytes == 0
    both = compile_source(source, SM90, "modest", "greedy")
    assert both.entries == {"modest": modest, "greedy": greedy}
    assert both.resources == greedy.model_copy(update={"warnings": both.resources.warnings})


def test_a_stack_frame_is_bad() -> None:
    source = """extern "C" __global__ void pick(float* x) {
      float a[100];
      for (int i = 0; i < 100; ++i) a[i] = x[i];
      x[0] = a[static_cast<int>(x[3])];
    }"""
    assert "stack frame" in str(compile_source(source, SM90, "pick").resources.why_bad())


def test_ignored_setmaxnreg_is_bad() -> None:
    source = """extern "C" __global__ void __launch_bounds__(384) shift(float* x) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
      x[0] = 1.0f;
    }"""
    assert "setmaxnreg" in str(compile_source(source, SM90, "shift").resources.why_bad())
    capped = source.replace("(384)", "(384, 1)")
    assert compile_source(capped, SM90, "shift").resources.why_bad() is None


def test_serialised_wgmma_is_bad() -> None:
    resources = nvrtc.parse_log(
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources in the function 'f'\n"
        "ptxas info    : Compiling entry function 'f' for 'sm_90a'\n"
        "ptxas info    : Function properties for f\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 2048 bytes smem, 96 bytes cmem[0]\n",
        ("f",),
    )["f"]
    assert (resources.registers, resources.smem_bytes) == (168, 2048)
    assert "serialised wgmma" in str(resources.why_bad())


def test_front_end_warnings_are_kept_but_not_bad() -> None:
    source = 'extern "C" __global__ void idle(float* x) { int unused; }'
    resources = compile_source(source, SM80, "idle").resources
    assert any("unused" in warning for warning in resources.warnings)
    assert resources.why_bad() is None


def test_refused_source_names_kernel_line_and_log() -> None:
    source = 'extern "C" __global__ void bad(float* x) {\n  x[0] = y;\n}'
    with pytest.raises(CompileError, match=r'bad for sm_80: bad.cu\(2\): error: .*"y"') as caught:
        compile_source(source, SM80, "bad")
    assert "1 error detected" in caught.value.log


def test_static_assert_is_a_compile_error() -> None:
    source = 'static_assert(1 == 2, "drifted");\n' + SCALE
    with pytest.raises(CompileError, match="drifted"):
        compile_source(source, SM80, "scale")


def test_missing_kernel_names_those_present() -> None:
    with pytest.raises(CompileError, match=r"no .* kernel scail in the source: scale"):
        compile_source(SCALE, SM80, "scail")


def test_unknown_target_is_a_compile_error() -> None:
    ancient = SM80.model_copy(update={"target": "sm_10"})
    with pytest.raises(CompileError, match="gpu-architecture"):
        compile_source(SCALE, ancient, "scale")


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(MissingDependencyError, match=r"CuPy.*fagen\[cuda13\]"):
        compile_source(SCALE, SM80, "scale")


def test_without_nvrtc_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder

    def find_nothing(name: str) -> None:
        raise cuda.pathfinder.DynamicLibNotFoundError(name)

    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", find_nothing)
    nvrtc.nvrtc_version.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"NVRTC.*fagen\[cuda13\]"):
        compile_source(SCALE, SM80, "scale")


def test_without_headers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder

    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda name: None)
    nvrtc.header_folder.cache_clear()
    cache._headers_digest.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"cuda_bf16.h.*fagen\[cuda13\]"):
        compile_source(SCALE, SM80, "scale")


def test_ptx() -> None:
    ptx = to_ptx(SCALE, SM90, "scale")
    assert ".target sm_90a" in ptx
    assert ".entry scale" in ptx
    assert ptx.endswith("\n")


# ---- many ----


def _jobs() -> list[tuple[Problem, AnyConfig]]:
    config = Sm80Forward(block_m=16, block_n=16, block_k=16, warps=1, stages=1)
    return [(Problem(dtype=dtype, head_dim=16), config) for dtype in DTYPE_NAMES]


def test_compile_many_equals_compile_kernel() -> None:
    jobs = _jobs()
    answers = list(compile_many(jobs, SM80, processes=2))
    assert {problem for problem, _, _ in answers} == {problem for problem, _ in jobs}
    for problem, config, answer in answers:
        assert isinstance(answer, Compiled)
        assert answer == compile_kernel(problem, config, SM80)


def test_compile_many_starts_no_process_for_cached_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = _jobs()
    expected = [compile_kernel(problem, config, SM80) for problem, config in jobs]
    monkeypatch.setattr("fagen.build.processes.Child", None)
    assert [answer for _, _, answer in compile_many(jobs, SM80)] == expected


def test_compile_many_reports_what_nvrtc_refuses() -> None:
    problem, config = _jobs()[0]
    broken = config.model_copy(update={"block_n": 24})  # no multiple of 16: a static_assert
    ((_, same, answer),) = compile_many([(problem, broken)], SM80, processes=1)
    assert same == broken
    assert isinstance(answer, CompileError)
    assert "error" in answer.log


def test_compile_many_raises_what_concerns_every_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "open"))
    with pytest.raises(CacheError, match=r"other users can write"):
        list(compile_many(_jobs(), SM80))
    with pytest.raises(ValueError, match="at least 1"):
        list(compile_many(_jobs(), SM80, processes=0))


# ---- processes ----


def _act(word: str, seconds: float = 0.0) -> str:
    """What the test's processes do."""
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "refuse":
        raise CompileError("refused", "the log")
    if word == "distrust":
        raise CacheError("not private")
    if word == "bug":
        raise TypeError("a bug")
    time.sleep(seconds)
    return word


def _run(jobs: list[tuple[object, ...]], timeout: float = 60.0) -> Iterator[tuple[object, object]]:
    return in_processes(_act, jobs, processes=2, timeout=timeout, failure=CompileError)


def test_crash_and_refusal_cost_only_their_own_job() -> None:
    words = ["a", "crash", "b", "refuse", "c", "crash", "d"]
    answers = list(_run([(word,) for word in words]))
    assert sorted(str(answer) for _, answer in answers) == [
        "a",
        "b",
        "c",
        "d",
        "refused",
        "the process was killed by SIGSEGV",
        "the process was killed by SIGSEGV",
    ]
    refusal = next(answer for job, answer in answers if job == ("refuse",))
    assert isinstance(refusal, CompileError)
    assert refusal.log == "the log"


def test_a_hanging_job_is_stopped() -> None:
    begin = time.monotonic()
    answers = dict(_run([("hang", 60.0), ("quick", 0.0), ("next", 0.0)], timeout=2.5))
    assert str(answers["hang", 60.0]) == "stopped after 2.5 s"
    assert answers["quick", 0.0] == "quick"
    assert answers["next", 0.0] == "next"
    assert time.monotonic() - begin < 30


def test_an_answer_that_waits_for_the_caller_is_not_a_hang() -> None:
    answers = []
    for _, answer in _run([("a", 0.0), ("b", 0.0), ("c", 0.0)], timeout=1.0):
        time.sleep(1.5)  # longer than the timeout
        answers.append(answer)
    assert sorted(map(str, answers)) == ["a", "b", "c"]


def test_other_errors_end_the_iteration() -> None:
    with pytest.raises(CacheError, match="not private"):
        list(_run([("distrust",)]))


def test_a_bug_is_not_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="traceback is above"):
        list(_run([("bug",)]))
    assert "TypeError: a bug" in capfd.readouterr().err


def _note_and_sleep(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(60)


@pytest.fixture
def sleepers(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A script, in a session of its own, two of whose processes sleep; and their ids."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""\
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
        from fagen.errors import CompileError
        from fagen.build.processes import in_processes
        from test_compile import _note_and_sleep

        if __name__ == "__main__":
            jobs = [({str(tmp_path / "pids")!r},)] * 2
            list(in_processes(
                _note_and_sleep, jobs, processes=2, timeout=60, failure=CompileError
            ))
        """)
    )
    (tmp_path / "pids").mkdir()
    with subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        deadline = time.monotonic() + 30
        while len(pids := [int(file.name) for file in (tmp_path / "pids").iterdir()]) < 2:
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield parent, pids
        for pid in (parent.pid, *pids):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_processes_end_with_a_killed_parent(
    sleepers: tuple[subprocess.Popen[str], list[int]],
) -> None:
    parent, pids = sleepers
    parent.kill()
    wait_until_dead(*pids)


def test_ctrl_c_ends_the_processes_with_one_traceback(
    sleepers: tuple[subprocess.Popen[str], list[int]],
) -> None:
    parent, pids = sleepers
    os.killpg(parent.pid, signal.SIGINT)  # what a terminal does
    _, errors = parent.communicate(timeout=10)
    wait_until_dead(*pids)
    assert errors.count("Traceback") == 1
    assert errors.strip().endswith("KeyboardInterrupt")


def test_resources_that_cannot_be_are_refused() -> None:
    text = '{"registers": 8, "spill_bytes": 0, "stack_bytes": 0, "smem_bytes": 0, "warnings": []}'
    assert Resources.model_validate_json(text).why_bad() is None
    with pytest.raises(ValueError, match="registers"):
        Resources.model_validate_json(text.replace("8", "-8"))


def test_cubin_is_a_whole_elf_file() -> None:
    """Its program headers, the last thing in the file, end where the file does."""
    cubin = compile_source(SCALE, SM80, "scale", cached=False).cubin
    (headers_at,) = struct.unpack_from("<Q", cubin, 32)
    entry_size, entries = struct.unpack_from("<HH", cubin, 54)
    assert len(cubin) == headers_at + entry_size * entries
