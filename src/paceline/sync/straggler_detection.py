"""Straggler detection: names a rank that computes, reads or communicates more slowly than the others.

Every few steps all ranks exchange how long a micro-batch takes them to read and to compute. A rank that
stands out in two windows in a row is named. Time in communication belongs to no single rank, because a rank
with a slow link and the rank that waits for it take equally long. So when all ranks communicate more slowly
than before, each rank sends some bytes to the next one in a ring: a slow host shows as two slow links.

Invariant: all ranks judge by the same numbers, so they agree on when to probe.
Wire: every `WINDOW_STEPS` steps one all_gather of 32 bytes per rank; a probe adds 3 x 64 KiB and 8 bytes
each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch

from paceline.comm.net import Net
from paceline.data.work import TrainingFeed
from paceline.job.mesh import RankGroup
from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.sync.sync_rule import SyncRule, observe_rounds
from paceline.sync.update import UpdateStep

WINDOW_STEPS = 4  # steps; two windows name a rank within ten steps, wherever in a window it became slow
COMMUNICATION = "communication"
"""The cause of a rank with a slow link."""
_PROBE_BYTES = 1 << 16
_PROBES = 3
_MIN_PROBE_RANKS = 3  # two ranks share one link, so it cannot be assigned to either
_MIN_SECONDS = 1e-4  # shorter times are noise of the clock and the scheduler
_MIN_SHARE = 0.01  # of a step; a rank that is slow in less of it delays nobody
_MIN_WINDOWS = 4  # windows that are needed to know the usual time of communication


class SlowRank(NamedTuple):
    """A rank that stands out.

    Args:
        rank: its rank in the group that was judged.
        cause: "data", "compute" or "communication".
        seconds: its time for a micro-batch, or for a probe.
        usual: the median time of the other ranks.
    """

    rank: int
    cause: str
    seconds: float
    usual: float


def find_slow_rank(
    data: Sequence[float], compute: Sequence[float], factor: float, step_seconds: float = 0.0
) -> SlowRank | None:
    """Return the rank that takes at least `factor` times the median of the others, if there is one; pure.

    Args:
        data, compute: seconds per micro-batch, by rank, for at least two ranks.
        factor: how much slower than the others a rank has to be.
        step_seconds: the usual time of a whole step; on a busy host 1 % of it is noise of the scheduler.
    """
    totals = [a + b for a, b in zip(data, compute, strict=True)]
    rank = max(range(len(totals)), key=totals.__getitem__)
    others = [i for i in range(len(totals)) if i != rank]
    usual = max(_MIN_SECONDS, _MIN_SHARE * step_seconds, median(totals[i] for i in others))
    if totals[rank] < factor * usual:
        return None
    # Reading and computing are compared separately: the cause is the phase with the larger excess.
    excess = {
        name: seconds[rank] - median(seconds[i] for i in others)
        for name, seconds in (("data", data), ("compute", compute))
    }
    return SlowRank(rank, max(excess, key=excess.__getitem__), totals[rank], usual)


def find_slow_link(received: Sequence[float], factor: float) -> SlowRank | None:
    """Return the rank whose two links are both slow, if there is one; pure.

    Args:
        received: seconds in which each rank received from the one before it, in a ring of at least three.
        factor: how much slower than the others a link has to be.
    """
    link_seconds = faster_link_seconds(received)
    rank = max(range(len(link_seconds)), key=link_seconds.__getitem__)
    usual = median(link_seconds[i] for i in range(len(link_seconds)) if i != rank)
    return (
        SlowRank(rank, COMMUNICATION, link_seconds[rank], usual)
        if link_seconds[rank] >= factor * usual
        else None
    )


def faster_link_seconds(received: Sequence[float]) -> list[float]:
    """Return for each rank the seconds of the faster of its two links; pure.

    Args:
        received: as for `find_slow_link`.
    """
    ring = len(received)
    # A slow host slows both of its links; next to one slow link the other is as fast as before.
    faster = [min(received[rank], received[(rank + 1) % ring]) for rank in range(ring)]
    return [max(_MIN_SECONDS, seconds) for seconds in faster]


def probe_links(net: Net, group: RankGroup, device: torch.device) -> list[float]:
    """Return the shortest of a few times in which each rank receives from the one before it; collective."""
    # The shortest of a few, because noise only makes a probe longer.
    seconds = [ring_receive_seconds(net, group, _PROBE_BYTES, device) for _ in range(_PROBES)]
    return [column[0] for column in gather_numbers(net, group, [min(seconds)], device)]


def gather_numbers(
    net: Net, group: RankGroup, numbers: Sequence[float], device: torch.device
) -> list[list[float]]:
    """Return the numbers of all ranks, by rank; collective."""
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    return [part.tolist() for part in net.all_gather(tensor, group, equal=True).wait()]


def ring_receive_seconds(net: Net, group: RankGroup, num_bytes: int, device: torch.device) -> float:
    """Return the seconds to receive `num_bytes` from the rank before while sending as many to the next;
    collective.
    """
    payload, size = torch.zeros(num_bytes, dtype=torch.uint8, device=device), group.size
    # All ranks start together, so a rank that comes late is not measured as a slow link.
    net.barrier(group)
    began = time.perf_counter()
    sending = net.send(payload, group, (group.rank + 1) % size)
    net.receive(torch.empty_like(payload), group, (group.rank - 1) % size).wait()
    seconds = time.perf_counter() - began
    sending.wait()
    return seconds


class StragglerJudge:
    """The decision which rank to name, from one window after another; pure.

    Args:
        factor: how much slower than the others a rank has to be.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last: tuple[int, str] | None = None
        self._named: tuple[int, str] | None = None
        self._waits: list[float] = []

    def is_communication_slow(self, communication: Sequence[float], step_seconds: float = 0.0) -> bool:
        """Return whether even the fastest communication of this window is much slower than it used to be.

        Args:
            communication: seconds in the phase, by rank.
            step_seconds: as for `find_slow_rank`.
        """
        # The rank that arrives last waits least, so the shortest time is that of the links alone.
        shortest = max(_MIN_SECONDS, _MIN_SHARE * step_seconds, min(communication))
        usual = median(self._waits) if len(self._waits) >= _MIN_WINDOWS else None
        if usual is not None and shortest >= self._factor * usual:
            return True
        # Slow windows are not recorded, or they would soon count as usual.
        self._waits = [*self._waits, shortest][-4 * _MIN_WINDOWS :]
        return False

    def observe_window(self, slow: SlowRank | None) -> SlowRank | None:
        """Record the result of a window. Return the rank to name, the second time in a row, and then only
        once.
        """
        key = None if slow is None else (slow.rank, slow.cause)
        is_repeated, self._last = key is not None and key == self._last, key
        # A window without a slow rank lets the same rank be named again later.
        if key is None:
            self._named = None
        if slow is None or not is_repeated or key == self._named:
            return None
        self._named = key
        return slow


