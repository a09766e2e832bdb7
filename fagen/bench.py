"""fagen beside its peers, on one grid, in one run: what `fagen bench` does.

A contestant is an adapter: a function of `Inputs` that returns the call to time, or raises
MissingDependencyError where its package is not installed. Each output is checked against float64
on sampled rows before it is timed; a wrong one is reported and not timed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from fagen import reference
from fagen.config import as_argument_error
from fagen.errors import ArgumentError, MissingDependencyError
from fagen.problem import HIDDEN, TOKENS, Dtype, Problem, Shape, standard_shape
from fagen.reference import EPSILON, NUMPY_DTYPE

if TYPE_CHECKING:
    from fagen.config import AnyConfig
    from fagen.launch import TensorView
    from fagen.store import Store

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
SAMPLED_ROWS = 64
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
TITLES = {
    "fagen": "fagen",
    "fagen_sm80": "fagen's sm80 template",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
}
Call = Callable[[int], Any]  # takes the raw CUDA stream, returns O (batch, seqlen, heads, head_dim)


# ---- results ----


class Cell(BaseModel):
    """One point of the grid.

    Attributes:
        us: microseconds of each contestant that ran and was right, the median over all rounds.
        spread: interquartile range of the rounds over their median.
        tflops: the same as 1e12 floating-point operations per second.
        config, tier: what fagen dispatched, and from where.
        failed: contestants that raised an error or were wrong, with the reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    us: dict[str, float]
    spread: dict[str, float]
    tflops: dict[str, float]
    config: str
    tier: str
    failed: dict[str, str] = {}

    def ratio(self, contestant: str, others: Sequence[str]) -> float | None:
        """Speed of a contestant over the fastest of others; None where either is missing."""
        rivals = [self.tflops[name] for name in others if name in self.tflops]
        if contestant not in self.tflops or not rivals:
            return None
        return self.tflops[contestant] / max(rivals)


class Results(BaseModel):
    """One run of the benchmark, as its JSON file holds it.

    Attributes:
        device: name, SM count and architecture.
        date: UTC day.
        versions: of fagen, the driver, NVRTC and each peer that ran.
        absent: peers that are not installed, with the line that installs them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    date: str
    dtype: Dtype
    versions: dict[str, str]
    absent: dict[str, str]
    cells: tuple[Cell, ...]

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers that ran anywhere, in the order of `TITLES`."""
        ran = {name for cell in self.cells for name in cell.tflops}
        return tuple(name for name in TITLES if name in ran and name in ADAPTERS)

    def ratios(self, contestant: str, others: Sequence[str]) -> list[float]:
        """`Cell.ratio` of the cells that have both."""
        return [r for r in (cell.ratio(contestant, others) for cell in self.cells) if r]


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


# ---- inputs ----


@dataclass(frozen=True)
class Inputs:
    """Q, K and V of one cell, contiguous (batch, seqlen, heads, head_dim) arrays, torch's if it
    is installed and CuPy's if not, with the float32 copies on the host that they were made from.
    """

    problem: Problem
    shape: Shape
    device_index: int
    q: Any
    k: Any
    v: Any
    host: tuple[Any, Any, Any]


class _Memory:
    """Random normal numbers for Q, K and V: made once, cut into each cell's shape."""

    def __init__(self, dtype: Dtype, device_index: int) -> None:
        dice = np.random.default_rng(0)
        self._device_index = device_index
        self._host = []
        self._device = []
        for _ in range(3):
            normal = dice.standard_normal(TOKENS * HIDDEN, dtype=np.float32)
            rounded = normal.astype(NUMPY_DTYPE[dtype])
            self._host.append(rounded.astype(np.float32))
            self._device.append(self._to_device(rounded, dtype))

    def _to_device(self, rounded: Any, dtype: Dtype) -> Any:
        if not find_spec("torch"):
            import cupy

            with cupy.cuda.Device(self._device_index):
                return cupy.asarray(rounded)
        import torch

        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        bits = torch.from_numpy(rounded.view(np.int16))
        return bits.to(f"cuda:{self._device_index}").view(kind)

    def cut(self, problem: Problem, shape: Shape) -> Inputs:
        sizes = (shape.batch, shape.seqlen_q, shape.heads_q, problem.head_dim)
        count = math.prod(sizes)
        q, k, v = (flat[:count].reshape(sizes) for flat in self._device)
        host_q, host_k, host_v = (flat[:count].reshape(sizes) for flat in self._host)
        return Inputs(problem, shape, self._device_index, q, k, v, (host_q, host_k, host_v))


# ---- contestants ----


