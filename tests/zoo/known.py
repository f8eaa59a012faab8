"""Cells of the zoo that are not right yet, and those that are refused: a kind, and the ways it goes with.

An entry of `KNOWN` is taken out by whoever mends it: a known cell that agrees fails the test.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

LANES = ("lanes-*", "same-bits-lanes-*")
PIPELINES = ("pipeline-*", "same-bits-pipeline-*")
THREADS = (*LANES, "stage-threads-*")
ORDERED = (*THREADS, "same-bits-*")
ORDERED_ALONE = ("*lanes-1", "stage-threads-1", "same-bits-1", "same-bits-pipeline-2")
SUMMED = ("replicas-*", "small-buckets-*", "native-*", "zero1-*", "lanes-2", "server-*")


@dataclass(frozen=True)
class Known:
    """A mistake that is known.

    Args:
        kinds, ways: patterns of the cells.
        item: of the issue; 0: found since.
        dies: it takes the process with it, or ends at a deadline: such a cell runs alone.
    """

    kinds: str
    ways: tuple[str, ...]
    item: int
    dies: bool = False

    def covers(self, kind: str, way: str) -> bool:
        """Whether this is one of its cells."""
        return fnmatch(kind, self.kinds) and any(fnmatch(way, pattern) for pattern in self.ways)


KNOWN: tuple[Known, ...] = ()

OTHER_BITS: tuple[Known, ...] = ()  # reproducible, and within rounding, but not to the bit

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


def known(kind: str, way: str) -> Known | None:
    """The entry of a cell, if it is known to fail."""
    return next((entry for entry in KNOWN if entry.covers(kind, way)), None)


def refusal(kind: str, way: str) -> str:
    """The words with which a cell is refused; empty if it runs."""
    for kinds, ways, words in REFUSED:
        if Known(kinds, ways, 0).covers(kind, way):
            return words
    return ""
