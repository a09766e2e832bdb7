"""Kernels with planted bugs, which `fagen.judge.verify` must refuse, and kernels that attack."""
