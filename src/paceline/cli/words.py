"""Words of a command line as users write them, before typer reads them. It is loaded with every command."""

from __future__ import annotations

from collections.abc import Sequence

NEWEST = "newest"


def with_value(arguments: Sequence[str]) -> list[str]:
    """The arguments of `paceline train`, with a value behind every `--resume` that has none."""
    found: list[str] = []
    for i, word in enumerate(arguments):
        found.append(word)
        if word == "--resume" and (i + 1 == len(arguments) or arguments[i + 1].startswith("-")):
            found.append(NEWEST)
    return found
