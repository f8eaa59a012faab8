"""Ranks that deal shards by speed over random delays, without processes: on one host, and between hosts."""

from __future__ import annotations

import heapq
import random
from typing import Any

import torch

from paceline.data import KeyedOrder, LockstepWork
from paceline.sync.gossip import PendingHalves, clocks_per_turn, peer_at_clock
from paceline.sync.hogwild import SharedCounters
from paceline.sync.work_assignment import (
    SPEED_WINDOW_STEPS,
    MessageSpeeds,
    SharedMemorySpeeds,
    SpeedAssignment,
    SpeedExchange,
    num_window_rows,
)

END, SAMPLES, SIZE, SHARDS = 40, 500, 48, 12
VALUE = torch.rand(SAMPLES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).tolist()


def unheard(name: str, record: Any) -> None:
    """Nobody is told."""


class Node:
    """A rank, and what it has run of every step.

    Args:
        speeds: of each rank, seconds a shard, by stretches of ten steps.
    """

    def __init__(self, rank: int, speeds: list[list[float]], notices: SpeedExchange, **shares: Any) -> None:
        self.rank, self.speeds, self.size, self.step = rank, speeds, len(speeds), 0
        even = [SHARDS * (r + 1) // self.size - SHARDS * r // self.size for r in range(self.size)]
        self.shares = SpeedAssignment(even, rank, notices, note=unheard, **shares)
        self.whole = LockstepWork(KeyedOrder(SAMPLES, SIZE, seed=1), SHARDS, 1, rank, self.size)
        self.shown: list[tuple[int, ...]] = []
        self.samples: list[list[int]] = []
        self.weights: list[float] = []
        self.seconds = 0.0

    def begin(self) -> float:
        """Take up the next step; returns how long it takes."""
        work = self.shares.assign(self.whole, self.step)
        self.shown.append(self.shares.shares)
        batches = work.micro_batches(self.step)
        self.samples.append([int(i) for one in batches for i in one.indices])
        self.weights.append(self.shares.weight)
        self.seconds = len(batches) * self.speeds[self.rank][self.step // 10]
        return self.seconds

    def end(self) -> None:
        """That step is taken."""
        self.shares.record_run(self.seconds, len(self.samples[-1]), applied=True)
        self.step += 1


def drawn(size: int, draw: random.Random) -> list[list[float]]:
    return [[draw.choice((1.0, 1.0, 3.0, 30.0)) for _ in range(END // 10)] for _ in range(size)]


def on_one_host(size: int, bound: int, seed: int, lag: int | None = None) -> list[Node]:
    """Ranks that look at a board, as under hogwild:S."""
    draw, words = (
        random.Random(seed),
        torch.zeros(num_window_rows(bound, SPEED_WINDOW_STEPS), size, dtype=torch.int64),
    )
    taken, stops, clocks = (torch.zeros(size, dtype=torch.int64) for _ in range(3))
    boards = [SharedCounters(taken, stops, clocks, torch.zeros(1), rank) for rank in range(size)]
    speeds, lag = drawn(size, draw), bound if lag is None else lag
    nodes = [Node(rank, speeds, SharedMemorySpeeds(words, rank), lag=lag) for rank in range(size)]
    due, computes = [(0.0, rank) for rank in range(size)], [False] * size
    while due:
        now, rank = heapq.heappop(due)
        node, shared_counters = nodes[rank], boards[rank]
        if computes[rank]:
            node.end()
            shared_counters.reach(node.step)
        if node.step == END:
            continue
        computes[rank] = shared_counters.behind(node.step, bound) is None
        seconds = node.begin() if computes[rank] else 0.5
        heapq.heappush(due, (now + seconds * (0.5 + draw.random()), rank))
    return nodes


class OnHosts:
    """Ranks whose halves take random times, as under gossip:S."""

    def __init__(self, size: int, bound: int, seed: int, lag: int | None = None) -> None:
        self.draw, self.size, turn = random.Random(seed), size, clocks_per_turn(size)
        self.said = [MessageSpeeds(rank, size) for rank in range(size)]
        speeds, lag = drawn(size, self.draw), turn - 1 + bound if lag is None else lag
        more = {"lag": lag, "window": max(SPEED_WINDOW_STEPS, turn)}
        self.nodes = [Node(rank, speeds, self.said[rank], **more) for rank in range(size)]
        self.boxes = [PendingHalves(rank, size, bound) for rank in range(size)]
        self.waits, self.now = [True] * size, 0.0
        self.early: list[list[int]] = [[] for _ in range(size)]
        self.events: list[tuple[float, int, int, Any]] = []

    def play(self) -> list[Node]:
        for rank in range(self.size):
            self.go(rank)
        while self.events:
            self.now, _, rank, half = heapq.heappop(self.events)
            if half is None:
                self.finish(rank)
            else:
                clock, sender, fields = half
                self.said[rank].receive_fields(sender, fields)
                self.early[rank].append(clock)
            if self.waits[rank]:
                self.go(rank)
        return self.nodes

    def push(self, seconds: float, rank: int, half: Any = None) -> None:
        due = self.now + seconds * (0.5 + self.draw.random())
        heapq.heappush(self.events, (due, self.draw.getrandbits(40), rank, half))

    def go(self, rank: int) -> None:
        node, box = self.nodes[rank], self.boxes[rank]
        box.reach(node.step)
        for clock in [c for c in self.early[rank] if not box.is_early(c)]:
            self.early[rank].remove(clock)
            box.take(clock)
        self.waits[rank] = node.step == END or box.is_due()
        if not self.waits[rank]:
            self.push(node.begin(), rank)

    def finish(self, rank: int) -> None:
        node = self.nodes[rank]
        node.end()
        other = peer_at_clock(rank, node.step - 1, self.size)
        if other is not None:
            half = node.step - 1, rank, dict(self.said[rank].message_fields())
            self.push(self.draw.choice((0.1, 5.0, 100.0)), other, half)
        self.waits[rank] = True