def _import(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except (ImportError, OSError) as error:  # OSError: its library was built for another CUDA
        first = str(error).partition("\n")[0]
        raise MissingDependencyError(f"pip install {package} ({first})") from None


def _on_stream(call: Callable[[], Any], device_index: int) -> Call:
    """A torch call, on a raw stream, its result alone (some return the LSE beside it)."""
    import torch

    def on_stream(stream: int) -> Any:
        # ExternalStream(0) would be a new stream, not the default one.
        external = torch.cuda.ExternalStream(stream, device=device_index) if stream else None
        with torch.cuda.stream(external):
            result = call()
        return result[0] if isinstance(result, tuple) else result

    return on_stream


def _sdpa(x: Inputs, backend: str) -> Call:
    """One backend of torch's scaled_dot_product_attention, which wants (batch, heads, ...)."""
    torch = _import("torch", "torch")
    attention = import_module("torch.nn.attention")
    choice = getattr(attention.SDPBackend, backend)
    q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))

    def call() -> Any:
        with attention.sdpa_kernel(choice):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=x.problem.causal
            )
        return out.transpose(1, 2)

    return _on_stream(call, x.device_index)


def _fa2(x: Inputs) -> Call:
    return _sdpa(x, "FLASH_ATTENTION")


def _cudnn(x: Inputs) -> Call:
    return _sdpa(x, "CUDNN_ATTENTION")


def _flash_attn(x: Inputs, module: str, package: str) -> Call:
    _import("torch", "torch")
    function = _import(module, package).flash_attn_func
    return _on_stream(lambda: function(x.q, x.k, x.v, causal=x.problem.causal), x.device_index)


def _fa3(x: Inputs) -> Call:
    return _flash_attn(x, "flash_attn_interface", "tokenspeed-fa3")


def _fa4(x: Inputs) -> Call:
    return _flash_attn(x, "flash_attn.cute.interface", '"flash-attn-4[cu13]"')


ADAPTERS: dict[str, Callable[[Inputs], Call]] = {
    "fa3": _fa3,
    "fa4": _fa4,
    "cudnn": _cudnn,
    "fa2": _fa2,
}
PACKAGES = {"fa3": "tokenspeed-fa3", "fa4": "flash-attn-4", "cudnn": "torch", "fa2": "torch"}
# What a peer raises where it does not take a problem. A wrong answer is the check's business.
PEER_ERRORS = (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError)


def _empty_like(array: Any) -> Any:
    if hasattr(array, "new_empty"):  # torch
        return array.new_empty(array.shape)
    import cupy

    with array.device:
        return cupy.empty_like(array)


def _view(array: Any) -> TensorView:
    from fagen.launch import TensorView

    pointer = array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr
    return TensorView.contiguous(pointer, tuple(array.shape))


def _own(x: Inputs, config: AnyConfig) -> Call:
    """A kernel of fagen's, launched without its Python front: host time is outside anyhow."""
    from fagen import driver
    from fagen.compile import compile_kernel
    from fagen.launch import LoadedKernel

    arch = driver.query_device(x.device_index).arch
    kernel = LoadedKernel(compile_kernel(x.problem, config, arch), x.problem, config)
    out = _empty_like(x.q)
    q, k, v, o = (_view(array) for array in (x.q, x.k, x.v, out))
    scale = 1 / math.sqrt(x.problem.head_dim)

    def call(stream: int) -> Any:
        kernel.launch(q, k, v, o, 0, scale, device_index=x.device_index, stream=stream)
        return out

    return call


# ---- the check ----


class _Sample:
    """Some rows of one head in float64, and how far from them a right output can be."""

    def __init__(self, x: Inputs) -> None:
        dice = np.random.default_rng(1)
        seqlen = x.shape.seqlen_q
        self.batch, self.head = x.shape.batch - 1, x.shape.heads_q - 1
        self.rows = np.unique(np.r_[0, seqlen - 1, dice.integers(0, seqlen, SAMPLED_ROWS)])
        q, k, v = (array[self.batch :, :, self.head :] for array in x.host)
        both = np.concatenate([v, np.abs(v)], axis=-1)
        answers, _ = reference.attention(q, k, both, causal=x.problem.causal, queries=self.rows)
        self.out, magnitude = np.split(answers[0, :, 0], 2, axis=-1)
        # P and O are each rounded to the dtype once, by half an epsilon at the most; the factor
        # 2 is for all that is float32.
        self.allowed = 2 * EPSILON[x.problem.dtype] * magnitude + 1e-6

    def why_wrong(self, out: Any) -> str | None:
        """Why an output cannot be right, or None."""
        sequence = out[self.batch]
        host = sequence.float().cpu().numpy() if hasattr(sequence, "cpu") else sequence.get()
        error = np.abs(host[self.rows, self.head].astype(np.float64) - self.out)
        excess = np.where(np.isfinite(error), error / self.allowed, np.inf).max()
        return f"wrong: off by {excess:.1f} times what rounding allows" if excess > 1 else None


