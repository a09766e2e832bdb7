"""The verdict: what it refuses, with made-up outputs here and with planted bugs on a GPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from wrong.bugs import BUGS

from fagen.build.compile import compile_source
from fagen.build.render import render
from fagen.device import architecture, typical_device
from fagen.judge import inputs as judge_inputs
from fagen.judge import rule, verify
from fagen.judge.inputs import GUARD, Slab, random_inputs, slab_of
from fagen.judge.reference import by_row, references
from fagen.judge.rule import Expected, Judged, expect, judge
from fagen.kernels import Sm90Forward
from fagen.kernels.registry import TEMPLATES, default_config
from fagen.kernels.template import symbol
from fagen.operation import FORWARD
from fagen.problem import DTYPE_NAMES, DtypeName, Problem, Shape

Array = np.ndarray[Any, Any]
SHAPE = Shape(batch=1, seqlen_q=90, seqlen_k=70, heads_q=2, heads_kv=1)  # causal: 20 empty rows
HEAD_DIM = 64


def problem_of(dtype: DtypeName, head_dim: int = HEAD_DIM, *, causal: bool = True) -> Problem:
    return Problem(dtype=dtype, head_dim=head_dim, causal=causal)


def expected_of(problem: Problem, inputs: dict[str, Array]) -> dict[str, Expected]:
    found = references(problem, inputs)
    return {name: expect(FORWARD.operand(name), found[name], problem) for name in ("o", "lse")}


INPUTS = {dtype: random_inputs(problem_of(dtype), SHAPE) for dtype in DTYPE_NAMES}
EXPECTED = {dtype: expected_of(problem_of(dtype), INPUTS[dtype]) for dtype in DTYPE_NAMES}


def judge_both(
    out: Array, lse: Array, expected: dict[str, Expected], shape: Shape = SHAPE
) -> tuple[Judged, Judged]:
    """What is found of the output and of the logsumexp."""
    return judge(out, expected["o"], shape), judge(lse[:, None], expected["lse"], shape)


def broken(out: Array, lse: Array, expected: dict[str, Expected], shape: Shape = SHAPE) -> str:
    """The rule that is broken; empty if all hold."""
    of_out, of_lse = judge_both(out, lse, expected, shape)
    return of_out.broken or of_lse.broken


def flash(dtype: DtypeName, fault: str = "") -> tuple[Array, Array]:
    """A fused kernel in NumPy, float32 softmax over blocks of 8 keys, with a fault in it."""
    q, k, v = (INPUTS[dtype][name][0].astype(np.float32) for name in "qkv")
    rounding = problem_of(dtype).element.numpy
    scale = np.float32(HEAD_DIM**-0.5)
    seqlen_q, seqlen_k = SHAPE.seqlen_q, SHAPE.seqlen_k
    out = np.zeros((1, seqlen_q, SHAPE.heads_q, HEAD_DIM), np.float32)
    lse = np.zeros((SHAPE.heads_q, seqlen_q), np.float32)
    off_by_one = 1 if fault == "causal off by one" else 0
    visible = np.clip(np.arange(seqlen_q) + 1 + off_by_one + seqlen_k - seqlen_q, 0, seqlen_k)
    end = seqlen_k // 8 * 8 if fault == "last keys dropped" else seqlen_k
    for head in range(SHAPE.heads_q):
        maximum = np.full((seqlen_q, 1), -np.inf, np.float32)
        total = np.zeros((seqlen_q, 1), np.float32)
        o = np.zeros((seqlen_q, HEAD_DIM), np.float32)
        for first in range(0, end, 8):
            keys = slice(first, min(first + 8, end))
            scores = q[:, head] @ k[keys, 0].T * scale
            if fault == "rounded scores":
                scores = scores.astype(rounding).astype(np.float32)
            scores[np.arange(keys.start, keys.stop) >= visible[:, None]] = -np.inf
            higher = np.maximum(maximum, scores.max(axis=1, keepdims=True))
            safe = np.where(higher == -np.inf, 0, higher)
            correction = np.exp(maximum - safe)
            p = np.exp(scores - safe)
            total = total * correction + p.sum(axis=1, keepdims=True)
            o *= 1 if fault == "no rescale" else correction
            o += p.astype(rounding).astype(np.float32) @ v[keys, 0]
            if fault == "rounded accumulator":
                o = o.astype(rounding).astype(np.float32)
            maximum = higher
        sees = total[:, 0] > 0
        out[0, sees, head] = o[sees] / total[sees]
        lse[head] = -np.inf
        lse[head, sees] = (maximum + np.log(np.where(total > 0, total, 1)))[sees, 0]
    return by_row(out).astype(rounding), lse.ravel()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_right_kernel_is_near_the_unavoidable_error(dtype: DtypeName) -> None:
    out, lse = judge_both(*flash(dtype), EXPECTED[dtype])
    assert out.broken == lse.broken == ""
    assert 0 < out.errors.max_error < 0.8 * out.errors.allowed_error
    assert 0.8 < out.errors.rms_ratio < 1.2
    assert lse.errors.max_error < 1e-5


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("causal off by one", "without keys is not 0"),
        ("last keys dropped", "output is off"),
        ("no rescale", "output is off"),
        ("rounded scores", "RMS error|logsumexp is off"),
        ("rounded accumulator", "RMS error"),
    ],
)
def test_wrong_arithmetic_is_refused(dtype: DtypeName, fault: str, reason: str) -> None:
    rule = broken(*flash(dtype, fault), EXPECTED[dtype])
    assert re.search(reason, rule), rule


FIRST_SEEING = SHAPE.seqlen_q - SHAPE.seqlen_k  # head 0


def _unwritten(out: Array, lse: Array) -> None:
    out.view(np.uint16)[-1, 5] = 0xFFFF


def _unwritten_lse(out: Array, lse: Array) -> None:
    lse.view(np.uint32)[3] = 0xFFFFFFFF


def _nan(out: Array, lse: Array) -> None:
    out[FIRST_SEEING, 1] = np.nan


def _not_zero(out: Array, lse: Array) -> None:
    out[FIRST_SEEING - 1, 1] = 1e-7


def _finite_lse(out: Array, lse: Array) -> None:
    lse[FIRST_SEEING - 1] = -1e30


def _infinite_lse(out: Array, lse: Array) -> None:
    lse[FIRST_SEEING] = -np.inf


def _inexact_lse(out: Array, lse: Array) -> None:
    lse[FIRST_SEEING] += 3e-3


def _one_element(out: Array, lse: Array) -> None:
    out[FIRST_SEEING, 0] += 0.1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_unwritten, "output was not written, 1 of 180 rows, the first being .* head 1, query 89"),
        (_unwritten_lse, "logsumexp was not written"),
        (_nan, "output is NaN"),
        (_not_zero, "row without keys is not 0"),
        (_finite_lse, "row without keys is not -inf"),
        (_infinite_lse, "logsumexp is NaN or infinite"),
        (_inexact_lse, "logsumexp is off by 3"),
        (_one_element, "output is off .* head 0, query 20"),
    ],
)
def test_a_spoiled_output_is_refused(spoil: Callable[[Array, Array], None], reason: str) -> None:
    out, lse = flash("fp16")
    spoil(out, lse)
    rule = broken(out, lse, EXPECTED["fp16"])
    assert re.search(reason, rule), rule


def test_one_key_may_round_but_not_err() -> None:
    """The baseline is exact there; its rounding is granted all the same."""
    shape = Shape(batch=8, seqlen_q=16, seqlen_k=1, heads_q=1, heads_kv=1)
    problem = problem_of("fp16", causal=False)
    expected = expected_of(problem, random_inputs(problem, shape))
    exact, lse = expected["o"].reference.exact, expected["lse"].reference.exact[:, 0]
    lse = lse.astype(np.float32)
    assert broken((exact * (1 + 7e-5)).astype(np.float16), lse, expected, shape) == ""
    assert "RMS error" in broken((exact * (1 + 7e-4)).astype(np.float16), lse, expected, shape)


def test_no_row_is_right() -> None:
    shape = Shape(batch=2, seqlen_q=0, seqlen_k=5, heads_q=1, heads_kv=1)
    problem = problem_of("bf16", 8, causal=False)
    expected = expected_of(problem, random_inputs(problem, shape))
    nothing = np.zeros((0, 8), problem.element.numpy)
    assert broken(nothing, np.zeros(0, np.float32), expected, shape) == ""


def test_poison_is_all_bits_set() -> None:
    for dtype in (*(problem_of(name).element.numpy for name in DTYPE_NAMES), np.dtype("f4")):
        values = np.array([1.0, np.nan, -np.nan, np.inf, 0.0], dtype)
        assert not judge_inputs.is_poison(values).any()
        values.view(f"u{dtype.itemsize}")[3] = 2 ** (8 * dtype.itemsize) - 1
        assert np.isnan(values[3].astype(np.float32))
        assert judge_inputs.is_poison(values).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("narrow", [False, True])
def test_slab_knows_its_surroundings(narrow: bool) -> None:
    slab = Slab((2, 3, 2, 8), np.dtype("u2"), strided=True, narrow=narrow)
    flat = slab.poison()
    assert (flat == 0xFFFF).all()
    slab.inside(flat)[...] = 1
    assert (flat == 1).sum() == 2 * 3 * 2 * 8
    assert slab.is_alone(flat)
    around = np.flatnonzero(flat != 1)
    for place in (0, slab.lead - 1, slab.lead + 16, around[-1]):
        spoiled = flat.copy()
        assert spoiled[place] == 0xFFFF
        spoiled[place] = 0
        assert not slab.is_alone(spoiled), place
    assert (slab.lead * 2 % 16 == 0) != narrow


def test_a_slab_without_strides_has_no_gap() -> None:
    shape = Shape(batch=2, seqlen_q=3, seqlen_k=1, heads_q=4, heads_kv=4)
    slab = slab_of(FORWARD.operand("lse"), problem_of("bf16"), shape)
    values = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    flat = slab.around(values)
    assert slab.size == flat.size == 24 + 2 * GUARD
    np.testing.assert_array_equal(slab.tensor(flat).view(np.float32), values)
    np.testing.assert_array_equal(flat[GUARD:-GUARD].view(np.float32), values.ravel())
    assert slab.is_alone(flat)
    for place in (GUARD - 1, GUARD + 24):
        spoiled = flat.copy()
        spoiled[place] = 0
        assert not slab.is_alone(spoiled), place
    view = slab.view(SimpleNamespace(data=SimpleNamespace(ptr=4096)))
    assert view == (4096 + 4 * GUARD, (2, 4, 3), (12, 3))


def test_cases_surround_the_blocks() -> None:
    config = Sm90Forward(block_m=128, block_n=96, block_k=64, stages=2)
    shapes = [case.shape for case in verify.cases(config)]
    assert {127, 129} <= {shape.seqlen_q for shape in shapes}
    assert {0, 95, 97} <= {shape.seqlen_k for shape in shapes}
    assert {shape.heads_q // shape.heads_kv for shape in shapes} >= {1, 4}
    assert any(shape.seqlen_q > shape.seqlen_k > 0 for shape in shapes)
    tiles = [
        s.batch * s.heads_q
        for s in (c.shape for c in verify.cases(config.model_copy(update={"persistent": True})))
    ]
    assert max(tiles) > 4 * 188, "a persistent block must meet a second tile on any known card"


# ---- verify itself, around a kernel that NumPy stands in for ----

# launch number, the buffers of O, LSE and Q
Spoil = Callable[[int, Array, Array, Array], None]


class OnDevice:
    """A CuPy buffer."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def get(self) -> Array:
        return self._array


