"""A run is evaluated, and asked for predictions, on any samples, whatever layout it was trained under."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.cli.evaluate_predict import evaluate, predict
from paceline.errors import CheckpointError, PacelineError, RecipeError, StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.recipe.support import resolve_inference_strategy
from paceline.session import fit, run_folder, saved_run
from paceline.session.saved_run import SavedRun, split_predictions, task_for_inference
from paceline.session.sink_setup import build_sinks
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from tests import commands
from tests.recipes import recipe_of

LAYOUTS = ("replicas=2", "replicas=1 shard=2 zero=3", "replicas=1 pipeline=2", "servers=1 sync=server-async")
WEIGHTS: tuple[Any, ...] = (None, "average", "last")
TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from paceline import Loss, Task

def points(first, count):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))[first:first + count]
    return list(zip(x, (x[:, 0] > 0).long()))

def only_x(count=3, far=1.0):
    return [x * far for x, _ in points(56, count)]

def loss(model, batch):
    x, y = batch
    out = model(x)
    return Loss(F.cross_entropy(out, y, reduction="sum"), len(y), {"accuracy": (out.argmax(1) == y).sum()})

def predict(model, batch):
    x = batch[0] if isinstance(batch, list) else batch
    out = model(x)
    return {"class": out.argmax(1), "score": out.softmax(1)[:, 1], "x": x[:, 0]}

def build():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    held_out = {"near": points(40, 16), "flipped": [(x, 1 - y) for x, y in points(40, 4)]}
    return Task(model, points(0, 40), loss, held_out=held_out, predict=predict)
"""


def run_recipe(folder: Path, layout: str) -> Recipe:
    return recipe_of(
        layout,
        steps=12,
        task=f"{folder / 'task.py'}:build",
        optimizer={"lr": 0.05},
        average={"decay": 0.5} if layout == "replicas=2" else {},
        evaluate={"every_steps": 4, "batch": 6, "metric": "flipped.loss", "patience": 2},
        checkpoint={"every_steps": 4, "keep_best": 1},
        run_dir=str(folder / layout.replace(" ", "_").replace(":", "_")),
    )


def run_all(cluster: Cluster, folder: Path) -> list[Any]:
    torch.set_num_threads(1)
    found = []
    for layout in LAYOUTS:
        session = build_test_session(cluster, run_recipe(folder, layout))
        run_dir = run_folder.prepare_folder(session, None)
        result = fit(session, run_dir, build_sinks(session, run_dir, None))
        session.close()
        found.append((run_dir, result))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "task.py").write_text(TASK)
    found: list[Any] = run_ranks(run_all, 2, folder)[0]
    return found


@pytest.mark.capability("M1")
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=LAYOUTS)
def test_a_run_of_any_layout_is_evaluated_and_predicts_in_one_process(runs: list[Any], number: int) -> None:
    run_dir, result = runs[number]
    with paceline.open_run(run_dir) as run:
        found = run.evaluate()
        assert (found.step, found.num_samples) == (result.steps, 16)
        assert found.loss == pytest.approx(result.evaluation.loss, rel=1e-5)
        assert found.metrics == pytest.approx(result.evaluation.metrics, rel=1e-5)
        assert set(found.metrics) == {f"{s}.{m}" for s in ("near", "flipped") for m in ("loss", "accuracy")}
        rows = list(run.predict(run.task.held_out["near"]))
        right = [
            int(row["class"]) == int(y) for row, (_, y) in zip(rows, run.task.held_out["near"], strict=True)
        ]
        assert sum(right) / 16 == pytest.approx(found.metrics["near.accuracy"])
        assert run.evaluate(run.task.data).num_samples == 40
    best = Path(str(result.best)) if result.best else run_dir / "checkpoints" / "best"
    with paceline.open_run(best) as run:
        assert run.evaluate().step <= result.steps


