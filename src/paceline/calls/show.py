"""Show the lines of a job where the caller looks: on a terminal, in a file, or below a cell of a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PROGRESS = "step "


@contextmanager
def shown_on(console: Console | None) -> Iterator[Callable[[str], object]]:
    """What takes one line, or a text of several, at a time."""
    if console is not None:
        yield lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
        return
    lines = Lines(_write, in_place="ipykernel" in sys.modules)
    try:
        yield lines.show
    finally:
        lines.close()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Lines:
    """Lines one below the other.

    Args:
        write: takes text.
        in_place: a line of progress takes the place of the one before it, as notebooks understand "\\r".
    """

    def __init__(self, write: Callable[[str], None], *, in_place: bool) -> None:
        self._write, self._in_place, self._standing = write, in_place, ""

    def show(self, text: str) -> None:
        """Show a text that ends with its line."""
        if self._in_place and text.startswith(_PROGRESS):
            line = text.rstrip("\n")
            self._write(("\r" if self._standing else "") + line.ljust(len(self._standing)))
            self._standing = line
            return
        self.close()
        self._write(text)

    def close(self) -> None:
        """Leave the last line of progress standing."""
        if self._standing:
            self._write("\n")
            self._standing = ""
