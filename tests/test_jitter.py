"""The barriers of the Hopper kernel, tried by random sleeps around every one of them.

racecheck does not see what TMA writes. Here each synchronising instruction and each TMA issue of
the rendered text is preceded by a sleep of random length: a kernel whose barriers suffice gives
the same bits every time, and one with a barrier taken out does not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from fagen.build.processes import in_processes
from fagen.build.render import render
from fagen.errors import FagenError
from fagen.kernels import Sm90Forward, forward_sm90
from fagen.kernels.template import symbol
from fagen.problem import Problem, Shape

if TYPE_CHECKING:
    from fagen.run.executor import Executor

JITTERED = (
    "mbarrier_wait",
    "mbarrier_arrive",
    "mbarrier_arrive_expect",
    "tma_load",
    "tma_load_multicast",
    "mbarrier_arrive_at",
    "cluster_sync",
    "tma_store",
    "wgmma_fence",
    "wgmma_commit",
    "barrier_sync",
    "barrier_arrive",
)
# One time in four, up to 4 us, decided by the clock. With no branch, which would look as if the
# lanes of a warp might part: ptxas then serialises wgmma, and lanes that part hang at bar.sync.
JITTER = """
DEVICE void jitter() {
  u32 x;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(x));
  x = (x ^ (threadIdx.x / 32 * 0x9e3779b9u) ^ (blockIdx.x * 0x85ebca6bu)) * 0xc2b2ae35u;
  x ^= x >> 15;
  __nanosleep(x % 4 == 0 ? x >> 20 : 0);
}
"""
CONFIGS = {
    "ping-pong": Sm90Forward(block_m=128, block_n=64, block_k=64, stages=2),
    "three turns": Sm90Forward(
        block_m=192, block_n=64, block_k=32, stages=3, producer_registers=32, persistent=True
    ),
    "two buffers for Q": Sm90Forward(
        block_m=128, block_n=64, block_k=64, stages=2, persistent=True, q_stages=2
    ),
    "cluster": Sm90Forward(
        block_m=128, block_n=80, block_k=64, stages=2, producer_registers=40, cluster=2
    ),
    "persistent cluster": Sm90Forward(
        block_m=64,
        block_n=48,
        block_k=32,
        stages=3,
        producer_registers=0,
        ping_pong=False,
        cluster=2,
        persistent=True,
        q_stages=2,
        head_grouping=False,
    ),
    "drawn tiles": Sm90Forward(
        block_m=128,
        block_n=64,
        block_k=64,
        stages=2,
        persistent=True,
        q_stages=2,
        dynamic_tiles=True,
    ),
    "drawn tiles, one buffer for Q": Sm90Forward(
        block_m=64,
        block_n=48,
        block_k=32,
        stages=1,
        ping_pong=False,
        persistent=True,
        dynamic_tiles=True,
    ),
    "two buffers, in turn with a head": Sm90Forward(
        block_m=64,
        block_n=48,
        block_k=32,
        stages=1,
        ping_pong=False,
        overlap=False,
        persistent=True,
        q_stages=2,
        head_grouping=False,
    ),
    "serial": Sm90Forward(
        block_m=128, block_n=48, block_k=64, stages=1, overlap=False, persistent=True
    ),
    "P in shared memory": Sm90Forward(
        block_m=128, block_n=64, block_k=64, stages=2, p_in_smem=True, producer_registers=0
    ),
}
PROBLEM = Problem(dtype="bf16", head_dim=64, causal=True)


class StoppedError(FagenError):
    """A process that did not answer in time, or died."""


def with_jitter(source: str) -> str:
    """The text with a random sleep at the start of every synchronising function."""
    source = source.replace("DEVICE u32 shared_address", f"{JITTER}\nDEVICE u32 shared_address", 1)
    pattern = rf"(DEVICE void (?:{'|'.join(JITTERED)})\([^)]*\) {{)"
    source, count = re.subn(pattern, r"\1 jitter();", source)
    assert count == len(JITTERED), f"{count} of {len(JITTERED)} functions found"
    return source


def without(source: str, line: str) -> str:
    """The text with a statement taken out where it first stands."""
    assert line in source
    return source.replace(line, "", 1)


def load(source: str, config: Sm90Forward) -> Executor:
    from fagen.build.compile import compile_source
    from fagen.run.driver import query_device
    from fagen.run.executor import Executor

    arch = query_device(0).arch
    if arch.name not in forward_sm90.ARCHS:
        pytest.skip(f"forward_sm90 does not run on {arch.name}")
    return Executor(compile_source(source, arch, symbol(PROBLEM)), PROBLEM, config)


def differing_runs(source: str, config: Sm90Forward, runs: int) -> int:
    """Of so many runs of a text on the same input, those that differ from the kernel's own bits."""
    import cupy
    import numpy as np

    from fagen.run.executor import TensorView

    kernel = load(source, config)
    # Several tiles for each block of a persistent grid.
    shape = Shape(batch=4, seqlen_q=700, seqlen_k=700, heads_q=32, heads_kv=32)
    dims = PROBLEM.operation.operand("q").sizes(PROBLEM, shape)  # of all four tensors
    rng = np.random.default_rng(0)

    def view(array: cupy.ndarray) -> TensorView:
        return TensorView.contiguous(array.data.ptr, dims)

    def bf16(values: np.ndarray) -> cupy.ndarray:
        return cupy.asarray((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))

    inputs = {name: bf16(rng.standard_normal(dims)) for name in "qkv"}

    def run(candidate: Executor) -> cupy.ndarray:
        out = cupy.full(dims, 0xFFFF, dtype=cupy.uint16)
        stream = cupy.cuda.get_current_stream().ptr
        views = {name: view(array) for name, array in (*inputs.items(), ("o", out))}
        scalars = forward_sm90.default_scalars(PROBLEM)
        candidate.launch(shape, views, scalars, device_index=0, stream=stream)
        return out

    expected = run(load(render(PROBLEM, config), config))
    return sum(not bool((run(kernel) == expected).all()) for _ in range(runs))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_bits_do_not_depend_on_timing(config: Sm90Forward) -> None:
    assert differing_runs(with_jitter(render(PROBLEM, config)), config, runs=200) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "barrier"),
    [
        ("ping-pong", "v_ring.wait(v_at);"),
        ("ping-pong", "k_ring.wait(k_at, column / kBlockK);"),
        ("cluster", "v_ring.acquire(kv_at);"),
        ("serial", "q_ring.acquire(q_at);"),
    ],
    ids=["V full", "K full", "V empty, cluster", "Q empty"],
)
def test_a_missing_barrier_shows(name: str, barrier: str) -> None:
    """In other bits, or in a kernel that waits for ever: then its process is stopped."""
    config = CONFIGS[name]
    text = render(PROBLEM, config)
    load(text, config)  # or skip, where the template does not run
    jobs = [(with_jitter(source), config, 60) for source in (text, without(text, barrier))]
    answers = in_processes(differing_runs, jobs, processes=1, timeout=30, failure=StoppedError)
    (_, right), (_, wrong) = answers
    assert right == 0
    assert isinstance(wrong, StoppedError) or wrong > 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_jittered_text_compiles(config: Sm90Forward) -> None:
    from fagen.build.compile import compile_source
    from fagen.device import architecture

    source = with_jitter(render(PROBLEM, config))
    compiled = compile_source(source, architecture("sm90"), symbol(PROBLEM), cached=False)
    assert compiled.resources.warnings == ()
