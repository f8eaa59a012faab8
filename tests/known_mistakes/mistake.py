"""What is written down of a mistake: for the tests, and for the page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Story:
    """A mistake of the field.

    Args:
        title: what is wrong, in one line.
        seen: where people made it.
        symptom: what they saw.
        cause: why.
        wrong, right: the line.
    """

    title: str
    seen: str
    symptom: str
    cause: str
    wrong: str
    right: str
