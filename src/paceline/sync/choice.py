"""`sync=auto:every-step,diloco:8`: a rule that was allowed, where the link is so slow that it pays.

A run begins with every-step. Its first steps are timed as they are, then an exchange by itself: all that a
gradient is, and a tally, summed while nobody computes, as replicas that train alone do it; and, where gossip
is allowed, which waits for no sum, a message of all parameters from each rank to the next. From that follows
what a step takes under every rule; the run goes on under the first of those allowed that is nearly as fast as
the best.

Invariant: all ranks decide from the same numbers, by a pure function, after the same step. No step is lost:
those that were timed are steps of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import NamedTuple, cast

import torch
from torch import Tensor

from paceline.comm import Net, Reduction
from paceline.comm.net import device_of
from paceline.data import Feed
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Stats
from paceline.slot import Slot
from paceline.sync.health import Note
from paceline.sync.rule import Rule
from paceline.sync.step_seconds import GAIN, GOSSIP, Found
from paceline.sync.straggler import seconds_from_before
from paceline.sync.update import UpdateStep

WARM, TIMED = 2, 6  # steps: the first ones allocate and connect
_EXCHANGES = 2


class SyncChoice(NamedTuple):
    """A rule, and why."""

    rule: str
    reason: str

    def __str__(self) -> str:
        return f"sync: {self.rule}, as {self.reason}; sync=RULE in the strategy chooses another"


def choose(allowed: Sequence[str], found: Found) -> SyncChoice:
    """The first rule that is nearly as fast as the fastest; pure."""
    best = min(found.seconds(rule) for rule in allowed)
    chosen = next(rule for rule in allowed if found.seconds(rule) <= GAIN * best)
    times = ", ".join(f"{rule} {_spell(found.seconds(rule))}" for rule in allowed)
    pays = ", ".join(_spell_limit(found, rule) for rule in allowed[1:])
    message = f", a message {_spell(found.message_seconds)}" if found.message_seconds else ""
    return SyncChoice(
        chosen,
        f"a step takes {times} (compute {_spell(found.compute_seconds)}, an exchange"
        f" {_spell(found.exchange_seconds)}{message}); a rule pays below about {pays}",
    )


class Measured:
    """Every-step, until it is known which rule pays.

    Args:
        inner: takes the steps; a round is one.
        allowed: the rules, every-step first.
        reducer: of the inner rule.
        tensors: what it sums, by slot.
        group: the ranks that sum.
        note: is told what was chosen, which ends the phase.
        warn: is told the same, in words.
    Wire: once, after some steps: two sums of all gradients and of a tally, and 64 bytes a rank; where gossip
        is allowed two messages of all parameters to the next rank as well.
    """

    def __init__(
        self,
        inner: Rule,
        allowed: Sequence[str],
        reducer: Reduction,
        tensors: Mapping[Slot, Tensor],
        *,
        group: Group,
        net: Net,
        note: Note,
        warn: Callable[[str], None],
    ) -> None:
        self.inner, self._allowed = inner, tuple(allowed)
        self._reducer, self._tensors = reducer, tensors
        self._group, self._net, self._note, self._warn = group, net, note, warn
        self._taken: list[tuple[float, float, float]] = []
        self._decided = False

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round is one of the inner rule."""
        rounds = cast("Generator[Stats, None, None]", self.inner.rounds(feed, placed, update_step))
        with closing(rounds):
            for stats in rounds:
                if not self._decided:
                    self._look(stats, feed.pause_after(0), placed.holding.device)
                yield stats

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()

    def _look(self, stats: Stats, round_steps: int, device: torch.device) -> None:
        """Take the times of a step; collective once there are enough."""
        phases = stats.phases
        self._taken.append((stats.seconds, stats.seconds - phases["communication"], phases["backward"]))
        if len(self._taken) < WARM + TIMED:
            return
        mine = [median(column) for column in zip(*self._taken[WARM:], strict=True)]
        before = self._net.ledger.sent_bytes
        mine.append(min(self._exchange() for _ in range(_EXCHANGES)))
        mine.append((self._net.ledger.sent_bytes - before) / _EXCHANGES)
        mine += [*self._messages(device), float(round_steps)]
        numbers = torch.tensor(mine, dtype=torch.float64, device=device)
        found = Found(*self._net.all_reduce(numbers, self._group, "max").wait().tolist())
        choice, self._decided = choose(self._allowed, found), True
        self._warn(str(choice))
        self._note("sync", {"step": stats.step + 1, **record(self._allowed, choice, found)})

    def _messages(self, device: torch.device) -> tuple[float, float]:
        """Seconds of a message of all parameters, and of a byte, to the next rank; where one may be sent."""
        if all(rule.partition(":")[0] != GOSSIP for rule in self._allowed):
            return 0.0, 0.0
        sizes = sum(x.nbytes for x in self._tensors.values()), 1
        whole, one = (
            min(seconds_from_before(self._net, self._group, size, device) for _ in range(_EXCHANGES))
            for size in sizes
        )
        return whole, min(one, whole)

    def _exchange(self) -> float:
        """Seconds until all is summed, and a tally with it, from when all are ready; nothing is used."""
        counts = torch.zeros(4 + len(self._tensors), dtype=torch.float64, device=device_of(self._group))
        self._net.barrier(self._group)
        began = time.perf_counter()
        self._reducer.begin()
        for slot in reversed([*self._tensors]):
            self._reducer.ready(slot, self._tensors[slot].detach())
        self._reducer.close()
        tally = self._net.all_reduce(counts, self._group)
        self._reducer.finish()
        tally.wait()
        seconds = time.perf_counter() - began
        self._reducer.abort()
        return seconds


def record(allowed: Sequence[str], choice: SyncChoice, found: Found) -> dict[str, object]:
    """What the run folder keeps of a choice."""
    limits = {rule: found.break_even(rule) for rule in allowed[1:]}
    return {
        "sync": choice.rule,
        "reason": choice.reason,
        "compute_seconds": found.compute_seconds,
        "exchange_seconds": found.exchange_seconds,
        "message_seconds": found.message_seconds,
        "bits_per_second": found.bits_per_second(found.exchange_seconds),
        "step_seconds": {rule: found.seconds(rule) for rule in allowed},
        "break_even": {rule: found.bits_per_second(limit) for rule, limit in limits.items()},
    }


def _spell(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _spell_limit(found: Found, rule: str) -> str:
    limit = found.bits_per_second(found.break_even(rule))
    return f"{limit / 1e6:.3g} Mbit/s ({rule})" if limit else f"no rate ({rule})"
