"""Every part of the state is written once, by a rank that holds it."""

import pytest

from paceline.checkpoint.plan import Entry, merge_scalars, parse_table, plan_writes, render_table
from paceline.checkpoint.tensor_file import Chunk

pytestmark = pytest.mark.capability("N3")


def entry(name: str, rows: int, begin: int = 0, end: int | None = None, split: bool = False) -> Entry:
    return Entry(Chunk(name, "F32", (rows, 4), (begin, 0), ((end or rows) - begin, 4)), split)


def test_equal_replicas_share_the_work_by_bytes() -> None:
    table = [entry("a", 8), entry("b", 5), entry("c", 4), entry("d", 1)]
    plan = plan_writes([table, table])
    assert plan == [{"a", "d"}, {"b", "c"}]
    assert plan_writes([table]) == [{"a", "b", "c", "d"}]


def test_where_replicas_differ_the_first_speaks() -> None:
    table = [entry("a", 8), entry("b", 5)]
    assert plan_writes([table, table], shared=False) == [{"a", "b"}, frozenset()]


def test_a_split_tensor_is_written_where_its_parts_are() -> None:
    tables = [[entry("w", 8, 0, 3, True)], [entry("w", 8, 3, 8, True)], [entry("w", 8, 0, 3, True)]]
    assert plan_writes(tables) in ([{"w"}, {"w"}, frozenset()], [frozenset(), {"w"}, {"w"}])


def test_a_whole_copy_that_is_out_of_date_is_not_written() -> None:
    """A stage of a pipeline holds all names, and only its own are right."""
    tables = [
        [entry("first", 4, split=True), entry("second", 4)],
        [entry("first", 4), entry("second", 4, split=True)],
    ]
    assert plan_writes(tables) == [{"first"}, {"second"}]


def test_a_table_travels_as_json() -> None:
    table = [entry("a", 8), entry("w", 8, 3, 8, True)]
    assert parse_table(render_table(table)) == table


def test_numbers_of_all_ranks_are_joined_and_the_first_speaks_for_the_rest() -> None:
    ranks = [{"step": 3, "optimizer": {"a/n": 1}}, {"step": 3, "optimizer": {"b/n": 2, "a/n": 9}}]
    assert merge_scalars(ranks) == {"step": 3, "optimizer": {"a/n": 1, "b/n": 2}}
