"""Precision, recomputation, compilation, own optimizers and what activations cost, on a GPT over text."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import Loss, Task
from paceline.job.cluster import Cluster
from paceline.optim import UserOptimizer
from paceline.recipe import Recipe, Strategy, load_recipe
from paceline.session import build_session, evaluate
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, Trajectory, build_test_session, make_task, run_oracle, run_strategy
from paceline.verification import compare_with_oracle
from tests.marks import soak_param
from tests.peak import peak_bytes
from tests.texts import SMALL_TEXT

TINY = {"text": SMALL_TEXT, "context": 64, "layers": 2, "heads": 2, "width": 32, "held_out_tokens": 4096}
TINY |= {"train_tokens": 200_000}


def gpt(**changes: object) -> Recipe:
    settings: dict[str, object] = {
        "task": "byte-gpt",
        "options": TINY | {"dropout": 0.1},
        "steps": 12,
        "batch": {"size": 8, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0},
    }
    return Recipe(**(settings | changes))


@pytest.mark.capability("A2", "J10", "V9")
@pytest.mark.parametrize("world", [soak_param(1), 3])
def test_a_gpt_with_dropout_ends_where_the_oracle_ends(world: int) -> None:
    """Dropout is keyed by shard, so the masks do not depend on who runs it."""
    ends = run_ranks(run_strategy, world, gpt())
    assert max(end.distance(run_oracle(gpt(), 12)) for end in ends) <= 1e-5
    without = run_oracle(gpt(options=TINY), 12)
    assert ends[0].distance(without) > 1e-4, "dropout did nothing"


@pytest.mark.capability("L1", "J10")
def test_recomputed_blocks_give_the_same_bits() -> None:
    plain = run_strategy(Cluster.single(), gpt())
    again = run_strategy(Cluster.single(), gpt(memory={"recompute": "blocks"}))
    assert again.distance(plain) == 0.0 and again.losses == plain.losses


@pytest.mark.capability("L1")
def test_recomputing_keeps_fewer_activations() -> None:
    """Bytes that autograd saves in one forward; with blocks recomputed they hardly grow with the depth."""

    def saved_bytes(layers: int, recompute: str) -> int:
        recipe = gpt(options=TINY | {"layers": layers}, memory={"recompute": recompute})
        session = build_test_session(Cluster.single(), recipe)
        sizes: dict[int, int] = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        batch = torch.stack([session.task.data[i] for i in range(4)])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            session.task.loss(session.runner.sharded_model.model.eval(), batch)
        return sum(sizes.values())

    plain = saved_bytes(8, "none") - saved_bytes(2, "none")
    recomputed = saved_bytes(8, "blocks") - saved_bytes(2, "blocks")
    assert recomputed < plain / 3


@pytest.mark.capability("K2")
@pytest.mark.parametrize("steps", [20, soak_param(40)])
def test_bf16_follows_its_own_oracle_and_learns_like_fp32(steps: int) -> None:
    """Rounding to bf16 enlarges that of the reduction, so after many steps losses are compared."""
    bf16 = gpt(precision={"compute": "bf16"}, steps=steps)
    ends = run_ranks(run_strategy, 2, bf16)
    oracle = run_oracle(bf16, steps)
    assert ends[0].distance(ends[1]) == 0.0
    assert all(abs(a / b - 1) < 2**-8 for a, b in zip(ends[0].losses, oracle.losses, strict=True))
    fp32 = run_strategy(Cluster.single(), gpt(steps=steps))
    assert abs(sum(ends[0].losses[-5:]) - sum(fp32.losses[-5:])) / sum(fp32.losses[-5:]) < 0.01
    assert ends[0].distance(fp32) > 0.0
    assert all(p.dtype == torch.float32 for p in ends[0].parameters.values())


@pytest.mark.capability("K1")
def test_fp16_skips_the_same_step_on_all_ranks_and_then_learns() -> None:
    """A loss scale that is too large overflows: the step is skipped, the scale halves, no rank differs."""

    def run(cluster: Cluster) -> tuple[list[bool], list[float], Trajectory]:
        recipe = gpt(precision={"compute": "fp16", "init_scale": 2.0**24, "growth_steps": 50}, steps=20)
        session = build_test_session(cluster, recipe)
        stats = list(session.rounds())
        parameters = {n: p.detach().clone() for n, p in session.runner.sharded_model.model.named_parameters()}
        return [s.applied for s in stats], [s.loss_scale for s in stats], Trajectory([], parameters, {})

    results = run_ranks(run, 2)
    (applied, scales, end), (applied_too, scales_too, end_too) = results
    assert applied == applied_too and scales == scales_too and end.distance(end_too) == 0.0
    assert not applied[0] and applied[-1], "the first step overflows, the last does not"
    assert scales[0] == 2.0**23


@pytest.mark.soak
@pytest.mark.capability("K1")
def test_halves_are_as_accurate_as_floats() -> None:
    """Held-out digits, three seeds: the gap of the means is one percent at most."""

    def held_out(compute: str, seed: int) -> tuple[float, float]:
        recipe = Recipe(
            task="digits",
            seed=seed,
            epochs=12,
            options={"model": "mlp", "hidden": [64]},
            batch={"size": 32, "shards": 1},
            precision={"compute": compute},
        )
        session = build_test_session(Cluster.single(), recipe)
        list(session.rounds())
        found = evaluate(session)
        return found.metrics["accuracy"], found.loss

    halves, floats = ([held_out(compute, seed) for seed in range(3)] for compute in ("fp16", "fp32"))
    assert all(half[1] != whole[1] for half, whole in zip(halves, floats, strict=True))  # it was in halves
    assert min(accuracy for accuracy, _ in floats) > 0.9
    gap = sum(half[0] - whole[0] for half, whole in zip(halves, floats, strict=True)) / 3
    assert abs(gap) <= 0.01, (halves, floats)


@pytest.mark.capability("K1", "J11")
def test_the_clip_sees_unscaled_gradients() -> None:
    """With a loss scale of 1,024 a clip before the division would clip everything; verify would tell."""

    def check(cluster: Cluster) -> bool:
        recipe = gpt(precision={"compute": "fp16"}, options=TINY)
        return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 2).ok

    assert all(run_ranks(check, 2))


@pytest.mark.soak
@pytest.mark.capability("K5")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the processor needs g++")
def test_compiled_and_plain_training_agree() -> None:
    recipe = Recipe(
        task="digits", options={"model": "mlp", "hidden": [16]}, steps=10, batch={"size": 16, "shards": 2}
    )

    def counted(cluster: Cluster, on: bool) -> tuple[Trajectory, int]:
        found = run_strategy(cluster, recipe.replace(runtime={"compile": on}))
        return found, int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    plain, none = run_ranks(counted, 1, False, deadline=400)[0]
    compiled, graphs = run_ranks(counted, 1, True, deadline=400)[0]
    assert none == 0 < graphs  # it was compiled, not run as it is
    assert compiled.distance(plain) <= 1e-5


@pytest.mark.capability("K5")
def test_without_a_compiler_it_says_so_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    said: list[str] = []
    recipe = Recipe(task="digits", steps=2, runtime={"compile": True})
    session = build_session(recipe, make_task(recipe), Cluster.single(), CPU, warn=said.append)
    assert len(list(session.rounds())) == 2
    assert any("g++" in text for text in said)


class Decaying(UserOptimizer):
    """theta <- theta - lr * 0.99^step * g."""

    def update(self, params: list[torch.Tensor], grads: list[torch.Tensor], step: int) -> None:
        for p, g in zip(params, grads, strict=True):
            p.sub_(g, alpha=self.group["lr"] * 0.99**step)


def own_task() -> Task:
    task = make_task(Recipe(task="digits", steps=1, options={"model": "mlp", "hidden": [32]}))
    return replace(task, optimizer=lambda model: Decaying(model.parameters(), lr=0.5))


@pytest.mark.capability("J13")
def test_an_own_optimizer_trains_alike_on_any_number_of_ranks() -> None:
    recipe = Recipe(task="digits", steps=40, batch={"size": 32, "shards": 4})
    reference = run_oracle(recipe, 40, own_task, shards=1)
    ends = run_ranks(run_strategy, 2, recipe, own_task)
    assert max(end.distance(reference) for end in ends) <= 1e-6
    assert ends[0].losses[-1] < ends[0].losses[0] / 2


@pytest.mark.soak
@pytest.mark.capability("J17")
def test_a_batch_eight_times_larger_with_the_scaled_rate_is_as_accurate() -> None:
    """Equal samples, linear scaling with warm-up, SGD with momentum; three seeds each."""

    def accuracy(size: int, scaling: str, seed: int) -> float:
        recipe = Recipe(
            task="digits",
            seed=seed,
            epochs=24,
            options={"model": "mlp", "hidden": [64]},
            batch={"size": size, "shards": 1},
            optimizer={"name": "sgd", "lr": 0.02, "momentum": 0.9},
            schedule={
                "batch_scaling": scaling,
                "base_batch": 16 if scaling != "none" else None,
                "warmup_steps": 20,
            },
        )
        session = build_test_session(Cluster.single(), recipe)
        list(session.rounds())
        return evaluate(session).metrics["accuracy"]

    base = [accuracy(16, "none", seed) for seed in range(3)]
    scaled = [accuracy(128, "linear", seed) for seed in range(3)]
    unscaled = [accuracy(128, "none", seed) for seed in range(3)]
    assert abs(sum(scaled) - sum(base)) / 3 <= 0.01, (base, scaled)
    assert sum(unscaled) < sum(scaled)


@pytest.mark.capability("V1")
def test_the_sum_is_learned_on_two_ranks() -> None:
    def error(cluster: Cluster) -> float:
        session = build_test_session(cluster, load_recipe("recipes/sum.toml"))
        list(session.rounds())
        return evaluate(session).loss

    assert max(run_ranks(error, 2, deadline=360)) < 1e-3


@pytest.mark.soak
@pytest.mark.capability("V2", "A1")
def test_digits_reach_97_percent_on_two_ranks() -> None:
    def accuracy(cluster: Cluster) -> float:
        session = build_test_session(cluster, load_recipe("recipes/digits.toml"))
        list(session.rounds())
        return evaluate(session).metrics["accuracy"]

    assert min(run_ranks(accuracy, 2, deadline=360)) >= 0.97


class Foreign(nn.Module):
    """A model from another library: torch's own transformer layer, with its own dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(x.view(-1, 8, 8))).mean(1))


