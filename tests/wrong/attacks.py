"""Kernels that attack the one who runs them: an evaluator for `Worker`, see test_bad_kernels.py.

`evaluate` puts another kernel in the place of some configs' own, compiled in the worker: the tuner
has no way to know.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from fagen.build.compile import compile_source
from fagen.build.compiled import Compiled
from fagen.device import KNOWN_DEVICES, architecture
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem, Shape
from fagen.records.store import digest
from fagen.tuning.model import predict
from fagen.tuning.outcome import Measured, Outcome, Rejected
from fagen.tuning.worker_child import evaluate_on_device
from wrong.bugs import BUGS

TEMPLATE = "forward_sm90"
BODY = "  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);\n"
FIRST_FUNCTION = "DEVICE u32 shared_address"
OUTPUT = "pack<Element>(o[j] * inverse, o[j + 1] * inverse)"

Attack = Callable[[str], str]  # source -> source


def _replaced(source: str, right: str, wrong: str) -> str:
    assert source.count(right) == 1, f"{TEMPLATE} holds {right!r} no more, or more than once"
    return source.replace(right, wrong)


def _at_start(statement: str) -> Attack:
    """The statement before all that the kernel does."""
    return lambda source: _replaced(source, BODY, f"{BODY}  {statement}\n")


def _bug(name: str) -> Attack:
    return lambda source: BUGS[name].plant(TEMPLATE, source)


def _second_run(source: str) -> str:
    """Right when it runs first, wrong when it runs again: only a count in memory tells."""
    state = (
        "__device__ unsigned int launches;\n"
        "DEVICE float late() {\n"
        "  return *const_cast<volatile unsigned int*>(&launches) == 2 ? 1.5f : 1.0f;\n"
        "}\n\n"
    )
    source = _replaced(source, OUTPUT, OUTPUT.replace("inverse", "inverse * late()"))
    count = _at_start("if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(&launches, 1u);")
    return count(source.replace(FIRST_FUNCTION, state + FIRST_FUNCTION, 1))


ATTACKS: dict[str, Attack] = {
    "hangs": _at_start("while (params.seqlen_q >= 0) __nanosleep(1000);"),
    "crashes": _at_start("if (threadIdx.x == 0) *reinterpret_cast<volatile int*>(16) = 1;"),
    "writes out of bounds": _bug("rows past the end"),
    "wrong on tails": _bug("last keys dropped"),
    "wrong on the second run": _second_run,
    "exceeds resources": _at_start(
        "volatile __shared__ unsigned char more[40 * 1024];\n  more[threadIdx.x] = 1;"
    ),
}

# By block_n, of configs that differ in nothing else: the larger ones are the fastest.
PLAN = {
    32: "crashes",
    112: "wrong on the second run",
    144: "hangs",
    160: "writes out of bounds",
    176: "wrong on tails",
    192: "exceeds resources",
}


def tampered(compiled: Compiled, attack: str) -> Compiled:
    """A kernel after an attack."""
    source = ATTACKS[attack](compiled.source)
    return compile_source(source, architecture(compiled.arch), *compiled.entries)


def evaluate(compiled: Compiled, problem: Problem, config: AnyConfig, *rest: Any) -> Outcome:
    """As `evaluate_on_device`, with attacks as planned."""
    attack = PLAN.get(config.axes()["block_n"])
    if attack is not None:
        compiled = tampered(compiled, attack)
    return evaluate_on_device(compiled, problem, config, *rest)


def pretend(
    compiled: Compiled, problem: Problem, config: AnyConfig, shape: Shape, *rest: Any
) -> Outcome:
    """What `evaluate` comes to, without a GPU; what is well takes as long as the model says."""
    match PLAN.get(config.axes()["block_n"]):
        case "hangs":
            time.sleep(3600)
        case "crashes":
            os.abort()
        case "writes out of bounds":
            return Rejected(kind="stray", reason="wrote outside of the logsumexp")
        case "wrong on tails":
            return Rejected(kind="wrong", reason="output is off by 1")
        case "wrong on the second run":
            return Rejected(kind="wrong", reason="two runs differ")
        case "exceeds resources":
            return Rejected(kind="launch", reason="CUDA_ERROR_INVALID_VALUE (1)")
    time_us = predict(problem, shape, config, KNOWN_DEVICES["NVIDIA H200"])
    return Measured(time_us=time_us, policy="cold-queued", cubin=digest(compiled.cubin))
