"""Stages compute what the whole model computes; PipeDream keeps the weights of each forward."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from paceline.comm import GradientSink
from paceline.comm.reduction import TiedGradientReduction
from paceline.data import LoadedBatch
from paceline.job.cluster import Cluster
from paceline.job.mesh import RankGroup
from paceline.parallel import LossSums
from paceline.parallel.pipeline import PipelineRunner
from paceline.recipe import Recipe, Strategy, load_recipe
from paceline.session import Components
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import VerificationReport, compare_with_oracle
from tests.texts import SMALL_TEXT

ROOT = Path(__file__).parents[2]


def gpt(strategy: str) -> Recipe:
    """A byte GPT of three blocks on the standard library's text; output layer and embedding are tied."""
    recipe = load_recipe(ROOT / "recipes" / "byte-gpt.toml")
    small = {"layers": 3, "width": 32, "heads": 4, "context": 32, "text": SMALL_TEXT, "train_tokens": 100_000}
    return recipe.replace(
        strategy=Strategy.parse(strategy),
        options={**dict(recipe.options), **small},
        batch={"size": 7, "shards": 4},
        precision={"compute": "fp32"},
    )


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


def verify(
    cluster: Cluster,
    recipe: Recipe,
    breaks: Callable[[], None] | None = None,
    pieces: Components | None = None,
) -> VerificationReport:
    if breaks is not None:
        breaks()
    return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 3, pieces=pieces)


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

    def all_reduce(self, x: Tensor, group: RankGroup) -> Any:
        return self.net.all_reduce(x, replace(group, ranks=group.ranks[:1], rank=0, process_group=None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)


def forget_the_tie() -> None:
    def close(self: TiedGradientReduction) -> None:
        self._net = Deaf(self._net)
        plain(self)

    plain, TiedGradientReduction.close = TiedGradientReduction.close, close


@pytest.mark.capability("D1")
def test_a_tied_gradient_that_is_not_summed_is_found() -> None:
    """The mutation twin."""
    report = run_ranks(verify, 2, gpt("replicas=1 pipeline=2"), forget_the_tie)[0]
    assert not report.ok


class DropsAMicroBatch(PipelineRunner):
    """Runs all micro-batches but the first."""

    def run(
        self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float
    ) -> LossSums:
        return super().run(list(micro_batches)[1:], count - 1, sink, scale)


@pytest.mark.capability("D1")
def test_recomputed_blocks_are_those_of_the_oracle() -> None:
    """With dropout: a block that runs again long after its forward draws the same mask."""
    recipe = gpt("replicas=1 pipeline=2").replace(memory={"recompute": "blocks"})
    recipe = recipe.replace(options={**dict(recipe.options), "dropout": 0.2})
    report = run_ranks(verify, 2, recipe)[0]
    assert report.ok, (report.failure, report.diagnosis)


@pytest.mark.capability("D2")
def test_a_micro_batch_that_is_dropped_is_found() -> None:
    """The mutation twin."""
    pieces = Components(stage=DropsAMicroBatch)
    report = run_ranks(verify, 2, gpt("replicas=1 pipeline=2"), None, pieces)[0]
    assert not report.ok


@pytest.mark.capability("D3")
def test_a_stage_stores_the_activations_of_all_its_micro_batches() -> None:
    def peak(cluster: Cluster) -> int:
        session = build_test_session(cluster, digits("replicas=1 pipeline=2", steps=1))
        list(session.rounds())
        return session.runner.peak_in_flight

    assert run_ranks(peak, 2) == [4, 4]
