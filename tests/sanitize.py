"""Runs a few kernels of a template once, for compute-sanitizer to watch:

    compute-sanitizer --tool memcheck python tests/sanitize.py forward_sm90
    compute-sanitizer --tool racecheck python tests/sanitize.py forward_sm80

racecheck does not see what TMA writes; for forward_sm90 there is tests/test_jitter.py.
"""

from __future__ import annotations

import sys

from fagen.build.compile import compile_kernel
from fagen.judge.bench import bench_of
from fagen.judge.verify import verify
from fagen.kernels import Sm80Forward, Sm90Forward
from fagen.kernels.registry import AnyConfig, default_config
from fagen.problem import Problem
from fagen.run.executor import Executor

CONFIGS: dict[str, list[tuple[int, AnyConfig]]] = {
    "forward_sm80": [
        (40, Sm80Forward(block_m=64, block_n=32, block_k=16, warps=4, stages=3)),
        (
            64,
            Sm80Forward(block_m=64, block_n=48, block_k=64, warps=2, q_in_registers=True, stages=1),
        ),
    ],
    "forward_sm90": [
        (40, Sm90Forward(block_m=192, block_n=48, block_k=32, stages=2, producer_registers=32)),
        (64, Sm90Forward(block_m=128, block_n=64, block_k=64, stages=1, p_in_smem=True)),
        (64, Sm90Forward(block_m=128, block_n=64, block_k=64, stages=2, cluster=2)),
        (
            64,
            Sm90Forward(
                block_m=128,
                block_n=64,
                block_k=64,
                stages=2,
                persistent=True,
                q_stages=2,
                dynamic_tiles=True,
            ),
        ),
    ],
}


def main(template: str) -> int:
    """Verifies the template's default and the configs above, causal; 1 if one is wrong."""
    bench = bench_of(0)
    device = bench.device
    wrong = 0
    for head_dim, config in [*CONFIGS[template], (128, None)]:
        for alignment in (16, 2) if template == "forward_sm80" else (16,):
            problem = Problem(dtype="bf16", head_dim=head_dim, causal=True, alignment=alignment)
            chosen = config or default_config(problem, device, template)
            compiled = compile_kernel(problem, chosen, device.arch)
            verdict = verify(Executor(compiled, problem, chosen), bench)
            print(f"{'right' if verdict.ok else verdict.reason}: {problem} {chosen}")
            wrong += not verdict.ok
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
