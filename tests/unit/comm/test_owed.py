"""What a group of one has taken over is in the first gradient that is applied, and in no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.comm.reduction import LocalReducer, OwedReducer, all_lost
from paceline.slot import Slot

W, V = (Slot(name, (3,), ((0, 3),)) for name in "wv")
FOUND = {
    ("sent", "w"): torch.tensor([1.0, 2.0, 3.0]),
    ("owned", "w"): torch.tensor([0.5, 0.0, 0.0]),
    ("sent", "v"): torch.ones(3),
    ("factor", "v"): torch.full((3,), 9.0),
    ("velocity", "v"): torch.full((3,), 9.0),
}


def step(reducer: OwedReducer, *, applied: bool) -> dict[str, list[float]]:
    """With losses times 0.5, where nobody uses v."""
    reducer.begin()
    grad = torch.ones(3)
    reducer.ready(W, grad)
    reducer.ready(V, None)
    reducer.ran(0.5)
    reducer.close()
    found = reducer.finish().tensors
    (reducer.commit if applied else reducer.abort)()
    assert grad.tolist() == [1.0] * 3  # it may be somebody's
    return {slot.name: g.tolist() for slot, g in found.items() if g is not None}


@pytest.mark.capability("H4")
def test_what_is_owed_is_paid_with_the_first_gradient_that_is_applied() -> None:
    """Times what the losses were multiplied with; also for a parameter that is not used."""
    tensors = {W: torch.zeros(3), V: torch.zeros(3)}
    reducer = OwedReducer(LocalReducer(tensors), tensors, [W])
    assert step(reducer, applied=True) == {"w": [1.0] * 3} and reducer.lost() == []
    reducer.set_lost(FOUND)
    owed = {"w": [1.75, 2.0, 2.5], "v": [0.5] * 3}
    for applied in (False, True):
        assert {*reducer.names} == {"w", "v"}
        assert step(reducer, applied=applied) == owed
    assert step(reducer, applied=True) == {"w": [1.0] * 3} and not reducer.names
    assert [float(value.abs().sum()) for _, _, value in reducer.lost()] == [0.0, 0.0]
    reducer.forget()
    assert reducer.lost() == []


def test_factors_and_velocities_are_no_loss() -> None:
    sums: dict[str, Tensor] = all_lost(FOUND)
    assert {name: value.tolist() for name, value in sums.items()} == {"w": [1.5, 2.0, 3.0], "v": [1.0] * 3}
