"""Is the space sound, and are the records? What `fagen check` reports.

Without a device: how many points of each space every rule removes, whether a sample of the legal
ones compiles, and whether each stored record is legal, compiles, does not spill and does not
serialise wgmma. With a device: also the verdict on every record's kernel.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from fagen.device import Architecture, Device, typical_device
from fagen.errors import CompileError
from fagen.kernels.registry import templates_for
from fagen.kernels.space import legal_configs, why_illegal
from fagen.kernels.template import Config
from fagen.operation import OPERATIONS
from fagen.problem import DTYPE_NAMES, Problem
from fagen.tuning.search.legal import LegalSet

if TYPE_CHECKING:
    from fagen.build.compiled import Compiled
    from fagen.records.store import RecordFile, TunedConfig

HEAD_DIMS = (64, 128, 256)
SAMPLE = 24  # legal configs that are compiled
Job = tuple[Problem, Config]
Progress = Callable[[int, int], None]  # kernels compiled, of how many


class SpaceReport(BaseModel):
    """The size of one template's space for one head dim on one device.

    Attributes:
        points: configs before any rule.
        rejections: points that each rule removes, by the rule's name.
        legal: configs that pass every rule.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str
    head_dim: int
    device: str
    points: int
    rejections: dict[str, int]
    legal: int


class SampleReport(BaseModel):
    """What the compiler said about legal configs.

    Attributes:
        compiled: how many were compiled.
        refused: one line for each that the compiler did not accept, which is a fault of fagen.
        slow: how many it accepted but warned about (spills, serialised wgmma), by reason; the
            search rejects these.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compiled: int
    refused: tuple[str, ...] = ()
    slow: dict[str, int] = {}


class RecordReport(BaseModel):
    """Whether one stored record is sound.

    Attributes:
        record: its problem, bucket and device.
        kind: "measured" or "predicted".
        config: its config in one line.
        fault: what is wrong with it, or None.
        registers: per thread, as compiled.
        smem_bytes: dynamic shared memory of a block.
        verified: whether its kernel ran here and was right; None if no device of its
            architecture is present.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    record: str
    kind: str
    config: str
    fault: str | None = None
    registers: int | None = None
    smem_bytes: int | None = None
    verified: bool | None = None


class CheckReport(BaseModel):
    """Everything that `check` found about one architecture.

    Attributes:
        unreadable: where each record is that this version cannot read, and why.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arch: str
    spaces: tuple[SpaceReport, ...]
    sample: SampleReport
    records: tuple[RecordReport, ...]
    unreadable: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the compiler accepted every sampled config and no record has a fault."""
        sound = all(record.fault is None for record in self.records)
        return sound and not self.sample.refused and not self.unreadable


def measure_space(template: str, problem: Problem, device: Device) -> SpaceReport:
    """Counts what each rule removes from a template's space."""
    legal = _legal_set(problem, device, template)
    return SpaceReport(
        template=template,
        head_dim=problem.head_dim,
        device=device.name,
        points=legal.points,
        rejections=dict(legal.removed.most_common()),
        legal=len(legal),
    )


def _templates(arch: Architecture) -> list[str]:
    return [t.NAME for operation in OPERATIONS for t in templates_for(operation, arch)]


@lru_cache(maxsize=2 * len(HEAD_DIMS))  # seconds each: counted first, then sampled
def _legal_set(problem: Problem, device: Device, template: str) -> LegalSet:
    return LegalSet(problem, device, template)


def sample_space(device: Device, count: int, *, seed: int = 0) -> list[Job]:
    """About `count` distinct legal (problem, config) pairs, spread over templates and head dims."""
    dice = random.Random(seed)
    jobs: set[Job] = set()
    spaces = [(t, head_dim) for t in _templates(device.arch) for head_dim in HEAD_DIMS]
    for index, (template, head_dim) in enumerate(spaces):
        problem = Problem(dtype="bf16", head_dim=head_dim)
        legal = _legal_set(problem, device, template)
        share = count * (index + 1) // len(spaces) - count * index // len(spaces)
        for row in dice.sample(range(len(legal)), min(share, len(legal))):
            question = problem.model_copy(
                update={"dtype": dice.choice(DTYPE_NAMES), "causal": dice.random() < 0.5}
            )
            jobs.add((question, legal.config(row)))
    return sorted(jobs, key=str)


