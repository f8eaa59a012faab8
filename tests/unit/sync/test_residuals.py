"""Of the residuals in a checkpoint a rank reads its own rows, the first one those of gone ranks as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paceline.comm.reduction import GradientUnit
from paceline.job.mesh import RankGroup
from paceline.state.slot import InMemorySource, TensorSlot
from paceline.sync.residuals import DeltaResidualState, FixedUnit, ResidualState

SLOT = TensorSlot("w", (4, 2), ((2, 4), (0, 2)), frozenset({"shard"}))
SAVED = {
    f"{side}/w": torch.arange(24.0).view(3, 4, 2) + 100 * i
    for i, side in enumerate(["sent", "owned", "factor", "velocity"])
}


class Taker:
    """Takes what it is given."""

    found: Mapping[tuple[str, str], Tensor]

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        return ()

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        self.found = found


def read(
    rank: int, size: int, more: Mapping[str, Tensor] | None = None, **options: Any
) -> tuple[int, Mapping[tuple[str, str], Tensor]]:
    """How many values a rank reads, and what it goes on from."""
    saved = {**SAVED, "sent/of another rank": torch.zeros(3, 9), **(more or {})}
    taker, source = Taker(), InMemorySource(saved)
    kept = ResidualState(taker, [SLOT], RankGroup("replica", tuple(range(size)), rank), **options)
    values = source.read(kept.wanted(source.shapes))
    kept.load(values)
    return sum(value.numel() for value in values.values()), taker.found


@pytest.mark.capability("H4")
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_reads_its_own_rows(rank: int) -> None:
    num_values, found = read(rank, 3)
    assert num_values == 4 * 4  # its half of a row, of four sides
    for (side, name), value in found.items():
        assert torch.equal(value, SAVED[f"{side}/{name}"][rank, 2:4])


@pytest.mark.capability("H4")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_under_another_number_of_ranks_the_sum_stays(size: int) -> None:
    reads = [read(rank, size) for rank in range(size)]
    assert [num for num, _ in reads] == [3 * 3 * 4] + [0] * (size - 1)
    total = sum(found["sent", "w"] for _, found in reads)
    assert torch.equal(total, (SAVED["sent/w"] + SAVED["owned/w"]).sum(0)[2:4])
    velocity = sum(found["velocity", "w"] for _, found in reads)
    assert torch.equal(velocity, SAVED["velocity/w"].sum(0)[2:4])  # momentum is no loss: it goes on apart
    assert all(found.keys() == {("sent", "w"), ("velocity", "w")} for _, found in reads)


@pytest.mark.capability("H4")
def test_the_rows_of_ranks_that_send_no_more_are_sent_by_the_first_that_does() -> None:
    _, gone = read(0, 3, first=1)
    _, first = read(1, 3, first=1)
    for side in ("sent", "owned"):
        rows = SAVED[f"{side}/w"][:, 2:4]
        assert not gone[side, "w"].any() and torch.equal(first[side, "w"], rows[0] + rows[1])


@pytest.mark.capability("H4")
def test_a_rule_that_multiplies_gradients_with_something_else_goes_on_from_the_same_loss() -> None:
    scale = torch.tensor([0.25], dtype=torch.float64)
    _, found = read(1, 3, {"scale": scale}, unit=FixedUnit(2.0))
    assert torch.equal(found["sent", "w"], 8 * SAVED["sent/w"][1, 2:4])
    of_two = {"scale": scale, "items": torch.tensor([2.0], dtype=torch.float64)}
    _, found = read(1, 3, of_two, unit=FixedUnit(2.0, items=8.0))  # a short batch's, in a full one
    assert torch.equal(found["sent", "w"], 32 * SAVED["sent/w"][1, 2:4])


@pytest.mark.capability("H4")
@pytest.mark.parametrize(("saved", "factor"), [({}, 4.0), ({"items": 7.0}, 4.0 * 3 / 7)])
def test_gradients_go_on_as_they_are_until_their_unit_changes(saved: dict[str, float], factor: float) -> None:
    """So a run that goes on has the digits of one that did not stop."""
    numbers = {word: torch.tensor([x], dtype=torch.float64) for word, x in ({"scale": 0.5} | saved).items()}
    followed: list[float] = []
    unit = GradientUnit(followed.append, 1.0, 3.0, divides=True)
    _, found = read(1, 3, numbers, unit=unit)
    assert torch.equal(found["sent", "w"], SAVED["sent/w"][1, 2:4])
    for _ in range(2):
        unit.follow(2.0, 3.0)
    assert followed == [pytest.approx(factor)]


@pytest.mark.capability("H4")
@pytest.mark.parametrize(
    ("share", "scale", "factor"), [(1.33, 1.0, 1.0), (1.33 / 128, 4.0, 1 / 128), (0.665, 1.0, 0.5)]
)
def test_what_movements_have_lost_is_worth_as_much_as_where_it_was_lost(
    share: float, scale: float, factor: float
) -> None:
    """Of files that keep a part of a mean, those that kept a multiple of 128 items, and of another rate."""
    taker, movement = Taker(), SimpleNamespace(share=1.33, anchors={SLOT: None})
    kept = DeltaResidualState(
        ResidualState(taker, [SLOT], RankGroup("replica", (0, 1, 2), 1)), cast(Any, [movement])
    )
    numbers = {"share/w": torch.tensor([share]), "scale": torch.tensor([scale])}
    source = InMemorySource(SAVED | {name: x.double() for name, x in numbers.items()})
    kept.load(source.read(kept.wanted(source.shapes)))
    for (side, name), value in taker.found.items():
        torch.testing.assert_close(value, SAVED[f"{side}/{name}"][1, 2:4] * factor)