def foreign_task() -> Task:
    def loss(model: nn.Module, batch: object) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    torch.manual_seed(0)
    return replace(make_task(Recipe(task="digits", steps=1)), model=Foreign(), loss=loss, initialize=None)


@pytest.mark.capability("J10", "A2")
def test_the_dropout_of_a_foreign_model_is_seeded_by_shard() -> None:
    recipe = Recipe(
        task="digits", steps=10, batch={"size": 24, "shards": 4}, optimizer={"name": "sgd", "lr": 0.05}
    )
    reference = run_oracle(recipe, 10, foreign_task)
    ends = run_ranks(run_strategy, 3, recipe, foreign_task)
    assert max(end.distance(reference) for end in ends) <= 1e-6
    other = run_oracle(recipe, 10, foreign_task, shards=2)
    assert ends[0].distance(other) > 1e-4, "the masks do not depend on the shard"


@pytest.mark.capability("A1")
def test_evaluation_has_the_same_bits_on_any_number_of_ranks() -> None:
    """299 held-out images in blocks of 64: the last is ragged, and ranks have unequal numbers of blocks."""

    def held_out(cluster: Cluster) -> tuple[float, float, int]:
        found = evaluate(build_test_session(cluster, Recipe(task="digits", steps=1)))
        return found.loss, found.metrics["accuracy"], found.num_samples

    results = {n: run_ranks(held_out, n) for n in (1, 2, 3)}
    assert len({value for ranks in results.values() for value in ranks}) == 1
    assert results[1][0][2] == 299


