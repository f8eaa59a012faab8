"""The tree of additions: the same bits for every way of dealing out the shards."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.comm.reduction.gradient_norm import row_squares
from paceline.comm.reduction.summation_tree import (
    TreeAccumulator,
    common_ancestor_level,
    covering_nodes,
    tree_sum,
)
from paceline.verification.oracle import tree_sum as oracle_tree_sum

pytestmark = pytest.mark.capability("I10")


@pytest.mark.parametrize("stop", [1, 2, 7, 8, 13, 32])
def test_a_cover_is_made_of_the_largest_nodes(stop: int) -> None:
    for start in range(stop):
        nodes = covering_nodes(range(start, stop))
        assert [shard for node in nodes for shard in node] == list(range(start, stop))
        for node in nodes:
            width = len(node)
            assert width & (width - 1) == 0 and node.start % width == 0
            larger = range(node.start // (2 * width) * 2 * width, (node.start // (2 * width) + 1) * 2 * width)
            assert larger.start < start or larger.stop > stop


def test_two_nodes_meet_where_the_smallest_node_has_both() -> None:
    assert common_ancestor_level(range(2, 3), range(3, 4)) == 1
    assert common_ancestor_level(range(1, 2), range(2, 3)) == 2
    assert common_ancestor_level(range(4, 8), range(4)) == 3


def leaves_of(rng: random.Random, num_shards: int) -> dict[int, Tensor]:
    """Values of very different size; some shards have none, as shards of a small last batch."""
    return {
        shard: torch.randn(17, generator=torch.Generator().manual_seed(rng.getrandbits(30)))
        * 10.0 ** rng.randint(-6, 6)
        for shard in range(num_shards)
        if rng.random() < 0.85
    }


ORDERS: dict[str, Callable[[range], list[int]]] = {
    "ascending": list,
    "descending": lambda block: list(reversed(block)),
    "any": lambda block: random.Random(len(block)).sample(block, len(block)),
}


def dealt(leaves: dict[int, Tensor], num_shards: int, num_parts: int, order: str) -> Tensor:
    """Every part adds up its block; then the nodes of all are added."""
    places, sums = [], []
    for part in range(num_parts):
        block = range(num_shards * part // num_parts, num_shards * (part + 1) // num_parts)
        nodes = covering_nodes(block)
        carry = TreeAccumulator(nodes)
        for shard in ORDERS[order](block):
            value = leaves.get(shard)
            carry.push(range(shard, shard + 1), None if value is None else value.clone())
        for k, value in sorted(carry.close().items()):
            places.append(nodes[k])
            sums.append(value)
    return tree_sum(places, sums)


@pytest.mark.parametrize("seed", range(40))
def test_any_deal_in_any_order_gives_the_bits_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    num_shards = rng.randint(1, 33)
    leaves = leaves_of(rng, num_shards) or {0: torch.ones(17)}
    right = oracle_tree_sum(leaves)
    for num_parts in range(1, num_shards + 1):
        for order in ORDERS:
            assert torch.equal(dealt(leaves, num_shards, num_parts, order) + 0.0, right)


def test_a_plain_sum_in_another_order_has_other_bits() -> None:
    """Twin: without the tree, the order shows."""
    leaves = leaves_of(random.Random(3), 16)
    forwards = sum(leaves.values(), start=torch.zeros(17))
    backwards = sum(reversed(leaves.values()), start=torch.zeros(17))
    assert not torch.equal(forwards, backwards)


def test_a_carry_keeps_one_partial_sum_for_a_level() -> None:
    carry = TreeAccumulator([range(64)])
    most = 0
    for shard in range(64):
        carry.push(range(shard, shard + 1), torch.ones(1))
        most = max(most, carry.num_sums)
    assert most <= 7
    assert carry.close()[0].item() == 64


@pytest.mark.capability("J11")
@pytest.mark.parametrize("width", [1, 3, 8, 17, 64, 100, 257, 4096])
def test_the_square_of_a_row_does_not_depend_on_the_other_rows(width: int) -> None:
    x = torch.randn(33, width)
    whole = row_squares(x)
    for start in range(33):
        for stop in (start + 1, min(33, start + 5), 33):
            assert torch.equal(row_squares(x[start:stop]), whole[start:stop])
    assert torch.allclose(whole, x.double().square().sum(1), rtol=1e-12)
