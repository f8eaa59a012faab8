"""Schedules are pure functions of the update index; every one against its closed form."""

import math

import pytest
import torch

from paceline.errors import RecipeError
from paceline.optim import build_schedule
from paceline.recipe import ScheduleRecipe


def factors(steps: int, *updates: int, batch_size: int = 32, **fields: object) -> list[float]:
    schedule = build_schedule(ScheduleRecipe(**fields), steps, batch_size)
    return [schedule.factor(t) for t in updates]


@pytest.mark.capability("J14")
def test_cosine_equals_its_formula_at_every_update() -> None:
    low, steps = 0.05, 97
    for t, value in enumerate(factors(steps, *range(2 * steps), decay="cosine", final=low)):
        way = min(t / steps, 1.0)  # past the end it stays
        assert abs(value - (low + 0.5 * (1 - low) * (1 + math.cos(way * math.pi)))) <= 1e-12


@pytest.mark.capability("J12")
def test_exponential_is_exact_and_equals_a_decay_per_update() -> None:
    rate, decay = 0.01, 0.995
    updates = range(0, 500, 7)
    assert factors(100, *updates, decay="exponential", rate=rate) == [math.exp(-rate * t) for t in updates]
    for t, value in zip(
        updates, factors(100, *updates, decay="exponential", rate=-math.log(decay)), strict=True
    ):
        assert abs(value - decay**t) <= 1e-12


def test_linear_goes_straight_and_holds() -> None:
    assert factors(10, 0, 5, 10, 99, decay="linear", final=0.2) == pytest.approx(
        [1.0, 0.6, 0.2, 0.2], abs=1e-15
    )


def test_constant_is_one_for_ever() -> None:
    assert factors(10, 0, 9, 10**9) == [1.0, 1.0, 1.0]


@pytest.mark.capability("J15")
@pytest.mark.parametrize(("first", "factor"), [(10, 1), (10, 2), (1, 1), (3, 3)])
def test_restarts_equal_torch_and_start_each_cycle_at_one(first: int, factor: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    peer = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, first, factor, eta_min=0.1)
    fields = {"decay": "cosine", "final": 0.1, "cycle_steps": first, "cycle_factor": factor}
    starts, start, length = set(), 0, first
    while start < 200:
        starts.add(start)
        start, length = start + length, length * factor
    for t, value in enumerate(factors(200, *range(200), **fields)):
        assert abs(value - optimizer.param_groups[0]["lr"]) <= 1e-12
        assert (value == 1.0) == (t in starts)
        optimizer.step()
        peer.step()


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize(("steps", "pct_start"), [(50, 0.3), (7, 0.5), (100, 0.123)])
def test_one_cycle_equals_torch_at_every_update_and_holds(
    steps: int, pct_start: float, strategy: str
) -> None:
    fields = {"pct_start": pct_start, "div_factor": 10.0, "final_div_factor": 50.0}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2.0, steps, **fields, anneal_strategy=strategy, cycle_momentum=False
    )
    found = factors(steps, *range(steps + 3), decay="one_cycle", anneal_strategy=strategy, **fields)
    for t in range(steps):
        assert abs(2.0 * found[t] - optimizer.param_groups[0]["lr"]) <= 1e-12
        optimizer.step()
        if t < steps - 1:
            peer.step()
    assert max(found) > 0.8 and found[steps:] == [found[steps - 1]] * 3
    assert found[steps - 1] == pytest.approx(1 / 500)
    # PyTorch divides by zero where the rise has less than one update.
    assert factors(2, 0, 1, decay="one_cycle") == pytest.approx([1.0, 1 / 25e4])
    assert factors(1, 0, decay="one_cycle") == [1.0]


@pytest.mark.capability("J15")
def test_restarts_resume_in_mid_cycle_from_the_index_alone() -> None:
    fields = {"decay": "cosine", "cycle_steps": 7, "cycle_factor": 2, "warmup_steps": 4}
    whole = factors(100, *range(100), **fields)
    assert factors(100, *range(53, 100), **fields) == whole[53:]
    assert factors(500, *range(100), **fields) == whole  # a longer run has the same cycles


@pytest.mark.capability("J16")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"decay": "cosine", "final": 0.1},
        {"decay": "linear"},
        {"decay": "exponential", "rate": 0.02},
        {"decay": "cosine", "cycle_steps": 9, "cycle_factor": 2},
    ],
)
def test_warm_up_is_linear_and_the_decay_starts_after_it(fields: dict[str, object]) -> None:
    warm = factors(110, *range(110), warmup_steps=10, warmup_from=0.25, **fields)
    assert warm[:11] == pytest.approx([0.25 + 0.75 * t / 10 for t in range(11)], abs=1e-12)
    assert warm[10:] == factors(100, *range(100), **fields)


def test_a_warm_up_longer_than_the_run_just_rises() -> None:
    assert factors(4, *range(4), warmup_steps=8, decay="cosine") == [0.0, 1 / 8, 2 / 8, 3 / 8]


@pytest.mark.capability("J17")
@pytest.mark.parametrize(("rule", "peak"), [("linear", 4.0), ("sqrt", 2.0)])
def test_scaling_goes_from_the_base_rate_to_the_scaled_one(rule: str, peak: float) -> None:
    fields = {"batch_scaling": rule, "base_batch": 64, "warmup_steps": 10, "decay": "cosine"}
    found = factors(110, 0, 5, 10, 60, 110, batch_size=256, **fields)
    assert found == pytest.approx([1.0, (1 + peak) / 2, peak, peak / 2, 0.0], abs=1e-12)


@pytest.mark.capability("J17")
def test_scaling_is_applied_again_for_another_batch_and_falls_below_one() -> None:
    fields = {"batch_scaling": "linear", "base_batch": 64}
    assert [factors(10, 0, batch_size=size, **fields)[0] for size in (32, 64, 128)] == [0.5, 1.0, 2.0]
    assert factors(10, 0, 3, batch_size=32, warmup_steps=5, **fields) == [0.5, 0.5]  # nothing to warm up to


def test_a_warm_up_start_that_scaling_would_ignore_is_an_error() -> None:
    fields = {"batch_scaling": "linear", "base_batch": 64, "warmup_from": 0.1, "warmup_steps": 5}
    with pytest.raises(RecipeError, match="warmup_from"):
        build_schedule(ScheduleRecipe(**fields), 10, 128)


def test_apply_multiplies_the_base_rate_of_every_group() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.1}])
    schedule = build_schedule(ScheduleRecipe(decay="linear"), 4, 32)
    for t, expected in enumerate([1.0, 0.75, 0.5, 0.25, 0.0]):
        assert schedule.apply(optimizer, t) == expected
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected, 0.1 * expected])
    other = torch.optim.SGD([{"params": [first], "lr": 9.0}, {"params": [second], "lr": 9.0}])
    other.load_state_dict(optimizer.state_dict())
    schedule.apply(other, 1)
    assert [group["lr"] for group in other.param_groups] == pytest.approx([0.75, 0.075])
