"""Profiles of the steps that the recipe names or that a file requests, and nothing without either."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Loss, Task
from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.observe.metrics_schema import find_schema_errors
from paceline.observe.step_stats import StepStats
from paceline.recipe import Recipe
from paceline.report.run_profile import (
    ProfileRequest,
    read_rank_profiles,
    sum_functions,
    sum_operations,
    write_request,
)
from paceline.session import fit, step_profile
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


def matmul_task() -> Task:
    square = torch.ones(768, 768)  # outside of the loss: on a busy machine filling it can take longer

    def loss(model: nn.Module, batch: torch.Tensor) -> Loss:
        return Loss((model(batch) ** 2).sum() * (square @ square)[0, 0], len(batch))

    return Task(nn.Linear(4, 1), list(torch.rand(32, 4)), loss)


@pytest.mark.capability("P7", clause="a range of steps in the recipe")
def test_the_table_names_the_operation_that_dominates(tmp_path: Path) -> None:
    recipe = Recipe(task="given", steps=4, batch={"size": 8}, runtime={"profile": "1:3"})
    fit(build_test_session(Cluster.single(), recipe, matmul_task), tmp_path)
    (found,) = read_rank_profiles(tmp_path)
    assert (found.request_id, found.first_step, found.end_step) == ("", 1, 3)
    first, second = sum_operations([found])[:2]
    assert (first.name, first.calls) == ("aten::mm", 4)  # one is that of the gradient
    assert first.self_cpu_seconds > 2 * second.self_cpu_seconds
    assert any("matmul_task.<locals>.loss (" in name for name, _ in sum_functions([found]))


class Requests:
    """A sink that writes a request after a step."""

    def __init__(self, folder: Path, after: int) -> None:
        self.folder, self.after = folder, after

    def step(self, stats: StepStats) -> None:
        if stats.step == self.after:
            write_request(self.folder, ProfileRequest("new", 3, 2, (), {}))

    def event(self, name: str, record: object) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_request_of_an_earlier_start_and_one_for_another_rank_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of a request are those that it names; its twin, the one that was there before, has none."""
    monkeypatch.setattr(step_profile, "_LOOK_SECONDS", 0.0)
    recipe = Recipe(task="given", steps=6, batch={"size": 8})
    for stale in (ProfileRequest("old", 0, 2, (), {}), ProfileRequest("other", 0, 2, (1,), {})):
        write_request(tmp_path, stale)
        fit(build_test_session(Cluster.single(), recipe, matmul_task), tmp_path)
        assert read_rank_profiles(tmp_path) == []
    sink = Requests(tmp_path, after=1)
    fit(build_test_session(Cluster.single(), recipe, matmul_task), tmp_path, [sink])
    (found,) = read_rank_profiles(tmp_path)
    assert (found.request_id, found.first_step, found.end_step) == ("new", 3, 5)
    assert not (tmp_path / "profile" / "rank-0.json").exists()
