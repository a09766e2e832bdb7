"""Planted bugs: each a small change of a rendered kernel's text."""

from __future__ import annotations

from typing import NamedTuple

_SM80, _SM90 = "forward_sm80", "forward_sm90"


class Bug(NamedTuple):
    """A change that breaks a kernel.

    Attributes:
        edits: what is replaced by what, by template; every occurrence.
        reason: what the verdict says, a regular expression.
        causal: the mask of the problem that it breaks.
    """

    edits: dict[str, tuple[str, str]]
    reason: str
    causal: bool = False

    def plant(self, template: str, source: str) -> str:
        """The text with the bug in it."""
        right, wrong = self.edits[template]
        assert right in source, f"{template} no longer holds {right!r}: plant this bug anew"
        return source.replace(right, wrong)


def _in_both(right: str, wrong: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys((_SM80, _SM90), (right, wrong))


BUGS: dict[str, Bug] = {
    "no rescale": Bug(
        _in_both("output[i] *= correction[fragment_row(i)];", "output[i] *= 1.0f;"),
        reason="output is off",
    ),
    "causal off by one": Bug(
        _in_both("row + 1 + params.seqlen_k - params", "row + 2 + params.seqlen_k - params"),
        reason="output is off|output of a row without keys",
        causal=True,
    ),
    "last keys dropped": Bug(
        _in_both("+ kBlockN - 1) / kBlockN", ") / kBlockN"),
        reason="output is off|logsumexp is NaN or infinite",
    ),
    "missing barrier": Bug(
        {
            _SM80: ("__syncthreads();", "__syncwarp();"),
            # Of Q and of K: the other waits often end before they begin.
            _SM90: (
                "if (first) q_ring.wait(q_at, column / kBlockK);\n"
                "          k_ring.wait(k_at, column / kBlockK);",
                "",
            ),
        },
        reason="output is off|output is NaN|two runs differ|RMS error|logsumexp",
    ),
    "unwritten rows": Bug(
        {
            _SM80: ("rows - warp_row, q_tile", "rows - warp_row - 1, q_tile"),
            _SM90: ("if (threadIdx.x % 128 == 0) {", "if (threadIdx.x == 0) {"),
        },
        reason="output was not written",
    ),
    "rows past the end": Bug(
        {
            _SM80: ("rows - warp_row, q_tile", "rows - warp_row + 1, q_tile"),
            _SM90: ("if (row < params.seqlen_q) lse_rows", "lse_rows"),
        },
        reason="wrote outside of the (output|logsumexp)",
    ),
    # A right kernel ran before on the same buffers: without poison its output would pass.
    "stale output": Bug(
        {
            _SM80: ("if (exists) store_unit<", "if (rows < -1000) store_unit<"),
            _SM90: ("        tma_store(&o_map", "        if (warpgroup < 0) tma_store(&o_map"),
        },
        reason="output was not written",
    ),
}
