"""Names a rank that is slow, and why: it computes, reads, or is reached more slowly than the others.

Every few steps all ranks say how long a micro-batch takes them to read and to compute. A rank that stands out
in two windows, one after another, is named. Communication is no rank's own: who waits for a slow link and who
has it take equally long. So when all communicate more slowly than before, each rank sends some bytes to the
next one; a slow host has two slow neighbours.

Invariant: all ranks judge from the same numbers, so they agree on when to probe.
Wire: every `WINDOW_STEPS` steps one all_gather of 24 bytes a rank; a probe adds 3 x 64 KiB and 8 bytes a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from statistics import median
from typing import NamedTuple, cast

import torch

from paceline.comm.net import Net
from paceline.data.work import TrainingFeed
from paceline.job.mesh import RankGroup
from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.sync.sync_rule import SyncRule
from paceline.sync.update import UpdateStep

WINDOW_STEPS = 4  # steps; two windows name a rank within ten steps, wherever in a window it became slow
COMMUNICATION = "communication"
"""The cause where a link is slow."""
_PROBE_BYTES = 1 << 16
_PROBES = 3
_MIN_PROBE_RANKS = 3  # of two ranks nobody can tell whose link it is
_MIN_SECONDS = 1e-4
_MIN_WINDOWS = 4  # windows before communication can be slower than usual


class SlowRank(NamedTuple):
    """A rank that stands out.

    Args:
        cause: "data", "compute" or "communication".
        seconds: what it takes for a micro-batch, or for a probe.
        usual: what the others take, their median.
    """

    rank: int
    cause: str
    seconds: float
    usual: float


def find_slow_rank(data: Sequence[float], compute: Sequence[float], factor: float) -> SlowRank | None:
    """The rank that takes `factor` times the median of the others, if there is one; pure.

    Args:
        data, compute: seconds a micro-batch, by rank, at least two.
    """
    both = [a + b for a, b in zip(data, compute, strict=True)]
    rank = max(range(len(both)), key=both.__getitem__)
    others = [i for i in range(len(both)) if i != rank]
    usual = max(_MIN_SECONDS, median(both[i] for i in others))
    if both[rank] < factor * usual:
        return None
    more = {
        name: found[rank] - median(found[i] for i in others)
        for name, found in (("data", data), ("compute", compute))
    }
    return SlowRank(rank, max(more, key=more.__getitem__), both[rank], usual)


def find_slow_link(received: Sequence[float], factor: float) -> SlowRank | None:
    """The rank both of whose links are slow; pure.

    Args:
        received: seconds in which each rank received from the one before it, in a ring of at least three.
    """
    each = faster_link_seconds(received)
    rank = max(range(len(each)), key=each.__getitem__)
    usual = median(each[i] for i in range(len(each)) if i != rank)
    return SlowRank(rank, COMMUNICATION, each[rank], usual) if each[rank] >= factor * usual else None


def faster_link_seconds(received: Sequence[float]) -> list[float]:
    """By rank, the seconds of the faster one of its two links; pure. See `find_slow_link`."""
    ring = len(received)
    faster = [min(received[rank], received[(rank + 1) % ring]) for rank in range(ring)]
    return [max(_MIN_SECONDS, seconds) for seconds in faster]


def probe_links(net: Net, group: RankGroup, device: torch.device) -> list[float]:
    """How long each rank receives from the one before it, the shortest of some; collective."""
    seconds = [ring_receive_seconds(net, group, _PROBE_BYTES, device) for _ in range(_PROBES)]
    return [column[0] for column in gather_numbers(net, group, [min(seconds)], device)]


def gather_numbers(
    net: Net, group: RankGroup, mine: Sequence[float], device: torch.device
) -> list[list[float]]:
    """By rank, the numbers of all; collective."""
    numbers = torch.tensor(mine, dtype=torch.float64, device=device)
    return [part.tolist() for part in net.all_gather(numbers, group, equal=True).wait()]


def ring_receive_seconds(net: Net, group: RankGroup, num_bytes: int, device: torch.device) -> float:
    """How long a rank receives so many bytes from the one before it, while it sends as many to the next."""
    sent, size = torch.zeros(num_bytes, dtype=torch.uint8, device=device), group.size
    net.barrier(group)
    began = time.perf_counter()
    going = net.send(sent, group, (group.rank + 1) % size)
    net.receive(torch.empty_like(sent), group, (group.rank - 1) % size).wait()
    seconds = time.perf_counter() - began
    going.wait()
    return seconds


class StragglerJudge:
    """Who is named, from one window after another; pure.

    Args:
        factor: how much slower than the others a rank has to be.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last: tuple[int, str] | None = None
        self._named: tuple[int, str] | None = None
        self._waits: list[float] = []

    def is_communication_slow(self, communication: Sequence[float]) -> bool:
        """Whether even the rank that communicates least does so much longer than it used to."""
        least = max(_MIN_SECONDS, min(communication))
        usual = median(self._waits) if len(self._waits) >= _MIN_WINDOWS else None
        if usual is not None and least >= self._factor * usual:
            return True
        self._waits = [*self._waits, least][-4 * _MIN_WINDOWS :]
        return False

    def hear(self, found: SlowRank | None) -> SlowRank | None:
        """Take what a window shows. Returns whom to name: the second time in a row, and then once."""
        key = None if found is None else (found.rank, found.cause)
        again, self._last = key is not None and key == self._last, key
        if key is None:
            self._named = None
        if found is None or not again or key == self._named:
            return None
        self._named = key
        return found


