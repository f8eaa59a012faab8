"""Heads are spread over ranks, and a part may have several runs: pure."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from paceline.errors import TaskError
from paceline.models import GPT, GPTConfig
from paceline.parallel.tensor.attention_heads import HeadShare, assign_heads, cut_heads
from paceline.state.slot import (
    TensorPiece,
    TensorSlot,
    index_of_span,
    join_runs,
    span_length,
    span_of_index,
    span_runs,
)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
def test_every_head_is_on_one_rank_with_the_keys_that_it_uses(heads: int, degree: int) -> None:
    for shared in (n for n in range(1, heads + 1) if heads % n == 0):
        shares = assign_heads(heads, shared, degree)
        assert len(shares) == degree and shares[0].queries[0] == 0 and shares[-1].queries[1] == heads
        assert all(a.queries[1] == b.queries[0] for a, b in pairwise(shares))
        group = heads // shared
        for share in shares:
            used = {head // group for head in range(*share.queries)}
            assert used <= {*range(*share.shared)}
            here = share.shared[1] - share.shared[0]
            assert not used or (share.queries[1] - share.queries[0]) % here == 0  # of equal groups
        counts = [b - a for (a, b), _ in shares]
        assert max(counts) - min(counts) <= group


def test_three_heads_on_two_ranks_are_one_and_two() -> None:
    assert assign_heads(3, 3, 2) == [HeadShare((0, 1), (0, 1)), HeadShare((1, 3), (1, 3))]
    assert assign_heads(4, 1, 3) == [
        HeadShare((0, 1), (0, 1)),
        HeadShare((1, 2), (0, 1)),
        HeadShare((2, 4), (0, 1)),
    ]


def test_a_span_of_several_runs_selects_what_it_says() -> None:
    span = join_runs([(0, 2), (2, 3), (5, 5), (7, 9)])
    assert span == (0, 3, 7, 9) and span_runs(span) == [(0, 3), (7, 9)] and span_length(span) == 5
    assert index_of_span(span) == [0, 1, 2, 7, 8] and span_of_index(index_of_span(span), 12) == span
    assert span_of_index(slice(4, None), 9) == (4, 9) and join_runs([]) == (0, 0)


def test_parts_of_parts_with_gaps_are_found_in_the_whole_and_in_each_other() -> None:
    whole = torch.arange(24).view(12, 2)
    rows = TensorSlot.whole("w", whole).take(0, (0, 2, 4, 6, 8, 10), "tensor")
    held = whole[rows.index]
    assert rows.sizes == (6, 2) and held[:, 0].tolist() == [0, 2, 8, 10, 16, 18]
    found = torch.zeros_like(whole)
    for first, last in ((0, 1), (1, 4), (4, 4), (4, 6)):
        part = rows.narrow(0, (first, last), "shard")
        assert part.sizes == (last - first, 2) and torch.equal(held[part.inside(rows)], whole[part.index])
        found[part.index] = held[part.inside(rows)]
    boxes = [*TensorPiece(rows, held).boxes()]
    assert [box.slot.part[0] for box in boxes] == [(0, 2), (4, 6), (8, 10)]
    assert all(torch.equal(box.tensor, whole[box.slot.index]) for box in boxes)
    assert torch.equal(found[rows.index], held) and int((found == 0).all(1).sum()) == 6


def test_a_fused_projection_is_three_runs_of_rows() -> None:
    attention = GPT(GPTConfig(heads=3, width=12, layers=1)).blocks[0].attention
    cut = cut_heads("attention", attention, 2)
    fused, output = cut.linears
    assert [one.name for one in cut.linears] == ["attention.qkv", "attention.project"]
    assert fused.spans == [(0, 4, 12, 16, 24, 28), (4, 12, 16, 24, 28, 36)]
    assert output.spans == [(0, 4), (4, 12)] and cut.numbers == [{"heads": 1}, {"heads": 2}]


def test_what_cannot_be_cut_by_heads_is_named() -> None:
    attention = GPT(GPTConfig(heads=3, width=12, layers=1)).blocks[0].attention
    with pytest.raises(TaskError, match="'a' has 3 attention heads for tensor=4, so a rank would have none"):
        cut_heads("a", attention, 4)
    with pytest.raises(TaskError, match="finds no queries, keys and values among its linear layers: up"):
        cut_heads("a", nn.ModuleDict({"up": nn.Linear(2, 2)}), 2)
    attention.attn_dropout = nn.Dropout(0.1)
    with pytest.raises(TaskError, match=r"'a.attn_dropout' drops attention weights with probability 0.1"):
        cut_heads("a", attention, 2)
