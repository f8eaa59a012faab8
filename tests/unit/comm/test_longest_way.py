"""The closed forms of the longest way are what the hops of every route wait for, on clocks that count."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.routes.grid_route import GridRoute, num_grid_columns
from paceline.comm.routes.message_route import MessageRoute
from paceline.comm.routes.recursive_doubling import RecursiveDoublingRoute
from paceline.comm.routes.ring_route import RingRoute
from paceline.comm.routes.route_by_size import ROUTED_OPS, critical_path_cost
from paceline.comm.routes.tree_route import TreeRoute
from paceline.comm.workspace import Workspace

HOPS = {
    "ring": RingRoute(),
    "tree": TreeRoute(),
    "recursive-doubling": RecursiveDoublingRoute(),
    "grid": GridRoute(),
}
WORLDS = (2, 3, 4, 5, 6, 7, 8)
N = 840  # values of a row; parts are equal for every number of ranks


@dataclass
class Wire:
    """From one rank to another: a message with the time at which it can leave, and when it had arrived."""

    messages: Queue[tuple[float, Tensor]] = field(default_factory=Queue)
    arrivals: Queue[float] = field(default_factory=Queue)


@dataclass
class Clocked:
    """In place of `RouteMessenger`: a message takes alpha and beta a byte, from when both sides are ready.

    Args:
        wires: by sender and receiver, of the whole group.
        places: of those that take part.
        now: the time of this rank, in a list that parts of the group share.
    """

    wires: dict[tuple[int, int], Wire]
    places: list[int]
    rank: int
    alpha: float
    beta: float
    now: list[float]
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def size(self) -> int:
        return len(self.places)

    def among(self, ranks: range) -> Clocked:
        places = [self.places[rank] for rank in ranks]
        rank = list(ranks).index(self.rank)
        return Clocked(self.wires, places, rank, self.alpha, self.beta, self.now)

    def send(self, to: int, x: Tensor) -> None:
        self.now[0] = self._sent(to, x, self.now[0])

    def receive(self, source: int, out: Tensor) -> Tensor:
        self.now[0] = max(self.now[0], self._received(source, out, self.now[0]))
        return out

    def exchange(self, to: int, x: Tensor, source: int, out: Tensor) -> Tensor:
        began = self.now[0]
        self._wire(self.rank, to).messages.put((began, x.clone()))
        arrived = self._received(source, out, began)
        left = self._wire(self.rank, to).arrivals.get(timeout=60.0)
        self.now[0] = max(arrived, left)
        return out

    def _sent(self, to: int, x: Tensor, began: float) -> float:
        wire = self._wire(self.rank, to)
        wire.messages.put((began, x.clone()))
        return wire.arrivals.get(timeout=60.0)

    def _received(self, source: int, out: Tensor, ready: float) -> float:
        wire = self._wire(source, self.rank)
        began, x = wire.messages.get(timeout=60.0)
        out.copy_(x.view_as(out))
        done = max(began, ready) + self.alpha + self.beta * x.nbytes
        wire.arrivals.put(done)
        return done

    def _wire(self, source: int, to: int) -> Wire:
        return self.wires[self.places[source], self.places[to]]


def waited(hops: MessageRoute, op: str, world: int, alpha: float, beta: float) -> float:
    """The time of the slowest rank."""
    wires = {(a, b): Wire() for a in range(world) for b in range(world)}
    clocks = [[0.0] for _ in range(world)]

    def one(rank: int) -> None:
        mail: Any = Clocked(wires, list(range(world)), rank, alpha, beta, clocks[rank])
        if op == "all_reduce":
            hops.all_reduce(mail, torch.zeros(N))
        elif op == "broadcast":
            hops.broadcast(mail, torch.zeros(N), 0)
        else:
            getattr(hops, op)(mail, torch.zeros(world, N))

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
    assert not any(thread.is_alive() for thread in threads)
    return max(clock[0] for clock in clocks)


@pytest.mark.capability("G9", "G13")
@pytest.mark.parametrize("op", ROUTED_OPS)
@pytest.mark.parametrize("route", HOPS)
def test_the_closed_form_is_what_the_slowest_rank_waits_for(route: str, op: str) -> None:
    wrong = []
    for world in WORLDS:
        if route == "grid" and num_grid_columns(world) == 1:
            continue  # a ring
        num_bytes = 4 * N * (world if op == "reduce_scatter" else 1)
        way = critical_path_cost(route, num_bytes, world, op=op)
        found = waited(HOPS[route], op, world, 1.0, 0.0), waited(HOPS[route], op, world, 0.0, 1.0)
        if found != pytest.approx((way.rounds, way.sent_bytes)):
            wrong.append((world, found, (way.rounds, way.sent_bytes)))
    assert wrong == []
