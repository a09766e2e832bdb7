"""The other attention kernels that `fagen bench` runs: one cell's inputs -> the call to time.

An adapter raises MissingDependencyError if its package is not installed, and whatever the package
raises if that does not take the problem.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from typing import Any

from fagen.errors import MissingDependencyError
from fagen.problem import Problem, Shape

Call = Callable[[int], Any]  # takes the raw CUDA stream, returns O (batch, seqlen, heads, head_dim)
TORCH_DTYPE = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Inputs:
    """Q, K and V of one cell.

    Attributes:
        q, k, v: contiguous, (batch, seqlen, heads, head_dim); torch tensors if torch is installed,
            CuPy arrays otherwise.
        host: their values on the host, in float32.
    """

    problem: Problem
    shape: Shape
    device_index: int
    q: Any
    k: Any
    v: Any
    host: tuple[Any, Any, Any]

    @property
    def grouped(self) -> bool:
        """Whether several heads of Q share one of K and V."""
        return self.shape.heads_q != self.shape.heads_kv

    @property
    def causal_offset(self) -> int | None:
        """Query i sees keys up to i + this; None for a full mask."""
        return self.shape.seqlen_k - self.shape.seqlen_q if self.problem.causal else None


@dataclass(frozen=True)
class Peer:
    """An implementation of attention that is not fagen's.

    Attributes:
        title: its name in tables.
        package: what `pip install` needs to install it.
        adapt: inputs -> the call on them.
    """

    title: str
    package: str
    adapt: Callable[[Inputs], Call]

    def versions(self) -> dict[str, str]:
        """The version of its package, if installed under that name; with torch, cuDNN's too."""
        name = self.package.partition("[")[0]
        found = {}
        with suppress(metadata.PackageNotFoundError):  # built from source under another name
            found[name] = metadata.version(name)
        if name == "torch":
            found["cudnn"] = str(import_module("torch.backends.cudnn").version())
        return found


def load(module: str, package: str) -> Any:
    """A peer's module.

    Raises:
        MissingDependencyError: with the line that installs it.
    """
    try:
        return import_module(module)
    except (ImportError, OSError) as error:  # OSError: its library was built for another CUDA
        first = str(error).partition("\n")[0]
        name = f'"{package}"' if "[" in package else package
        raise MissingDependencyError(f"pip install {name} ({first})") from None


def _on_stream(call: Callable[[], Any], device_index: int) -> Call:
    """A torch call on a raw stream; returns O alone, even if the call also returns the LSE."""
    import torch

    def on_stream(stream: int) -> Any:
        # ExternalStream(0) would be a new stream, not the default one.
        external = torch.cuda.ExternalStream(stream, device=device_index) if stream else None
        with torch.cuda.stream(external):
            result = call()
        return result[0] if isinstance(result, tuple) else result

    return on_stream


def _flash_attn(x: Inputs, module: str, package: str) -> Call:
    load("torch", "torch")
    function = load(module, package).flash_attn_func
    return _on_stream(lambda: function(x.q, x.k, x.v, causal=x.problem.causal), x.device_index)


def sdpa_call(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    device_index: int,
    backend: str | None = None,
    mask: Any = None,
) -> Call:
    """torch's scaled_dot_product_attention.

    Args:
        q, k, v: torch tensors, (batch, seqlen, heads, head_dim).
        causal: whether to use torch's own causal mask, which is aligned top-left.
        backend: a name of torch.nn.attention.SDPBackend; torch picks one if None.
        mask: a mask of torch's instead.

    Raises:
        MissingDependencyError: without torch.
    """
    torch = load("torch", "torch")
    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # it takes (batch, heads, ...)
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal}
    if q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True  # unknown before torch 2.5
    chosen: Callable[[], AbstractContextManager[Any]] = nullcontext
    if backend is not None:
        attention = load("torch.nn.attention", "torch")
        chosen = partial(attention.sdpa_kernel, getattr(attention.SDPBackend, backend))

    def call() -> Any:
        with chosen():
            return attend(q, k, v, **options).transpose(1, 2)

    return _on_stream(call, device_index)


def torch_baseline(problem: Problem, shape: Shape, device_index: int) -> Call | None:
    """torch's own attention on random inputs, by the backend that it picks.

    None if torch is not installed, or cannot answer: its causal mask is aligned top-left, its
    fallback may need more memory than there is.
    """
    if problem.causal and shape.seqlen_q != shape.seqlen_k:
        return None
    try:
        torch = load("torch", "torch")
    except MissingDependencyError:
        return None
    options = {
        "dtype": getattr(torch, TORCH_DTYPE[problem.dtype]),
        "device": f"cuda:{device_index}",
    }
    dims = [problem.operation.operand(name).sizes(problem, shape) for name in "qkv"]
    try:
        q, k, v = (torch.randn(each, **options) for each in dims)
        call = sdpa_call(q, k, v, causal=problem.causal, device_index=device_index)
        torch.cuda.synchronize(device_index)
        call(torch.cuda.Stream(device_index).cuda_stream)
        torch.cuda.synchronize(device_index)
    except (RuntimeError, TypeError):  # out of memory; no grouped heads before torch 2.5
        return None
    return call


def _sdpa(x: Inputs, backend: str, mask: Any = None) -> Call:
    causal = x.problem.causal and mask is None
    return sdpa_call(
        x.q, x.k, x.v, causal=causal, device_index=x.device_index, backend=backend, mask=mask
    )


def _fa2(x: Inputs) -> Call:
    mask = None
    if x.causal_offset:  # torch's own causal mask is aligned top-left
        bias = load("torch.nn.attention.bias", "torch")
        mask = bias.causal_lower_right(x.shape.seqlen_q, x.shape.seqlen_k)
    return _sdpa(x, "FLASH_ATTENTION", mask)


def _cudnn(x: Inputs) -> Call:
    load("torch", "torch")
    if x.causal_offset:
        raise NotImplementedError("torch gives cuDNN only causal masks that are aligned top-left")
    return _sdpa(x, "CUDNN_ATTENTION")


def _flex(x: Inputs) -> Call:
    torch = load("torch", "torch")
    flex = load("torch.nn.attention.flex_attention", "torch")
    # It compiles for each shape, and after eight shapes torch would run it uncompiled.
    torch.compiler.reset()
    attend = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)
    q, k, v = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v))
    offset = x.causal_offset
    mask = None
    if offset is not None:

        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return key <= query + offset

        lengths = x.shape.seqlen_q, x.shape.seqlen_k
        mask = flex.create_block_mask(sees, None, None, *lengths, device=q.device)

    def call() -> Any:
        return attend(q, k, v, block_mask=mask, enable_gqa=x.grouped).transpose(1, 2)

    return _on_stream(call, x.device_index)


def _flash_attn_peer(title: str, module: str, package: str) -> Peer:
    return Peer(title, package, partial(_flash_attn, module=module, package=package))


PEERS = {
    "fa3": _flash_attn_peer("FlashAttention-3", "flash_attn_interface", "tokenspeed-fa3"),
    "fa4": _flash_attn_peer("FlashAttention-4", "flash_attn.cute", "flash-attn-4[cu13]>=4.0.0b1"),
    "cudnn": Peer("cuDNN", "torch", _cudnn),
    "fa2": Peer("FlashAttention-2", "torch", _fa2),
    "flex": Peer("FlexAttention", "torch", _flex),
}
