"""Gossip: replicas update when each is ready, and give halves of what they have to each other, in pairs.

No server, no memory in common, and nobody waits for all. A replica has a sum x of parameters and a weight w
(1 to begin with), and computes with x / w. After its step of clock k it adds what the step has moved to x,
halves x and w, and sends the other half to the peer that the clock names. What others have sent at clocks
before is added when it is there; before clock k begins, all that was sent before clock k - S has come.

Invariant: nothing is lost or counted twice: over replicas and messages the weights add up to their number,
and the sums to what all steps have moved. What is added is at most S clocks late. At the end of a round all
has come, and all replicas go on from the mean; optimizers stay apart.
A half may carry how fast its sender is, so that shares follow speed (`dealing`): every rank meets every other
in a turn of the pairs, and what was sent has come S clocks later.
Not as in the papers: both ranks of a pair send, pairs take turns as in a tournament, any optimizer moves x.
Source: Assran, Loizou, Ballas and Rabbat 2019, Stochastic Gradient Push, ICML, arXiv:1811.10792, Algorithm 2
(overlap SGP); the pairs of Lian et al. 2018, Asynchronous Decentralized Parallel SGD, arXiv:1710.06952.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Net, Tally
from paceline.comm.channel import Channel, Message
from paceline.comm.many import sum_all
from paceline.data import Feed
from paceline.errors import DeadlineError
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Phases, Stats
from paceline.sync.alone import Alone, Stretch, Take
from paceline.sync.dealing import Even
from paceline.sync.every_step import EveryStep
from paceline.sync.memory import Asked, RuleMemory
from paceline.sync.notices import Carried
from paceline.sync.pairs import Mailbox, Purse, partner
from paceline.sync.update import UpdateStep


def memory(asked: Asked) -> RuleMemory:
    """What the rule keeps: a sum, what the parameters were before a step, and how they have moved after it.

    Of messages, halves that nobody has taken and halves that came early, as many as one may be late, and one
    that is being read.
    """
    weights, bound = asked.sizes.computes, int(asked.recipe.strategy.sync.partition(":")[2])
    halves = 2 * (bound + 1) + 1 if asked.recipe.strategy.degrees["replica"] > 1 else 0
    return RuleMemory(state=weights, messages=halves * weights, running=weights, agreement=weights)


class Gossip:
    """The rule.

    Args:
        inner: the step of one replica.
        bound: S, at least 0: how many clocks late what others have sent may be.
        params: what this rank computes with.
        channel: to all other ranks.
        replicas: all ranks, each of which is one.
        stop_requested: see `EveryStep`.
        notices: travel with halves; None: shares stay.
        shares: which part of a batch this rank runs.
    Wire: a message of the parameters a step; at the end of a round a few bytes to every other rank, and an
        all_reduce of the parameters (16 MiB at a time) and of the tally.
    """

    def __init__(
        self,
        inner: EveryStep,
        bound: int,
        params: Sequence[Tensor],
        channel: Channel,
        *,
        replicas: Group,
        net: Net,
        phases: Phases,
        stop_requested: Callable[[], bool],
        notices: Carried | None = None,
        shares: Even | None = None,
    ) -> None:
        self.inner, self.purse, self._notices = inner, Purse(params), notices
        self.mailbox = Mailbox(replicas.rank, replicas.size, bound)
        self._alone = Alone(inner, replicas=replicas, net=net, phases=phases, shares=shares)
        self._channel, self._replicas, self._net, self._phases = channel, replicas, net, phases
        self._stop_requested = stop_requested
        self._ages, self._early = list[int](), dict[int, Message]()
        self._come = dict[int, int]()  # how far ranks have come that are about to end the round

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round ends where the feed wants a pause, or a rank was asked to stop."""
        return self._alone.rounds(
            feed, placed, update_step, begin=self._begin, step=self._step, meet=self._meet
        )

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()

    def _begin(self, feed: Feed, step: int) -> int:
        self._ages.clear()
        self._come.clear()
        self.purse.fill()
        self.mailbox.begin(step)
        return feed.pause_after(step)

    def _step(self, stretch: Stretch, take: Take) -> None:
        """One clock: what has come, a step, a half to the peer; and where the round ends, once it is due."""
        clock = stretch.step
        self._phases.begin("communication")
        may_begin = self._hear(stretch)
        if may_begin:
            before = self.purse.spend()
            take()
            self.purse.move(before)
        self._phases.begin("communication")
        if may_begin:
            self._give(clock)
        is_due = stretch.step == stretch.end or self._stop_requested() or self._ends_early(stretch)
        if is_due and not stretch.is_agreed:
            self._agree_on_end(stretch)

    def _ends_early(self, stretch: Stretch) -> bool:
        """Whether a rank has said that it is asked to stop, and all have not agreed yet."""
        return not stretch.is_agreed and any(step < stretch.end for step in self._come.values())

    def _agree_on_end(self, stretch: Stretch) -> None:
        """Say how far this rank has come, and hear it of all; they end where the farthest is."""
        me = self._replicas.ranks[self._replicas.rank]
        self._come[me] = stretch.step
        for rank in self._replicas.ranks:
            if rank != me:
                said = Message("end", {"step": stretch.step})
                self._channel.send(rank, said, self._net.deadline_seconds)
        while len(self._come) < self._replicas.size:
            self._take_in(self._channel.receive(self._net.deadline_seconds))
        stretch.end_with(self._come.values())

    def _give(self, clock: int) -> None:
        other = partner(self._replicas.rank, clock, self._replicas.size)
        if other is None:
            return
        self.purse.halve()
        fields: dict[str, Any] = {"clock": clock, "weight": self.purse.weight}
        if self._notices is not None:
            fields |= self._notices.say()
        self._channel.send(
            self._replicas.ranks[other], Message("half", fields, self.purse.sums), self._net.deadline_seconds
        )

    def _hear(self, stretch: Stretch, late: int | None = None) -> bool:
        """Take what is there, and wait for what may not be later; false: the round is about to end instead.

        Raises:
            CommunicationError: a peer is gone, or says nothing for the deadline.
        """
        self.mailbox.reach(stretch.step)
        for made in sorted(self._early):
            if not self.mailbox.is_early(made):
                self._add(self._early.pop(made))
        while self._replicas.size > 1:
            waits = self.mailbox.is_due(late)
            if waits and self._ends_early(stretch):
                return False
            try:
                self._take_in(self._channel.receive(self._net.deadline_seconds if waits else 0.0))
            except DeadlineError:
                if waits:
                    raise
                break
        return True

    def _take_in(self, message: Message) -> None:
        """A half; or a rank says how far it has come."""
        if message.kind == "end":
            self._come[message.sender] = int(message.fields["step"])
            return
        if self._notices is not None:
            self._notices.hear(self._replicas.ranks.index(message.sender), message.fields)
        self._add(message)

    def _add(self, message: Message) -> None:
        """Add a half; one of a clock that is not made here yet waits for it."""
        made = int(message.fields["clock"])
        if self.mailbox.is_early(made):
            self._early[made] = message
            return
        self._ages.append(self.mailbox.take(made))
        self.purse.add(message.tensors, message.fields["weight"])

    @torch.no_grad()
    def _meet(self, stretch: Stretch, placed: Placed) -> tuple[Tally, Mapping[str, float]]:
        """All that is under way comes in, and all go on from the mean."""
        self._channel.flush(self._net.deadline_seconds)
        self._hear(stretch, late=0)
        tally, own = self._alone.agree(stretch, placed, ages=sum(self._ages), heard=len(self._ages))
        oldest = torch.tensor(
            [float(max(self._ages, default=0))], dtype=torch.float64, device=placed.holding.device
        )
        latest = self._net.all_reduce(oldest, self._replicas, "max")
        sum_all(self.purse.sums, self._net, self._replicas)
        self.purse.weight = float(self._replicas.size)
        self.purse.spend()
        return tally, {
            "staleness": own["ages"] / max(1.0, own["heard"]),
            "staleness_max": float(latest.wait()),
        }
