"""What a job in the lab has found: one of its processes prints it on a line, behind a mark."""

from __future__ import annotations

import json
from typing import Any

from paceline.lab import LabOutcome


def found_in(outcome: LabOutcome, mark: str) -> dict[str, Any]:
    """The record of the first such line.

    Raises:
        RuntimeError: the job failed, or printed none; with all that it printed.
    """
    lines = [line for host in outcome.output.values() for line in host]
    marked = [line.partition(mark)[2] for line in lines if mark in line]
    if outcome.exit_code or not marked:
        raise RuntimeError("\n".join(lines))
    found: dict[str, Any] = json.loads(marked[0])
    return found
