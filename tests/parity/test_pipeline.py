"""Stages hold their layers alone and compute what the whole model computes, at the edges too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Task
from paceline.comm import BucketReducer, GradientReduction, GradientSink, LedgerEntry
from paceline.comm.reduction import TiedGradientReduction, UnorderedSum
from paceline.data import LoadedBatch
from paceline.job.cluster import Cluster
from paceline.job.mesh import RankGroup
from paceline.parallel import LossSums, ShardedModel
from paceline.parallel.pipeline import PipelineRunner
from paceline.parallel.session_context import SessionContext
from paceline.recipe import OptimizerRecipe, Recipe, Strategy, load_recipe
from paceline.session import Components, evaluate
from paceline.state.slot import TensorSlot
from paceline.sync import every_step
from paceline.testing import run_ranks
from paceline.testing.parity import (
    CPU,
    Trajectory,
    build_test_session,
    make_task,
    run_oracle,
)
from paceline.verification import VerificationReport, compare_with_oracle
from tests.marks import soak_param
from tests.parity.training_runs import train_whole
from tests.recipes import recipe_of
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


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [48, 32]},
    steps=40,
    batch={"size": 46, "shards": 4},
    optimizer={"name": "adamw", "lr": 2e-3},
)


def verify(
    cluster: Cluster,
    recipe: Recipe,
    breaks: Callable[[], None] | None = None,
    components: Components | None = None,
) -> VerificationReport:
    if breaks is not None:
        breaks()
    return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 3, components=components)


@pytest.mark.capability("D1", "D2", "D3", "A11")
@pytest.mark.parametrize(
    "strategy, num_ranks",
    [
        soak_param("replicas=1 pipeline=2", 2),
        ("replicas=1 pipeline=3", 3),
        soak_param("replicas=2 pipeline=2", 4),
        ("zero1", 4),
    ],
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
        self, micro_batches: Iterable[LoadedBatch], num_micro_batches: int, sink: GradientSink, scale: float
    ) -> LossSums:
        return super().run(list(micro_batches)[1:], num_micro_batches - 1, sink, scale)


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
    components = Components(stage=DropsAMicroBatch)
    report = run_ranks(verify, 2, gpt("replicas=1 pipeline=2"), None, components)[0]
    assert not report.ok


@pytest.mark.capability("D3")
def test_a_stage_stores_the_activations_of_all_its_micro_batches() -> None:
    def peak(cluster: Cluster) -> int:
        session = build_test_session(cluster, digits("replicas=1 pipeline=2", steps=1))
        list(session.rounds())
        return session.runner.peak_in_flight

    assert run_ranks(peak, 2) == [4, 4]


TRAINING_IMAGES = 1498
TWO_STAGES = "replicas=1 pipeline=2"


def digits_edges(strategy: str = TWO_STAGES, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [48, 32]},
        "steps": 4,
        "batch": {"size": 46, "shards": 4},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def verify_edges(
    cluster: Cluster, recipe: Recipe, make: Callable[[], Task] | None = None, steps: int = 3
) -> VerificationReport:
    task = make() if make is not None else make_task(recipe)
    return compare_with_oracle(recipe, task, cluster, CPU, steps)


@pytest.mark.capability("D2")
def test_micro_batches_are_the_full_batch_however_many() -> None:
    """46 samples in 1, 3 and 8 micro-batches, of which the last is smaller, against one batch of 46."""

    def ends(cluster: Cluster) -> list[Trajectory]:
        return [train_whole(cluster, digits_edges(batch={"size": 46, "shards": m})) for m in (1, 3, 8)]

    right = run_oracle(digits_edges(), 4, shards=1)
    for rank in run_ranks(ends, 2):
        assert all(end.distance(right) <= 1e-6 for end in rank)


@pytest.mark.capability("D2", "D3")
@pytest.mark.parametrize(
    "strategy, num_ranks", [soak_param("replicas=1 pipeline=3", 3), ("replicas=2 pipeline=2", 4)]
)
def test_the_last_step_of_an_epoch_has_one_sample(strategy: str, num_ranks: int) -> None:
    """Fewer micro-batches than usual, and a replica without any."""
    recipe = digits_edges(
        strategy,
        options={"model": "convnet", "channels": 4, "dropout": 0.1},
        steps=None,
        epochs=1,
        batch={"size": TRAINING_IMAGES - 1, "shards": 4},
        optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
    )
    report = run_ranks(verify_edges, num_ranks, recipe)[0]
    assert report.ok, (report.failure, report.diagnosis)
    assert report.steps == 2


@pytest.mark.capability("D3")
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_stage_really_runs_in_the_order_of_the_table(num_stages: int) -> None:
    def order(cluster: Cluster) -> list[str]:
        session = build_test_session(cluster, digits_edges(f"replicas=1 pipeline={num_stages}", steps=1))
        seen: list[str] = []
        (stage,) = session.runner.executor.chunks
        stage.register_forward_hook(lambda *_: seen.append("F"))
        next(stage.parameters()).register_hook(lambda grad: seen.append("B"))
        list(session.rounds())
        return seen

    assert run_ranks(order, num_stages) == [["F"] * 4 + ["B"] * 4] * num_stages


class Tied(nn.Sequential):
    """The first and the last layer share their weights, and are on two stages."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self[4].weight = self[0].weight


