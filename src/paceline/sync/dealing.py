"""What each of the replicas that train alone runs of a batch: a part that stays, or one that follows speed.

A rank that is slow runs fewer shards, and nobody waits for another to learn that. Every few steps (a window)
a rank tells how long a shard takes it, through what its rule has anyway: memory in common, or the next
message to a peer. The rule bounds how far ranks are apart; so `lag` steps after a window all have heard of
all, and each plans by itself, from the same numbers and for the same step.

A rank with n of the N samples of a batch makes an update of weight n P / N, where P ranks make one each. So
the weighted gradients of a batch add up to P times that of the whole batch, as with equal parts, whatever the
shares. SGD, also with momentum, is linear in the gradient, so its gradients are multiplied. Other optimizers
divide their gradient by its own size, and would not notice: they multiply the rate of that step instead.

Invariant: all ranks change their shares before the same step; at the end of a round every sample of its
batches was taken once, by one rank, and applied or dropped.
Not done here: samples that count different numbers of items weigh alike in sum, not one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol, cast

import torch

from paceline.data import LoadedBatch, LockstepWork, Work
from paceline.errors import CommunicationError
from paceline.sync.balance import LEAST_GAIN, LEAST_SECONDS, plan_shares, slowest
from paceline.sync.health import Note
from paceline.sync.update import UpdateStep, Updating, placed_before

WINDOW = 4  # steps that one measurement is of, at least


class Taken(Iterator[LoadedBatch]):
    """A stream, and how many samples were taken from it."""

    def __init__(self, stream: Iterator[LoadedBatch]) -> None:
        self._stream, self.samples = stream, 0

    def __next__(self) -> LoadedBatch:
        loaded = next(self._stream)
        self.samples += len(loaded.micro_batch.indices)
        return loaded


class Even:
    """Every rank has the part of every batch that its work gives it."""

    def weighted(self, update_step: UpdateStep) -> UpdateStep:
        """How this rank makes its updates."""
        return update_step

    def is_ready(self, step: int) -> bool:
        """Whether it is known here who does what in a step."""
        return True

    def deal(self, work: Work, step: int) -> Work:
        """What this rank does from a step on, the next one or the same again."""
        return work

    def ran(self, seconds: float, samples: int, *, applied: bool) -> None:
        """This rank has run its part of that step, in so many seconds."""

    def sums(self) -> Mapping[str, float]:
        """Of this round, to be added up over ranks."""
        return {}

    def settle(self, step: int, sums: Mapping[str, float]) -> None:
        """A round has ended before a step: these are the sums of all ranks."""


class Notices(Protocol):
    """How ranks tell each other, without waiting, what a shard takes them."""

    def tell(self, window: int, seconds: float) -> None:
        """Of this rank."""

    def told(self, window: int) -> Sequence[float] | None:
        """By rank; None: not all are known here."""


class Dealt(Even):
    """Shares that follow speed.

    Args:
        shares: to begin with, by rank.
        rank: this one.
        notices: of the same ranks.
        lag: steps after which all know a window: what a rank tells where it ends has come when a rank begins
            a step that many later.
        window: steps that are measured at a time.
        divides: an update is of the mean of its samples; or else of their sum, which needs no weight.
        note: is told of new shares, and of samples where a round ends.
    Wire: nothing of its own.
    """

    def __init__(
        self,
        shares: Sequence[int],
        rank: int,
        notices: Notices,
        *,
        lag: int,
        window: int = WINDOW,
        divides: bool = True,
        note: Note,
    ) -> None:
        self.shares, self._rank, self._notices, self._note = tuple(shares), rank, notices, note
        self._lag, self._window, self._divides = lag, window, divides
        self._step, self._first = -2, 0
        self._found: list[float] = []
        self._whole: Work | None = None
        self._mine: LockstepWork | None = None
        self._rates: list[Any] = []
        self._due = self._taken = self._dropped = 0
        self._totals = {"taken": 0, "applied": 0, "dropped": 0}

    @property
    def weight(self) -> float:
        """Of this rank's update in the present step."""
        assert self._mine is not None, "nothing was dealt"
        if not self._divides:
            return 1.0
        own, whole = self._mine.own_samples(self._step), self._mine.num_samples(self._step)
        return own * len(self.shares) / whole

    def weighted(self, update_step: UpdateStep) -> UpdateStep:
        """See `Even`: two parts more, around that in which the optimizer steps."""
        parts = placed_before(update_step.parts, "step", "weigh", self._weigh)
        return replace(update_step, parts=placed_before(parts, "gather", "unweigh", self._unweigh))

    def is_ready(self, step: int) -> bool:
        """See `Even`; false only until what is there has become visible."""
        window = self._window_of(step)
        return window is None or self._notices.told(window) is not None

    def deal(self, work: Work, step: int) -> Work:
        """See `Even`.

        Raises:
            CommunicationError: a rank should have told, and has not.
        """
        if step not in (self._step, self._step + 1):  # another state was loaded: what is measured begins anew
            self._first, self._found = step // self._window, []
        self._step = step
        window = self._window_of(step)
        shares = self.shares if window is None else self._plan(window, step)
        if self._mine is None or work is not self._whole or shares != self.shares:
            self.shares, self._whole = shares, work
            self._mine = cast("LockstepWork", work).dealt(shares)
        return self._mine

    def ran(self, seconds: float, samples: int, *, applied: bool) -> None:
        """See `Even`."""
        assert self._mine is not None, "nothing was dealt"
        self._due += self._mine.num_samples(self._step)
        self._taken += samples
        self._dropped += 0 if applied else samples
        self._found.append(seconds / max(1, self._mine.num_micro_batches(self._step)))
        if (self._step + 1) % self._window == 0:
            self._notices.tell(self._step // self._window, max(median(self._found), LEAST_SECONDS))
            self._found = []

    def sums(self) -> Mapping[str, float]:
        """See `Even`: samples; whole numbers, which float64 adds exactly."""
        return {"taken": self._taken, "dropped": self._dropped}

    def settle(self, step: int, sums: Mapping[str, float]) -> None:
        """See `Even`.

        Raises:
            CommunicationError: ranks have not taken every sample once.
        """
        taken, dropped = int(sums["taken"]), int(sums["dropped"])
        if taken != self._due:
            raise _mistake(f"before step {step} ranks have taken {taken} samples of {self._due}")
        self._due = self._taken = self._dropped = 0
        for name, count in (("taken", taken), ("applied", taken - dropped), ("dropped", dropped)):
            self._totals[name] += count
        self._note("samples", {"step": step, **self._totals})

    def _window_of(self, step: int) -> int | None:
        """The window from which shares are planned before a step; None: they stay."""
        ended, rest = divmod(step - self._lag, self._window)
        return ended - 1 if rest == 0 and ended - 1 >= self._first else None

    def _plan(self, window: int, step: int) -> tuple[int, ...]:
        seconds = self._notices.told(window)
        if seconds is None:
            raise _mistake(f"not all ranks have told by step {step} how fast they were in window {window}")
        shares = plan_shares(seconds, sum(self.shares))
        if slowest(shares, seconds) >= (1 - LEAST_GAIN) * slowest(self.shares, seconds):
            return self.shares
        self._note("shares", {"step": step, "shares": [*shares], "seconds": [*seconds]})
        return shares

    def _weigh(self, record: Updating) -> None:
        optimizer = record.state.optimizer
        self._rates = [group.get("lr") for group in optimizer.param_groups]
        if isinstance(optimizer, torch.optim.SGD) or None in self._rates:
            record.multiplier *= self.weight
            return
        for group in optimizer.param_groups:
            group["lr"] *= self.weight

    def _unweigh(self, record: Updating) -> None:
        for group, rate in zip(record.state.optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def _mistake(what: str) -> CommunicationError:
    return CommunicationError(
        what, next_step="this is a mistake of the rule, not of the recipe: please report it"
    )
