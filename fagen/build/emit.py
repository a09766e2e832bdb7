"""A kernel as files to keep, for people who leave Python behind.

`emit` answers with the files of one kernel, `emit_all` with those of an architecture's records,
`files.write_files` puts them into a folder. In the format "cu" a kernel is four files that need
nothing of fagen any more:

    NAME.cu        the kernel, under a header comment with its config and where that came from
    NAME.h         the declaration of NAME_launch
    NAME_host.cu   NAME_launch: checks, tensor maps, grid; includes NAME.cu
    NAME_main.cu   a check against attention in float64; includes NAME_host.cu, so that one nvcc
                   line builds it
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, get_args

from fagen import __version__
from fagen.build.render import fold, render
from fagen.device import Architecture, typical_device
from fagen.errors import ArgumentError, ConfigError
from fagen.kernels.registry import default_config, template_of
from fagen.kernels.space import why_illegal
from fagen.kernels.template import Config, symbol
from fagen.problem import Problem

if TYPE_CHECKING:
    from fagen.records.store import TunedConfig

Format = Literal["cu", "ptx", "cubin"]
FORMATS: tuple[Format, ...] = get_args(Format)


def emit(
    problem: Problem,
    config: Config,
    arch: Architecture,
    *,
    record: TunedConfig | None = None,
    format: str = "cu",
    name: str | None = None,
) -> dict[str, str | bytes]:
    """The files of one kernel: file name -> content. Writes nothing.

    Args:
        record: where `config` comes from; None for a config that nobody tuned.
        format: "cu" for sources, "ptx" or "cubin" for what NVRTC makes of the kernel alone
            (its symbol is `kernels.template.symbol(problem)`).
        name: what the files and the launcher are called; PROBLEM_ARCH if None, such as
            "forward_bf16_d128_causal_sm90".

    Raises:
        ArgumentError: for an unknown format, or a name that is no C identifier.
        ConfigError: for a config that is illegal for the problem on this architecture.
        CompileError: if NVRTC refuses the kernel ("ptx" and "cubin" only).
    """
    name = name or default_name(problem, arch)
    if format not in FORMATS:
        raise ArgumentError(f"unknown format {format!r}: allowed are {', '.join(FORMATS)}")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ArgumentError(f"name {name!r} is no C identifier: use letters, digits and _")
    reason = why_illegal(config, problem, typical_device(arch))
    if reason:
        raise ConfigError(f"{config} is illegal for {problem} on {arch.name}: {reason}")
    if format == "cu":
        return _sources(problem, config, arch, record, name)

    from fagen.build.compile import compile_kernel, to_ptx

    if format == "cubin":
        return {f"{name}.cubin": compile_kernel(problem, config, arch).cubin}
    return {f"{name}.ptx": to_ptx(render(problem, config), arch, symbol(problem))}


def emit_all(
    arch: Architecture, records: Iterable[TunedConfig], *, format: str = "cu"
) -> dict[str, str | bytes]:
    """The files of every record, as `emit` gives them.

    Where records share a problem, the bucket joins their names, and the device where they share
    that too.

    Args:
        records: those of `arch`; others are left out. Of several for one device, problem and
            bucket the first counts.

    Raises:
        ArgumentError: if no record is of `arch`, or as `emit` does.
    """
    best: dict[object, TunedConfig] = {}
    for record in records:
        if record.device.arch == arch.name:
            best.setdefault(record.key, record)
    if not best:
        raise ArgumentError(
            f"no record of {arch.name}: run `fagen tune --arch {arch.name}`, or name a problem "
            "with --dtype and --head-dim to emit its default config"
        )
    files: dict[str, str | bytes] = {}
    chosen = list(best.values())
    for name, record in zip(_names(arch, chosen), chosen, strict=True):
        files |= emit(record.problem, record.config, arch, record=record, format=format, name=name)
    return files


def default_name(problem: Problem, arch: Architecture) -> str:
    """What a kernel's files are called if nobody says otherwise."""
    return f"{problem.name}_{arch.name}"


def _sources(
    problem: Problem, config: Config, arch: Architecture, record: TunedConfig | None, name: str
) -> dict[str, str | bytes]:
    template = template_of(config)
    element = problem.element
    values = {
        **config.axes(),
        **template.constants(problem, config),
        **template.HOST,
        "stem": name,
        "problem": problem,
        "arch": arch,
        "target": arch.target,
        "map_type": element.tensor_map,
        "roundoff": f"0x1p{math.frexp(element.epsilon / 2)[1] - 1}",
        "number": element.number,
        "number_header": element.number_header,
    }
    return {
        f"{name}.cu": _header(problem, config, arch, record, name) + render(problem, config),
        f"{name}.h": fold("host/header.h", **values),
        f"{name}_host.cu": fold(f"host/{template.NAME}.cu", **values),
        f"{name}_main.cu": fold("host/main.cu", **values),
    }


def _header(
    problem: Problem, config: Config, arch: Architecture, record: TunedConfig | None, name: str
) -> str:
    """The comment above a kernel: what it is, how good it is known to be, how to build it."""
    if record is not None:
        origin = list(_provenance(record))
    elif config == default_config(problem, typical_device(arch), config.template):
        origin = [("tuned", "default config, not tuned")]
    else:
        origin = [("tuned", "config chosen by hand, not tuned")]
    lines = [
        f"{name}.cu, written by fagen {__version__} for {arch.name}.",
        "",
        f"  config  {config}",
        *(f"  {word:<6}  {text}" for word, text in origin),
        f"  launch  {config.threads} threads, {config.smem_bytes(problem)} "
        f"bytes of dynamic shared memory; {name}_host.cu does it",
        f"  build   nvcc -std=c++17 -arch={arch.target} -c {name}.cu",
    ]
    return "".join(f"// {line}".rstrip() + "\n" for line in lines) + "\n"


def _provenance(record: TunedConfig) -> Iterator[tuple[str, str]]:
    """Where a tuned config comes from, as lines of (word, text)."""
    result, origin = record.result, record.provenance
    verb = "on" if record.measured else "for"
    yield "tuned", f"{result.kind} {verb} {record.device}, {origin.date}, {result.trials} configs"
    yield "speed", f"{result.median_us:g} us, {result.tflops:g} TFLOP/s at {record.shape}"
    for ratio, other in (
        (result.speedup_over_default, "the default config"),
        (result.speedup_over_torch, "torch SDPA"),
    ):
        if ratio is not None:
            yield "", f"{ratio:g} times the speed of {other}"
    driver = f", driver {origin.driver}" if origin.driver else ""
    yield "with", f"fagen {origin.fagen}, NVRTC {origin.nvrtc}{driver}"


def _names(arch: Architecture, records: list[TunedConfig]) -> list[str]:
    """A name for each record, no longer than it takes to tell them apart."""

    def told_apart(names: list[str], suffixes: list[str]) -> list[str]:
        shared = Counter(names)
        return [
            f"{name}_{suffix}" if shared[name] > 1 else name
            for name, suffix in zip(names, suffixes, strict=True)
        ]

    names = [default_name(record.problem, arch) for record in records]
    names = told_apart(names, [str(record.bucket) for record in records])
    devices = [re.sub(r"\W+", "_", record.device.key).strip("_").lower() for record in records]
    return told_apart(names, devices)
