"""Where commands print, and how errors look."""

from __future__ import annotations

from rich.console import Console

from paceline.errors import PacelineError


def output() -> Console:
    """Standard output."""
    return Console()


def fail(error: PacelineError) -> None:
    """Print an error to standard error."""
    console = Console(stderr=True)
    console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
