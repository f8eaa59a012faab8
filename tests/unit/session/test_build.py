"""What a session refuses to be built from."""

import pytest
import torch
from torch import nn

from paceline.errors import DataError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.task import Loss, Task
from paceline.testing.parity import build_test_session


def empty() -> Task:
    return Task(nn.Linear(4, 1), [], lambda model, batch: Loss(model(batch).sum(), len(batch)))


def test_empty_data_is_refused_before_a_sample_is_asked_for() -> None:
    recipe = Recipe(task="own", steps=1, batch={"size": 2, "shards": 1})
    with pytest.raises(DataError, match="the training data is empty") as caught:
        build_test_session(Cluster.single(), recipe, empty)
    assert "options" in caught.value.next_step
    full = build_test_session(
        Cluster.single(), recipe, lambda: Task(nn.Linear(4, 1), torch.rand(4, 4), empty().loss)
    )
    assert full.num_steps == 1
