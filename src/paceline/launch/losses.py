"""Workers that a job can lose: which failures do not end it, and what is said of them.

Invariant: a failure is borne only while the servers, whose workers the others are, live and are trained with
(a run may begin under another rule); in the end a job is what they made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.launch.judge import failed, judge
from paceline.launch.process import Running
from paceline.launch.stop import Stop
from paceline.launch.watch import phase_of
from paceline.phase import TRAINING

_UNKILLABLE_SECONDS = 5.0


class Losses:
    """The workers that a node has lost.

    Args:
        servers: see `Job`.
        tell: shows a line to the user.
        lose: is given the rank of every worker that is lost; the store knows from then on that it is gone.
    """

    def __init__(self, servers: int, tell: Callable[[str], object], lose: Callable[[int], object]) -> None:
        self._servers, self._tell, self._lose = servers, tell, lose
        self._lost: list[Running] = []

    def bears(self, one: Running, stop: Stop) -> bool:
        """Whether the job goes on although this worker has ended; the user is told."""
        if not (self._may_lose(one, stop) and failed(one, stop)):
            return False
        failure = judge(one, stop)
        headline = "has ended" if failure is None else failure.headline
        self._lost.append(one)
        self._lose(one.worker.global_rank)
        self._tell(f"rank {one.worker.global_rank} {headline}; the server goes on without it where it can\n")
        return True

    def gives_up(self, one: Running, stop: Stop) -> bool:
        """End a worker that will not go on by itself; whether the job goes on without it."""
        if not self._may_lose(one, stop):
            return False
        one.kill(_UNKILLABLE_SECONDS)
        return self.bears(one, stop)

    def those_that_count(self, running: Sequence[Running]) -> Sequence[Running]:
        """Those by which the job is judged: all, if a server has not ended well."""
        servers = [one for one in running if one.worker.global_rank < max(1, self._servers)]
        if not all(one.process.returncode in (0, 143) for one in servers):
            return running
        return [one for one in running if one not in self._lost]

    def _may_lose(self, one: Running, stop: Stop) -> bool:
        asked = stop.terminated or stop.signal is not None
        is_worker = one.worker.global_rank >= self._servers > 0
        return stop.begun and not asked and is_worker and not _is_needed(one)


def _is_needed(one: Running) -> bool:
    """Whether it trains under a rule that needs all."""
    phase = phase_of(one)
    return phase is not None and phase.what == TRAINING
