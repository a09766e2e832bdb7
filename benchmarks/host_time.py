"""Host time of a repeated `fagen.attention` call, beside torch's scaled_dot_product_attention.

    python benchmarks/host_time.py

Needs a GPU and torch. 8 sets of tensors and 50 lengths of one bucket take turns, so no call
repeats the last one. Prints microseconds per call (median of rounds, each far shorter than the
driver's queue) and milliseconds of a first call in a new process, as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fagen
from fagen import call

SETS = 8
LENGTHS = range(1000, 1050)
HEADS, HEAD_DIM = 8, 128
ROUNDS = 50

# Run in a new process: the array library is loaded and the device awake before the clock starts.
FIRST_CALL = """
import time, torch
q, k, v = torch.randn(3, 1, 1024, 8, 128, device="cuda").bfloat16()
torch.cuda.synchronize()
start = time.perf_counter()
import fagen
fagen.attention(q, k, v, causal=True)
torch.cuda.synchronize()
print((time.perf_counter() - start) * 1e3)
"""


def host_us(call: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> float:
    """Median over rounds of the host's microseconds per call; each round starts idle."""
    rounds = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for tensors in inputs:
            call(*tensors)
        rounds.append((time.perf_counter() - start) / len(inputs) * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(rounds[2:]), 2)  # the first two warm up


def first_call_ms(cache: Path) -> float:
    """Milliseconds of the first call of a new process, importing fagen included."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL],
        # The driver keeps a cache of its own, which would hide what compiling costs.
        env={**os.environ, "FAGEN_CACHE": str(cache), "CUDA_CACHE_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return round(float(done.stdout), 1)


def main() -> None:
    full = torch.randn(SETS, 3, 1, LENGTHS[-1], HEADS, HEAD_DIM, device="cuda").bfloat16()
    inputs = [
        tuple(tensor[:, :length] for tensor in tensors) for length in LENGTHS for tensors in full
    ]
    outputs = [(*tensors, torch.empty_like(tensors[0])) for tensors in inputs]
    transposed = [tuple(tensor.transpose(1, 2) for tensor in tensors) for tensors in inputs]
    kernels = len(call._kernels)

    def attention_into(q: Any, k: Any, v: Any, out: Any) -> None:
        fagen.attention(q, k, v, causal=True, out=out)

    result: dict[str, Any] = {
        "fagen_us": host_us(lambda q, k, v: fagen.attention(q, k, v, causal=True), inputs),
        "fagen_out_us": host_us(attention_into, outputs),
        "torch_sdpa_us": host_us(
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True
            ),
            transposed,
        ),
        "empty_like_us": host_us(lambda q, k, v: torch.empty_like(q), inputs),
        "kernels_compiled": len(call._kernels) - kernels,
    }
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        result["first_call_cold_ms"] = first_call_ms(cache)
        result["first_call_warm_ms"] = first_call_ms(cache)
    result |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