class StragglerDetection:
    """A rule that reports the slow ranks of another one.

    Args:
        inner: takes the steps; its rounds have one step.
        num_run: returns how many micro-batches this rank ran in a step.
        factor: how much slower than the others a rank has to be.
        group: the ranks that share the shards of a step.
        net: this rank's collectives.
        note: receives the event "straggler".
    """

    def __init__(
        self,
        inner: SyncRule,
        num_run: Callable[[int], int],
        factor: float,
        *,
        group: RankGroup,
        net: Net,
        note: EventCallback,
    ) -> None:
        self.inner = inner
        self._num_run, self._judge = num_run, StragglerJudge(factor)
        self._factor, self._group, self._net, self._note = factor, group, net, note
        self._window: list[tuple[float, ...]] = []

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        device = runner.sharded_model.device
        return observe_rounds(
            self.inner, lambda stats: self._observe(stats, device), feed, runner, update_step
        )

    def abort(self) -> None:
        self.inner.abort()

    def _observe(self, stats: StepStats, device: torch.device) -> None:
        """Record the times of a step; collective at the end of a window."""
        phases, num_run = stats.phases, max(1, self._num_run(stats.step))
        compute = phases["forward"] + phases["backward"]
        step_seconds = sum(phases.values())
        self._window.append(
            (phases["data"] / num_run, compute / num_run, phases["communication"], step_seconds)
        )
        if (stats.step + 1) % WINDOW_STEPS:
            return
        # The median, so that one slow step in a window names no rank.
        medians = [median(column) for column in zip(*self._window, strict=True)]
        by_rank = gather_numbers(self._net, self._group, medians, device)
        data, compute_by_rank, communication, steps = map(list, zip(*by_rank, strict=True))
        self._window = []
        slow = find_slow_rank(data, compute_by_rank, self._factor, median(steps))
        if self._judge.is_communication_slow(communication, median(steps)) and slow is None:
            slow = self._probe(device)
        named = self._judge.observe_window(slow)
        if named is not None:
            rank = self._group.ranks[named.rank]
            self._note("straggler", {"step": stats.step + 1, **named._asdict(), "rank": rank})

    def _probe(self, device: torch.device) -> SlowRank | None:
        """Probe the links of all ranks; None: no link is slow, or there are too few ranks."""
        if self._group.size < _MIN_PROBE_RANKS:
            return None
        return find_slow_link(probe_links(self._net, self._group, device), self._factor)
