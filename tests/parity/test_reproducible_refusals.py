"""What would break the promise of a reproducible run is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.errors import DeviceError, PacelineError, RecipeError, StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.models import KeyedDropout
from paceline.parallel.state_hash import state_sha256
from paceline.recipe import OptimizerRecipe, Recipe
from paceline.session import reproducibility
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session, make_task
from tests.parity.reproducible import recipe_of


@pytest.mark.capability("I10")
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"strategy": "replicas=2 sync=local:4"}, "sync=every-step"),
        ({"strategy": "replicas=2 codec=int8"}, "codec=fp32"),
        ({"runtime": {"threads": 2}}, "lanes=2"),
        ({"runtime": {"compile": True}}, "compile = false"),
    ],
    ids=["local", "int8", "threads", "compile"],
)
def test_a_recipe_that_cannot_keep_its_bits_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        recipe_of(**({"strategy": "replicas=1"} | changes))


def refusal(cluster: Cluster, recipe: Recipe, prepare: Callable[[Cluster], Any]) -> str:
    try:
        build_test_session(cluster, recipe, prepare(cluster))
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def as_it_is(cluster: Cluster) -> None:
    return None


def another_processor(cluster: Cluster) -> None:
    """Rank 1 is of another kind."""
    if cluster.global_rank == 1:
        reproducibility._cpu_model = lambda: "Another 9000"


def two_threads(cluster: Cluster) -> None:
    torch.set_num_threads(2)


def denormals_flushed(cluster: Cluster) -> None:
    if cluster.global_rank == 1:
        assert torch.set_flush_denormal(True)


def fused_optimizer(cluster: Cluster) -> Any:
    def task() -> Task:
        built = make_task(recipe_of("replicas=1"))
        return replace(built, optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True))

    return task


@pytest.mark.capability("I10")
@pytest.mark.parametrize(
    ("prepare", "kind", "words"),
    [
        (another_processor, DeviceError, "processor is .* on ranks \\[0\\], Another 9000 on ranks \\[1\\]"),
        (denormals_flushed, DeviceError, "denormal numbers is kept on ranks \\[0\\], flushed"),
        (two_threads, StrategyError, "2 threads"),
        (fused_optimizer, StrategyError, "fused optimizer"),
    ],
)
def test_what_breaks_the_promise_is_named_before_training(
    prepare: Callable[[Cluster], Any], kind: type[Exception], words: str
) -> None:
    import re

    recipe = recipe_of("replicas=2").replace(optimizer=OptimizerRecipe())  # a task may bring its own
    for said in run_ranks(refusal, 2, recipe, prepare):
        assert said.startswith(kind.__name__) and re.search(words, said), said
    assert run_ranks(refusal, 2, recipe_of("replicas=2"), as_it_is) == ["", ""]


class Drops(nn.Module):
    """Two layers with a dropout of either kind."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), dropout, nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    return Loss((model(x).squeeze(-1) - y).square().sum(), len(y))


def dropping(kind: type[nn.Module]) -> Task:
    torch.manual_seed(1)
    x = torch.randn(64, 6)
    return Task(Drops(kind(0.5)), TensorDataset(x, x.sum(1)), loss, stages=lambda model: list(model.layers))


@pytest.mark.capability("J10", "A9")
def test_random_numbers_that_would_be_shared_are_an_error() -> None:
    def trained(cluster: Cluster, kind: type[nn.Module]) -> str:
        try:
            recipe = recipe_of("replicas=1 lanes=2", steps=2)
            session = build_test_session(cluster, recipe, lambda: dropping(kind))
            list(session.rounds())
        except TaskError as error:
            return str(error)
        return state_sha256(session.snapshot().tensors())

    for said in run_ranks(trained, 1, nn.Dropout):
        assert "draws from PyTorch's" in said and "KeyedDropout" in said
    for sha256 in run_ranks(trained, 1, KeyedDropout):
        assert len(sha256) == 64


@pytest.mark.capability("J10")
def test_random_numbers_go_on_from_stage_to_stage() -> None:
    """What a stage draws from PyTorch's own stream, the next goes on with: the bits of one process."""

    def trained(cluster: Cluster, strategy: str) -> str:
        session = build_test_session(cluster, recipe_of(strategy, steps=2), lambda: dropping(nn.Dropout))
        list(session.rounds())
        return state_sha256(session.snapshot().tensors())

    assert run_ranks(trained, 2, "replicas=1 pipeline=2") == run_ranks(trained, 1, "replicas=1") * 2


@pytest.mark.capability("A7", "A9")
def test_an_error_in_one_lane_ends_the_step_and_the_other_lanes() -> None:
    def failing(cluster: Cluster) -> list[str]:
        def task() -> Task:
            built = dropping(KeyedDropout)

            def raises(model: nn.Module, batch: Any) -> Loss:
                if model is not built.model and model.training:
                    raise ValueError("in the second lane")
                return loss(model, batch)

            return replace(built, loss=raises)

        session = build_test_session(cluster, recipe_of("replicas=1 lanes=2"), task)
        said = []
        for _ in range(2):  # and the lanes are there for the next try
            try:
                list(session.rounds())
            except ValueError as error:
                said.append(str(error))
            session.abort()
        session.close()
        return said

    assert run_ranks(failing, 1)[0] == ["in the second lane"] * 2