# ---- the run ----


class _Bench:
    """What the cells of one run share."""

    def __init__(
        self,
        dtype: Dtype,
        peers: Sequence[str],
        store: Store | None,
        sm80_store: Store | None,
        device_index: int,
    ) -> None:
        from fagen.driver import query_device

        self.device = query_device(device_index)
        self.dtype = dtype
        self.peers = peers
        self.store = store
        self.sm80_store = sm80_store
        self.device_index = device_index
        self.absent: dict[str, str] = {}

    @cached_property
    def memory(self) -> _Memory:
        return _Memory(self.dtype, self.device_index)

    def cell(self, problem: Problem, shape: Shape) -> Cell:
        """Check and time every contestant on one point of the grid."""
        from fagen.dispatch import choose
        from fagen.measure import compare, median_and_spread

        x = self.memory.cut(problem, shape)
        sample = _Sample(x)
        choice = choose(problem, shape, self.device, store=self.store)
        calls = {"fagen": _own(x, choice.config)}
        if choice.config.template != "forward_sm80":
            calls["fagen_sm80"] = _own(x, self.sm80_config(problem, shape))
        failed = {}
        for name in self.peers:
            try:
                calls[name] = ADAPTERS[name](x)
            except MissingDependencyError as error:
                self.absent[name] = str(error)
        for name, call in list(calls.items()):
            try:
                why_wrong = sample.why_wrong(call(0))
            except PEER_ERRORS as error:
                if name not in ADAPTERS:
                    raise
                why_wrong = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if why_wrong:
                failed[name] = why_wrong
                del calls[name]
        rounds = compare(calls, device_index=self.device_index) if calls else {}
        medians = {name: median_and_spread(us) for name, us in rounds.items()}
        return Cell(
            head_dim=problem.head_dim,
            causal=problem.causal,
            seqlen=shape.seqlen_q,
            batch=shape.batch,
            heads=shape.heads_q,
            us={name: round(us, 2) for name, (us, _) in medians.items()},
            spread={name: round(spread, 4) for name, (_, spread) in medians.items()},
            tflops={name: round(shape.tflops(problem, us), 1) for name, (us, _) in medians.items()},
            config=str(choice.config),
            tier=choice.tier_name,
            failed=failed,
        )

    def sm80_config(self, problem: Problem, shape: Shape) -> AnyConfig:
        """The sm80 template's best record for this card, or its default."""
        from fagen.dispatch import tier_table
        from fagen.space import default_config

        store = self.sm80_store or self.store
        offers = tier_table(problem, shape, self.device, store=store)
        for tier in sorted(offers):
            for offer in offers[tier]:
                if offer.illegal is None and offer.config.template == "forward_sm80":
                    return offer.config
        return default_config(problem, self.device, "forward_sm80")

    def versions(self) -> dict[str, str]:
        import fagen
        from fagen.compile import nvrtc_version
        from fagen.driver import driver_version

        versions = {
            "fagen": fagen.__version__,
            "driver": f"CUDA {driver_version()}",
            "nvrtc": nvrtc_version(),
        }
        packages = {PACKAGES[name] for name in self.peers if name not in self.absent}
        versions |= {package: metadata.version(package) for package in sorted(packages)}
        if "cudnn" in self.peers and "cudnn" not in self.absent:
            versions["cudnn"] = str(import_module("torch.backends.cudnn").version())
        return versions


