"""Stages compute what the whole model computes; PipeDream keeps the weights of each forward."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.cluster import Cluster
from paceline.comm import Gradients, Tally
from paceline.data import LoadedUnit
from paceline.errors import StrategyError, TaskError
from paceline.layout import GradSink, Sums
from paceline.layout.pipeline import StageReducer
from paceline.mesh import Group
from paceline.recipe import Recipe, Strategy, load_recipe
from paceline.sync import Update, UpdateTail
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.contracts.layout import whole
from paceline.testing.interrupt import Interrupt
from paceline.testing.parity import CPU, Trajectory, make_task, session_of
from paceline.training import Pieces, evaluate
from paceline.verification import Report, compare_with_oracle

ROOT = Path(__file__).parents[2]


def gpt(strategy: str) -> Recipe:
    """A byte GPT of three blocks on the standard library's text; output layer and embedding are tied."""
    recipe = load_recipe(ROOT / "recipes" / "byte-gpt.toml")
    small = {"layers": 3, "width": 32, "heads": 4, "context": 32, "train_tokens": 100_000}
    return recipe.replace(
        strategy=Strategy.parse(strategy),
        options={**dict(recipe.options), **small},
        batch={"size": 7, "shards": 4},
        precision={"compute": "fp32"},
    )


def verify(cluster: Cluster, recipe: Recipe, breaks: Callable[[], None] | None = None) -> Report:
    if breaks is not None:
        breaks()
    return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 3)


@pytest.mark.capability("D1", "D2", "D3", "A11")
@pytest.mark.parametrize(
    "strategy, num_ranks",
    [("replicas=1 pipeline=2", 2), ("replicas=1 pipeline=3", 3), ("replicas=2 pipeline=2", 4), ("zero1", 4)],
)
def test_a_gpt_with_tied_weights_is_that_of_the_oracle(strategy: str, num_ranks: int) -> None:
    report = run_ranks(verify, num_ranks, gpt(strategy))[0]
    assert report.ok, (report.failure, report.diagnosis)
    assert report.steps == 3