def whole_space(device: Device) -> list[Job]:
    """Every legal (problem, config) pair of bf16 at the standard head dims: hundreds of
    thousands, which take hours to compile.
    """
    problems = [
        Problem(dtype="bf16", head_dim=head_dim, causal=causal)
        for head_dim in HEAD_DIMS
        for causal in (False, True)
    ]
    return [
        (problem, config)
        for problem in problems
        for template in _templates(device.arch)
        for config in legal_configs(template, problem, device)
    ]


def _compile_all(
    jobs: Sequence[Job], arch: Architecture, progress: Progress
) -> dict[Job, Compiled | CompileError]:
    from fagen.build.compile import compile_many

    results: dict[Job, Compiled | CompileError] = {}
    for problem, config, result in compile_many(jobs, arch):
        results[problem, config] = result
        progress(len(results), len(jobs))
    return results


def _why_refused(error: CompileError) -> str:
    """The first line of the compiler's log that names an error, or the error itself."""
    lines = [line for line in error.log.splitlines() if "error" in line or "fatal" in line]
    return lines[0] if lines else str(error).partition("\n")[0]


def _judge_sample(results: dict[Job, Compiled | CompileError]) -> SampleReport:
    refused = []
    slow: Counter[str] = Counter()
    for (problem, config), result in results.items():
        if isinstance(result, CompileError):
            refused.append(f"{problem} {config}: {_why_refused(result)}")
        elif reason := result.resources.why_bad():
            slow[re.sub(r"\d+", "N", reason.partition(":")[0])] += 1
    return SampleReport(compiled=len(results), refused=tuple(refused), slow=dict(slow))


def _judge_record(
    record: TunedConfig, device: Device, result: Compiled | CompileError | None, index: int | None
) -> RecordReport:
    """Judges one record; `index` is the CUDA device to verify it on, or None."""
    verified = None
    fault = why_illegal(record.config, record.problem, device)
    if fault is None and isinstance(result, CompileError):
        fault = f"does not compile: {_why_refused(result)}"
    compiled = None if result is None or isinstance(result, CompileError) else result
    if fault is None and compiled is not None:
        fault = compiled.resources.why_bad()
        if index is not None:
            from fagen.judge.bench import bench_of
            from fagen.judge.verify import verify
            from fagen.run.executor import Executor

            kernel = Executor(compiled, record.problem, record.config)
            verdict = verify(kernel, bench_of(index))
            verified = verdict.ok
            fault = fault or (None if verdict.ok else f"wrong result: {verdict.reason}")
    return RecordReport(
        record=f"{record.problem} {record.bucket} {record.device.key}",
        kind=record.result.kind,
        config=str(record.config),
        fault=fault,
        registers=compiled.resources.registers if compiled else None,
        smem_bytes=record.config.smem_bytes(record.problem) if compiled else None,
        verified=verified,
    )


def check(
    arch: Architecture,
    files: Iterable[RecordFile],
    *,
    sample: int = SAMPLE,
    everything: bool = False,
    device: Device | None = None,
    device_index: int | None = None,
    progress: Progress = lambda done, total: None,
) -> CheckReport:
    """Checks one architecture's spaces and stored records.

    Args:
        files: the stored records; those of another architecture are left out.
        sample: how many legal configs to compile.
        everything: compile all of them instead.
        device: the device whose limits apply; a typical one of the architecture if None.
        device_index: the CUDA device to run the records' kernels on; None runs nothing.
        progress: called with (compiled, of how many) after every kernel.
    """
    device = device or typical_device(arch)
    files = tuple(files)
    spaces = tuple(
        measure_space(template, Problem(dtype="bf16", head_dim=head_dim), device)
        for template in _templates(arch)
        for head_dim in HEAD_DIMS
    )
    sampled = whole_space(device) if everything else sample_space(device, sample)
    stored = [record for file in files for record in file.records]
    mine = [record for record in stored if record.device.arch == arch.name]
    wanted = [
        (record.problem, record.config)
        for record in mine
        if why_illegal(record.config, record.problem, device) is None
    ]
    results = _compile_all(list(dict.fromkeys([*sampled, *wanted])), arch, progress)
    return CheckReport(
        arch=arch.name,
        spaces=spaces,
        sample=_judge_sample({job: results[job] for job in sampled}),
        records=tuple(
            _judge_record(
                record, device, results.get((record.problem, record.config)), device_index
            )
            for record in mine
        ),
        unreadable=tuple(
            f"{file.path}, line {skip.line}: {skip.reason}"
            for file in files
            for skip in file.skipped
        ),
    )