def bench(
    *,
    dtype: str = "bf16",
    seqlens: Sequence[int] = SEQLENS,
    head_dims: Sequence[int] = HEAD_DIMS,
    peers: Sequence[str] = tuple(ADAPTERS),
    store: Store | None = None,
    sm80_store: Store | None = None,
    device_index: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> Results:
    """Time fagen and its peers: 16k tokens, hidden size 2048, full and causal.

    Args:
        store: the records that fagen dispatches from.
        sm80_store: the records of fagen's sm80 template, where it is not the dispatched one.
        progress: called with one line for every cell.

    Raises:
        ArgumentError: for a dtype, length, head dim or peer that is not allowed.
        DeviceError: if there is no such device.
    """
    unknown = [name for name in peers if name not in ADAPTERS]
    if unknown:
        raise ArgumentError(f"unknown peer {unknown[0]!r}: allowed are {', '.join(ADAPTERS)}")
    if max(seqlens) > TOKENS:
        raise ArgumentError(f"seqlen {max(seqlens)}: allowed are 1 to {TOKENS}")
    with as_argument_error():
        problems = [
            Problem.model_validate({"dtype": dtype, "head_dim": head_dim, "causal": causal})
            for head_dim in head_dims
            for causal in (False, True)
        ]
    run = _Bench(problems[0].dtype, peers, store, sm80_store, device_index)
    cells = []
    for problem in problems:
        for seqlen in seqlens:
            shape = standard_shape(problem.head_dim, seqlen, seqlen)
            cells.append(run.cell(problem, shape))
            progress(_line(cells[-1]))
    return Results(
        device=str(run.device),
        date=datetime.now(UTC).date().isoformat(),
        dtype=run.dtype,
        versions=run.versions(),
        absent=run.absent,
        cells=tuple(cells),
    )


def _line(cell: Cell) -> str:
    speeds = "  ".join(f"{name} {tflops:.0f}" for name, tflops in cell.tflops.items())
    failures = "".join(f"  {name}: {why}" for name, why in cell.failed.items())
    return f"d{cell.head_dim} {_mask(cell.causal)} {cell.seqlen:>5}: {speeds}{failures}"


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


# ---- files and tables ----


def save_results(results: Results, path: Path) -> None:
    """Write a run as JSON.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(results.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from None


def load_results(path: Path) -> Results:
    """The run that a JSON file holds.

    Raises:
        ArgumentError: the file is missing or holds something else.
    """
    try:
        return Results.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError):
        raise ArgumentError(f"{path} is no result of `fagen bench --json`") from None


def markdown(results: Results) -> str:
    """The table: TFLOP/s, and beside it the ratio to the fastest peer of the same shape."""
    seqlens = sorted({cell.seqlen for cell in results.cells})
    names = [_seqlen_name(seqlen) for seqlen in seqlens]
    lines = [
        f"| {results.dtype}, sequence | {' | '.join(names)} |",
        f"|---|{'---:|' * len(seqlens)}",
    ]
    cells = {(c.head_dim, c.causal, c.seqlen): c for c in results.cells}
    for head_dim, causal in dict.fromkeys((c.head_dim, c.causal) for c in results.cells):
        row = [_entry(cells.get((head_dim, causal, seqlen)), results.peers) for seqlen in seqlens]
        lines.append(f"| head dim {head_dim}, {_mask(causal)} | {' | '.join(row)} |")
    return "\n".join([*lines, "", *_summary(results)])


def _seqlen_name(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _entry(cell: Cell | None, peers: Sequence[str]) -> str:
    if cell is None or "fagen" not in cell.tflops:
        return "-"
    ratio = cell.ratio("fagen", peers)
    return f"{cell.tflops['fagen']:.0f}" + (f" ({ratio:.2f})" if ratio else "")


def _summary(results: Results) -> list[str]:
    """The sentences under the table."""
    peers = results.peers
    against = ", ".join(TITLES[name] for name in peers)
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [
        f"Forward, {TOKENS // 1024}k tokens, hidden size {HIDDEN}, TFLOP/s"
        + (f" (in brackets: over the fastest of {against} on that shape)." if peers else "."),
        f"{results.device}, {results.date}; {versions}.",
    ]
    rivals = [("fagen", peers)] + [("fagen", (name,)) for name in peers]
    for contestant, others in [*rivals, ("fagen_sm80", ("fa2",))]:
        ratios = results.ratios(contestant, others)
        if ratios:
            whom = "the fastest peer" if len(others) > 1 else TITLES[others[0]]
            lines.append(
                f"- {TITLES[contestant]} over {whom}: geometric mean "
                f"{geometric_mean(ratios):.2f}, lowest {min(ratios):.2f}"
            )
    lines += [f"- {TITLES[name]} was not installed" for name in results.absent]
    failures = {(name, why) for cell in results.cells for name, why in cell.failed.items()}
    return lines + [f"- left out where it failed: {name} ({why})" for name, why in sorted(failures)]


def write_table(results: Results, path: Path) -> None:
    """Put the table between the markers of a Markdown file.

    Raises:
        ArgumentError: the file cannot be read or written, or has no markers.
    """
    try:
        text = path.read_text(encoding="utf-8")
        parts = re.split(f"({re.escape(BEGIN)}.*?{re.escape(END)})", text, flags=re.DOTALL)
        if len(parts) != 3:
            raise ArgumentError(f"{path} wants one pair of markers: {BEGIN} and {END}")
        path.write_text(
            f"{parts[0]}{BEGIN}\n{markdown(results)}\n{END}{parts[2]}", encoding="utf-8"
        )
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from None
