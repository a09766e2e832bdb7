"""fagen beside its peers, on one grid, in one run: what `fagen bench` measures.

Each output is checked against float64 on sampled rows before it is timed. A wrong output, or an
error, is reported, and that contestant is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fagen.dtypes import DTYPES
from fagen.errors import ArgumentError, MissingDependencyError
from fagen.judge import reference
from fagen.problem import TOKENS, DtypeName, Problem, Shape, standard_shape
from fagen.show.peers import PEERS, TORCH_DTYPE, Call, Inputs
from fagen.show.results import Cell, Grid, Results
from fagen.validation import as_argument_error

if TYPE_CHECKING:
    from fagen.kernels.template import Config
    from fagen.records.store import Store
    from fagen.run.executor import TensorView

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
DEFAULT_PEERS = ("fa3", "fa4", "cudnn", "fa2")  # flex takes seconds to compile for each shape
GRIDS: dict[Grid, str] = {
    "A": "the standard shapes",
    "B": "other head dims, grouped heads, a half-empty GPU, few queries",
    "C": "A with and without the LSE, without peers",
}
SAMPLED_ROWS = 64


# ---- grids ----


class GridPoint(NamedTuple):
    """What is measured, and how its shape differs from the standard one."""

    problem: Problem
    shape: Shape
    note: str = ""


def grid_points(
    grid: Grid,
    dtype: str,
    seqlens: Sequence[int] | None = None,
    head_dims: Sequence[int] | None = None,
) -> list[GridPoint]:
    """The points of a grid.

    - A and C: the standard shapes, for any lengths and head dims.
    - B: other head dims, grouped heads, a half-empty GPU, few queries with many keys; lengths and
      head dims choose among them.

    Raises:
        ArgumentError: for a dtype, length or head dim that is not allowed.
    """
    with as_argument_error():
        if grid != "B":
            return _squares(dtype, head_dims or HEAD_DIMS, seqlens or SEQLENS)
        points = [
            *_squares(dtype, (96, 160, 192), SEQLENS),
            *_squares(dtype, (128,), SEQLENS, "32/8 heads", heads=32, heads_kv=8),
            *_squares(dtype, (128,), SEQLENS, "64/8 heads", heads=64, heads_kv=8),
            *_squares(dtype, (128,), SEQLENS[1:5], "batch 1, 8 heads", batch=1, heads=8),
            *_points(dtype, (128,), [(n, 8192) for n in (128, 512)], "8k keys", batch=2),
        ]
    return [
        point
        for point in points
        if point.problem.head_dim in (head_dims or [point.problem.head_dim])
        and point.shape.seqlen_q in (seqlens or [point.shape.seqlen_q])
    ]


def _squares(
    dtype: str, head_dims: Sequence[int], seqlens: Sequence[int], note: str = "", **sizes: int
) -> list[GridPoint]:
    return _points(dtype, head_dims, [(n, n) for n in seqlens], note, **sizes)


def _points(
    dtype: str,
    head_dims: Sequence[int],
    lengths: Sequence[tuple[int, int]],
    note: str,
    **sizes: int,
) -> list[GridPoint]:
    """Full and causal points for pairs of lengths of Q and K; `sizes` go to `standard_shape`."""
    return [
        GridPoint(
            Problem.model_validate({"dtype": dtype, "head_dim": head_dim, "causal": causal}),
            standard_shape(head_dim, seqlen_q, seqlen_k, **sizes),
            note,
        )
        for head_dim in head_dims
        for causal in (False, True)
        for seqlen_q, seqlen_k in lengths
    ]


# ---- inputs ----


class _Memory:
    """Random normal numbers for Q, K and V, made once and cut to each point's shape."""

    def __init__(self, points: Sequence[GridPoint], device_index: int) -> None:
        dice = np.random.default_rng(0)
        dtype = points[0].problem.dtype
        counts = [[math.prod(dims) for dims in _dims(p.problem, p.shape)] for p in points]
        self._device_index = device_index
        self._host = []
        self._device = []
        for count in map(max, zip(*counts, strict=True)):
            rounded = dice.standard_normal(count, dtype=np.float32).astype(DTYPES[dtype].numpy)
            self._host.append(rounded.astype(np.float32))
            self._device.append(self._to_device(rounded, dtype))

    def _to_device(self, rounded: Any, dtype: DtypeName) -> Any:
        if not find_spec("torch"):
            import cupy

            with cupy.cuda.Device(self._device_index):
                return cupy.asarray(rounded)
        import torch

        kind = getattr(torch, TORCH_DTYPE[dtype])
        bits = torch.from_numpy(rounded.view(np.int16))
        return bits.to(f"cuda:{self._device_index}").view(kind)

    def cut(self, problem: Problem, shape: Shape) -> Inputs:
        def each(arrays: Sequence[Any]) -> list[Any]:
            both = zip(arrays, _dims(problem, shape), strict=True)
            return [flat[: math.prod(dims)].reshape(dims) for flat, dims in both]

        q, k, v = each(self._device)
        host_q, host_k, host_v = each(self._host)
        return Inputs(problem, shape, self._device_index, q, k, v, (host_q, host_k, host_v))