@pytest.fixture
def verdict_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil], verify.Verdict]:
    """Runs `verify` on a right kernel whose buffers `spoil` changes after each launch."""
    problem = Problem(dtype="bf16", head_dim=8, causal=True)
    config = Sm90Forward(block_m=64, block_n=32, block_k=32, stages=1, ping_pong=False)

    soft: dict[Shape, Array] = {}  # the outputs of a fused kernel

    def prepare(bench: Any, problem: Problem, case: verify.Case) -> verify.Prepared:
        inputs = random_inputs(problem, case.shape, drift=case.drift)
        expected = expected_of(problem, inputs)
        unavoidable = expected["o"].reference.unavoidable
        assert unavoidable is not None
        soft[case.shape] = unavoidable
        slabs = {o.name: slab_of(o, problem, case.shape) for o in FORWARD.operands}
        uploaded = {name: slabs[name].around(values) for name, values in inputs.items()}
        buffers = {name: OnDevice(flat.copy()) for name, flat in uploaded.items()}
        return verify.Prepared(case.shape, {}, slabs, buffers, uploaded, expected)

    def verdict(spoil: Spoil) -> verify.Verdict:
        launches = itertools.count(1)

        def run(kernel: Any, bench: Any, prepared: verify.Prepared) -> dict[str, Array]:
            batch, seqlen, heads, head_dim = prepared.slabs["o"].dims
            rows = soft[prepared.shape].reshape(batch, heads, seqlen, head_dim)
            lse = prepared.expected["lse"].reference.exact.reshape(batch, heads, seqlen)
            flat = {
                "o": prepared.slabs["o"].around(
                    rows.transpose(0, 2, 1, 3).astype(problem.element.numpy)
                ),
                "lse": prepared.slabs["lse"].around(lse.astype(np.float32)),
            }
            spoil(next(launches), flat["o"], flat["lse"], prepared.buffers["q"].get())
            return flat

        monkeypatch.setattr(verify, "_prepared", prepare)
        monkeypatch.setattr(verify, "run_poisoned", run)
        kernel: Any = SimpleNamespace(problem=problem, config=config)
        bench: Any = SimpleNamespace(use=nullcontext)
        return verify.verify(kernel, bench)

    return verdict


