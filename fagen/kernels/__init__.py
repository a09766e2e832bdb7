"""All that knows a template: a module each, and the registry that finds them.

To add one, write a module with the names of `fagen.kernels.template.Template` and list it in
`fagen.kernels.registry`. The classes of configs are importable from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fagen.kernels.forward_sm80 import Sm80Forward
    from fagen.kernels.forward_sm90 import Sm90Forward

__all__ = ["Sm80Forward", "Sm90Forward"]

_MODULE_OF = {"Sm80Forward": "forward_sm80", "Sm90Forward": "forward_sm90"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fagen.kernels' has no attribute {name!r}")
    return getattr(import_module(f"fagen.kernels.{_MODULE_OF[name]}"), name)
