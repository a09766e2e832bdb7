"""The cache of compiled kernels: what hits, what misses, and what it survives."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fagen.build import cache, render
from fagen.build import compile as compiler
from fagen.build.cache import cache_folder, cache_key, clear_cache, load_entry, store_entry
from fagen.build.compile import compile_kernel, compile_source
from fagen.build.compiled import Compiled, Resources
from fagen.build.nvrtc import OPTIONS, run_nvrtc
from fagen.device import Architecture, architecture
from fagen.errors import CacheError
from fagen.kernels import Sm80Forward
from fagen.problem import Problem

SM80 = architecture("sm80")
SOURCE = 'extern "C" __global__ void one(float* x) { x[0] = 1.0f; }\n'
PROBLEM = Problem(dtype="bf16", head_dim=16)
CONFIG = Sm80Forward(block_m=16, block_n=16, block_k=16, warps=1, stages=1)  # quick to compile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that went through NVRTC."""
    names: list[str] = []

    def counting(source: str, arch: Architecture, name: str) -> object:
        names.append(name)
        return run_nvrtc(source, arch, name)

    monkeypatch.setattr(compiler, "run_nvrtc", counting)
    return names


@pytest.fixture
def _no_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("rendered although the kernel is cached")

    monkeypatch.setattr(render, "render", fail)


def _in_python(code: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


# ---- hits and misses ----


def test_second_compilation_is_a_hit(folder: Path, compilations: list[str]) -> None:
    first = compile_source(SOURCE, SM80, "one")
    assert compile_source(SOURCE, SM80, "one") == first
    assert compilations == ["one"]
    assert first.path == folder / "kernels" / first.key
    assert (first.path / "kernel.cu").read_text() == SOURCE
    assert (first.path / "kernel.cubin").read_bytes() == first.cubin
    assert list((folder / "partial").iterdir()) == []


def test_uncached_compilation_leaves_no_trace(folder: Path, compilations: list[str]) -> None:
    for _ in range(2):
        assert compile_source(SOURCE, SM80, "one", cached=False).path is None
    assert compilations == ["one", "one"]
    assert not folder.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(cache, "OPTIONS", (*OPTIONS, "-lineinfo")),
        lambda patch: patch.setattr(cache, "nvrtc_version", lambda: "12.6"),
        lambda patch: patch.setattr(cache, "_headers_digest", lambda: "another wheel's"),
        lambda patch: patch.setattr(cache, "CACHE_VERSION", 99),
    ],
    ids=["options", "nvrtc", "headers", "version"],
)
def test_whatever_decides_the_cubin_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    key = cache_key(SOURCE, SM80, ("one",))
    index = cache._index_hash(PROBLEM, CONFIG, SM80)
    assert cache_key(SOURCE, SM80, ("one",)) == key
    change(monkeypatch)
    assert cache_key(SOURCE, SM80, ("one",)) != key
    assert cache._index_hash(PROBLEM, CONFIG, SM80) != index


def test_source_target_and_kernel_are_in_the_key() -> None:
    keys = {
        cache_key(SOURCE, SM80, ("one",)),
        cache_key(SOURCE + " ", SM80, ("one",)),
        cache_key(SOURCE, SM80, ("two",)),
        cache_key(SOURCE, architecture("sm86"), ("one",)),
    }
    assert len(keys) == 4
    several = {cache_key(SOURCE, SM80, names) for names in (("a", "b"), ("b", "a"), ("ab",))}
    assert len(several) == 3


def test_modification_times_do_not_matter(folder: Path, compilations: list[str]) -> None:
    path = compile_source(SOURCE, SM80, "one").path
    assert path is not None
    for file in path.iterdir():
        os.utime(file, (0, 0))
    compile_source(SOURCE, SM80, "one")
    assert compilations == ["one"]


# ---- the index ----


@pytest.mark.usefixtures("folder")
def test_warm_kernel_is_not_rendered(request: pytest.FixtureRequest) -> None:
    first = compile_kernel(PROBLEM, CONFIG, SM80)
    request.getfixturevalue("_no_rendering")
    assert compile_kernel(PROBLEM, CONFIG, SM80) == first


@pytest.mark.usefixtures("folder")
def test_warm_process_imports_neither_jinja2_nor_cupy() -> None:
    compile_kernel(PROBLEM, CONFIG, SM80)
    with _in_python(f"""
        import sys
        from fagen.build.compile import compile_kernel
        from fagen.device import architecture
        from fagen.kernels.registry import parse_config
        from fagen.problem import Problem
        config = parse_config({CONFIG.model_dump()!r})
        compile_kernel(Problem(**{PROBLEM.model_dump()!r}), config, architecture("sm80"))
        print(*sorted({{"jinja2", "cupy", "multiprocessing"}} & set(sys.modules)))
        """) as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output.split() == []


