"""A loss that compares all samples of a batch is that of one process on any number of ranks, by `gather`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import PacelineError, StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.parallel.batch_gather import RankGather, _GatherRows, gather_scope
from paceline.recipe import Recipe
from paceline.session import OwnLoop, evaluate
from paceline.session.fit_loop import fitting
from paceline.session.task_contract import describe_coupling
from paceline.task import Loss, Task
from paceline.testing.parity import CPU, build_test_session, run_oracle, whole_trajectory
from paceline.testing.rank_processes import run_ranks
from paceline.verification import compare_with_oracle
from paceline.verification.oracle_loop import _REFUSED_GATHER

STEPS = 4
Gather = Callable[[Tensor], Tensor]


class Towers(nn.Module):
    """Two encoders and a learned temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.texts = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        images, texts = self.images(x[:, :6]), self.texts(x[:, 6:])
        return F.normalize(images, dim=1), F.normalize(texts, dim=1), self.scale


def contrast(gather: Gather, model: nn.Module, x: Tensor) -> Loss:
    images, texts, scale = model(x)
    images, texts = gather(images), gather(texts)
    logits, labels = scale.exp() * images @ texts.T, torch.arange(len(images))
    total = F.cross_entropy(logits, labels, reduction="sum") + F.cross_entropy(
        logits.T, labels, reduction="sum"
    )
    return Loss(total / 2, len(images), {"found": (logits.argmax(1) == labels).sum()})


