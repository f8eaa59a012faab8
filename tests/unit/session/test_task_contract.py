"""What breaks the contract of a task is named before the first step; metrics have counts of their own."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import DataError, RecipeError, TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import evaluate
from paceline.session.task_contract import refuse_means, refuse_two_optimizers, warn_large_batch
from paceline.task import Loss, LossFunction, Metric, Task, finish_metrics
from paceline.tasks import scores
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, Trajectory, build_test_session, whole_trajectory
from paceline.verification import compare_with_oracle
from paceline.verification.plain_evaluation import PlainEvaluation
from paceline.verification.verify_on_rank import build_oracle

X = torch.linspace(-1, 1, 48).reshape(12, 4)
Y = torch.arange(12) % 2
RECIPE = Recipe(task="own", steps=3, batch={"size": 4, "shards": 2}, optimizer={"name": "sgd", "lr": 0.1})


def task_of(loss: LossFunction) -> Task:
    torch.manual_seed(0)
    data = list(zip(X, Y, strict=True))
    return Task(nn.Linear(4, 2), data, loss, held_out=data[:7])


def summed(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum")


MISTAKES = {
    "mean as total": (lambda out, y: Loss(F.cross_entropy(out, y), len(y)), "the total is a mean"),
    "no items": (lambda out, y: Loss(summed(out, y), 0), "counts 0 items in the first 8 samples"),
    "one item": (lambda out, y: Loss(summed(out, y), 1), "as many in two copies of it"),
    "mean of one": (lambda out, y: Loss(F.cross_entropy(out, y), 1), "as many in two copies of it"),
    "mean metric": (
        lambda out, y: Loss(summed(out, y), len(y), {"size": out.abs().mean()}),
        "the metric 'size' is the same",
    ),
    "mean metric that is 0 for the first sample": (
        lambda out, y: Loss(summed(out, y), len(y), {"found": (y == 1).float().mean()}),
        "the metric 'found' is the same",
    ),
    "sum as a mean": (
        lambda out, y: Loss.mean(F.cross_entropy(out, y), len(y), found=(out.argmax(1) >= 0).sum()),
        "the metric 'found' is four times as large",
    ),
    "count of a metric": (
        lambda out, y: Loss(summed(out, y), len(y), {"found": Metric(out.abs().sum(), 1)}),
        "the metric 'found' is the same",
    ),
}


@pytest.mark.capability("A6")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_loss_is_named_before_the_first_step(mistake: str) -> None:
    make, why = MISTAKES[mistake]
    task = task_of(lambda model, batch: make(model(batch[0]), batch[1]))
    with pytest.raises(TaskError, match=why):
        build_test_session(Cluster.single(), RECIPE, lambda: task)


def test_metrics_of_a_mean_are_means_too() -> None:
    def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        out = model(x)
        right = out.argmax(1) == y
        return Loss.mean(
            F.cross_entropy(out, y), len(y), accuracy=right.float().mean(), again=Metric(right.sum(), len(y))
        )

    session = build_test_session(Cluster.single(), RECIPE, lambda: task_of(loss))
    found = evaluate(session)
    assert found is not None and found.num_samples == 7
    model = session.runner.sharded_model.model
    expected = float((model(X[:7]).argmax(1) == Y[:7]).double().mean())
    assert found.metrics == {"accuracy": pytest.approx(expected), "again": pytest.approx(expected)}
    assert 0 < expected < 1


def penalised(model: nn.Module, batch: list[Tensor]) -> Loss:
    """A gradient penalty, for which the loss takes a gradient itself."""
    x = batch[0].detach().requires_grad_(True)
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return Loss(out.square().sum() + 10 * ((grad.norm(dim=1) - 1) ** 2).sum(), len(x))


def penalised_task() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    task = task_of(penalised)
    data = [(x.double(), y) for x, y in task.data]
    return replace(task, model=model, data=data, held_out=data[:7], stages=lambda model: [*model])


def trained_with_penalty(cluster: Cluster, strategy: str) -> tuple[float, float, float]:
    """Return the distance of the weights, and the evaluation by the run and by one process."""
    recipe = RECIPE.replace(strategy=Strategy.parse(strategy), precision={"compute": "fp32"})
    session = build_test_session(cluster, recipe, penalised_task)
    found = whole_trajectory([stats.loss for stats in session.rounds()], session)
    evaluation = evaluate(session)
    assert evaluation is not None
    oracle = build_oracle(recipe, penalised_task(), CPU)
    for step in range(3):
        oracle.step(step, step)
    plain = PlainEvaluation(oracle, penalised_task(), recipe)(oracle.model, 3)
    assert (
        plain is not None and compare_with_oracle(recipe, penalised_task(), cluster, CPU, 2, strict=True).ok
    )
    weights = {name: p.detach() for name, p in oracle.model.named_parameters()}
    return found.distance(Trajectory([], weights, {})), evaluation.loss, plain.loss


@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=1 shard=2 zero=3"])
def test_a_loss_that_takes_a_gradient_trains_and_is_evaluated(strategy: str) -> None:
    for distance, evaluated, plain in run_ranks(partial(trained_with_penalty, strategy=strategy), 2):
        assert distance < 1e-12 and evaluated == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize("strategy", ["replicas=1 pipeline=2", "replicas=1 pipeline=2 lanes=2"])
def test_in_a_pipeline_a_loss_that_takes_a_gradient_is_refused_by_name(strategy: str) -> None:
    recipe = RECIPE.replace(strategy=Strategy.parse(strategy))

    def refused(cluster: Cluster) -> str:
        try:
            [*build_test_session(cluster, recipe, penalised_task).rounds()]
        except TaskError as error:
            return f"{error.what} {error.next_step}"
        return ""

    for what in run_ranks(refused, 1 if "lanes" in strategy else 2):
        assert "the loss takes a gradient through the model" in what and "without pipeline" in what


CUT_LAYOUTS = ["replicas=1 pipeline=2", "replicas=1 shard=2 zero=3", "replicas=1 tensor=2"]


def refused_loss(cluster: Cluster, strategy: str) -> str:
    """A total that is a mean, where no rank holds the whole model."""

    def build() -> Task:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        task = task_of(lambda model, batch: Loss(F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])))
        return replace(task, model=model, tensor={"0": "column", "2": "row"})

    try:
        build_test_session(cluster, RECIPE.replace(strategy=Strategy.parse(strategy)), build)
    except TaskError as error:
        return error.what
    return ""


@pytest.mark.parametrize("strategy", CUT_LAYOUTS)
def test_a_mistake_is_named_on_every_rank_though_none_holds_the_whole_model(strategy: str) -> None:
    for what in run_ranks(partial(refused_loss, strategy=strategy), 2):
        assert "the total is a mean" in what


def test_what_is_right_or_cannot_be_told_is_let_through() -> None:
    def masked(model: nn.Module, batch: list[Tensor]) -> Loss:
        """The first sample has no items."""
        x, y = batch
        return Loss((F.cross_entropy(model(x), y, reduction="none") * (y > 0)).sum(), (y > 0).sum())

    def contrast(model: nn.Module, batch: list[Tensor]) -> Loss:
        """No sum over samples: each is held against the others of its micro-batch."""
        out = model(batch[0])
        return Loss(F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="sum") + 1e-3, len(out))

    for loss in (masked, contrast):
        session = build_test_session(Cluster.single(), RECIPE, partial(task_of, loss))
        assert session.runner.metric_names.names == ()
    nothing = Loss(torch.tensor(0.0), 1)
    refuse_means(nothing, replace(nothing, count=2))


def test_a_metric_has_a_count_of_its_own() -> None:
    task = task_of(lambda model, batch: Loss(model(batch[0]).sum(), 1))
    one = Loss(torch.tensor(1.0), 4, {"right": 3, "of masked": Metric(2.0, 5)})
    assert {name: float(value) / 4 for name, value in one.metrics.items()}["right"] == 0.75
    means = {name: float(value) / 4 for name, value in one.metrics.items()}
    assert finish_metrics(task, 0.25, 4, means) == {"right": 0.75, "of masked": pytest.approx(0.4)}
    none = Loss(torch.tensor(1.0), 4, {"of masked": Metric(0.0, 0)})
    assert math.isnan(finish_metrics(task, 0.25, 4, dict(none.metrics))["of masked"])


def scored(width: int = 2) -> Task:
    """Perplexity, F1 and AUC of two classes, and a mean over the ones alone."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        out = model(x)
        chance = out.softmax(1)[:, 1]
        metrics = {
            "recall of ones": Metric(((out.argmax(1) == y) & (y == 1)).sum(), (y == 1).sum()),
            **scores.f1_sums(out.argmax(1), y),
            **scores.auc_sums(chance, y, bins=16),
        }
        return Loss(summed(out, y), len(y), metrics)

    def derive(sums: dict[str, float]) -> dict[str, float]:
        return scores.perplexity(sums) | scores.f1(sums) | scores.auc(sums)

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 4, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(96, generator=generator) > 0).long()
    data = list(zip(x, y, strict=True))
    torch.manual_seed(0)
    model = nn.Linear(4, width)
    return replace(Task(model, data, loss, held_out=data), derive=derive)