def test_an_edited_template_is_rendered_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = tmp_path / "templates"
    shutil.copytree(render.template_folder(), templates)
    monkeypatch.setattr(render, "template_folder", lambda: templates)
    render._environment.cache_clear()
    try:
        first = compile_kernel(PROBLEM, CONFIG, SM80)
        file = templates / "forward_sm80.cu.j2"
        times = file.stat()
        file.write_text(file.read_text() + "// edited\n")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns - 1))
        render._environment.cache_clear()
        second = compile_kernel(PROBLEM, CONFIG, SM80)
    finally:
        render._environment.cache_clear()
    assert second.source == first.source + "// edited\n"
    assert second.key != first.key


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"key": ',
        "[]",
        "{}",
        '{"key": 3}',
        '{"key": "../../etc"}',
        json.dumps({"key": "0" * 64}),
        "\0\xff",
    ],
)
def test_damaged_index_is_a_miss_and_mended(
    folder: Path, compilations: list[str], text: str
) -> None:
    first = compile_kernel(PROBLEM, CONFIG, SM80)
    (index,) = (folder / "index").iterdir()
    whole = index.read_text()
    index.write_text(text)
    assert compile_kernel(PROBLEM, CONFIG, SM80) == first
    assert compilations == list(first.entries)  # rendered, then found by its text
    assert index.read_text() == whole


def test_index_of_a_missing_entry_is_a_miss(folder: Path, compilations: list[str]) -> None:
    first = compile_kernel(PROBLEM, CONFIG, SM80)
    shutil.rmtree(folder / "kernels")
    second = compile_kernel(PROBLEM, CONFIG, SM80)
    assert second == first
    assert len(compilations) == 2


# ---- damage ----


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["kernel.cu", "kernel.cubin", "resources.json"])
def test_damaged_entry_is_a_miss_and_mended(
    folder: Path, compilations: list[str], damage: Callable[[Path], None], name: str
) -> None:
    first = compile_source(SOURCE, SM80, "one")
    assert first.path is not None
    damage(first.path / name)
    assert compile_source(SOURCE, SM80, "one") == first
    assert compilations == ["one", "one"]
    assert compile_source(SOURCE, SM80, "one") == first
    assert compilations == ["one", "one"]  # mended
    assert list((folder / "partial").iterdir()) == []


@pytest.mark.parametrize("written_files", [1, 2, 3])
def test_kill_while_writing_leaves_a_miss(folder: Path, written_files: int) -> None:
    with _in_python(f"""
        import os, signal
        from pathlib import Path
        from fagen.build.compile import compile_source
        from fagen.device import architecture
        left = [{written_files}]
        write = Path.write_bytes
        def write_and_die(path, data):
            write(path, data)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        Path.write_bytes = write_and_die
        compile_source({SOURCE!r}, architecture("sm80"), "one")
        """) as process:
        process.communicate(timeout=30)
    assert process.returncode == -9
    (leftover,) = (folder / "partial").iterdir()
    assert load_entry(cache_key(SOURCE, SM80, ("one",)), SM80) is None
    compiled = compile_source(SOURCE, SM80, "one")
    assert compiled.path is not None
    assert leftover.exists()  # its writer may live
    past = time.time() - 2 * cache.LEFTOVER_SECONDS
    os.utime(leftover, (past, past))
    compile_source(SOURCE + "\n", SM80, "one")
    assert not leftover.exists()


# ---- many at once ----


def test_four_processes_compile_the_same_source(folder: Path, tmp_path: Path) -> None:
    code = f"""
        import pathlib, time
        from fagen.build import compile as compiler
        from fagen.device import architecture
        compiler.nvrtc_version()
        while not pathlib.Path({str(tmp_path / "go")!r}).exists():
            time.sleep(0.001)
        compiled = compiler.compile_source({SOURCE!r}, architecture("sm80"), "one")
        print(compiled.key, compiled.path)
        """
    processes = [_in_python(code) for _ in range(4)]
    time.sleep(1.0)
    (tmp_path / "go").touch()
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    (output,) = outputs
    assert output.split() == [cache_key(SOURCE, SM80, ("one",)), str(*folder.glob("kernels/*"))]
    assert list((folder / "partial").iterdir()) == []
    assert load_entry(output.split()[0], SM80) is not None