class StragglerDetection:
    """A rule whose slow ranks are named.

    Args:
        inner: takes the steps; a round is one.
        ran: how many micro-batches this rank ran in a step.
        factor: see `StragglerJudge`.
        group: the ranks that share the shards of a step.
        note: is told of a slow rank.
    """

    def __init__(
        self,
        inner: SyncRule,
        ran: Callable[[int], int],
        factor: float,
        *,
        group: RankGroup,
        net: Net,
        note: EventCallback,
    ) -> None:
        self.inner = inner
        self._ran, self._judge = ran, StragglerJudge(factor)
        self._factor, self._group, self._net, self._note = factor, group, net, note
        self._found: list[tuple[float, float, float]] = []

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `SyncRule`: a round is one of the inner rule."""
        rounds = cast("Generator[StepStats, None, None]", self.inner.rounds(feed, runner, update_step))
        with closing(rounds):
            for stats in rounds:
                self._look(stats, runner.sharded_model.device)
                yield stats

    def abort(self) -> None:
        """See `SyncRule`."""
        self.inner.abort()

    def _look(self, stats: StepStats, device: torch.device) -> None:
        """Collective where a window ends."""
        phases, ran = stats.phases, max(1, self._ran(stats.step))
        compute = phases["forward"] + phases["backward"]
        self._found.append((phases["data"] / ran, compute / ran, phases["communication"]))
        if (stats.step + 1) % WINDOW_STEPS:
            return
        mine = [median(column) for column in zip(*self._found, strict=True)]
        of_ranks = gather_numbers(self._net, self._group, mine, device)
        data, compute_of, communication = map(list, zip(*of_ranks, strict=True))
        self._found = []
        found = find_slow_rank(data, compute_of, self._factor)
        if self._judge.is_communication_slow(communication) and found is None:
            found = self._probe(device)
        named = self._judge.hear(found)
        if named is not None:
            rank = self._group.ranks[named.rank]
            self._note("straggler", {"step": stats.step + 1, **named._asdict(), "rank": rank})

    def _probe(self, device: torch.device) -> SlowRank | None:
        """How long each rank receives from the one before it; the shortest of some."""
        if self._group.size < _MIN_PROBE_RANKS:
            return None
        return find_slow_link(probe_links(self._net, self._group, device), self._factor)
