"""Twenty configs that show whether a change of structure has changed a kernel.

Every axis of both templates has each kind of value somewhere in the list. Compile them before a
change and compare them after it (no GPU needed; `nvdisasm` is in the wheel nvidia-cuda-nvdisasm)::

    python tests/twenty.py write /tmp/before
    python tests/twenty.py compare /tmp/before
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from fagen.build.compile import compile_many
from fagen.build.compiled import Compiled
from fagen.device import architecture
from fagen.kernels import Sm80Forward, Sm90Forward
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem


def _problem(dtype: str, head_dim: int, mask: str, alignment: int = 16) -> Problem:
    return Problem.model_validate(
        {
            "dtype": dtype,
            "head_dim": head_dim,
            "causal": mask == "causal",
            "alignment": alignment,
        }
    )


def _sm90(block_m: int, block_n: int, block_k: int, stages: int = 2, **axes: object) -> AnyConfig:
    sizes = {"block_m": block_m, "block_n": block_n, "block_k": block_k, "stages": stages}
    return Sm90Forward.model_validate(sizes | axes)


def _sm80(block_m: int, block_n: int, block_k: int, stages: int = 1, **axes: object) -> AnyConfig:
    sizes = {"block_m": block_m, "block_n": block_n, "block_k": block_k, "stages": stages}
    return Sm80Forward.model_validate(sizes | axes)


_ALONE = {"ping_pong": False, "producer_registers": 0}

TWENTY: tuple[tuple[Problem, AnyConfig], ...] = (
    (_problem("bf16", 128, "causal"), _sm90(128, 128, 128)),
    (_problem("bf16", 128, "full"), _sm90(128, 176, 128, cluster=2, producer_registers=40)),
    (
        _problem("bf16", 128, "causal"),
        _sm90(128, 160, 128, persistent=True, q_stages=2, dynamic_tiles=True),
    ),
    (
        _problem("fp16", 128, "causal"),
        _sm90(128, 128, 64, persistent=True, q_stages=2, head_grouping=False),
    ),
    (_problem("fp16", 64, "full"), _sm90(192, 128, 64, producer_registers=32)),
    (_problem("fp16", 64, "causal"), _sm90(192, 192, 64, p_in_smem=True, producer_registers=32)),
    (_problem("bf16", 64, "causal"), _sm90(64, 80, 64, min_blocks_per_sm=3, **_ALONE)),
    (_problem("bf16", 256, "full"), _sm90(128, 80, 256, lazy_rescale=True)),
    (
        _problem("bf16", 256, "causal"),
        _sm90(128, 64, 128, 1, lazy_rescale=True, persistent=True, ping_pong=False),
    ),
    (_problem("bf16", 192, "full"), _sm90(128, 112, 192, overlap=False)),
    (_problem("fp16", 96, "causal"), _sm90(192, 112, 96, exp2_fma_every=4, producer_registers=32)),
    (_problem("bf16", 40, "full"), _sm90(128, 128, 64, 3, exp2_fma_every=8)),
    (
        _problem("bf16", 128, "full"),
        _sm90(128, 128, 128, cluster=2, persistent=True, q_stages=2, producer_registers=40),
    ),
    (_problem("bf16", 128, "causal"), _sm80(128, 64, 128)),
    (_problem("fp16", 64, "full"), _sm80(128, 64, 64, 2, min_blocks_per_sm=2)),
    (_problem("bf16", 128, "full"), _sm80(128, 128, 64, warps=8, q_in_registers=True)),
    (_problem("fp16", 40, "full", 2), _sm80(64, 64, 48)),
    (_problem("bf16", 256, "causal"), _sm80(64, 64, 256, lazy_rescale=True)),
    (_problem("fp16", 96, "causal"), _sm80(64, 48, 32, 3, exp2_fma_every=4, head_grouping=False)),
    (_problem("bf16", 72, "causal"), _sm80(32, 64, 80, warps=2, exp2_fma_every=8)),
)


def compile_twenty() -> dict[str, Compiled]:
    """The kernels by a name for files; each is built for the first architecture of its template."""
    kernels: dict[str, Compiled] = {}
    for arch in ("sm90", "sm80"):
        jobs = [pair for pair in TWENTY if pair[1].template.endswith(arch)]
        for problem, config, compiled in compile_many(jobs, architecture(arch)):
            assert isinstance(compiled, Compiled), compiled
            kernels[f"{TWENTY.index((problem, config)):02}_{problem}_{arch}"] = compiled
    return kernels


def sass(cubin: Path) -> str:
    """The instructions of a cubin, without what depends on names and places."""
    tool = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin/nvdisasm"
    text = subprocess.run([tool, "-c", cubin], check=True, capture_output=True, text=True).stdout
    code = [line for line in text.splitlines() if re.match(r"\s+/\*[0-9a-f]+\*/", line)]
    return "\n".join(re.sub(r"fagen_\w+", "KERNEL", line) for line in code)


def main(verb: str, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    changed = 0
    for name, compiled in sorted(compile_twenty().items()):
        path = folder / f"{name}.cubin"
        if verb == "write":
            path.write_bytes(compiled.cubin)
            continue
        other = folder / f"{name}.new.cubin"
        other.write_bytes(compiled.cubin)
        verdict = "same cubin"
        if path.read_bytes() != compiled.cubin:
            verdict = "same SASS" if sass(path) == sass(other) else "OTHER SASS"
            changed += verdict != "same SASS"
        print(f"{verdict:10}  {name}  {compiled.resources.registers} registers")
    return changed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
