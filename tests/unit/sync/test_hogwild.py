"""What ranks tell each other without a lock: how many updates were made, and how many arrived."""

import pytest
import torch

from paceline.sync.hogwild import Board


def boards(num_ranks: int, num_ones: int = 8) -> list[Board]:
    taken, stops = torch.zeros(num_ranks, dtype=torch.int64), torch.zeros(num_ranks, dtype=torch.int64)
    ones = torch.zeros(num_ones)
    return [Board(taken, stops, ones, rank) for rank in range(num_ranks)]


@pytest.mark.capability("I5")
def test_updates_that_come_one_after_another_are_all_there() -> None:
    first, second = boards(2)
    for board in (first, second):
        board.begin()
    for board in (first, second, first):
        board.count()
    assert first.updates == second.updates == 3
    assert first.lost_share() == second.lost_share() == 0.0


@pytest.mark.capability("I5")
def test_one_of_two_that_are_made_at_once_is_lost_and_counted() -> None:
    """Both read before either writes, in half of the values: one of two updates is lost there."""
    first, second = boards(2)
    for board in (first, second):
        board.begin()
    read = second.ones[:4].clone()
    first.count()
    second.count()
    second.ones[:4] = read + 1.0  # what a processor does that has read before the other wrote
    assert first.lost_share() == second.lost_share() == 0.25


def test_a_round_counts_its_own_updates_only() -> None:
    first, second = boards(2)
    first.begin()
    first.count()
    first.ones.zero_()
    assert first.lost_share() == 1.0
    for board in (first, second):
        board.begin()
    second.count()
    assert first.lost_share() == 0.0


def test_a_request_to_stop_is_seen_by_all() -> None:
    first, second = boards(2)
    assert not first.stopping
    second.ask_to_stop(True)
    assert first.stopping and second.stopping