def test_the_average_is_what_is_asked_unless_the_last_weights_are(runs: list[Any]) -> None:
    losses: dict[Any, float] = {}
    for which in WEIGHTS:
        with paceline.open_run(runs[0][0], weights=which) as run:
            losses[which] = run.evaluate().loss
    assert losses[None] == losses["average"] != losses["last"]


def test_early_stopping_and_the_best_go_by_one_of_several_sets(runs: list[Any]) -> None:
    run_dir, result = runs[1]
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {e["step"]: e["metrics"] for e in events if e["event"] == "evaluation"}
    first, last = min(found), max(found)
    assert found[last]["near.loss"] < found[first]["near.loss"]
    assert found[last]["flipped.loss"] > found[first]["flipped.loss"], "what helps the one harms the other"
    assert Path(str(result.best)).name == f"step-{first:08}"


def test_the_commands_print_json_and_write_files(runs: list[Any]) -> None:
    run_dir, result = runs[1]
    folder = run_dir.parent
    data = ("--data", "task.py:points", "--option", "first=40", "--option", "count=16")
    done = commands.run(folder, "evaluate", run_dir, "--json", *data, anew=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loss"] == pytest.approx(result.evaluation.metrics["near.loss"], rel=1e-5)
    assert (found["samples"], found["step"]) == (16, result.steps)
    done = commands.run(folder, "predict", run_dir, "task.py:only_x", "--to", "found.safetensors", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 3
    assert {name: t.shape for name, t in load_file(folder / "found.safetensors").items()} == {
        "class": (3,),
        "score": (3,),
        "x": (3,),
    }
    with pytest.raises(RecipeError, match=r"found\.txt"):
        predict(run_dir, "flipped", to=Path("found.txt"))


def other_model() -> Task:
    return Task(
        nn.Linear(4, 2), [torch.zeros(4)], lambda model, batch: paceline.Loss(model(batch).sum(), len(batch))
    )


def test_what_does_not_fit_is_said(runs: list[Any], tmp_path: Path) -> None:
    run_dir = runs[0][0]
    with (
        pytest.raises(CheckpointError, match="do not fit the task's model"),
        paceline.open_run(run_dir, other_model),
    ):
        pass
    with pytest.raises(PacelineError), paceline.open_run(tmp_path):
        pass
    other = Path(shutil.copytree(run_dir, tmp_path / "other"))
    recipe = (run_dir / "recipe.toml").read_text()
    (other / "recipe.toml").write_text(recipe.replace(f"{run_dir.parent / 'task.py'}:build", "build"))
    with pytest.raises(TaskError, match="function 'build'"), paceline.open_run(other):
        pass
    with paceline.open_run(run_dir) as run, pytest.raises(PacelineError, match="several sets"):
        list(run.predict(run.task.held_out))
    for wrong in (torch.zeros(3), torch.tensor(1.0), (1, 2), [1, 2, 3]):
        with pytest.raises(TaskError, match="not one prediction for each"):
            split_predictions(wrong, 2)


# Several ranks: each holds its part of the weights, and every sample is answered once, in order

TENSOR_TASK = TASK.replace("nn.BatchNorm1d(8), ", "").replace(
    "predict=predict)", 'predict=predict, tensor={"0": "column", "2": "row"})'
)
NUM_SAMPLES = 637
RANK_LAYOUTS = ("replicas=2", "shard=2 zero=3", "pipeline=2")


def many(task: Task) -> list[Any]:
    """More blocks than are predicted at a time, and a last one that is smaller."""
    return (list(task.held_out["near"]) * 40)[:NUM_SAMPLES]


deserialize_correctly = saved_run._deserialize


def with_wrong_first_sample(share: bytes) -> tuple[int, list[Any]]:
    """A share whose place in the source is wrong: those of several ranks come in the reverse order."""
    first, rows = deserialize_correctly(share)
    return -first, rows


def answers(cluster: Cluster, run_dir: Path, strategy: str | None, mixed: bool = False) -> Any:
    """Losses, predictions, how many numbers of the weights lie here, and under which strategy."""
    torch.set_num_threads(1)
    if mixed:
        saved_run._deserialize = with_wrong_first_sample  # the twin's mistake
    found = SavedRun.find(run_dir, strategy, None, cluster.world_size)
    run = found.open(task_for_inference(found.recipe, None, found.folder), cluster, CPU)
    evaluation, rows = run.evaluate(), list(run.predict(many(run.task)))
    held = sum(part.numel() for part in run.session.runner.sharded_model.updates.values())
    run.session.close()
    return evaluation, rows, held, str(run.session.strategy)


def all_answers(cluster: Cluster, run_dir: Path, strategies: tuple[str, ...]) -> list[Any]:
    """In one job, as a start costs seconds."""
    return [answers(cluster, run_dir, strategy) for strategy in strategies]


def same_answers(found: Any, alone: Any, near: float) -> bool:
    """Return whether samples, order, losses and scores are those of one process."""
    (evaluation, rows, *_), (right, right_rows, *_) = found, alone
    scores = [[float(row["score"]) for row in one] for one in (rows, right_rows)]
    return bool(
        [float(row["x"]) for row in rows] == [float(row["x"]) for row in right_rows]
        and len(rows) == NUM_SAMPLES
        and evaluation.num_samples == right.num_samples
        and evaluation.loss == pytest.approx(right.loss, rel=near, abs=0)
        and evaluation.metrics == pytest.approx(right.metrics, rel=near, abs=0)
        and scores[0] == pytest.approx(scores[1], rel=max(near, 1e-6))
    )


def trained(folder: Path, task: str) -> Path:
    """The folder of a run of one process."""
    (folder / "task.py").write_text(task)
    session = build_test_session(Cluster.single(), run_recipe(folder, "replicas=1"))
    run_dir = run_folder.prepare_folder(session, None)
    fit(session, run_dir)
    session.close()
    return run_dir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"), TASK)


@pytest.mark.capability("M1")
def test_two_ranks_answer_as_one_process_does_however_the_weights_lie(run: Path) -> None:
    alone = answers(Cluster.single(), run, None)
    for rank in run_ranks(all_answers, 2, run, RANK_LAYOUTS):
        for layout, found in zip(RANK_LAYOUTS, rank, strict=True):
            whole = layout == "replicas=2"
            assert same_answers(found, alone, near=0.0 if whole else 1e-5), layout
            assert (found[2] < 0.75 * alone[2]) != whole, "a rank holds its part"
            assert layout in found[3]


def test_three_ranks_with_uneven_shares_keep_the_order_and_a_mistake_in_it_would_be_seen(run: Path) -> None:
    alone = answers(Cluster.single(), run, None)
    for mixed in (False, True):
        found = run_ranks(answers, 3, run, None, mixed)
        assert [same_answers(one, alone, near=0.0) for one in found] == [not mixed] * 3


def test_tensor_shards_answer_by_command(tmp_path: Path) -> None:
    run_dir = trained(tmp_path, TENSOR_TASK)
    alone = answers(Cluster.single(), run_dir, None)
    layout = ("-n", 2, "--strategy", "tensor=2")
    done = commands.run(tmp_path, "evaluate", run_dir, *layout, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == pytest.approx(alone[0].loss, rel=1e-5)
    done = commands.run(tmp_path, "predict", run_dir, "near", *layout, "--to", "found.safetensors", "--json")
    assert done.returncode == 0, done.stderr
    right = [float(row["x"]) for row in alone[1][:16]]
    assert load_file(tmp_path / "found.safetensors")["x"].tolist() == right
    done = commands.run(tmp_path, "evaluate", run_dir, "-n", 3, "--strategy", "tensor=2 replicas=1")
    assert done.returncode == 2 and "needs 2 processes, and there are 3" in done.stderr


def test_the_layout_of_a_training_is_kept_and_how_it_trained_is_not() -> None:
    by_server = Strategy.parse("servers=1 sync=server-async")
    assert resolve_inference_strategy(by_server, None, 3) == Strategy.parse("replicas=3")
    assert resolve_inference_strategy(Strategy.parse("pipeline=2 lanes=2"), None, 2) == Strategy.parse(
        "replicas=2"
    )
    sharded = Strategy.parse("replicas=4 shard=2 zero=3 codec=int8")
    assert resolve_inference_strategy(sharded, None, 4) == Strategy.parse("replicas=2 shard=2 zero=3")
    assert resolve_inference_strategy(sharded, None, 1) == Strategy.parse("replicas=1")
    with pytest.raises(StrategyError, match="an evaluation does not train"):
        resolve_inference_strategy(by_server, "sync=local:4", 2)


def test_the_first_samples_of_a_source_and_a_prediction_that_cannot_travel(run: Path) -> None:
    with paceline.open_run(run, max_samples=5) as opened:
        assert len([*opened.predict(opened.task.data)]) == 5
    packed = saved_run._serialize(0, [object()])
    with pytest.raises(TaskError, match="these predictions cannot be sent between ranks"):
        saved_run._deserialize(packed)


def test_a_run_on_a_text_beside_its_recipe_is_resumed_and_evaluated_from_anywhere(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "own.txt").write_text("abcdefgh " * 4000)
    (folder / "r.toml").write_text(
        'task = "byte-gpt"\nsteps = 2\n[options]\ntext = "own.txt"\ncontext = 32\nlayers = 1\nheads = 1\n'
        "width = 16\nsample_tokens = 4\n[batch]\nsize = 4\nshards = 1\n"
    )
    assert commands.run(tmp_path, "train", "job/r.toml", "--name", "a").returncode == 0
    (made,) = tmp_path.glob("runs/*-a")
    for words in (("train", "--resume", made, "--set", "steps=3"), ("evaluate", made)):
        done = commands.run(folder, *words)
        assert done.returncode == 0, done.stderr


@pytest.mark.capability("J20")
def test_early_exits_of_a_trained_run_are_reported_by_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLOPs and metric of a GPT with layer drop; the twin: without early exits the loss is the run's own."""
    recipe = recipe_of(
        "replicas=1",
        task="byte-gpt",
        steps=60,
        options={
            "context": 16,
            "layers": 4,
            "heads": 2,
            "width": 16,
            "layer_drop": 0.2,
            "train_tokens": 20_000,
            "held_out_tokens": 2_000,
            "sample_tokens": 0,
        },
        batch={"size": 16, "shards": 1},
        optimizer={"lr": 0.01},
        run_dir=str(tmp_path / "run"),
    )
    session = build_test_session(Cluster.single(), recipe)
    run_dir = run_folder.prepare_folder(session, None)
    result = fit(session, run_dir)
    session.close()
    found = {}
    for confidence in (1.1, 0.2, 0.0):
        capsys.readouterr()
        evaluate(run_dir, early_exit=confidence, as_json=True)
        found[confidence] = json.loads(capsys.readouterr().out)
    never, some, always = found.values()
    assert result.evaluation is not None
    assert never["loss"] == pytest.approx(result.evaluation.loss, rel=1e-5)
    assert never["samples"] == result.evaluation.num_samples == never["exits after 4"]
    assert never["flops"] == never["full flops"] > always["flops"]
    assert always["flops"] <= some["flops"]
    assert sum(some[f"exits after {k}"] for k in range(1, 5)) == some["samples"] == never["samples"]
    assert always["exits after 1"] == always["samples"] and 0 < always["accuracy"] < 1
    with (
        paceline.open_run(trained(tmp_path, TASK)) as opened,
        pytest.raises(TaskError, match="the model of the run is a Sequential, and only a GPT"),
    ):
        opened.evaluate_early_exit(0.9)
