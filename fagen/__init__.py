"""FlashAttention kernels, written for your GPU by search."""

__version__ = "0.1.0"
