"""Every part of the state is written once, by a rank that holds it."""

import pytest
import torch
from torch import nn

from paceline.checkpoint.safetensors_file import TensorChunk
from paceline.checkpoint.write_plan import (
    chunk_of_piece,
    merge_scalars,
    parse_table,
    plan_writes,
    render_table,
)
from paceline.parallel.placement import ModelPlacement, PipelineTransform
from paceline.parallel.sharded_model import shard_model
from paceline.state.slot import trained_parameters
from paceline.state.train_state import TrainState

pytestmark = pytest.mark.capability("N3")


def chunk(name: str, rows: int, begin: int = 0, end: int | None = None) -> TensorChunk:
    return TensorChunk(name, "F32", (rows, 4), (begin, 0), ((end or rows) - begin, 4))


def names(plan: list[frozenset[TensorChunk]]) -> list[set[str]]:
    return [{one.name for one in chunks} for chunks in plan]


def test_equal_replicas_share_the_work_by_bytes() -> None:
    table = [chunk("a", 8), chunk("b", 5), chunk("c", 4), chunk("d", 1)]
    plan = plan_writes([table, table])
    assert names(plan) == [{"a", "d"}, {"b", "c"}]
    assert plan_writes([table]) == [set(table)]


def test_where_replicas_differ_the_first_speaks() -> None:
    table = [chunk("a", 8), chunk("b", 5)]
    assert plan_writes([table, table], shared=False) == [set(table), frozenset()]


def test_a_split_tensor_is_written_where_its_parts_are() -> None:
    upper, lower = chunk("w", 8, 0, 3), chunk("w", 8, 3, 8)
    found = plan_writes([[upper], [lower], [upper]])
    assert found in ([{upper}, {lower}, frozenset()], [frozenset(), {lower}, {upper}])


def test_a_whole_copy_of_what_others_hold_in_parts_is_written_in_parts() -> None:
    """As of a worker of several servers; while a part is missing, the whole copy is written, too."""
    upper, lower, whole = chunk("w", 8, 0, 3), chunk("w", 8, 3, 8), chunk("w", 8)
    assert plan_writes([[upper], [lower], [whole]]) == [{upper}, {lower}, frozenset()]
    assert plan_writes([[upper], [], [whole]])[2] == {whole}


def test_what_a_rank_does_not_hold_is_not_written_by_it() -> None:
    """A stage of a pipeline has modules for all names, and values for its own only."""
    tables = []
    for stage in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        slots = tuple(trained_parameters(model))
        placement = ModelPlacement(slots).cut(
            PipelineTransform({slot.name: (int(slot.name[0]),) for slot in slots})
        )
        sharded_model = shard_model(model, placement, {"pipeline": stage}, links=[model[stage]])
        state = TrainState(
            sharded_model, torch.optim.SGD(sharded_model.updates.values(), lr=0.1, momentum=0.9)
        )
        for p in sharded_model.updates.values():
            p.grad = torch.ones_like(p)
        state.optimizer.step()
        tables.append([chunk_of_piece(piece) for piece in state.pieces()])
    linear = {f"0.{kind}" for kind in ("weight", "bias")}
    norm = {f"1.{kind}" for kind in ("weight", "bias")}
    moments = [{f"optimizer/{name}/momentum_buffer" for name in own} for own in (linear, norm)]
    statistics = {f"model/1.{kind}" for kind in ("running_mean", "running_var", "num_batches_tracked")}
    first, second = names(plan_writes(tables))
    assert first == {f"model/{name}" for name in linear} | moments[0]
    assert second == {f"model/{name}" for name in norm} | moments[1] | statistics


def test_a_table_travels_as_json() -> None:
    table = [chunk("a", 8), chunk("w", 8, 3, 8)]
    assert parse_table(render_table(table)) == table


def test_numbers_of_all_ranks_are_joined_and_the_first_speaks_for_the_rest() -> None:
    ranks = [{"step": 3, "optimizer": {"a/n": 1}}, {"step": 3, "optimizer": {"b/n": 2, "a/n": 9}}]
    assert merge_scalars(ranks) == {"step": 3, "optimizer": {"a/n": 1, "b/n": 2}}
