"""Sleeping layers take what a schedule counts with, and a measured share is held against the right plan."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.measure import Series
from benchmarks.pipelines import Waited, idle_table, planned_idle
from benchmarks.sleeping import Clock, Sleeping
from paceline.parallel.pipeline.split_backward import split_backward


def asked_for(layers: int) -> tuple[nn.Sequential, list[float]]:
    """A chain, and what its layers have slept."""
    slept: list[float] = []
    return nn.Sequential(*(Sleeping(0.5, Clock(slept.append)) for _ in range(layers))), slept


def test_a_layer_sleeps_once_forward_and_twice_backward() -> None:
    chain, slept = asked_for(2)
    total = chain(torch.ones(3, 32)).sum()
    assert slept == [0.5] * 2
    total.backward()
    assert slept == [0.5] * 6
    assert all(p.grad is not None for p in chain.parameters())


def test_a_backward_in_halves_sleeps_once_in_each() -> None:
    chain, slept = asked_for(2)
    x = torch.ones(3, 32, requires_grad=True)
    y = chain(x)
    halves = split_backward([y], [x], list(chain.parameters()))
    halves.input_gradients([torch.ones_like(y)])
    assert slept == [0.5] * 4
    halves.weight_gradients()
    assert slept == [0.5] * 6


def waited(idle: float) -> Waited:
    return Waited(Series("x", (1.0,) * 3, (1.0,) * 3, (1.0,), 1), idle)


def test_the_table_counts_the_schedules_that_wait_as_planned() -> None:
    plans = [planned_idle(schedule, 4) for schedule in ("gpipe", "1f1b", "interleaved:2", "zero-bubble")]
    assert [round(100 * plan, 1) for plan in plans] == [27.3, 27.3, 15.8, 11.1]
    off = (0.029, -0.029, 0.031, -0.031)
    found = [waited(x) for plan, more in zip(plans, off, strict=True) for x in (plan + more, 0.5)]
    table = idle_table(4, 0.03, found)
    assert [row[3] for row in table.rows] == ["+2.9", "-2.9", "+3.1", "-3.1"]
    assert table.remarks == ("within 3 points of the plan: 2 of 4 schedules",)
