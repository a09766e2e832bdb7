"""problem, config -> compiled kernels, from the cache or by NVRTC. Needs no GPU and no driver."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fagen.build import render
from fagen.build.cache import cache_key, load_entry, look_up, store_entry, store_index
from fagen.build.compiled import Compiled
from fagen.build.nvrtc import nvrtc_version, parse_log, run_nvrtc
from fagen.device import Architecture
from fagen.errors import CompileError
from fagen.kernels.registry import template_of
from fagen.kernels.template import Config
from fagen.problem import Problem


def compile_source(source: str, arch: Architecture, *entries: str, cached: bool = True) -> Compiled:
    """The cubin of a self-contained CUDA text, and the resources of its kernels.

    Args:
        source: CUDA C++; cuda_fp16.h and cuda_bf16.h may be included.
        entries: `extern "C" __global__` functions of it, one at least.
        cached: look into the cache first, and store the result there.

    Raises:
        CompileError: if NVRTC refuses the text, or it has no such kernel.
        CacheError: if others can write the cache folder.
        MissingDependencyError: if NVRTC or the CUDA headers are not installed.
    """
    key = cache_key(source, arch, entries)
    hit = load_entry(key, arch) if cached else None
    if hit is not None:
        return hit
    cubin, _, log = run_nvrtc(source, arch, entries[0])
    compiled = Compiled(
        arch=arch.name,
        source=source,
        cubin=cubin,
        entries=parse_log(log, entries),
        nvrtc=nvrtc_version(),
        key=key,
    )
    return replace(compiled, path=store_entry(compiled, arch)) if cached else compiled


def compile_kernel(problem: Problem, config: Config, arch: Architecture) -> Compiled:
    """The kernels of `config` for `problem`; where they are cached, nothing is rendered.

    Raises:
        CompileError, CacheError, MissingDependencyError: as `compile_source` does.
    """
    hit = look_up(problem, config, arch)
    if hit is not None:
        return hit
    source = render.render(problem, config)
    compiled = compile_source(source, arch, *template_of(config).entries(problem))
    if compiled.path is not None:
        store_index(problem, config, arch, compiled.key)
    return compiled


def compile_many(
    jobs: Iterable[tuple[Problem, Config]],
    arch: Architecture,
    *,
    processes: int | None = None,
    timeout: float = 60.0,
) -> Iterator[tuple[Problem, Config, Compiled | CompileError]]:
    """Compiles many kernels in processes (NVRTC does not run on two threads of one).

    Args:
        processes: how many at most; one per available CPU if None.
        timeout: seconds after which a compilation is stopped and counts as refused.

    Yields:
        (problem, config, kernel or error), as they come: cached kernels first.

    Raises:
        FagenError: what concerns every job: CacheError, MissingDependencyError.
        ValueError: if `processes` is less than 1.
    """
    from fagen.build.processes import in_processes

    processes = len(os.sched_getaffinity(0)) if processes is None else processes
    if processes < 1:
        raise ValueError(f"processes is {processes}: at least 1 is needed")
    misses: list[tuple[Problem, Config, Architecture]] = []
    for problem, config in jobs:
        hit = look_up(problem, config, arch)
        if hit is None:
            misses.append((problem, config, arch))
        else:
            yield problem, config, hit
    answers = in_processes(
        compile_kernel, misses, processes=processes, timeout=timeout, failure=CompileError
    )
    for (problem, config, _), answer in answers:
        yield problem, config, answer


def to_ptx(source: str, arch: Architecture, name: str) -> str:
    """The PTX that NVRTC makes of a CUDA text on its way to the cubin; not cached.

    Raises:
        CompileError, MissingDependencyError: as `compile_source` does.
    """
    return run_nvrtc(source, arch, name)[1].decode().rstrip("\0")