def tied_task() -> Task:
    def over_first_ten(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
        images, targets = batch
        return Loss(F.cross_entropy(model(images)[:, :10], targets, reduction="sum"), len(images))

    torch.manual_seed(3)
    return replace(
        make_task(digits_edges()),
        model=Tied(),
        initialize=None,
        stages=None,
        loss=over_first_ten,
        held_out=None,
    )


def tied_weights(cluster: Cluster, codec: str) -> list[float]:
    """The first layer's weights as this rank trained them: on every second rank, those of the last layer."""
    adamw = {"name": "adamw", "lr": 1e-2}
    recipe = digits_edges(f"replicas=3 pipeline=2 codec={codec}", steps=6, optimizer=adamw)
    session = build_test_session(cluster, recipe, tied_task)
    list(session.rounds())
    return session.runner.sharded_model.model[0].weight.detach().flatten().tolist()


@pytest.mark.capability("D1", "H8")
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_tied_weights_on_two_stages_keep_equal_bits(codec: str) -> None:
    """Three replicas: a sum, or a codec's blocks, would fall differently in the buckets of another stage."""
    ranks = run_ranks(tied_weights, 6, codec)
    assert all(values == ranks[0] for values in ranks)


class AmongOthers(TiedGradientReduction):
    """Shared tensors meet, and then lie in one bucket with the others of their stage."""

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        (super() if slot in self._tensors else self.inner).ready(slot, grad)


def reduction_of_every_stage(
    context: SessionContext, sharded_model: ShardedModel, *others: object
) -> GradientReduction:
    mesh = context.mesh
    sums = UnorderedSum(context.collective(mesh.axes["shard"]), context.collective(mesh.replica))
    inner = BucketReducer(sharded_model.computes, sharded_model.parts, sums, context.bucket_bytes)
    shared = [held for held in sharded_model.held.values() if held.holders]
    tensors = {held.computes: sharded_model.computes[held.computes] for held in shared}
    return AmongOthers(inner, tensors, mesh.subgroup_along("pipeline", shared[0].holders), context.net)


@pytest.mark.capability("D1")
def test_tied_weights_that_every_stage_sums_by_itself_drift_apart() -> None:
    """The mutation twin."""

    def drifting(cluster: Cluster) -> list[float]:
        with patch.object(every_step, "build_masked_reduction", reduction_of_every_stage):
            return tied_weights(cluster, "int8")

    ranks = run_ranks(drifting, 6)
    assert any(values != ranks[0] for values in ranks)


class Counts(torch.optim.SGD):
    """Keeps a plain number for every parameter."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["updates"] = self.state[p].get("updates", 0) + 1


@pytest.mark.capability("D1", "Z1")
@pytest.mark.parametrize("strategy", [TWO_STAGES, "replicas=1 shard=2 zero=1"])
def test_numbers_in_the_optimizer_of_another_rank_are_in_the_snapshot(strategy: str) -> None:
    recipe = digits_edges(strategy).replace(optimizer=OptimizerRecipe())

    def counted() -> Task:
        return replace(make_task(recipe), optimizer=lambda model: Counts(model.parameters(), lr=0.05))

    def numbers(cluster: Cluster) -> dict[str, int]:
        session = build_test_session(cluster, recipe, counted)
        list(session.rounds())
        return dict(session.snapshot().scalars()["optimizer"])

    for found in run_ranks(numbers, 2):
        assert found == {f"layers.{k}.{kind}/updates": 4 for k in (0, 3, 6) for kind in ("weight", "bias")}


@pytest.mark.capability("D1")
def test_stages_send_the_bytes_of_activations_and_a_description_of_each() -> None:
    """By the backend; and in memory, where each is whole."""

    def sent(cluster: Cluster) -> list[tuple[int, int]]:
        found = []
        for route in ("native", "auto"):
            session = build_test_session(cluster, digits_edges(f"{TWO_STAGES} route={route}"))
            entry = session.net.ledger.rows.get(("send", "pipeline"), LedgerEntry())
            calls, payload = entry.calls, entry.payload_bytes  # the loss was tried before the first step
            list(session.rounds())
            entry = session.net.ledger.rows["send", "pipeline"]
            found.append((entry.calls - calls, entry.payload_bytes - payload))
            session.close()
        return found

    def counted(images: list[int], first: int) -> tuple[int, int]:
        """4 steps; the first part of a message is as long as the message before."""
        calls = num_bytes = 0
        for length in [512 + 4 * 48 * n for n in images] * 4:  # an image has 48 features
            calls += 1 if length <= first else 2
            num_bytes += first + (0 if length <= first else length - 512)
            first = length
        return calls, num_bytes

    whole = 4 * 4, 4 * (4 * 512 + 4 * 48 * 46)
    assert run_ranks(sent, 2) == [
        [counted([11, 12, 11, 12], first=512 + 4 * 48), whole],  # one image was tried last
        [counted([12, 11, 12, 11], first=512), whole],
    ]


WIDTHS = (6, 9, 8, 11, 7, 10, 8, 3)  # seven layers, no two with as many numbers
SAMPLES = 12


class Found(NamedTuple):
    """What one rank has, and where it has come to after one step of SGD with a rate of 1.

    Args:
        held: numbers of each parameter that lies here.
        optimized: numbers that the optimizer of this rank updates.
        outputs: of three samples, before the step.
        moved: by parameter, how far it went: the gradient.
    """

    held: dict[str, int]
    optimized: int
    outputs: list[float]
    loss: float
    moved: dict[str, Tensor]


def build() -> Task:
    torch.manual_seed(3)
    links = [part for a, b in pairwise(WIDTHS) for part in (nn.Linear(a, b), nn.Tanh())]
    samples = [(torch.randn(6), torch.randint(3, ())) for _ in range(SAMPLES)]
    held_out = {str(k): samples[k : k + 1] for k in range(3)}
    return Task(nn.Sequential(*links[:-1]), samples, loss, held_out=held_out)


def loss(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    out = model(x)
    outputs = {f"out {k}": out[:, k].sum() for k in range(3)}
    return Loss(F.cross_entropy(out, y, reduction="sum"), len(y), outputs)


recipe = partial(
    recipe_of,
    task="layers",
    steps=1,
    batch={"size": SAMPLES, "shards": 4, "shuffle": False},
    optimizer={"name": "sgd", "lr": 1.0},
)


def outputs(found: dict[str, float]) -> list[float]:
    return [found[f"{sample}.out {k}"] for sample in range(3) for k in range(3)]


def one_step(cluster: Cluster, strategy: str) -> Found:
    session = build_test_session(cluster, recipe(strategy), build)
    held = {n: p.numel() for n, p in session.runner.sharded_model.model.named_parameters() if not p.is_meta}
    groups = session.state.optimizer.param_groups
    before = {name: t.clone() for name, t in session.snapshot().tensors().items()}
    evaluation = evaluate(session)
    assert evaluation is not None
    (stats,) = session.rounds()
    after = session.snapshot().tensors()
    moved = {name.removeprefix("model/"): t - after[name] for name, t in before.items() if "model/" in name}
    optimized = sum(p.numel() for group in groups for p in group["params"])
    session.close()
    return Found(held, optimized, outputs(dict(evaluation.metrics)), stats.loss, moved)


@pytest.mark.capability("C1", "D1")
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_rank_holds_its_layers_alone_and_all_is_as_in_one_process(num_stages: int) -> None:
    task = build()
    x, y = (torch.stack(column) for column in zip(*task.data, strict=True))
    right = F.cross_entropy(task.model(x), y)
    right.backward()
    ranks = run_ranks(one_step, num_stages, f"replicas=1 pipeline={num_stages}")
    sizes = {name: p.numel() for name, p in task.model.named_parameters()}
    names = [name for rank in ranks for name in rank.held]
    assert names == [*sizes], "each layer once, in order"
    for rank in ranks:
        assert 0 < sum(rank.held.values()) < sum(sizes.values()) and rank.optimized == sum(rank.held.values())
        assert rank.loss == pytest.approx(right.item(), abs=1e-6)
        assert rank.outputs == pytest.approx(task.model(x[:3]).detach().flatten().tolist(), abs=1e-6)
    for name, p in task.model.named_parameters():
        assert p.grad is not None
        assert float((ranks[0].moved[name] - p.grad).abs().max()) <= 1e-6, name