def scores_of(cluster: Cluster) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    session = build_test_session(cluster, RECIPE, scored)
    *_, last = session.rounds()
    found = evaluate(session)
    assert found is not None
    return dict(last.metrics), dict(found.metrics), dict(last.rates)


def test_scores_follow_from_sums_on_any_number_of_ranks() -> None:
    (_, alone, rates), (stepped, two, _) = scores_of(Cluster.single()), run_ranks(scores_of, 2)[0]
    assert two == pytest.approx(alone, rel=1e-5)
    assert alone.keys() == {"recall of ones", "perplexity", "precision", "recall", "f1", "auc"}
    assert alone["recall of ones"] == pytest.approx(alone["recall"])
    assert stepped.keys() == alone.keys() and rates == {"0": pytest.approx(0.1), "1": pytest.approx(0.1)}


def test_the_scores_are_those_of_scikit_learn() -> None:
    from sklearn import metrics

    generator = torch.Generator().manual_seed(1)
    chance = torch.rand(400, generator=generator)
    chance = (chance * 64).floor() / 64 + 1 / 128  # in the middle of its bin: no rounding
    actual = torch.rand(400, generator=generator) < chance
    sums: dict[str, float] = {"loss": 8.0, "count": 4.0}
    for part in (slice(0, 130), slice(130, 400)):
        for name, value in {
            **scores.f1_sums(chance[part] > 0.5, actual[part]),
            **scores.auc_sums(chance[part], actual[part]),
        }.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    assert scores.f1(sums)["f1"] == pytest.approx(metrics.f1_score(actual, chance > 0.5))
    assert scores.auc(sums)["auc"] == pytest.approx(metrics.roc_auc_score(actual, chance))
    assert scores.perplexity(sums)["perplexity"] == pytest.approx(math.exp(2))


