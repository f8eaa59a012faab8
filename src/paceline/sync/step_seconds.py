"""What a step takes under a rule, from what was measured of one, of an exchange and of a message. Pure.

Sums under every-step go on beside backward; replicas that train alone wait for theirs; who gossips waits for
messages only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

GAIN = 1.1
"""A rule is chosen where it makes a step this many times as fast as those that were named before it."""
_HIDDEN = 0.05  # of an exchange: where a step is longer than its compute by less, all of it was hidden


class Found(NamedTuple):
    """What was measured, equal on every rank; each on the slowest.

    Args:
        step_seconds: of every-step.
        compute_seconds: of a step, without what it waits for.
        backward_seconds: of these, those in which sums can go on.
        exchange_seconds: of all gradients, while nobody computes.
        exchange_bytes: that a rank sends in it.
        message_seconds: of all parameters from each rank to the next; 0: nobody would send them.
        latency_seconds: of these, what one byte takes as well.
        round_steps: steps of a round that ends where the feed wants a pause.
    """

    step_seconds: float
    compute_seconds: float
    backward_seconds: float
    exchange_seconds: float
    exchange_bytes: float
    message_seconds: float = 0.0
    latency_seconds: float = 0.0
    round_steps: float = 1.0

    def seconds(self, rule: str) -> float:
        """A step under a rule, over a whole round of it."""
        word, _, number = rule.partition(":")
        return _SECONDS.get(word, _alone)(self, float(number or 0))

    @property
    def hidden_seconds(self) -> float:
        """Of an exchange, what every-step hides behind backward; where all of it is hidden, what it could."""
        waited = max(0.0, self.step_seconds - self.compute_seconds)
        if waited <= _HIDDEN * self.exchange_seconds:
            return max(self.exchange_seconds, self.backward_seconds)
        return max(0.0, self.exchange_seconds - waited)

    def break_even(self, rule: str) -> float:
        """Seconds of an exchange above which a rule is chosen over every-step; infinite: it never is."""
        coarse = self._first_that_pays(rule, 1e-5, 1.1, 242)
        if coarse == math.inf:
            return coarse
        return self._first_that_pays(rule, coarse / 1.1, 1.005, 21) * self.exchange_seconds

    def _first_that_pays(self, rule: str, begin: float, ratio: float, count: int) -> float:
        """The first of some factors, of links that are slower by them, at which a rule pays; or infinite."""
        factors = (begin * ratio**number for number in range(count))
        slower = ((factor, self._on_a_link(factor)) for factor in factors)
        return next((f for f, at in slower if at.step_seconds >= GAIN * at.seconds(rule)), math.inf)

    def _on_a_link(self, factor: float) -> Found:
        """What would be found where all that travels takes so many times as long."""
        exchange = factor * self.exchange_seconds
        return self._replace(
            step_seconds=self.compute_seconds + max(0.0, exchange - self.hidden_seconds),
            exchange_seconds=exchange,
            message_seconds=factor * self.message_seconds,
            latency_seconds=factor * self.latency_seconds,
        )

    def bits_per_second(self, exchange_seconds: float) -> float:
        """What a link carries over which an exchange takes so long."""
        return 8 * self.exchange_bytes / exchange_seconds


def _alone(found: Found, steps: float) -> float:
    """Replicas that train alone for so many steps."""
    return found.compute_seconds + found.exchange_seconds / steps


def _in_pairs(found: Found, bound: float) -> float:
    """Gossip: a message may be on its way while `bound` more steps begin; and all meet where a round ends.

    Messages follow each other on the link, where only their bytes are in each other's way. Where a round ends
    all say so, wait until it was heard, sum as replicas do, and compare how late halves were.
    """
    compute, message = found.compute_seconds, found.message_seconds
    clock = max(compute, message - found.latency_seconds, (compute + message) / (bound + 1))
    meeting = found.exchange_seconds + message + 2 * found.latency_seconds
    return clock + meeting / found.round_steps


GOSSIP = "gossip"
_SECONDS: Mapping[str, Callable[[Found, float], float]] = {
    "every-step": lambda found, _: found.step_seconds,
    GOSSIP: _in_pairs,
}
"""By word; of every other rule, whose replicas sum where they meet, `_alone`."""
