"""Show the lines of the workers that write to files, each with its rank in front, but those of the first.

Invariant: a line is shown once and whole, and reading never waits for a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.launch.render import Worker


class Follow:
    """What the log files have grown by since the last look.

    Args:
        workers: those with a log file are followed, from what it holds now.
        say: is given one line at a time, with its end.
    """

    def __init__(self, workers: Sequence[Worker], say: Callable[[str], object]) -> None:
        self._files: dict[int, Path] = {
            worker.global_rank: worker.log_file for worker in workers if worker.log_file is not None
        }
        self._heads = {w.global_rank: f"[rank {w.global_rank}] " if w.local_rank else "" for w in workers}
        self._offsets = {rank: path.stat().st_size for rank, path in self._files.items()}
        self._say = say

    def show(self) -> None:
        """Show all whole lines that are new."""
        for rank, path in self._files.items():
            with path.open("rb") as stream:
                stream.seek(self._offsets[rank])
                whole, newline, _ = stream.read().rpartition(b"\n")
            self._offsets[rank] += len(whole) + len(newline)
            for line in whole.decode(errors="replace").split("\n") if newline else ():
                self._say(f"{self._heads[rank]}{line}\n")
