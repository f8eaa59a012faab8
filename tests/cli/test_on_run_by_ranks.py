"""Several ranks evaluate a run's weights and predict by them: the answer is that of one process.

Each rank holds its part of the weights; every sample is answered once, in the order of the source, whatever
is left for the last blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Strategy
from paceline.recipe.support import resolve_inference_strategy
from paceline.session import fit, run_folder, saved_run
from paceline.session.saved_run import SavedRun, task_for_inference
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from tests import commands
from tests.cli.test_on_run import TASK, run_recipe

TENSOR_TASK = TASK.replace("nn.BatchNorm1d(8), ", "").replace(
    "predict=predict)", 'predict=predict, tensor={"0": "column", "2": "row"})'
)
NUM_SAMPLES = 637
LAYOUTS = ("replicas=2", "shard=2 zero=3", "pipeline=2")


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
    """Whether samples, order, losses and scores are those of one process."""
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
    for rank in run_ranks(all_answers, 2, run, LAYOUTS):
        for layout, found in zip(LAYOUTS, rank, strict=True):
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
