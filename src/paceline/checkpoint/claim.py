"""Make a folder of checkpoints a run's own, on a disk that may be full at that moment."""

from __future__ import annotations

from paceline.checkpoint.files import Files
from paceline.checkpoint.part import Patience, insist
from paceline.checkpoint.shelf import Shelf


def claim(files: Files, patience: Patience) -> Shelf:
    """Look at a folder, and claim it; see `Shelf.claim`.

    Raises:
        CheckpointError: it cannot be read or written.
    """
    found: list[Shelf] = []
    insist(lambda: found.append(Shelf.look(files).claim()), files, [], patience)
    return found[-1]
