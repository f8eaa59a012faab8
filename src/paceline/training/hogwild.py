"""Hogwild! on the ranks of one host: parameters and counters in memory that they share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.comm.routes import SharedMemoryCollective
from paceline.errors import StrategyError
from paceline.layout.shard import lay_whole_in_common
from paceline.state import TrainState
from paceline.sync import Rule
from paceline.sync.dealing import WINDOW, Even
from paceline.sync.hogwild import Board, Hogwild
from paceline.sync.memory import Asked, RuleMemory
from paceline.sync.notices import Posted, num_rows
from paceline.training.alone import number_of, step_alone, those_who_meet
from paceline.training.arrange import Setting
from paceline.training.balance import dealt_by_speed, is_by_speed
from paceline.training.layouts import Layout

_MOST_ONES = 1 << 16
_ONE_BYTES = 4


def hogwild(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """Replicas update the same parameters, without a lock.

    Raises:
        StrategyError: the ranks have no memory in common.
    """
    world, holding = setting.mesh.world, layout.placed.holding
    num_ones = _num_ones(max(p.numel() for p in holding.computes.values()))
    if world.size == 1:
        board = _board(0, 1, num_ones, lambda n, dtype: torch.zeros(n, dtype=dtype))
    else:
        memory = _memory(setting)
        lay_whole_in_common(holding, memory)
        board = _board(world.rank, world.size, num_ones, partial(_zeros, memory))
    return Hogwild(
        step_alone(setting, holding, state),
        board,
        number_of(setting),
        stop_requested=setting.stop_requested,
        shares=_shares(setting),
        **those_who_meet(setting),
    )


def _shares(setting: Setting) -> Even | None:
    """By speed, as ranks write it down in memory; None: they stay."""
    if not is_by_speed(setting):
        return None
    bound, size = int(number_of(setting)), setting.mesh.world.size
    rows = num_rows(bound, WINDOW)
    words = _zeros(_memory(setting), rows * size, torch.int64).view(rows, size)
    return dealt_by_speed(setting, Posted(words, setting.mesh.world.rank), lag=bound)


def memory(asked: Asked) -> RuleMemory:
    """What the rule keeps: a share of the memory in common, in which the tally of ones lies, too.

    At the end of a round the ones are added up in float64.
    """
    ranks = asked.recipe.strategy.degrees["replica"]
    num_ones = _num_ones(asked.sizes.largest // _ONE_BYTES)
    return RuleMemory(copies=_ONE_BYTES * num_ones // ranks, agreement=8 * num_ones, sharers=ranks)


def _num_ones(num_values: int) -> int:
    """Of a tally, where so many values are in the largest tensor."""
    return min(_MOST_ONES, num_values)


def _board(rank: int, num_ranks: int, num_ones: int, zeros: Callable[[int, torch.dtype], Tensor]) -> Board:
    taken, stops, clocks = (zeros(num_ranks, torch.int64) for _ in range(3))
    return Board(taken, stops, clocks, zeros(num_ones, torch.float32), rank)


def _memory(setting: Setting) -> SharedMemoryCollective:
    found = setting.exact_collective(setting.mesh.world)
    if isinstance(found, SharedMemoryCollective):
        return found
    why = "compute on GPUs" if setting.device.type != "cpu" else "run on several hosts"
    raise StrategyError(
        f"sync=hogwild trains in the memory of one host, and these ranks {why}",
        next_step="choose sync=local:H, or servers=1 sync=server-async",
    )


def _zeros(memory: SharedMemoryCollective, num_values: int, dtype: torch.dtype) -> Tensor:
    return memory.common(num_values, torch.empty(0, dtype=dtype))