def test_a_batch_beyond_the_data_is_told() -> None:
    said: list[str] = []
    warn_large_batch(RECIPE.replace(batch={"size": 13, "shards": 1}), scored(), said.append)
    warn_large_batch(RECIPE.replace(batch={"size": 97, "shards": 1}), scored(), said.append)
    (text,) = said
    assert text.startswith("warning: batch.size = 97 is larger than the data set of 96 samples, so")


def test_a_metric_that_no_evaluation_has_is_refused_at_the_start() -> None:
    def build(*names: str) -> Task:
        return replace(scored(), held_out={name: scored().data for name in names} or scored().data)

    def best_by(metric: str) -> Recipe:
        return RECIPE.replace(evaluate={"metric": metric, "every_steps": 1, "patience": 1})

    for metric, names in (("f1", ()), ("far.f1", ("near", "far")), ("loss", ("near", "far"))):
        build_test_session(Cluster.single(), best_by(metric), partial(build, *names))
    for metric, names, near in (("recll", (), "recall"), ("far.recll", ("near", "far"), "far.recall")):
        with pytest.raises(RecipeError, match=f"evaluations have no metric '{metric}'") as found:
            build_test_session(Cluster.single(), best_by(metric), partial(build, *names))
        assert f'evaluate.metric = "{near}"' in found.value.next_step


