"""Cells of the zoo that are refused: kinds, and the ways in which they do not go."""

from __future__ import annotations

from fnmatch import fnmatch

LANES = ("lanes-*", "same-bits-lanes-*")
PIPELINES = ("pipeline-*", "same-bits-pipeline-*")
THREADS = (*LANES, "stage-threads-*")


_DRAWS = "draws from PyTorch's global generator"
REFUSED: tuple[tuple[str, tuple[str, ...], str], ...] = (  # kinds, ways, words of the refusal
    ("*-dropout", THREADS, _DRAWS),
    ("dropout-module", THREADS, _DRAWS),
    ("loss-closes-over-the-model", (*PIPELINES, "stage-threads-*"), "the loss never called the model"),
    ("layer-reused", ("same-bits-pipeline-*",), "3 modules on several stages share"),
    ("loss-closes-over-a-part", (*PIPELINES, "stage-threads-*"), "of a model outside of its arguments"),
    ("loss-closes-over-*", LANES, "of a model outside of its arguments"),
    ("half-weights", ("same-bits-zero*",), "depends on how it is partitioned"),
    ("mixed-types", ("same-bits-zero*",), "depends on how it is partitioned"),
    (
        "channels-last-fused",
        ("same-bits-*",),
        "a fused optimizer rounds depending on how a tensor is partitioned",
    ),
)


def refusal(kind: str, way: str) -> str:
    """The words with which a cell is refused; empty if it runs."""
    for kinds, ways, words in REFUSED:
        if fnmatch(kind, kinds) and any(fnmatch(way, pattern) for pattern in ways):
            return words
    return ""