def _dims(problem: Problem, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Of Q, K and V."""
    return tuple(problem.operation.operand(name).sizes(problem, shape) for name in "qkv")


# ---- fagen itself ----


def _empty_like(array: Any) -> Any:
    if hasattr(array, "new_empty"):  # torch
        return array.new_empty(array.shape)
    import cupy

    with array.device:
        return cupy.empty_like(array)


def _view(array: Any) -> TensorView:
    from fagen.run.executor import TensorView

    pointer = array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr
    return TensorView.contiguous(pointer, tuple(array.shape))


def _own(x: Inputs, config: Config, *, with_lse: bool = False) -> Call:
    """A kernel of fagen's, launched without its Python front, since host time does not count."""
    import cupy

    from fagen.build.compile import compile_kernel
    from fagen.judge.bench import bench_of
    from fagen.run.executor import Executor

    bench = bench_of(x.device_index)
    kernel = Executor(compile_kernel(x.problem, config, bench.device.arch), x.problem, config)
    out = _empty_like(x.q)
    arrays = {"q": x.q, "k": x.k, "v": x.v, "o": out}
    if with_lse:
        with bench.use():
            sizes = x.problem.operation.operand("lse").sizes(x.problem, x.shape)
            arrays["lse"] = cupy.empty(sizes, np.float32)

    def call(stream: int) -> Any:
        views = {name: _view(array) for name, array in arrays.items()}
        bench.launch(kernel, x.shape, views, stream)
        return out

    return call


# ---- the check ----


class _Sample:
    """Some rows of one head in float64, and how far from them a right output can be.

    Not `rule.judge`, whose limits on the RMS error and the LSE are for fagen's own kernels.
    """

    def __init__(self, x: Inputs) -> None:
        dice = np.random.default_rng(1)
        seqlen = x.shape.seqlen_q
        self.batch, self.head = x.shape.batch - 1, x.shape.heads_q - 1
        self.rows = np.unique(np.r_[0, seqlen - 1, dice.integers(0, seqlen, SAMPLED_ROWS)])
        q, k, v = (array[-1:, :, -1:] for array in x.host)  # the last heads go together
        both = np.concatenate([v, np.abs(v)], axis=-1)
        answers, _ = reference.attention(q, k, both, causal=x.problem.causal, queries=self.rows)
        self.out, magnitude = np.split(answers[0, :, 0], 2, axis=-1)
        # P and O are each rounded to the dtype once, by at most half an epsilon; the factor 2 is
        # for everything in float32.
        self.allowed = 2 * x.problem.element.epsilon * magnitude + 1e-6

    def why_wrong(self, out: Any) -> str | None:
        """Why an output cannot be right, or None."""
        sequence = out[self.batch]
        host = sequence.float().cpu().numpy() if hasattr(sequence, "cpu") else sequence.get()
        error = np.abs(host[self.rows, self.head].astype(np.float64) - self.out)
        excess = np.where(np.isfinite(error), error / self.allowed, np.inf).max()
        return f"wrong: off by {excess:.1f} times what rounding allows" if excess > 1 else None


# ---- the run ----


class _Run:
    """What the cells of one run share."""

    def __init__(
        self,
        grid: Grid,
        points: Sequence[GridPoint],
        peers: Sequence[str],
        store: Store | None,
        sm80_store: Store | None,
        device_index: int,
    ) -> None:
        from fagen.run.driver import query_device

        self.device = query_device(device_index)
        self.grid = grid
        self.points = points
        self.peers = () if grid == "C" else peers
        self.store = store
        self.sm80_store = sm80_store
        self.device_index = device_index
        self.absent: dict[str, str] = {}

    @cached_property
    def memory(self) -> _Memory:
        return _Memory(self.points, self.device_index)

    def cell(self, point: GridPoint) -> Cell:
        """Check and time every contestant on one point of the grid."""
        from fagen.judge.bench import bench_of
        from fagen.judge.measure import compare, read_clock
        from fagen.records.dispatch import choose

        problem, shape, note = point
        x = self.memory.cut(problem, shape)
        choice = choose(problem, shape, self.device, store=self.store)
        calls, failed = self._right_calls(x, choice.config)
        bench = bench_of(self.device_index)
        read_clock(bench)  # forgets what came before this cell
        times = compare(calls, bench) if calls else {}
        clock_mhz = read_clock(bench) if calls else None
        tflops = {name: shape.tflops(problem, float(np.median(us))) for name, us in times.items()}
        limit = self.device.arch.mma_flops * self.device.sm_count * (clock_mhz or math.inf) * 1e-6
        return Cell(
            problem=problem,
            shape=shape,
            note=note,
            us={name: tuple(round(t, 3) for t in us) for name, us in times.items()},
            tflops={name: round(speed, 1) for name, speed in tflops.items()},
            clock_mhz=clock_mhz and round(clock_mhz),
            tensor_share={name: round(speed / limit, 4) for name, speed in tflops.items()},
            config=str(choice.config),
            tier=choice.tier_name,
            failed=failed,
        )

    def _right_calls(self, x: Inputs, config: Config) -> tuple[dict[str, Call], dict[str, str]]:
        """The calls of the contestants whose output is right, and what is wrong with the others."""
        makers: dict[str, Callable[[], Call]] = {"fagen": lambda: _own(x, config)}
        if self.grid == "C":
            makers["fagen_lse"] = lambda: _own(x, config, with_lse=True)
        elif config.template != (portable := self._portable(x.problem)):
            makers["fagen_sm80"] = lambda: _own(x, self._best_of(portable, x.problem, x.shape))
        makers |= {name: partial(PEERS[name].adapt, x) for name in self.peers}
        sample = _Sample(x)
        calls, failed = {}, {}
        for name, make in makers.items():
            try:
                call = make()
                why_wrong = sample.why_wrong(call(0))
            except MissingDependencyError as error:
                if name not in PEERS:
                    raise
                self.absent[name] = str(error)
                continue
            except Exception as error:  # a peer may raise anything if it does not take the input
                if name not in PEERS:
                    raise
                why_wrong = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if why_wrong:
                failed[name] = why_wrong
            else:
                calls[name] = call
        return calls, failed

    def _portable(self, problem: Problem) -> str:
        """The name of the template that runs on every architecture."""
        from fagen.kernels.registry import templates_for

        return templates_for(problem.op, self.device.arch)[-1].NAME

    def _best_of(self, template: str, problem: Problem, shape: Shape) -> Config:
        """A template's best record for this card, or its default."""
        from fagen.kernels.registry import default_config
        from fagen.records.dispatch import tier_table

        store = self.sm80_store or self.store
        offers = tier_table(problem, shape, self.device, store=store)
        for tier in sorted(offers):
            for offer in offers[tier]:
                if offer.illegal is None and offer.config.template == template:
                    return offer.config
        return default_config(problem, self.device, template)

    def versions(self) -> dict[str, str]:
        import fagen
        from fagen.build.nvrtc import nvrtc_version
        from fagen.run.driver import driver_version

        versions = {
            "fagen": fagen.__version__,
            "driver": f"CUDA {driver_version()}",
            "nvrtc": nvrtc_version(),
        }
        for name in self.peers:
            if name not in self.absent:
                versions |= PEERS[name].versions()
        return versions


def bench(
    *,
    grid: str = "A",
    dtype: str = "bf16",
    seqlens: Sequence[int] | None = None,
    head_dims: Sequence[int] | None = None,
    peers: Sequence[str] = DEFAULT_PEERS,
    store: Store | None = None,
    sm80_store: Store | None = None,
    device_index: int,
    progress: Callable[[str], None] = lambda line: None,
) -> Results:
    """Time fagen and its peers; on grid C, fagen with and without the LSE.

    Args:
        grid, seqlens, head_dims: see `grid_points`.
        store: the records that fagen dispatches from.
        sm80_store: the records of fagen's sm80 template, if another is dispatched.
        device_index: the CUDA device to measure on.
        progress: called with one line for every cell.

    Raises:
        ArgumentError: for a grid, dtype, length, head dim or peer that is not allowed.
        DeviceError: if there is no such device.
    """
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise ArgumentError(f"unknown peer {unknown[0]!r}: allowed are {', '.join(PEERS)}")
    chosen = next((name for name in GRIDS if name == grid), None)
    if chosen is None:
        raise ArgumentError(f"unknown grid {grid!r}: allowed are {', '.join(GRIDS)}")
    if seqlens and max(seqlens) > TOKENS:
        raise ArgumentError(f"seqlen {max(seqlens)}: allowed are 1 to {TOKENS}")
    points = grid_points(chosen, dtype, seqlens, head_dims)
    if not points:
        raise ArgumentError(
            "grid B does not have these lengths with these head dims: leave out one of them"
        )
    run = _Run(chosen, points, peers, store, sm80_store, device_index)
    cells = []
    for point in points:
        cells.append(run.cell(point))
        progress(_line(cells[-1]))
    return Results(
        device=str(run.device),
        date=datetime.now(UTC).date().isoformat(),
        grid=chosen,
        versions=run.versions(),
        absent=run.absent,
        cells=tuple(cells),
    )


def _line(cell: Cell) -> str:
    speeds = "  ".join(f"{name} {tflops:.0f}" for name, tflops in cell.tflops.items())
    failures = "".join(f"  {name}: {why}" for name, why in cell.failed.items())
    return f"{cell.name}: {speeds}{failures}"