def build(gather: Gather = paceline.gather) -> Task:
    torch.manual_seed(0)
    data = list(torch.randn(22, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    return Task(Towers().double(), data, partial(contrast, gather), held_out=data[:9])


def recipe_of(strategy: str = "replicas=all", **changes: Any) -> Recipe:
    """Batches of 9 samples, and a last one of 4."""
    batch = {"size": 9} | changes.pop("batch", {})
    settings = {"steps": STEPS, "batch": batch, "strategy": strategy, "precision": {"compute": "fp32"}}
    return Recipe(task="own", **(settings | {"optimizer": {"name": "adamw", "lr": 0.02}} | changes))


def distance(cluster: Cluster, recipe: Recipe) -> tuple[float, float]:
    """Return the distances of the final weights and of the losses from those of one process."""
    session = build_test_session(cluster, recipe, build)
    rounds = [*session.rounds()]
    assert all(stats.num_items == stats.num_samples for stats in rounds), "each row is counted once"
    own = whole_trajectory([stats.loss for stats in rounds], session)
    session.close()
    plain = run_oracle(recipe, STEPS, build, shards=1)
    return own.distance(plain), max(abs(a - b) for a, b in zip(own.losses, plain.losses, strict=True))


CASES = [
    recipe_of(),
    recipe_of(batch={"reduction": "sum"}, optimizer={"name": "sgd", "lr": 0.01}),
    recipe_of(optimizer={"name": "sgd", "lr": 0.1, "clip_norm": 0.1}),
]
SHARDED = [recipe_of(f"replicas=1 shard=2 zero={stage}") for stage in (1, 2, 3)]


def distances(cluster: Cluster, recipes: list[Recipe]) -> list[tuple[float, float]]:
    return [distance(cluster, recipe) for recipe in recipes]


def in_parts() -> Task:
    """Two views of a sample by one chain of modules, which stages and tensor ranks share."""

    def loss(model: nn.Module, x: Tensor) -> Loss:
        out = paceline.gather(model(x))
        first, second = F.normalize(out[:, :4], dim=1), F.normalize(out[:, 4:], dim=1)
        labels = torch.arange(len(out))
        return Loss(F.cross_entropy(3 * first @ second.T, labels, reduction="sum"), len(out))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    return Task(model, build().data, loss, tensor={"0": "column", "2": "row"})


PARTS = [
    recipe_of("replicas=2 pipeline=2", batch={"shards": 2}, optimizer={"name": "sgd", "lr": 0.1}),
    recipe_of("replicas=2 tensor=2", optimizer={"name": "sgd", "lr": 0.1}),
]


def distances_in_parts(cluster: Cluster) -> list[float]:
    found = []
    for recipe in PARTS:
        session = build_test_session(cluster, recipe, in_parts)
        own = whole_trajectory([stats.loss for stats in session.rounds()], session)
        session.close()
        found.append(own.distance(run_oracle(recipe, STEPS, in_parts, shards=1)))
    return found


def test_replicas_of_stages_and_tensor_ranks_gather_among_themselves() -> None:
    for found in run_ranks(distances_in_parts, 4):
        assert max(found) < 1e-12


def own_rows_only(ctx: Any, grad: Tensor) -> Any:
    """Drop what the losses of other ranks say about the rows of this one."""
    first = sum(ctx.lengths[: ctx.group.rank])
    return grad[first : first + ctx.lengths[ctx.group.rank]], None, None


def broken_distance(cluster: Cluster) -> float:
    right = _GatherRows.backward
    _GatherRows.backward = staticmethod(own_rows_only)
    try:
        return distance(cluster, CASES[1])[0]  # AdamW would hide a factor
    finally:
        _GatherRows.backward = right


def looped(cluster: Cluster) -> tuple[float, bool]:
    """Return the distance of an own loop from one process, and whether it is verified."""

    def run(loop: Any) -> None:
        for batch in loop.batches():
            loop.backward(contrast(paceline.gather, loop.model, batch))
            loop.step()
            loop.evaluate()

    recipe = CASES[1]
    session = build_test_session(cluster, recipe, build)
    with fitting(session, None, []) as fit:
        loop = OwnLoop(session, fit)
        run(loop)
        loop.end()
        fit.finish()
    own = whole_trajectory([], session)
    session.close()
    right = compare_with_oracle(recipe, build(), cluster, CPU, 2, loop=run).ok
    return own.distance(run_oracle(recipe, STEPS, build, shards=1)), right


def test_in_an_own_loop_it_is_that_of_one_process() -> None:
    for distance, verified in run_ranks(looped, 2):
        assert distance < 1e-12 and verified
    with gather_scope(_REFUSED_GATHER), pytest.raises(StrategyError, match="calls no gather"):
        paceline.gather(torch.zeros(2, 1))


@pytest.mark.parametrize("world, recipes", [(2, CASES + SHARDED), (3, CASES[:1])])
def test_a_loss_over_the_batch_is_that_of_one_process(world: int, recipes: list[Recipe]) -> None:
    for found in run_ranks(partial(distances, recipes=recipes), world):
        assert max(map(max, found)) < 1e-12


def test_without_the_gradients_of_other_ranks_it_is_not() -> None:
    assert min(run_ranks(broken_distance, 2)) > 1e-4


def outcome(cluster: Cluster, recipe: Recipe, gathers: bool = True) -> str:
    make = build if gathers else partial(build, lambda x: x)
    try:
        session = build_test_session(cluster, recipe, make)
        evaluation = evaluate(session)
        assert evaluation is not None
        return f"{evaluation.loss:.9f}"
    except PacelineError as error:
        assert error.next_step, error
        return f"{type(error).__name__}: {error.what}"


REFUSED = [
    ({"batch": {"shards": 4}}, "a batch has 4 micro-batches for 2 ranks"),
    ({"batch": {"size": 7}}, "the last batch of an epoch has 1 samples for 2 ranks"),
    ({"strategy": "replicas=2 sync=local:2"}, "sync=local:2 does not run all ranks"),
    ({"strategy": "replicas=2 balance=speed"}, "balance=speed"),
    ({"strategy": "replicas=2 sync=every-step@2,local:2"}, "does not run all ranks"),
]


def outcomes(cluster: Cluster) -> list[str]:
    return [
        *(outcome(cluster, recipe_of(**changes)) for changes, _ in REFUSED),
        outcome(cluster, recipe_of(), gathers=False),
        outcome(cluster, recipe_of(batch={"shards": 2}), gathers=False),
        outcome(cluster, recipe_of()),
    ]


def test_where_a_rank_would_wait_or_the_answer_depend_on_ranks_it_is_refused() -> None:
    """Without `gather` the answer depends on the number of ranks, unless the recipe fixes micro-batches."""
    *refused, coupled, fixed, evaluated = run_ranks(outcomes, 2)[0]
    for found, (_, why) in zip(refused, REFUSED, strict=True):
        assert found.startswith(StrategyError.__name__) and why in found
    assert coupled.startswith(TaskError.__name__) and "it compares the samples" in coupled
    assert fixed == evaluated == outcome(Cluster.single(), recipe_of()), "evaluation gathers nothing"
    assert "4 micro-batches for 1 ranks" in outcome(Cluster.single(), recipe_of(batch={"shards": 4}))


def verified(cluster: Cluster) -> list[bool]:
    right = compare_with_oracle(recipe_of(), build(), cluster, CPU, 3, strict=True)
    share = RankGather.share
    RankGather.share = lambda self, loss: Loss(loss.total, loss.count / self.num_ranks, loss.metrics)
    try:
        wrong = compare_with_oracle(recipe_of(), build(), cluster, CPU, 3)
    finally:
        RankGather.share = share
    return [right.ok, wrong.ok]


def test_verify_compares_it_with_one_forward_of_the_batch() -> None:
    assert run_ranks(verified, 2)[0] == [True, False]


def test_outside_of_training_rows_are_those_of_the_caller() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert paceline.gather(x) is x
    for wrong in (torch.tensor(1.0), [1.0]):
        with pytest.raises(TaskError, match="one row for each sample"):
            paceline.gather(wrong)


def test_sums_that_cancel_are_no_coupling() -> None:
    first, second = Loss(torch.tensor(5.0), 1), Loss(torch.tensor(-5.0), 1)
    assert not describe_coupling(first, second, Loss(torch.tensor(1e-5), 2), 1e-3)
    assert "total" in describe_coupling(first, second, Loss(torch.tensor(0.1), 2), 1e-3)
    assert "count" in describe_coupling(first, second, Loss(torch.tensor(0.0), 4), 1e-3)
