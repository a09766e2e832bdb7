"""Studies of the first release, which keep in words what later ones keep as JSON.

Their names say what they are about, and a trial has its config as one line.
"""

from __future__ import annotations

import re
from typing import Any

STUDY_NAME = re.compile(
    r"(?P<card>.+ \(\d+ SMs\)) "
    r"(?P<op>\w+)_(?P<dtype>[a-z]+\d+)_d(?P<head_dim>\d+)_(?P<mask>causal|full)(?P<narrow>_narrow)?"
    r" q(?P<seqlen_q>\d+)_k(?P<seqlen_k>\d+)_bh(?P<batch_heads>\d+)_g(?P<group>\d+)"
    r" (?P<template>\w+) v(?P<version>\d+) axes-\w+(?: #\d+)?"
)


def notes_of_name(name: str) -> dict[str, Any]:
    """What a study's name says: card, problem, bucket and template; nothing for another name."""
    found = STUDY_NAME.fullmatch(name)
    if found is None:
        return {}
    problem: dict[str, Any] = {"dtype": found["dtype"], "head_dim": int(found["head_dim"])}
    if found["op"] != "forward":
        problem["op"] = found["op"]
    if found["mask"] == "causal":
        problem["causal"] = True
    if found["narrow"]:
        problem["alignment"] = 2
    lengths = ("seqlen_q", "seqlen_k", "batch_heads", "group")
    return {
        "card": found["card"],
        "problem": problem,
        "bucket": {length: int(found[length]) for length in lengths},
        "template": found["template"],
        "axes_version": int(found["version"]),
    }


def template_of(config: str) -> str:
    """The template of a config in one line, its first word."""
    return config.partition(" ")[0]
