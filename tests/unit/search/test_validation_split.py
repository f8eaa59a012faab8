"""`evaluate.validation`: a keyed part of the training samples for every seed, and the test set untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from paceline import Loss, Recipe, Task
from paceline.data.task_data import prepare_data
from paceline.errors import DataError, RecipeError
from paceline.recipe.resume_changes import refuse_changes


class Untouched:
    """Samples that nothing may read."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the test set was opened")


def task_of(data: Any, **more: Any) -> Task:
    loss = lambda model, batch: Loss(model(batch).sum(), len(batch))  # noqa: E731
    return Task(nn.Linear(1, 1), data, loss, held_out=Untouched(), **more)


def recipe_of(share: float | None = 0.2, **more: Any) -> Recipe:
    return Recipe(task="digits", steps=1, evaluate={"validation": share} if share else {}, **more)


@pytest.mark.capability("S6")
@pytest.mark.parametrize("kind", ["list", "loader"])
def test_the_parts_are_disjoint_and_keyed_and_the_test_set_is_not_read(kind: str) -> None:
    samples = list(torch.arange(103.0).unsqueeze(1))
    data: Any = samples
    if kind != "list":
        data = DataLoader(data, batch_size=32, shuffle=True)
    one = prepare_data(task_of(data), recipe_of())
    other = prepare_data(task_of(data), recipe_of(seed=9))
    parts = [[int(source[i]) for i in range(len(source))] for source in (one.data, one.held_out)]
    assert [len(part) for part in parts] == [82, 21]
    assert sorted(parts[0] + parts[1]) == list(range(103))
    assert parts[1] != list(range(21)) and parts[1] != list(range(82, 103))
    assert [int(other.held_out[i]) for i in range(21)] == parts[1]
    assert isinstance(one.test, Untouched)
    assert prepare_data(one, recipe_of()) is one  # not split again
    assert isinstance(prepare_data(task_of(samples), recipe_of(None)).held_out, Untouched)


def test_data_that_cannot_be_split_is_refused() -> None:
    samples = list(torch.arange(10.0))
    for task, says in (
        (task_of(iter_again(samples)), "stream"),
        (task_of(samples, sampler=RandomSampler(samples)), "sampler"),
        (task_of(samples[:1]), "fewer than two"),
    ):
        with pytest.raises(DataError, match=says):
            prepare_data(task, recipe_of())
    with pytest.raises(RecipeError, match=r"evaluate.validation: 0.2 -> left out"):
        refuse_changes(recipe_of(), recipe_of(None), "run")


def iter_again(samples: list[Any]) -> Any:
    class Stream:
        def __iter__(self) -> Any:
            return iter(samples)

    return Stream()
