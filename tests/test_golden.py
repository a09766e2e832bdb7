"""Emitted kernels as they are in the repository: what a change of a template is reviewed by.

After such a change, `python tests/test_golden.py` writes them anew; read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fagen import __version__
from fagen.build.emit import emit
from fagen.device import architecture, typical_device
from fagen.files import write_files
from fagen.kernels.registry import default_config
from fagen.problem import Problem

FOLDER = Path(__file__).parent / "golden"


def golden(arch: str, problem: Problem, *, host: bool = False, **axes: object) -> dict[str, str]:
    """The kernel of the default config with these axes, and its host side if wanted."""
    device = typical_device(architecture(arch))
    config = default_config(problem, device).model_copy(update=axes)
    files = emit(problem, config, device.arch)
    kernel = next(iter(files))
    return {
        name: str(content).replace(f"fagen {__version__} ", "fagen VERSION ")
        for name, content in files.items()
        if host or name == kernel
    }


GOLDENS = {
    **golden("sm80", Problem(dtype="bf16", head_dim=128, causal=True)),
    **golden("sm80", Problem(dtype="fp16", head_dim=40, alignment=2), host=True),
    **golden("sm90", Problem(dtype="bf16", head_dim=128, causal=True), host=True),
    **golden("sm90", Problem(dtype="fp16", head_dim=64), p_in_smem=True, cluster=2),
    **golden(
        "sm90",
        Problem(dtype="bf16", head_dim=256),
        block_n=64,
        stages=1,
        persistent=True,
        q_stages=2,
        dynamic_tiles=True,
        lazy_rescale=True,
    ),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_emitted_text_is_the_golden(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == GOLDENS[name], (
        f"{name} has changed: run `python tests/test_golden.py` and read the diff"
    )


def test_no_golden_is_left_over() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(GOLDENS)


if __name__ == "__main__":
    for old in FOLDER.iterdir():
        old.unlink()
    for path in write_files(GOLDENS, FOLDER):
        print(path)