def test_verify_accepts_a_right_kernel(verdict_on: Callable[[Spoil], verify.Verdict]) -> None:
    verdict = verdict_on(lambda *_: None)
    assert verdict, verdict.reason
    errors = verdict.outputs["o"]
    assert errors.rms_ratio == pytest.approx(1.0, abs=0.01)
    assert 0 < errors.max_error < errors.allowed_error
    assert verdict.outputs["lse"].max_error < 1e-5
    assert verdict.shape is not None


def _guard_of_o(launch: int, o: Array, lse: Array, q: Array) -> None:
    o[-1] = 0


def _guard_of_lse(launch: int, o: Array, lse: Array, q: Array) -> None:
    lse[GUARD - 1] = 0


def _inputs(launch: int, o: Array, lse: Array, q: Array) -> None:
    q[GUARD] = 1


def _key_of_another(launch: int, o: Array, lse: Array, q: Array) -> None:
    lse[GUARD : GUARD + 1].view(np.float32)[...] += 3e-3


def _unsteady(launch: int, o: Array, lse: Array, q: Array) -> None:
    if launch == 6:  # the second of the third shape
        o[GUARD] ^= 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_guard_of_o, "wrote outside of the output"),
        (_guard_of_lse, "wrote outside of the logsumexp"),
        (_inputs, "wrote to its inputs"),
        (_unsteady, "two runs differ"),
        (_key_of_another, "logsumexp is off by 3"),
    ],
)
def test_verify_refuses_what_memory_shows(
    spoil: Spoil, reason: str, verdict_on: Callable[[Spoil], verify.Verdict]
) -> None:
    verdict = verdict_on(spoil)
    assert not verdict
    assert reason in verdict.reason
    assert verdict.reason.endswith(f"; {verdict.shape}")
    assert verdict.stray == reason.startswith("wrote")


