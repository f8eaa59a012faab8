"""The three answers to the loss of a process: the table of docs/howto/survive.md is that of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecipeError
from paceline.recipe import Recipe, Strategy
from paceline.recipe.recovery import recovery_of, strategy_for_members

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "survive.md"
KINDS = {"in process": "in process", "restart": "from a checkpoint", "end": "none"}


def recipe_with(strategy: str, **elastic: Any) -> Recipe:
    sync_batchnorm = strategy.endswith("sync_batchnorm")
    batch: dict[str, Any] = {"size": 16, "sync_batchnorm": sync_batchnorm}
    strategy = strategy.replace(" batch.sync_batchnorm", "")
    return Recipe(task="digits", steps=4, batch=batch, strategy=strategy, elastic=elastic)


def answer_of(strategy: str, **elastic: Any) -> str:
    """The answer in the words of the table."""
    try:
        kind = recovery_of(recipe_with(strategy, **elastic)).kind
    except RecipeError as error:
        assert str(error).startswith("elastic.redundancy: expected only with shard or pipeline"), error
        return "refused"
    return next(word for word, other in KINDS.items() if other == kind)


@pytest.mark.capability("N8", clause="one of three answers for every layout")
def test_the_table_of_the_page_has_the_answers_of_the_code() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    answers = set()
    for strategies, redundancy, answer, *_ in (row for row in rows if len(row) == 4):
        for strategy in re.findall(r"`([^`]+)`", strategies):
            assert answer_of(strategy, redundancy=redundancy.strip("` ")) == answer.strip(), strategy
            answers.add((strategy, redundancy, answer.strip()))
    assert {answer for _, _, answer in answers} == {"in process", "restart", "refused"}
    assert len(answers) >= 15
    assert answer_of("replicas=2", mode="off") == answer_of("shard=2 zero=1", mode="off") == "end"


@pytest.mark.parametrize(
    ("strategy", "processes", "expected"),
    [
        ("shard=3 zero=2", 2, "shard=2 zero=2"),
        ("shard=2 zero=1", 4, "shard=2 zero=1"),
        ("replicas=2 shard=2 zero=1", 3, "shard=3 zero=1"),
        ("pipeline=3", 2, "pipeline=2"),
        ("pipeline=2 schedule=1f1b", 1, "replicas=1"),
        ("shard=all zero=3", 5, "shard=all zero=3"),
        ("shard=all zero=3", 1, "replicas=1"),
    ],
)
def test_fewer_or_more_processes_share_the_state(strategy: str, processes: int, expected: str) -> None:
    found = strategy_for_members(Strategy.parse(strategy), processes)
    assert found.replace(replicas=None) == Strategy.parse(expected).replace(replicas=None)
