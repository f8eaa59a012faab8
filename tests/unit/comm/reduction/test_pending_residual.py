"""What a replica has taken over is in the first gradient that is applied, and in no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.comm.reduction import Gradients, PendingResidual, sum_residuals
from paceline.state.slot import TensorSlot

W, V = (TensorSlot(name, (3,), ((0, 3),)) for name in "wv")
FOUND = {
    ("sent", "w"): torch.tensor([1.0, 2.0, 3.0]),
    ("owned", "w"): torch.tensor([0.5, 0.0, 0.0]),
    ("sent", "v"): torch.ones(3),
    ("factor", "v"): torch.full((3,), 9.0),
    ("velocity", "v"): torch.full((3,), 9.0),
}


def step(owed: PendingResidual, *, applied: bool) -> dict[str, list[float]]:
    """With losses times 0.5, of 6 items, where nobody uses v."""
    grad = torch.ones(3)
    found = owed.add_to(Gradients({W: grad, V: None}, [grad], [grad.norm()], 0.5), 6.0)
    counted = [g for slot, g in found.tensors.items() if slot == W and g is not None]
    assert [float(x) for x in found.norms] == [float(g.norm()) for g in counted] and found.scale == 0.5
    if applied:
        owed.mark_applied()
    assert grad.tolist() == [1.0] * 3  # it may be somebody's
    return {slot.name: g.tolist() for slot, g in found.tensors.items() if g is not None}


@pytest.mark.capability("H4")
def test_what_is_owed_is_applied_with_the_first_gradient_that_is_applied() -> None:
    """Times what the losses were multiplied with; also for a parameter that is not used."""
    owed = PendingResidual({W: torch.zeros(3), V: torch.zeros(3)}, [W], None)
    assert step(owed, applied=True) == {"w": [1.0] * 3} and owed.residuals() == []
    owed.set_residuals(FOUND)
    sums = {"w": [1.75, 2.0, 2.5], "v": [0.5] * 3}
    for applied in (False, True):
        assert {*owed.names} == {"w", "v"}
        assert step(owed, applied=applied) == sums
    assert step(owed, applied=True) == {"w": [1.0] * 3} and not owed.names
    owed.settle_mean([W], is_applied=True)
    assert [slot for _, slot, _ in owed.residuals()] == [V]


@pytest.mark.parametrize(
    ("pays", "is_applied", "mixing", "left"),
    [
        (True, True, 0.3, 0.0),
        (True, False, 0.0, 1.0),  # it paid after the others had left, and what they bring has it not
        (False, True, 0.0, 0.0),
        (False, True, 0.25, 0.25),  # the share of its own that stays lacks it
        (True, False, 0.25, 0.75),
        (False, False, 0.25, 1.0),
    ],
)
def test_what_a_mean_brings_is_owed_no_more(pays: bool, is_applied: bool, mixing: float, left: float) -> None:
    owed = PendingResidual({W: torch.zeros(3)}, [W], None)
    owed.set_residuals(FOUND)
    if pays:
        owed.mark_applied()
    owed.settle_mean([W], is_applied=is_applied, mixing=mixing)
    assert [value.tolist() for _, _, value in owed.residuals()] == [[x * left for x in (1.5, 2.0, 3.0)]] * (
        left > 0
    )
    assert bool(owed.names) == (left > 0)


@pytest.mark.capability("H4")
def test_of_a_mean_of_fewer_items_it_is_the_same_part() -> None:
    """6 of 24; the only replica keeps nothing once it has paid."""
    owed = PendingResidual({W: torch.zeros(3)}, [W], 24.0, others=False)
    owed.set_residuals(FOUND)
    assert step(owed, applied=True) == {"w": [1.0 + 0.25 * 0.5 * x for x in (1.5, 2.0, 3.0)]}
    assert owed.residuals() == []


def test_a_mean_that_has_come_counts_where_nobody_moves_afterwards() -> None:
    """The share of its own that stays lacks half as much each time."""
    owed = PendingResidual({W: torch.zeros(3)}, [W], None)
    owed.set_residuals(FOUND)
    for is_applied, left in ((True, 0.5), (False, 0.25)):
        owed.settle_mean([W], is_applied=is_applied, mixing=0.5)
        assert [value.tolist() for _, _, value in owed.residuals()] == [[x * left for x in (1.5, 2.0, 3.0)]]


def test_factors_and_velocities_are_no_loss() -> None:
    sums: dict[str, Tensor] = sum_residuals(FOUND)
    assert {name: value.tolist() for name, value in sums.items()} == {"w": [1.5, 2.0, 3.0], "v": [1.0] * 3}
