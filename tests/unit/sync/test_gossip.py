"""Halves that travel in pairs, over random delays: nothing is lost, and nothing too old is ever added."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CommunicationError
from paceline.recipe import Strategy, support
from paceline.sync.gossip import PendingHalves, PushSumState, peer_at_clock

FIRST, END = 3, 15


@pytest.mark.parametrize("size", range(1, 10))
def test_each_meets_every_other_once_in_a_turn(size: int) -> None:
    turns = size - 1 + size % 2
    for clock in range(2 * turns):
        for rank in range(size):
            other = peer_at_clock(rank, clock, size)
            assert other is None or (other != rank and peer_at_clock(other, clock, size) == rank)
        assert sum(peer_at_clock(rank, clock, size) is None for rank in range(size)) == size % 2
    for rank in range(size):
        met = Counter(peer_at_clock(rank, clock, size) for clock in range(turns))
        assert met == Counter([*{*range(size)} - {rank}, *[None] * (size % 2)])


@dataclass
class Node:
    """A replica of one number."""

    rank: int
    pending_halves: PendingHalves
    value: torch.Tensor
    push_sum: PushSumState
    clock: int = FIRST
    waits: bool = False
    early: dict[int, tuple[torch.Tensor, float]] = field(default_factory=dict)


class Played:
    """Replicas that take random times, with messages that do."""

    def __init__(self, size: int, bound: int, seed: int) -> None:
        self.draw, self.moves = random.Random(seed), random.Random(0)
        self.speeds = [self.draw.choice((1.0, 1.0, 3.0, 30.0)) for _ in range(size)]
        self.size, self.ages, self.now = size, list[int](), 0.0
        self.nodes = []
        for rank in range(size):
            box = PendingHalves(rank, size, bound)
            box.begin(FIRST)
            value = torch.zeros(1, dtype=torch.float64)
            self.nodes.append(Node(rank, box, value, PushSumState([value])))
        self.moved = 0.0
        self.events: list[tuple[float, int, int, int, torch.Tensor | None, float]] = []
        self.table = {(r, c): self.moves.random() for r in range(size) for c in range(FIRST, END)}

    def play(self) -> None:
        for node in self.nodes:
            self.go(node)
        while self.events:
            self.now, _, rank, clock, sums, weight = heapq.heappop(self.events)
            node = self.nodes[rank]
            if sums is None:
                self.finish(node)
            else:
                self.add(node, clock, sums, weight)
                if node.waits:
                    self.go(node)
            self.require_all_there()

    def push(self, seconds: float, rank: int, clock: int, sums: torch.Tensor | None, weight: float) -> None:
        due = self.now + seconds * self.draw.random()
        heapq.heappush(self.events, (due, self.draw.getrandbits(40), rank, clock, sums, weight))

    def go(self, node: Node) -> None:
        node.pending_halves.reach(node.clock)
        for made in sorted(node.early):
            if not node.pending_halves.is_early(made):
                self.add(node, made, *node.early.pop(made))
        node.waits = node.pending_halves.is_due(0 if node.clock == END else None)
        if not node.waits and node.clock < END:
            self.push(self.speeds[node.rank], node.rank, node.clock, None, 0.0)

    def finish(self, node: Node) -> None:
        before = node.push_sum.load_mean()
        moved = self.table[node.rank, node.clock]
        node.value.add_(moved)
        self.moved += moved
        node.push_sum.add_movement(before)
        other = peer_at_clock(node.rank, node.clock, self.size)
        if other is not None:
            node.push_sum.halve()
            self.push(5.0, other, node.clock, node.push_sum.sums[0].clone(), node.push_sum.weight)
        node.clock += 1
        self.go(node)

    def add(self, node: Node, clock: int, sums: torch.Tensor, weight: float) -> None:
        if node.pending_halves.is_early(clock):
            node.early[clock] = (sums, weight)
            return
        self.ages.append(node.pending_halves.take(clock))
        node.push_sum.add([sums], weight)

    def require_all_there(self) -> None:
        flying = [(s, w) for *_, s, w in self.events if s is not None]
        flying += [pair for node in self.nodes for pair in node.early.values()]
        weight = sum(node.push_sum.weight for node in self.nodes) + sum(w for _, w in flying)
        assert weight == self.size
        total = sum(float(node.push_sum.sums[0]) for node in self.nodes) + sum(float(s) for s, _ in flying)
        assert total == pytest.approx(self.moved, abs=1e-9)


@pytest.mark.capability("I2", "I4", clause="without a server, between hosts")
@settings(max_examples=60)
@given(size=st.integers(1, 7), bound=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_nothing_older_than_the_bound_is_added_and_nothing_is_lost(size: int, bound: int, seed: int) -> None:
    played = Played(size, bound, seed)
    played.play()
    assert all(node.clock == END and not node.waits and not node.early for node in played.nodes)
    pairs = sum(peer_at_clock(r, c, size) is not None for r in range(size) for c in range(FIRST, END))
    assert len(played.ages) == pairs and all(0 <= age <= bound for age in played.ages)


def test_without_the_bound_older_halves_would_be_added() -> None:
    """The twin."""
    oldest = 0
    for seed in range(20):
        played = Played(4, 1000, seed)
        played.play()
        oldest = max(oldest, *played.ages)
    assert oldest > 4


@pytest.mark.capability("I4", clause="without a server: S = 0 follows no delay")
def test_with_a_bound_of_zero_no_delay_changes_what_comes_out() -> None:
    ends = set()
    for seed in range(10):
        played = Played(3, 0, seed)
        played.play()
        ends.add(tuple(float(node.push_sum.sums[0]) for node in played.nodes))
    assert len(ends) == 1


def test_a_half_that_comes_twice_is_a_mistake() -> None:
    box = PendingHalves(0, 2, 1)
    box.begin(0)
    assert box.is_early(0) and not box.is_due()
    box.reach(1)
    assert not box.is_early(0) and not box.is_due() and box.is_due(late=0)
    assert box.take(0) == 0
    with pytest.raises(CommunicationError, match="twice"):
        box.take(0)


def test_codecs_and_split_replicas_are_refused() -> None:
    for text, reason in {
        "replicas=2 sync=gossip:2 codec=int8": "leave out codec",
        "replicas=1 shard=2 zero=1 sync=gossip:2": "must be whole",
        "replicas=2 sync=gossip:2 route=ring": "leave out route",
    }.items():
        answer = support(Strategy.parse(text), processes=2, shards=4)
        assert not answer.ok and reason in answer.reason, (text, answer.reason)
