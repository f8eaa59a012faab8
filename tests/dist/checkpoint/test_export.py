"""Weights leave a run whatever strategy wrote it; plain PyTorch and a new run take them over to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.checkpoint.model_weights import export_weights, find_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.cli.export import export
from paceline.errors import CheckpointError, RecipeError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import evaluate, fit, join, run_folder
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session, make_task
from tests import commands

pytestmark = pytest.mark.capability("W6")
STRATEGIES = ("replicas=2", "replicas=1 shard=2 zero=1", "replicas=1 pipeline=2")


def digits(strategy: str, run_dir: Path) -> Recipe:
    return Recipe(
        task="digits",
        options={"model": "convnet"},
        steps=3,
        batch={"size": 16, "shards": 4},
        optimizer={"lr": 1e-2},
        strategy=Strategy.parse(strategy),
        runtime={"threads": 1},
        run_dir=str(run_dir),
    )


def train_all(cluster: Cluster, folder: Path) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    torch.set_num_threads(1)
    found = []
    for i, strategy in enumerate(STRATEGIES):
        session = build_test_session(cluster, digits(strategy, folder / str(i)))
        result = fit(session, run_folder.prepare_folder(session, None))
        assert result.evaluation is not None
        values = {name: t.clone() for name, t in session.complete().state_dict().items()}
        found.append((asdict(result.evaluation), values))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Two ranks train three runs; returns their folder, and evaluation and weights of each."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(train_all, 2, folder)[0]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("i", range(len(STRATEGIES)), ids=STRATEGIES)
def test_what_was_exported_evaluates_to_the_same_bits(
    i: int, trained: tuple[Path, list[Any]], tmp_path: Path, threads: None
) -> None:
    folder, ends = trained
    evaluation, values = ends[i]
    path = tmp_path / "model.safetensors"
    export_weights(find_checkpoint(StorageFolder(str(folder / str(i) / "checkpoints")), print), path)
    recipe = digits("replicas=all", tmp_path)
    plain = make_task(recipe).model
    plain.load_state_dict(load_file(path), strict=True)
    assert all(torch.equal(value, values[name]) for name, value in plain.state_dict().items())
    with join(recipe.replace(init_from=str(path)), cluster=Cluster.single()) as session:
        found = evaluate(session)
    assert found is not None and asdict(found) | {"step": 3} == evaluation
    with join(recipe, cluster=Cluster.single()) as session:  # the twin: the seed alone gives other numbers
        other = evaluate(session)
    assert other is not None and other.loss != evaluation["loss"]


def test_the_command_and_what_the_file_says_of_itself(
    trained: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    run = trained[0] / "1"
    path = tmp_path / "new" / "model.safetensors"
    done = commands.run(tmp_path, "export", run, "--to", path)
    assert done.returncode == 0, done.stderr
    assert f"{path}: " in done.stdout and "step 3" in done.stdout
    with safe_open(path, "pt") as file:
        said = file.metadata()
    assert (said["format"], said["task"], said["step"]) == ("pt", "digits", "3")
    assert said["recipe"] == (run / "recipe.toml").read_text() and len(said["recipe_sha256"]) == 64
    assert json.loads(said["versions"])["torch"] == torch.__version__
    (copy,) = (run / "checkpoints").glob("step-*")
    again = tmp_path / "again.safetensors"
    export(copy, again)
    same = load_file(again)
    assert all(torch.equal(value, same[name]) for name, value in load_file(path).items())


def test_what_cannot_be_exported_is_refused_with_a_next_step(
    trained: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"--to .*model\.safetensors"):
        export(trained[0] / "1", tmp_path / "model.bin")
    with pytest.raises(RecipeError, match="is not a run folder"):
        export(tmp_path, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no manifest"):
        export(trained[0] / "1" / "checkpoints" / "step-00000009", tmp_path / "model.safetensors")
    assert not [*tmp_path.iterdir()]
