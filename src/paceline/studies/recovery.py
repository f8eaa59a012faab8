"""What it took to go on after a worker was killed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FILE = "recovery.json"


@dataclass(frozen=True)
class Recovery:
    """One kill.

    Args:
        how: "goes on": the job took no notice; "resumed": it ended, and was started again from its newest
            checkpoint; "lost": it ended, and no checkpoint was there.
        seconds: from the kill to the first step beyond those that were done at the kill; None: it was lost.
        steps_again: steps that were done a second time.
    """

    how: Literal["goes on", "resumed", "lost"]
    seconds: float | None
    steps_again: int

    def keep(self, folder: Path) -> None:
        """Write it into a folder."""
        (folder / FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_recovery(folder: Path) -> Recovery | None:
    """The inverse of `Recovery.keep`; None: nothing was measured there."""
    path = folder / FILE
    return Recovery(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
