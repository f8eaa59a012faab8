"""Every layout of some ranks is in the table once, and the table says what the support table says."""

from __future__ import annotations

import json
from math import prod

import pytest
from typer.testing import CliRunner

from paceline.cli.main import build_app
from paceline.recipe import support
from paceline.recipe.support import list_layouts, num_ranks

DEGREES = ("replicas", "shard", "tensor", "context", "pipeline")


@pytest.mark.capability("E1")
@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 4 + 3), (8, 20 + 3 * 15), (6, 16 + 3 * 9)])
def test_every_way_to_make_the_ranks_is_there_once(ranks: int, count: int) -> None:
    rows = list_layouts(ranks)
    assert len({row.strategy for row in rows}) == len({row.name for row in rows}) == len(rows) == count
    for row in rows:
        assert prod(getattr(row.strategy, name) for name in DEGREES) == num_ranks(row.strategy) == ranks
        assert row.support == support(row.strategy, processes=ranks, shards=ranks)
        assert row.support.ok != bool(row.support.reason)


def test_the_command_lists_them_with_their_reasons() -> None:
    told = CliRunner().invoke(build_app(["strategies"]), ["strategies", "--ranks", "8"])
    lines = told.stdout.splitlines()
    rows = list_layouts(8)
    assert told.exit_code == 0 and len(lines) == len(rows) + 1
    refused = [row for row in rows if not row.support.ok]
    assert lines[-1] == f"65 layouts of 8 ranks, {len(refused)} of them refused"
    for line, row in zip(lines, rows, strict=False):
        assert line.startswith(row.name) and line.endswith(row.support.reason or "runs")
    told = CliRunner().invoke(build_app(["strategies"]), ["strategies", "--ranks", "8", "--json"])
    assert [one["strategy"] for one in json.loads(told.stdout)] == [str(row.strategy) for row in rows]