@pytest.mark.usefixtures("folder")
def test_writers_readers_and_vandals() -> None:
    """Whatever happens to an entry meanwhile, what is read is whole or a miss."""
    whole = Compiled(
        arch="sm80",
        source=SOURCE,
        cubin=bytes(range(256)) * 64,
        entries={"one": Resources(registers=8, spill_bytes=0, stack_bytes=0, smem_bytes=0)},
        nvrtc="13.0",
        key=cache_key(SOURCE, SM80, ("one",)),
    )
    end = time.monotonic() + 1.0
    hits: list[Compiled] = []

    def write() -> None:
        while time.monotonic() < end:
            assert store_entry(whole, SM80) is not None

    def read() -> None:
        while time.monotonic() < end:
            found = load_entry(whole.key, SM80)
            if found is not None:
                hits.append(found)

    def damage() -> None:
        while time.monotonic() < end:
            cubin = cache_folder() / "kernels" / whole.key / "kernel.cubin"
            if cubin.exists():
                try:
                    cubin.write_bytes(b"torn")
                except FileNotFoundError:  # replaced meanwhile
                    continue
            time.sleep(0.002)

    errors: list[str] = []
    previous, threading.excepthook = threading.excepthook, lambda args: errors.append(repr(args))
    try:
        threads = [threading.Thread(target=f) for f in (write, write, write, read, read, damage)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = previous
    assert errors == []
    assert hits
    assert {replace(hit, path=None) == whole for hit in hits} == {True}


# ---- the folder ----


@pytest.mark.parametrize("exists", [False, True])
def test_folders_are_private(folder: Path, exists: bool) -> None:
    before = os.umask(0)
    try:
        if exists:
            folder.mkdir(parents=True, mode=0o755)  # readable by others, which is fine
        compile_kernel(PROBLEM, CONFIG, SM80)
    finally:
        os.umask(before)
    inside = [path for path in folder.rglob("*") if path.is_dir()]
    assert {path.name for path in inside} >= {"kernels", "index", "partial"}
    assert {path.stat().st_mode & 0o777 for path in inside} == {0o700}
    assert folder.stat().st_mode & 0o777 == (0o755 if exists else 0o700)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702])
def test_folder_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(CacheError, match=r"other users can write .* FAGEN_CACHE") as caught:
        compile_source(SOURCE, SM80, "one")
    assert "\n" not in str(caught.value)
    folder.chmod(0o755)
    assert compile_source(SOURCE, SM80, "one").path is not None


def test_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(CacheError, match=r"belongs to another user .* set FAGEN_CACHE"):
        compile_source(SOURCE, SM80, "one")
    with pytest.raises(CacheError, match="belongs to another user"):
        clear_cache()


def test_folder_that_is_a_file_is_refused(folder: Path) -> None:
    folder.parent.mkdir()
    folder.touch()
    with pytest.raises(CacheError, match="is not a folder"):
        cache_folder()


def test_folder_defaults_to_the_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fagen"


def test_folder_that_cannot_be_made_costs_only_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert compile_source(SOURCE, SM80, "one").path is None
    assert [record.name for record in caplog.records] == ["fagen.build.cache"]  # once
    assert "not cached" in caplog.text
    assert "Not a directory" in caplog.text


def test_full_disk_costs_only_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "write_bytes", full)
        kernel = compile_kernel(PROBLEM, CONFIG, SM80)
    assert kernel.path is None
    assert "No space left on device" in caplog.text
    assert list((folder / "partial").iterdir()) == []
    assert compile_kernel(PROBLEM, CONFIG, SM80).cubin == kernel.cubin


def test_clear_frees_what_was_cached_and_nothing_else(
    folder: Path, compilations: list[str]
) -> None:
    assert clear_cache() == 0
    compile_kernel(PROBLEM, CONFIG, SM80)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    (folder / "mine.txt").write_text("not fagen's")
    assert clear_cache() == size
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    compile_kernel(PROBLEM, CONFIG, SM80)
    assert len(compilations) == 2


def test_entry_says_which_cubin_it_belongs_to(folder: Path) -> None:
    compiled = compile_source(SOURCE, SM80, "one")
    assert compiled.path is not None
    entry = json.loads((compiled.path / "resources.json").read_text())
    assert entry["cubin_sha256"] == hashlib.sha256(compiled.cubin).hexdigest()
    assert entry["entries"]["one"]["registers"] == compiled.resources.registers
