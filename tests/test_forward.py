"""Every kernel family against float64, on a GPU: both templates over the whole grid."""

from __future__ import annotations

import itertools
import random

import pytest

from fagen.build.compile import compile_kernel
from fagen.judge.bench import bench_of
from fagen.judge.verify import verify
from fagen.kernels.registry import TEMPLATES, default_config
from fagen.kernels.space import axes, why_illegal
from fagen.problem import DtypeName, Problem, Shape
from fagen.run.executor import Executor

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 63, 64, 65, 113, 127, 129, 512, 1000, 2048)
# Every length meets three others, shorter and longer, and itself.
PAIRS = tuple(
    (LENGTHS[i], LENGTHS[(i + step) % len(LENGTHS)])
    for step, i in itertools.product((0, 1, 4, 7), range(len(LENGTHS)))
)
HEAD_DIMS = (8, 40, 64, 72, 96, 128, 160, 192, 256)


def shapes(group: int) -> list[Shape]:
    """Two sequences and two KV heads of each pair of lengths."""
    return [Shape(batch=2, seqlen_q=q, seqlen_k=k, heads_q=2 * group, heads_kv=2) for q, k in PAIRS]


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_default_config_on_the_grid(
    template: str, dtype: DtypeName, head_dim: int, causal: bool, group: int
) -> None:
    bench = bench_of(0)
    device = bench.device
    if device.arch.name not in TEMPLATES[template].ARCHS:
        pytest.skip(f"{template} does not run on {device}")
    problem = Problem(dtype=dtype, head_dim=head_dim, causal=causal)
    config = default_config(problem, device, template)
    kernel = Executor(compile_kernel(problem, config, device.arch), problem, config)
    verdict = verify(kernel, bench, shapes=shapes(group))
    assert verdict.ok, verdict


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("seed", range(24))
def test_configs_drawn_from_the_space(template: str, seed: int) -> None:
    bench = bench_of(0)
    device = bench.device
    if device.arch.name not in TEMPLATES[template].ARCHS:
        pytest.skip(f"{template} does not run on {device}")
    draw = random.Random(seed)
    problem = Problem(
        dtype=draw.choice(("fp16", "bf16")),
        head_dim=draw.choice(HEAD_DIMS),
        causal=draw.random() < 0.5,
        alignment=2 if template == "forward_sm80" and seed % 4 == 0 else 16,
    )
    values = axes(template, problem)
    while True:
        config = TEMPLATES[template].Config(**{axis: draw.choice(v) for axis, v in values.items()})
        if why_illegal(config, problem, device) is not None:
            continue
        compiled = compile_kernel(problem, config, device.arch)
        if compiled.resources.why_bad() is None:
            break
    verdict = verify(Executor(compiled, problem, config), bench)
    assert verdict.ok, f"{problem} {config}: {verdict}"
