"""Rendering: pure, self-contained, strict; and every axis reaches the machine code."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from fagen.build import render
from fagen.build.compile import compile_many
from fagen.build.compiled import Compiled
from fagen.device import architecture, typical_device
from fagen.kernels import Sm80Forward, Sm90Forward
from fagen.kernels.registry import AnyConfig, default_config
from fagen.kernels.space import axes, why_illegal
from fagen.kernels.template import symbol
from fagen.problem import Problem

SM90 = typical_device(architecture("sm90"))
TEMPLATES = ("forward_sm80", "forward_sm90")
PROBLEM = Problem(dtype="bf16", head_dim=64)
# Roomy enough that each axis can change alone.
BASES: dict[str, AnyConfig] = {
    "forward_sm80": Sm80Forward(block_m=64, block_n=32, block_k=64, stages=1),
    "forward_sm90": Sm90Forward(block_m=128, block_n=64, block_k=64, stages=2, persistent=True),
}


def _text(template: str, **fields: object) -> str:
    problem = PROBLEM.model_copy(update=fields)
    return render.render(problem, default_config(problem, SM90, template))


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_same_arguments_give_the_same_text(template: str) -> None:
    first = _text(template)
    render._environment.cache_clear()
    assert _text(template) == first


def test_text_does_not_depend_on_process_folder_or_hash_seed(tmp_path: Path) -> None:
    code = f"""
from fagen.kernels.registry import parse_config
from fagen.kernels.template import symbol
from fagen.problem import Problem
from fagen.build.render import render
config = parse_config({BASES["forward_sm90"].model_dump()!r})
print(render(Problem(**{PROBLEM.model_dump()!r}), config), end="")
"""
    for seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout == render.render(PROBLEM, BASES["forward_sm90"])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_text_is_self_contained(template: str, dtype: str) -> None:
    text = _text(template, dtype=dtype)
    element = {"bf16": "Bfloat16", "fp16": "Half"}[dtype]
    assert f"using Element = {element};" in text
    assert "#include" not in text
    assert "#pragma once" not in text
    assert not re.search(r"\{\{ |\{%[ -]|\{#", text), "Jinja is left over"
    assert text.endswith("\n")


@pytest.mark.parametrize("template", TEMPLATES)
def test_includes_are_folded_in_once(template: str) -> None:
    """params.cuh and ptx.cuh are included from several files."""
    text = _text(template)
    for marker in ("struct ForwardParams {", "DEVICE u32 shared_address(", "struct SwizzledTile {"):
        assert text.count(marker) == 1, marker


@pytest.mark.parametrize("template", TEMPLATES)
def test_kernel_bears_the_name_of_its_problem(template: str) -> None:
    text = _text(template, causal=True)
    assert re.search(r'extern "C" __global__ [^;{]*\bfagen_forward_bf16_d64_causal\(', text)
    assert symbol(PROBLEM) == "fagen_forward_bf16_d64_full"
    narrow = PROBLEM.model_copy(update={"alignment": 2})
    assert symbol(narrow) == "fagen_forward_bf16_d64_full_narrow"


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_axis_is_a_constant_at_the_top(template: str) -> None:
    """One spelling everywhere: block_m is kBlockM, with the config's value."""
    config = BASES[template]
    text = render.render(PROBLEM, config)
    presence_only = {"p_in_smem"}  # decides which declarations are there
    for axis, value in config.axes().items():
        if axis in presence_only:
            continue
        constant = "k" + axis.title().replace("_", "")
        cpp = str(value).lower()
        assert re.search(rf"^constexpr \w+ {constant} = {cpp};", text, re.MULTILINE), constant


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        *itertools.product(TEMPLATES, [{"dtype": "fp16"}, {"head_dim": 72}, {"causal": True}]),
        ("forward_sm80", {"alignment": 2}),  # TMA has no narrow loads
    ],
)
def test_every_part_of_the_problem_changes_the_code(
    template: str, fields: dict[str, object]
) -> None:
    def code(text: str) -> str:
        return re.sub(r"//.*|fagen_\w+", "", text)  # less comments and the kernel's name

    assert code(_text(template, **fields)) != code(_text(template))


def test_a_value_that_is_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="kernel_name"):
        render.fold("forward_sm80.cu")


def test_folding_plain_cuda_and_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "c.cuh"\nint a;  // {{ braces }}\n')
    (tmp_path / "b.cuh.j2").write_text('#include "c.cuh"\nint b[{{ size }}];\n')
    (tmp_path / "c.cuh").write_text("#pragma once\n#include <cuda_fp16.h>\nint c;\n")
    (tmp_path / "top.cu.j2").write_text('#include "a.cuh"\n#include "b.cuh"\nint top;\n')
    monkeypatch.setattr(render, "template_folder", lambda: tmp_path)
    render._environment.cache_clear()
    try:
        assert render.fold("top.cu", size=3) == (
            "#include <cuda_fp16.h>\nint c;\nint a;  // {{ braces }}\nint b[3];\nint top;\n"
        )
    finally:
        render._environment.cache_clear()


# ---- axes reach the machine code ----


def _variants(template: str) -> dict[str, AnyConfig]:
    """For each axis, the base config with another legal value of that axis alone."""
    base = BASES[template]
    variants = {}
    for axis, values in axes(template, PROBLEM).items():
        for value in values:
            variant = base.model_copy(update={axis: value})
            if variant != base and why_illegal(variant, PROBLEM, SM90) is None:
                variants[axis] = variant
                break
    return variants


@pytest.mark.parametrize("template", TEMPLATES)
def test_two_values_of_each_axis_give_different_cubins(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    variants = _variants(template)
    assert set(variants) == set(BASES[template].axis_names())
    cubins: dict[AnyConfig, bytes] = {}
    jobs = [(PROBLEM, config) for config in (BASES[template], *variants.values())]
    for _, config, answer in compile_many(jobs, SM90.arch):
        assert isinstance(answer, Compiled), f"{config}: {answer}"
        cubins[config] = answer.cubin
    same = [axis for axis, config in variants.items() if cubins[config] == cubins[BASES[template]]]
    assert same == []
    assert len(set(cubins.values())) == len(jobs)
