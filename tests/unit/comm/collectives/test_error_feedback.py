"""What coding has lost of one buffer: where sums were dropped, it is what it was."""

import pytest
import torch

from paceline.comm.collectives.error_feedback import ErrorFeedback

PLACES = torch.tensor([[True, False], [False, True]])


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.capability("H4")
def test_in_some_places_what_was_lost_before_is_lost_still() -> None:
    """Also of a sum that was sent as it was, and so has lost nothing now; velocities go on from it."""
    before = ErrorFeedback(
        torch.stack([row(1, 2), row(3, 4)]), row(5, 6), torch.stack([row(7, 8), row(9, 10)])
    )
    now = ErrorFeedback(torch.full((2, 2), 0.5), None, torch.full((2, 2), 0.25))
    now.restore(before, PLACES, rank=1)
    assert now.sent.tolist() == [[1, 0.5], [0.5, 4]]
    assert now.velocity is not None and now.velocity.tolist() == [[7, 0.25], [0.25, 10]]
    assert now.owned is not None and now.owned.tolist() == [0, 6]


@pytest.mark.capability("H4")
def test_where_nothing_was_lost_before_nothing_is() -> None:
    now = ErrorFeedback(torch.full((2, 2), 0.5), torch.full((2,), 0.5))
    now.restore(None, PLACES, rank=0)
    assert now.sent.tolist() == [[0, 0.5], [0.5, 0]]
    assert now.owned is not None and now.owned.tolist() == [0, 0.5]
