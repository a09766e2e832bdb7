"""attention, load, explain and tune: what `import fagen` offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fagen.build.compile import compile_kernel
from fagen.build.compiled import Resources
from fagen.call import attend, loaded
from fagen.device import Architecture, Device, architecture
from fagen.errors import ArgumentError
from fagen.kernels.forward import scale_log2
from fagen.kernels.registry import parse_config, template_of
from fagen.kernels.template import Config
from fagen.operation import FORWARD
from fagen.problem import Bucket, DtypeName, Problem, Shape
from fagen.records.dispatch import Choice, choose
from fagen.run import driver
from fagen.run.ask import Layout, ask, read
from fagen.run.executor import Executor
from fagen.tuning.options import TuneOptions, takes_tune_options
from fagen.validation import as_argument_error

if TYPE_CHECKING:
    from fagen.tuning.events import OnEvent
    from fagen.tuning.tasks import Task
    from fagen.tuning.tuner import TuneResult
    from fagen.tuning.worker import Worker


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    out: Any = None,
    config: Config | Mapping[str, Any] | None = None,
) -> Any:
    """softmax(q k^T * softmax_scale) v, by the fastest kernel that fagen knows for the call.

    Queued on the caller's current stream; does not wait. Arrays are torch tensors, CuPy arrays,
    or others with DLPack or `__cuda_array_interface__`; the result is of q's framework.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16 or bf16, on a CUDA device; head_dim is a
            multiple of 8 from 8 to 256 and contiguous, other strides are free.
        k, v: (batch, seqlen_k, heads_kv, head_dim), like q; heads_q is a multiple of heads_kv.
        causal: query i sees keys up to i + seqlen_k - seqlen_q (bottom-right).
        softmax_scale: 1/sqrt(head_dim) if None.
        return_lse: also return the logsumexp of the scaled scores: natural logarithm, float32,
            (batch, heads_q, seqlen_q); -inf for a query that sees no key, whose output is 0.
        layout: "bshd" as above, or "bhsd": (batch, heads, seqlen, head_dim) for q, k, v and out.
        out: where the output goes, of q's shape and dtype; must not overlap q, k or v.
        config: a config, or its fields, to use instead of the tuned one.

    Returns:
        The output, or (output, lse).

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for a problem outside what fagen covers, gradients among them.
        ConfigError: for a `config` that is illegal here; the message is the broken rule.
        DeviceError: without a usable GPU, or if the driver refuses.
    """
    fixed = None if config is None else _parsed(config)
    return attend(q, k, v, causal, softmax_scale, return_lse, layout, out, fixed)


@takes_tune_options
def tune(
    tasks: Sequence[Task] | None = None,
    *,
    dtype: DtypeName | Sequence[DtypeName] | None = None,
    head_dim: int | Sequence[int] | None = None,
    causal: bool | Sequence[bool] | None = None,
    seqlen: int | Sequence[int] | None = None,
    batch: int | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
    arch: str | Architecture | None = None,
    on_event: OnEvent = lambda event: None,
    workers: Sequence[Worker] = (),
    **options: Any,
) -> TuneResult:
    """Searches the fastest config of each problem, verifies it, times it and saves it.

    What `fagen tune` does. It starts processes, which import the script that calls it: guard the
    call with `if __name__ == "__main__":`.

    Args:
        tasks: problems and their shapes, as of `fagen.tuning.tasks`; if None, those that the next
            arguments name.
        dtype, head_dim, causal, seqlen: one value or several; what is None is the standard list.
        batch, heads, heads_kv: those of `fagen.problem.standard_shape` if None.
        arch: such as "sm90"; that of the device if None.
        on_event: called with each `TaskStarted`, `TrialDone`, ...; where it raises
            KeyboardInterrupt over a `TrialDone`, the search ends as after Ctrl-C: the best so far
            is saved.
        workers: that evaluate, instead of one for each of `devices`.
        options: the fields of `fagen.tuning.options.TuneOptions`, which says what they mean.

    Raises:
        ArgumentError: for a value that is not allowed.
        DeviceError: without a device, if `arch` is None: what is tuned for is not known.
    """
    from fagen.tuning import tuner
    from fagen.tuning.tasks import standard_tasks

    named = {"dtypes": dtype, "head_dims": head_dim, "causal": causal, "seqlens": seqlen}
    chosen: dict[str, Any] = {
        name: [value] if isinstance(value, str | int) else list(value)
        for name, value in named.items()
        if value is not None
    }
    for name, values in chosen.items():
        kind = str if name == "dtypes" else int
        if not values or not all(isinstance(value, kind) for value in values):
            raise ArgumentError(f"{name} {values!r}: give one {kind.__name__}, or several")
    if (older := options.pop("kv_heads", None)) is not None:  # its name in 0.1.0
        if heads_kv is not None:
            raise ArgumentError("kv_heads is the old name of heads_kv: give only one of them")
        heads_kv = older
    sizes = {"batch": batch, "heads": heads, "heads_kv": heads_kv}
    chosen |= {name: size for name, size in sizes.items() if size is not None}
    if tasks is None:
        with as_argument_error():
            tasks = standard_tasks(**chosen)
    elif chosen:
        raise ArgumentError("give tasks, or what names them (dtype, head_dim, ...), not both")
    if arch is not None and not isinstance(arch, Architecture):
        arch = architecture(str(arch))
    chosen_options = TuneOptions.of(arch=arch, **options)
    return tuner.tune(tasks, chosen_options, on_event=on_event, workers=workers)


class Kernel:
    """One tuned kernel, to look at and to call.

    Attributes:
        config: the point of the template's space that it is.
        source, cubin: its CUDA text and what NVRTC made of it.
        resources: registers, spills, stack and shared memory.
        explanation: where the config comes from.
    """

    def __init__(self, kernel: Executor, explanation: Explanation) -> None:
        self._kernel = kernel
        self.explanation = explanation
        self.config = kernel.config
        self.source = kernel.compiled.source
        self.cubin = kernel.compiled.cubin
        self.resources = kernel.resources

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool | None = None,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        layout: Layout = "bshd",
        out: Any = None,
    ) -> Any:
        """`attention` by this kernel, for any lengths of its problem.

        Raises:
            ArgumentError: also for tensors that this kernel is not for.
        """
        causal = self._kernel.problem.causal if causal is None else causal
        return attend(q, k, v, causal, softmax_scale, return_lse, layout, out, self._kernel)

    def __repr__(self) -> str:
        return f"<fagen.Kernel {self._kernel.problem}: {self.config}>"


@dataclass(frozen=True)
class Explanation:
    """Which kernel answers a call, and why that one. `print` it.

    Attributes:
        choice: the config, the record that it comes from, and why it was chosen.
        shape: the lengths of the call.
        resources: what the compiler says that the kernel takes.
    """

    choice: Choice
    shape: Shape
    resources: Resources

    @classmethod
    def of(cls, choice: Choice, shape: Shape) -> Explanation:
        """Explains a choice; compiles its kernel if the cache does not have it."""
        compiled = compile_kernel(choice.problem, choice.config, choice.device.arch)
        return cls(choice, shape, compiled.resources)

    @property
    def problem(self) -> Problem:
        """The static question."""
        return self.choice.problem

    @property
    def bucket(self) -> Bucket:
        """The class of shapes that the call belongs to."""
        return self.shape.bucket()

    @property
    def device(self) -> Device:
        """The card."""
        return self.choice.device

    @property
    def config(self) -> Config:
        """The answer."""
        return self.choice.config

    @property
    def tier(self) -> int:
        """1 to 6, in the order in which dispatch looks."""
        return int(self.choice.tier)

    @property
    def reason(self) -> str:
        """Why it is that one, in a sentence."""
        return self.choice.reason

    @property
    def stale(self) -> bool:
        """Whether the config gives another text than the one that was tuned: the template has
        changed, or the config was edited.
        """
        return self.choice.stale

    @property
    def kernel_name(self) -> str:
        """The symbol in the cubin; of several kernels, all with commas."""
        return ", ".join(template_of(self.config).entries(self.problem))

    @property
    def text(self) -> str:
        """All of it in a few lines; what `print` shows."""
        takes = (
            f"{self.resources.registers} registers per thread, "
            f"{self.resources.spill_bytes} bytes of spills"
        )
        lines = {"kernel": self.kernel_name, "bucket": str(self.bucket), "takes": takes}
        described = (f"{name:8} {text}" for name, text in lines.items())
        return "\n".join([self.choice.describe(), *described])

    def __str__(self) -> str:
        return self.text


def load(
    *,
    dtype: str,
    head_dim: int,
    causal: bool = False,
    seqlen_q: int,
    seqlen_k: int,
    batch: int,
    heads: int,
    heads_kv: int | None = None,
    device: int | None = None,
    config: Config | Mapping[str, Any] | None = None,
) -> Kernel:
    """The kernel that `attention` would use for a call like this, compiled and loaded.

    Args:
        dtype: "fp16" or "bf16".
        heads, heads_kv: heads of q and of k and v (as many if None).
        device: index of the CUDA device; the current one if None.
        config: a config, or its fields, to use instead of the tuned one.

    Raises:
        ArgumentError, ConfigError, DeviceError: as `attention`.
    """
    with as_argument_error():
        problem = Problem.model_validate({"dtype": dtype, "head_dim": head_dim, "causal": causal})
        shape = Shape(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads,
            heads_kv=heads if heads_kv is None else heads_kv,
        )
    card = driver.query_device(driver.current_device() if device is None else device)
    choice = choose(problem, shape, card, config=None if config is None else _parsed(config))
    kernel = loaded(problem, choice.config, card.arch)
    return Kernel(kernel, Explanation.of(choice, shape))


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    out: Any = None,
    config: Config | Mapping[str, Any] | None = None,
) -> Explanation:
    """Which kernel `attention` uses for the same arguments, and why; launches nothing.

    Raises:
        ArgumentError, ConfigError, DeviceError: as `attention`.
    """
    if softmax_scale is not None:
        scale_log2(softmax_scale)
    given = (("q", q), ("k", k), ("v", v), ("out", out))
    known = [read(array, name) for name, array in given if array is not None]
    question = ask(
        FORWARD,
        [(framework, geometry) for framework, _, geometry in known],
        causal=causal,
        layout=layout,
        aligned=all(pointer % 16 == 0 for _, pointer, _ in known),
    )
    card = driver.query_device(question.device_index)
    fixed = None if config is None else _parsed(config)
    choice = choose(question.problem, question.shape, card, config=fixed)
    return Explanation.of(choice, question.shape)


def _parsed(config: Config | Mapping[str, Any]) -> Config:
    return parse_config(dict(config)) if isinstance(config, Mapping) else config
