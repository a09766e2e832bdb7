"""Records that nobody tuned."""

from __future__ import annotations

from datetime import date
from typing import Any

from fagen.device import KNOWN_DEVICES
from fagen.kernels.registry import AnyConfig
from fagen.problem import Problem, Shape
from fagen.records.store import Card, Provenance, Result, TunedConfig

H200 = KNOWN_DEVICES["NVIDIA H200"]


def some_record(
    problem: Problem,
    config: AnyConfig,
    *,
    seqlen: int = 4096,
    card: Card | None = None,
    kind: Any = "measured",
    text: str = "0f" * 8,
    **result: Any,
) -> TunedConfig:
    """A record of a config, on an H200 if no card is given.

    Args:
        text: the digest of what was tuned.
        result: fields of `Result`.
    """
    numbers = {"median_us": 123.4, "tflops": 612.3, "trials": 80, "policy": "cold-queued"}
    return TunedConfig(
        problem=problem,
        shape=Shape(batch=4, seqlen_q=seqlen, seqlen_k=seqlen, heads_q=16, heads_kv=16),
        device=card or Card.of(H200),
        config=config,
        result=Result.model_validate({"kind": kind, **numbers, **result}),
        provenance=Provenance(
            date=date(2026, 1, 2),
            fagen="0.1.0",
            nvrtc="13.0",
            driver="13.0",
            text=text,
            cubin="1e" * 8,
        ),
    )