class Deaf:
    """A net whose sums stay on their rank."""

    def __init__(self, net: Any) -> None:
        self.net = net

    def all_reduce(self, x: Tensor, group: Group) -> Any:
        return self.net.all_reduce(x, replace(group, ranks=group.ranks[:1], rank=0, handle=None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)


def forget_the_tie() -> None:
    def finish(self: StageReducer) -> Gradients:
        self._net = Deaf(self._net)
        return plain(self)

    plain, StageReducer.finish = StageReducer.finish, finish


@pytest.mark.capability("D1")
def test_a_tied_gradient_that_is_not_summed_is_found() -> None:
    """The mutation twin."""
    report = run_ranks(verify, 2, gpt("replicas=1 pipeline=2"), forget_the_tie)[0]
    assert not report.ok


def drop_a_micro_batch() -> None:
    from paceline.layout.pipeline import Pipeline

    plain = Pipeline.run

    def run(
        self: Pipeline, units: Iterable[LoadedUnit], num_units: int, sink: GradSink, scale: float
    ) -> Sums:
        return plain(self, list(units)[1:], num_units - 1, sink, scale)

    Pipeline.run = run


@pytest.mark.capability("D2")
def test_a_micro_batch_that_is_dropped_is_found() -> None:
    """The mutation twin."""
    report = run_ranks(verify, 2, gpt("replicas=1 pipeline=2"), drop_a_micro_batch)[0]
    assert not report.ok


@pytest.mark.capability("D3")
def test_a_stage_stores_the_activations_of_all_its_micro_batches() -> None:
    def peak(cluster: Cluster) -> int:
        session = session_of(cluster, digits("replicas=1 pipeline=2", steps=1))
        list(session.rounds())
        return session.placed.peak_stored

    assert run_ranks(peak, 2) == [4, 4]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


@pytest.mark.capability("D1")
@pytest.mark.parametrize(
    "stages, words",
    [
        (None, "nothing says which chain"),
        (lambda m: [m.a, m.b], "another result"),
        (lambda m: [m.a], "leaves out"),
    ],
)
def test_a_chain_that_is_not_the_model_is_refused(stages: Any, words: str) -> None:
    def run(cluster: Cluster) -> str:
        def odd() -> Task:
            return replace(make_task(recipe), model=Odd(), initialize=None, stages=stages)

        recipe = digits("replicas=1 pipeline=2")
        try:
            session_of(cluster, recipe, odd)
        except TaskError as error:
            return str(error)
        return ""

    assert all(words in text for text in run_ranks(run, 2))


# -- PipeDream -------------------------------------------------------------------------------------------


def digits(strategy: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [48, 32]},
        "steps": 40,
        "batch": {"size": 46, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


@pytest.mark.capability("D6")
@pytest.mark.parametrize("num_stages", [2, 3])
def test_each_backward_uses_the_weights_of_its_forward_and_is_as_stale_as_its_stage(num_stages: int) -> None:
    def run(cluster: Cluster) -> tuple[list[Any], dict[str, float]]:
        session = session_of(cluster, digits(f"replicas=1 pipeline={num_stages} sync=pipedream", steps=400))
        stats = next(session.rounds())
        return session.rule.versions, dict(stats.metrics)

    ranks = run_ranks(run, num_stages)
    for stage, (versions, metrics) in enumerate(ranks):
        assert [v.step for v in versions] == list(range(20))
        assert all(v.forward == v.backward for v in versions)
        steady = versions[num_stages:]
        assert {v.applied - v.forward for v in steady} == {num_stages - stage - 1}
        assert all(v.applied - v.forward <= num_stages - stage - 1 for v in versions)
        assert metrics == ranks[0][1]
        stale = sum(v.applied - v.forward for v in versions) / len(versions)
        assert metrics[f"staleness of stage {stage}"] == pytest.approx(stale)


@pytest.mark.capability("D6")
def test_pipedream_learns_about_as_well_as_every_step() -> None:
    """Held-out loss after 150 steps: the mean over three seeds is within 10 % of the synchronous one's."""

    def losses(cluster: Cluster, strategy: str) -> list[float]:
        found = []
        for seed in (1, 2, 3):
            session = session_of(cluster, digits(strategy, steps=150, seed=seed))
            list(session.rounds())
            evaluation = evaluate(session)
            assert evaluation is not None
            found.append(evaluation.loss)
        return found

    stale = run_ranks(losses, 2, "replicas=1 pipeline=2 sync=pipedream")[0]
    sync = run_ranks(losses, 2, "replicas=1 pipeline=2")[0]
    assert mean(stale) <= 1.1 * mean(sync) + 2 * stdev(sync), (stale, sync)
    assert stale != sync


class RaisesOnce(UpdateTail):
    """Raises instead of the fifth update of a stage."""

    calls = 0

    def apply(self, grads: Gradients, tally: Tally) -> Update:
        self.calls += 1
        if self.calls == 5:
            raise Interrupt
        return super().apply(grads, tally)


@pytest.mark.capability("D6", "Z1")
def test_pipedream_goes_back_to_where_it_was_empty() -> None:
    recipe = digits("replicas=1 pipeline=2 sync=pipedream")

    def run(cluster: Cluster, pieces: Pieces | None) -> Trajectory:
        session = session_of(cluster, recipe, pieces=pieces)
        losses: list[float] = []
        while session.state.step < session.num_steps:
            try:
                for stats in session.rounds():
                    losses.append(stats.loss)
            except Interrupt:
                session.abort()
        return whole(losses, session)

    plain = run_ranks(run, 2, None)
    disturbed = run_ranks(run, 2, Pieces(tail=RaisesOnce))
    assert plain[0].losses == disturbed[0].losses
    assert plain[0].distance(disturbed[0]) == 0.0


@pytest.mark.capability("D6")
def test_what_needs_all_stages_at_once_is_refused() -> None:
    def run(cluster: Cluster) -> str:
        clipped = {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0}
        try:
            session_of(cluster, digits("replicas=1 pipeline=2 sync=pipedream", optimizer=clipped))
        except StrategyError as error:
            return str(error)
        return ""

    assert all("optimizer.clip_norm" in text for text in run_ranks(run, 2))
