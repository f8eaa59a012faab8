"""`runtime.profile`: a Chrome trace of the steps that it names, and nothing where it is not set."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.observe.metrics_schema import find_schema_errors
from paceline.recipe import Recipe
from paceline.session import fit
from paceline.session.sink_setup import build_sinks
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

SHARDS, LAYERS = 2, 2


def train(folder: Path, profile: str | None, cluster: Cluster | None = None) -> None:
    recipe = Recipe(
        task="digits",
        steps=6,
        options={"model": "mlp", "hidden": [8]},
        batch={"size": 8, "shards": SHARDS},
        runtime={} if profile is None else {"profile": profile},
        evaluate={"every_steps": 100},
    )
    session = build_test_session(cluster or Cluster.single(), recipe)
    fit(session, folder, build_sinks(session, folder, None))


def names_of(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(path.read_text("utf-8"))["traceEvents"]]


def told(folder: Path) -> dict[str, Any]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
    (record,) = (record for record in records if record["event"] == "profile")
    return dict(record)


@pytest.mark.parametrize(
    ("profile", "first", "end"), [("2:4", 2, 4), ("0:1", 0, 1), ("5:6", 5, 6), ("4:99", 4, 6)]
)
def test_a_trace_has_exactly_the_steps_of_the_range(
    tmp_path: Path, profile: str, first: int, end: int
) -> None:
    """Also at the first step, at the last, and where the run ends before the range does; no evaluation."""
    train(tmp_path, profile)
    names = names_of(tmp_path / "profile" / "rank-0.json")
    assert names.count("aten::linear") == (end - first) * SHARDS * LAYERS
    assert any("Backward" in name for name in names)
    record = told(tmp_path)
    assert (record["step"], record["end"], record["path"]) == (first, end, str(tmp_path / "profile"))
    assert not find_schema_errors(record)


def test_without_it_no_profiler_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "profile", pytest.fail)
    train(tmp_path, None)
    assert not (tmp_path / "profile").exists()


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    train(tmp_path, "2:4")
    assert "the profile cannot be written" in (tmp_path / "metrics.jsonl").read_text("utf-8")


def test_steps_that_the_run_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the run has 6 steps, the last is 5"):
        train(tmp_path, "6:8")


@pytest.mark.parametrize("text", ["3:3", "4:3", "3", ":3", "a:b", "-1:3"])
def test_a_text_that_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"runtime\.profile.*10:13"):
        Recipe(task="digits", steps=6, runtime={"profile": text})


def _train_a_rank(cluster: Cluster, folder: str) -> None:
    train(Path(folder), "2:4", cluster)


def test_every_rank_writes_its_trace(tmp_path: Path) -> None:
    run_ranks(_train_a_rank, 2, str(tmp_path))
    counts = [names_of(tmp_path / "profile" / f"rank-{rank}.json").count("aten::linear") for rank in (0, 1)]
    assert counts == [2 * LAYERS] * 2  # each rank has one of two shards in each of two steps
