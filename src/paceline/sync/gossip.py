"""Gossip: replicas update when each is ready, and give halves of what they have to each other, in pairs.

No server, no memory in common, and nobody waits for all. A replica has a sum x of parameters and a weight w
(1 to begin with), and computes with x / w. After its step of clock k it adds what the step has moved to x,
halves x and w, and sends the other half to the peer that the clock names. What others have sent at clocks
before is added when it is there; before clock k begins, all that was sent before clock k - S has come.

Invariant: nothing is lost or counted twice: over replicas and messages the weights add up to their number,
and the sums to what all steps have moved. What is added is at most S clocks late. At the end of a round all
has come, and all replicas go on from the mean; optimizers stay apart.
Not as in the papers: both ranks of a pair send, pairs take turns as in a tournament, any optimizer moves x.
Source: Assran, Loizou, Ballas and Rabbat 2019, Stochastic Gradient Push, ICML, arXiv:1811.10792, Algorithm 2
(overlap SGP); the pairs of Lian et al. 2018, Asynchronous Decentralized Parallel SGD, arXiv:1710.06952.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.comm import Net, Tally
from paceline.comm.channel import Channel, Message
from paceline.data import Feed, Stream
from paceline.errors import DeadlineError
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Phases, Stats
from paceline.state import TrainState
from paceline.sync.every_step import EveryStep
from paceline.sync.local import add_tallies, counted
from paceline.sync.pairs import Mailbox, Purse, partner
from paceline.sync.rule import step_stats
from paceline.sync.update import Update, UpdateStep


@dataclass
class _Half:
    """A round under way.

    Args:
        first: its first step; negative: none is under way.
        end: the step before which it ends.
        buffers: what it started from.
        taken: its steps so far.
        ages: how many messages were so many clocks late.
    """

    first: int = -1
    end: int = -1
    buffers: list[Tensor] = field(default_factory=list)
    taken: list[tuple[Tally, Update]] = field(default_factory=list)
    ages: dict[int, int] = field(default_factory=lambda: defaultdict(int))


class Gossip:
    """The rule.

    Args:
        inner: the step of one replica.
        bound: S, at least 0: how many clocks late what others have sent may be.
        params: what this rank computes with.
        channel: to all other ranks.
        world: all ranks.
    Wire: a message of the parameters a step; at the end of a round an all_reduce of them and of the tally.
    """

    def __init__(
        self,
        inner: EveryStep,
        bound: int,
        params: Sequence[Tensor],
        channel: Channel,
        *,
        world: Group,
        net: Net,
        phases: Phases,
    ) -> None:
        self.inner, self.purse = inner, Purse(params)
        self.mailbox = Mailbox(world.rank, world.size, bound)
        self._channel, self._world, self._net, self._phases = channel, world, net, phases
        self._half, self._early = _Half(), dict[int, Message]()

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round ends where the feed wants a pause."""
        state = update_step.state
        with feed.from_step(state.step) as stream:
            while state.step < feed.num_steps:
                self._phases.take()
                half = self._begin(feed, placed, state)
                while state.step < half.end:
                    self._step(feed, stream, placed, update_step)
                tally, oldest = self._meet(placed)
                self._half = _Half()
                steps, update = range(half.first, half.end), half.taken[-1][1]
                stats = step_stats(steps, feed.work, state, tally, update, self._phases, self._net)
                yield _told(stats, tally, oldest)

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()

    def _begin(self, feed: Feed, placed: Placed, state: TrainState) -> _Half:
        """A new round; one that an abort has interrupted goes on."""
        if self._half.first < 0:
            self.purse.fill()
            self.mailbox.begin(state.step)
            self._half = _Half(state.step, feed.pause_after(state.step), buffers=placed.buffers.values())
        return self._half

    def _step(self, feed: Feed, stream: Stream, placed: Placed, update_step: UpdateStep) -> None:
        """One clock: what has come, a step, and a half to the peer."""
        state = update_step.state
        with self._phases.during("communication"):
            self._hear(state.step)
        before = self.purse.spend()
        self._half.taken.append(counted(*self.inner.step(feed.work, stream, placed, update_step)))
        self.purse.move(before)
        with self._phases.during("communication"):
            self._give(state.step)
        state.step += 1

    def _give(self, clock: int) -> None:
        other = partner(self._world.rank, clock, self._world.size)
        if other is None:
            return
        self.purse.halve()
        fields = {"clock": clock, "weight": self.purse.weight}
        self._channel.send(
            self._world.ranks[other], Message("half", fields, self.purse.sums), self._net.deadline_seconds
        )

    def _hear(self, clock: int, late: int | None = None) -> None:
        """Take what is there, and wait for what may not be later.

        Raises:
            CommunicationError: a peer is gone, or says nothing for the deadline.
        """
        self.mailbox.reach(clock)
        for made in sorted(self._early):
            if not self.mailbox.is_early(made):
                self._add(self._early.pop(made))
        while self._world.size > 1:
            waits = self.mailbox.is_due(late)
            try:
                self._add(self._channel.receive(self._net.deadline_seconds if waits else 0.0))
            except DeadlineError:
                if waits:
                    raise
                return

    def _add(self, message: Message) -> None:
        """Add a half; one of a clock that is not made here yet waits for it."""
        made = int(message.fields["clock"])
        if self.mailbox.is_early(made):
            self._early[made] = message
            return
        self._half.ages[self.mailbox.take(made)] += 1
        self.purse.add(message.tensors, message.fields["weight"])

    @torch.no_grad()
    def _meet(self, placed: Placed) -> tuple[Tally, int]:
        """All that is under way comes in, and all go on from the mean; also how late the latest was."""
        half = self._half
        with self._phases.during("communication"):
            self._channel.flush(self._net.deadline_seconds)
            self._hear(half.end, late=0)
        ages, mine = half.ages, add_tallies([tally for tally, _ in half.taken])
        change = placed.buffers.moved_since(half.buffers, mine.micro_batches)
        told = {_AGES: float(sum(age * n for age, n in ages.items())), _HEARD: float(sum(ages.values()))}
        mine = replace(mine, buffers=change, metrics={**mine.metrics, **told})
        with self._phases.during("communication"):
            device = placed.holding.device
            tally = mine.agree(self._net, self._world, device).wait()
            oldest = torch.tensor([float(max(ages, default=0))], dtype=torch.float64, device=device)
            latest = int(self._net.all_reduce(oldest, self._world, "max").wait())
            going = [self._net.all_reduce(x, self._world) for x in self.purse.sums]
            self.purse.sums = [handle.wait() for handle in going]
        self.purse.weight = float(self._world.size)
        self.purse.spend()
        placed.buffers.reset(half.buffers)
        placed.buffers.end_step(tally.buffers, tally.micro_batches)
        return tally, latest


_AGES, _HEARD = "ages", "heard"


def _told(stats: Stats, tally: Tally, oldest: int) -> Stats:
    """With how late messages were, beside the metrics of the task."""
    metrics: Mapping[str, float] = {
        name: value for name, value in stats.metrics.items() if name not in (_AGES, _HEARD)
    }
    mean = tally.metrics[_AGES] / max(1.0, tally.metrics[_HEARD])
    return replace(stats, metrics={**metrics, "staleness": mean, "staleness_max": float(oldest)})
