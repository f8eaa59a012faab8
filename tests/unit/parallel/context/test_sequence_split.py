"""Positions of a sequence over ranks: each once, the same work on all, the right blocks."""

import pytest
import torch

from paceline.errors import TaskError
from paceline.parallel.context.sequence_split import PositionRuns, attention_block, split_positions

CASES = [(length, ranks) for ranks in (1, 2, 3, 4, 7) for length in range(ranks, ranks + 23)]


def places(runs: PositionRuns) -> list[int]:
    return [*range(*runs.early), *range(*runs.late)]


def test_every_position_is_on_one_rank_and_sizes_differ_by_one_at_most() -> None:
    for length, ranks in CASES:
        runs = split_positions(length, ranks)
        assert sorted(place for one in runs for place in places(one)) == list(range(length))
        assert all(places(one) == sorted(places(one)) for one in runs)
        sizes = [one.size for one in runs]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_are_the_whole_mask(causal: bool) -> None:
    for length, ranks in CASES:
        runs = split_positions(length, ranks)
        for mine in range(ranks):
            for theirs in range(ranks):
                seen = torch.zeros(runs[mine].size, runs[theirs].size, dtype=torch.bool)
                block = attention_block(runs, mine, theirs, causal=causal)
                inside = torch.ones_like(seen[block.queries, block.keys])
                seen[block.queries, block.keys] = inside.tril() if block.causal else inside
                queries, keys = (torch.tensor(places(runs[rank])) for rank in (mine, theirs))
                right = keys[None] <= queries[:, None] if causal else torch.ones_like(seen)
                assert torch.equal(seen, right), (length, ranks, mine, theirs)


def test_under_a_causal_mask_ranks_have_the_same_work() -> None:
    runs = split_positions(4096, 4)
    work = [sum(place + 1 for place in places(one)) for one in runs]
    assert max(work) - min(work) <= 0.001 * max(work)
    contiguous = [sum(range(start, start + 1024)) for start in range(0, 4096, 1024)]
    assert max(contiguous) > 6 * min(contiguous)  # what the pairing of runs is for


def test_fewer_positions_than_ranks_are_refused() -> None:
    with pytest.raises(TaskError, match="3 positions is too short for context=4"):
        split_positions(3, 4)