def with_a_bad_sample(kind: str) -> Task:
    """Sample 7 of twelve has a label out of range (or all but two have), or is wider than the others."""
    task = task_of(lambda model, batch: Loss(summed(model(batch[0]), batch[1]), len(batch[1])))
    data = list(task.data)
    for index in range(2, 12) if kind == "labels" else [7]:
        data[index] = (torch.zeros(6), Y[7]) if kind == "width" else (X[index], torch.tensor(5))
    return replace(task, data=data, held_out=None)


def failure(cluster: Cluster, kind: str, strategy: str) -> str:
    recipe = RECIPE.replace(strategy=Strategy.parse(strategy), batch={"size": 12, "shards": 4})
    try:
        [*build_test_session(cluster, recipe, partial(with_a_bad_sample, kind)).rounds()]
    except (DataError, IndexError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "trained"


def test_a_bad_sample_is_named_with_the_shapes_of_its_batch() -> None:
    label, width, sharded = (
        failure(Cluster.single(), "label", "replicas=1"),
        failure(Cluster.single(), "width", "replicas=1"),
        run_ranks(partial(failure, kind="labels", strategy="replicas=1 shard=2 zero=3"), 2),
    )
    assert "the loss fails for sample 7: IndexError: Target 5 is out of bounds" in label
    assert "step 0, samples" in label and "float32 [3, 4], int64 [3] from 0 to 5" in label
    assert "sample 7 is Tensor [6]" in width or "and sample 7 is Tensor [6]" in width
    # A rank of ZeRO-3 cannot run a sample alone, but names those of the micro-batch.
    assert all("in step 0, with the samples" in text and "int64 [3]" in text for text in sharded)


def refused_model(cluster: Cluster) -> str:
    """Rank 2 has a wider layer."""
    try:
        recipe = RECIPE.replace(batch={"size": 4, "shards": 4})
        build_test_session(cluster, recipe, lambda: scored(2 + cluster.global_rank // 2))
    except TaskError as error:
        return error.what
    return ""


def test_models_that_differ_by_rank_are_named_by_tensor() -> None:
    for what in run_ranks(refused_model, 3):
        assert "'weight' is (2, 4) torch.float32 on rank 0 and (3, 4) torch.float32 on rank 2" in what


def test_two_optimizers_are_an_error_that_names_both() -> None:
    recipe = RECIPE.replace(optimizer=RECIPE.optimizer.replace(lr=0.5, clip_norm=1.0))
    with pytest.raises(TaskError, match=r"Task\(optimizer=\.\.\.\).*optimizer\.name, optimizer\.lr"):
        refuse_two_optimizers(recipe)
    refuse_two_optimizers(Recipe(task="own", steps=1, optimizer={"clip_norm": 1.0}))
    own = replace(scored(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TaskError, match="has its own optimizer"):
        build_test_session(Cluster.single(), RECIPE, lambda: own)


def test_the_rate_of_every_group_is_written(tmp_path: Path) -> None:
    def build() -> Task:
        def groups(model: nn.Module) -> torch.optim.Optimizer:
            named = [
                {"params": [model.weight], "lr": 0.5, "name": "slow"},
                {"params": [model.bias], "lr": 1.0},
            ]
            return torch.optim.SGD(named)

        return replace(scored(), optimizer=groups)

    recipe = Recipe(task="own", steps=2, batch={"size": 4, "shards": 2}, run_dir=str(tmp_path / "run"))
    paceline.train(recipe, build)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if '"event": "step"' in line]
    assert [step["rates"] for step in steps] == [{"slow": 0.5, "1": 1.0}] * 2
