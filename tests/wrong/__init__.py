"""Kernels with planted bugs, which `fagen.verify` must refuse, and kernels that attack."""