def test_small_shapes_are_pooled_for_the_rms_rule(
    monkeypatch: pytest.MonkeyPatch, verdict_on: Callable[[Spoil], verify.Verdict]
) -> None:
    monkeypatch.setattr(rule, "MAX_RMS_RATIO", 0.99)
    monkeypatch.setattr(rule, "RMS_ELEMENTS", 10**9)
    verdict = verdict_on(lambda *_: None)
    assert not verdict
    assert "over all shapes" in verdict.reason


# ---- planted bugs ----

PROBLEMS = {causal: Problem(dtype="bf16", head_dim=64, causal=causal) for causal in (False, True)}


@pytest.mark.parametrize(("template", "arch"), [("forward_sm80", "sm80"), ("forward_sm90", "sm90")])
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_compile(name: str, template: str, arch: str) -> None:
    bug = BUGS[name]
    problem = PROBLEMS[bug.causal]
    device = typical_device(architecture(arch))
    source = render(problem, default_config(problem, device, template))
    compile_source(bug.plant(template, source), device.arch, symbol(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("template", ["forward_sm80", "forward_sm90"])
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_refused(name: str, template: str) -> None:
    from fagen.judge.bench import bench_of
    from fagen.run.executor import Executor

    bench = bench_of(0)
    device = bench.device
    if device.arch.name not in TEMPLATES[template].ARCHS:
        pytest.skip(f"{template} does not run on {device}")
    bug = BUGS[name]
    problem = PROBLEMS[bug.causal]
    config = default_config(problem, device, template)
    right = render(problem, config)
    verdicts = []
    for source in (right, bug.plant(template, right)):
        compiled = compile_source(source, device.arch, symbol(problem))
        verdicts.append(verify.verify(Executor(compiled, problem, config), bench))
    assert verdicts[0], verdicts[0].reason
    assert not verdicts[1]
    assert re.search(bug.reason, verdicts[1].reason), verdicts[1].reason


@pytest.mark.gpu
def test_sample_of_a_large_shape() -> None:
    from fagen.build.compile import compile_kernel
    from fagen.judge.bench import bench_of
    from fagen.run.executor import Executor

    bench = bench_of(0)
    device = bench.device
    problem = PROBLEMS[True]
    config = default_config(problem, device)
    shape = Shape(batch=2, seqlen_q=4096, seqlen_k=4096, heads_q=8, heads_kv=2)
    kernel = Executor(compile_kernel(problem, config, device.arch), problem, config)
    verdict = verify.check_sample(kernel, shape, bench)
    assert verdict, verdict.reason
    assert 0.5 < verdict.outputs["o"].rms_ratio < 1.3
    assert verdict.outputs["lse"].max_error < 1e-3

    bug = BUGS["causal off by one"]
    source = bug.plant(config.template, kernel.compiled.source)
    wrong = Executor(compile_source(source, device.arch, symbol(problem)), problem, config)
    assert "output is off" in verify.check_sample(wrong, shape, bench).reason