GPT = {"text": SMALL_TEXT, "context": 32, "layers": 4, "heads": 2, "width": 16, "dropout": 0.2}
GPT |= {"train_tokens": 20_000, "held_out_tokens": 2048}
STRATEGIES = (
    "replicas=1 shard=2 zero=3 route=native",
    "replicas=1 pipeline=2 schedule=1f1b",
    "replicas=1 tensor=2",
)


def gpt_recomputed(strategy: str, how: str) -> Recipe:
    return Recipe(
        task="byte-gpt",
        options=GPT,
        steps=4,
        batch={"size": 8, "shards": 4},
        optimizer={"name": "adamw", "lr": 1e-3},
        memory={"recompute": how},
        strategy=Strategy.parse(strategy),
    )


def under_all(cluster: Cluster) -> list[Trajectory]:
    return [run_strategy(cluster, gpt_recomputed(words, "segments")) for words in STRATEGIES]


@pytest.mark.capability("L1")
def test_segments_give_the_same_bits() -> None:
    plain = run_strategy(Cluster.single(), gpt_recomputed("replicas=1", "none"))
    assert run_strategy(Cluster.single(), gpt_recomputed("replicas=1", "segments")).distance(plain) == 0.0


@pytest.mark.soak
@pytest.mark.capability("L1", "D10", clause="stages end where one process does")
def test_segments_end_where_one_process_ends_that_keeps_everything() -> None:
    """With dropout."""
    plain = run_strategy(Cluster.single(), gpt_recomputed("replicas=1", "none"))
    for found in run_ranks(under_all, 2):
        for words, end in zip(STRATEGIES, found, strict=True):
            assert end.losses == pytest.approx(plain.losses, rel=1e-5), words


SMALL, TIMES, WIDTH = 512, 8, 64


def wide() -> Task:
    """Its activations are far larger than parameters and samples."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    data = torch.randn(SMALL * TIMES, 1).expand(-1, WIDTH)

    def loss(model: nn.Module, batch: torch.Tensor) -> Loss:
        return Loss(model(batch.contiguous()).square().sum(), len(batch))

    return Task(nn.Sequential(*layers), data, loss)


def step_bytes(size: int, accumulation: int) -> int:
    """The most that tensors of one step take, beside what stays."""
    recipe = Recipe(
        task="own",
        steps=3,
        batch={"size": size, "accumulation": accumulation},
        optimizer={"name": "sgd", "lr": 1e-3},
    )
    session = build_test_session(Cluster.single(), recipe, wide)
    rounds = session.rounds()
    next(rounds)  # what is allocated once is there now
    return peak_bytes(partial(next, rounds))


@pytest.mark.capability("A10")
def test_accumulation_takes_the_activations_of_one_micro_batch() -> None:
    """Eight micro-batches take hardly more than one; the same samples at once take several times as much."""
    one, eight, at_once = step_bytes(SMALL, 1), step_bytes(SMALL * TIMES, TIMES), step_bytes(SMALL * TIMES, 1)
    assert eight <= 1.1 * one and at_once >= 4 * one, (one, eight, at_once)
