"""Where the files that come with fagen are: templates/ and tuned_configs/."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def packaged_folder(name: str) -> Path:
    """A folder that comes with fagen: inside the wheel, or at the top of a checkout."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
