"""Kernels that draw their tiles, in launches that overlap: each computes all of its own."""

from __future__ import annotations

import pytest

from fagen.kernels import Sm90Forward, forward_sm90
from fagen.problem import Problem, Shape

PROBLEM = Problem(dtype="fp16", head_dim=64, causal=True)
STATIC = Sm90Forward(block_m=128, block_n=64, block_k=64, stages=2)
DRAWN = STATIC.model_copy(update={"persistent": True, "dynamic_tiles": True, "q_stages": 2})
SHAPE = Shape(batch=4, seqlen_q=700, seqlen_k=700, heads_q=32, heads_kv=32)
DIMS = (4, 700, 32, 64)
LAUNCHES = 30


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_launches_that_overlap_do_not_share_a_counter(captured: bool) -> None:
    import cupy

    from fagen.build.compile import compile_kernel
    from fagen.run.driver import query_device
    from fagen.run.executor import Executor, TensorView

    arch = query_device(0).arch
    if arch.name not in forward_sm90.ARCHS:
        pytest.skip(f"forward_sm90 does not run on {arch.name}")
    static, drawn = (
        Executor(compile_kernel(PROBLEM, config, arch), PROBLEM, config)
        for config in (STATIC, DRAWN)
    )
    q, k, v = (cupy.random.standard_normal(DIMS).astype(cupy.float16) for _ in range(3))

    def run(kernel: Executor, out: cupy.ndarray, stream: cupy.cuda.Stream) -> None:
        arrays = {"q": q, "k": k, "v": v, "o": out}
        views = {n: TensorView.contiguous(array.data.ptr, DIMS) for n, array in arrays.items()}
        scalars = forward_sm90.default_scalars(PROBLEM)
        kernel.launch(SHAPE, views, scalars, device_index=0, stream=stream.ptr)

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    wanted = cupy.full(DIMS, cupy.nan, cupy.float16)
    outputs = [cupy.full(DIMS, cupy.nan, cupy.float16) for _ in streams]
    cupy.cuda.Device(0).synchronize()
    run(static, wanted, streams[0])
    run(drawn, outputs[0], streams[0])  # loads the code
    streams[0].synchronize()
    graphs = []
    if captured:
        for out in outputs:
            with streams[0]:
                streams[0].begin_capture()
                run(drawn, out, streams[0])
                graphs.append(streams[0].end_capture())
    for _ in range(LAUNCHES):
        for i, (stream, out) in enumerate(zip(streams, outputs, strict=True)):
            with stream:
                out.fill(cupy.nan)
                if captured:
                    graphs[i].launch(stream)
                else:
                    run(drawn, out, stream)
        for stream in streams:
            stream.synchronize()
        for out in outputs:
            assert bool((out == wanted).all())
