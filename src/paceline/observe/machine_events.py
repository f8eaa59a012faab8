"""Fields of the events that say what was left to the machine, and why it is so; see `schema`."""

from __future__ import annotations

PRECISION = {"compute": "str: chosen by the machine", "reason": "str: why, with what was measured"}
THREADS = {"number": "int: intra-op threads of each process of rank 0's host", "reason": "str: why"}
OPTIMIZER = {
    "name": "str: as in the recipe",
    "fused": "bool: one kernel updates many values",
    "reason": "str: why, or why not",
}
COMPILE = {
    "seconds": "float: of the first step, beyond those of a later one",
    "steps": "int: that many later steps take as long",
}
