"""Which server holds which rows: every row is on exactly one, and bytes are balanced."""

from random import Random

import pytest

from paceline.parallel.placement import ModelPlacement
from paceline.parallel.server_partition import (
    ServerTransform,
    TensorExtent,
    bytes_by_server,
    make_partitioner,
    one_piece_per_server,
    plan_partition,
)
from paceline.recipe import Recipe
from paceline.recipe.strategy_text import parse_partition
from paceline.state.slot import TensorSlot, trained_parameters
from paceline.testing.parity import make_task

pytestmark = pytest.mark.capability("B4")
WORDS = ("fixed", "min-size:512", "min-size:100000", "max-size:64", "max-size:4096")


def extents_of(task: str, **options: object) -> dict[str, TensorExtent]:
    model = make_task(Recipe(task=task, options=options, steps=1)).model
    return {
        slot.name: TensorExtent(p.shape[0] if p.dim() else 1, p.numel() * p.element_size())
        for slot, p in trained_parameters(model).items()
    }


@pytest.mark.parametrize("word", WORDS)
def test_every_row_is_on_one_server_and_no_server_is_ahead_by_more_than_a_piece(word: str) -> None:
    draw = Random(7)
    for _ in range(200):
        num_servers = draw.randint(1, 6)
        extents = {}
        for number in range(draw.randint(1, 9)):
            rows = draw.choice((1, 2, 5, 64, 1000))
            extents[f"t{number}"] = TensorExtent(rows, rows * draw.choice((4, 128, 4096)))
        plan = plan_partition(extents, num_servers, make_partitioner(parse_partition(word)))
        largest = 0.0
        for name, spans in plan.items():
            rows = sorted(row for span in spans if span for row in range(*span))
            assert len(spans) == num_servers and rows == list(range(extents[name].rows))
            sizes = [
                (stop - start) * extents[name].num_bytes / extents[name].rows
                for start, stop in filter(None, spans)
            ]
            largest = max(largest, *sizes)
        held = bytes_by_server(extents, plan)
        assert sum(held) == sum(extent.num_bytes for extent in extents.values())
        assert max(held) - min(held) <= largest + 1e-6


def test_a_partitioner_decides_about_the_number_of_pieces() -> None:
    extents = {"large": TensorExtent(1000, 1000), "small": TensorExtent(10, 10)}

    def pieces(word: str) -> dict[str, int]:
        plan = plan_partition(extents, 4, make_partitioner(parse_partition(word)))
        return {name: sum(span is not None for span in spans) for name, spans in plan.items()}

    assert pieces("fixed") == {"large": 4, "small": 4}
    assert pieces("min-size:400") == {"large": 2, "small": 1}  # as many as have 400 bytes
    assert pieces("max-size:400") == {"large": 3, "small": 1}  # so few that none has more
    assert pieces("max-size:1") == {"large": 4, "small": 4}  # there are no more servers


@pytest.mark.parametrize("num_servers", [2, 3, 4])
def test_bytes_of_real_models_are_within_ten_percent(num_servers: int) -> None:
    """The twin deals whole tensors in turn, as names come."""
    models = [
        extents_of("digits", model="mlp", hidden=[32]),
        extents_of("digits", model="convnet"),
        extents_of("byte-gpt"),
    ]
    for extents in models:
        held = bytes_by_server(extents, plan_partition(extents, num_servers, one_piece_per_server))
        mean = sum(held) / num_servers
        assert all(abs(one - mean) <= 0.1 * mean for one in held), held
    dealt = [0] * num_servers
    for number, extent in enumerate(models[0].values()):
        dealt[number % num_servers] += extent.num_bytes
    assert max(dealt) > 1.1 * sum(dealt) / num_servers


def test_servers_hold_and_update_their_parts_and_workers_hold_everything_and_update_nothing() -> None:
    slots = tuple(
        TensorSlot(name, shape, tuple((0, n) for n in shape)) for name, shape in (("w", (5, 3)), ("s", ()))
    )
    plan = plan_partition({"w": TensorExtent(5, 60), "s": TensorExtent(1, 4)}, 2, one_piece_per_server)
    placement = ModelPlacement(slots).cut(ServerTransform(plan, {}))
    ranks = [placement.at({"replica": rank}) for rank in range(5)]
    for rank in ranks:
        assert all(held.computes.is_whole and len(held.parts) == 3 for held in rank.values())
    assert [[held.kept for held in rank.values()] for rank in ranks] == [[False] * 2] * 2 + [[True] * 2] * 3
    assert [sum(held.updates.numel for held in rank.values() if held.updates) for rank in ranks[:2]] == [9, 7]
    assert all(held.updates is None for rank in ranks[2:] for held in rank.values())
