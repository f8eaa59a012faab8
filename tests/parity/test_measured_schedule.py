"""A step of a pipeline as it ran, in the report beside the plan: the same order, and about the idle time."""

import json
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from paceline.job.cluster import Cluster
from paceline.pipeline_schedule import PipelineAction, gpipe, one_f_one_b, simulate_schedule
from paceline.recipe import Recipe
from paceline.report import read_run, render_page
from paceline.session import fit
from paceline.session.sink_setup import build_sinks
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

SECONDS = 0.03  # long enough that a busy machine adds little to it
MICRO_BATCHES = 4
SVG = "{http://www.w3.org/2000/svg}"


class SleepTwiceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * SECONDS)
        return grad


class SleepingLayer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return SleepTwiceInBackward.apply(super().forward(x))


def sleeping_task() -> Task:
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    model = nn.Sequential(SleepingLayer(4, 4), SleepingLayer(4, 4))
    return Task(model, data, lambda model, batch: Loss(model(batch[0]).square().sum(), len(batch[0])))


def train_stages(cluster: Cluster, folder: str, strategy: str) -> None:
    recipe = Recipe(
        task="sleeping",
        strategy=strategy,
        steps=3,
        batch={"size": 2 * MICRO_BATCHES, "shards": MICRO_BATCHES},
        checkpoint={"every_steps": 0},
    )
    session, run = build_test_session(cluster, recipe, sleeping_task), Path(folder)
    if session.is_first:
        run.mkdir()
        (run / "recipe.toml").write_text('task = "sleeping"\n')
    fit(session, run, build_sinks(session, run, None) if session.is_first else ())


def drawn(page: str) -> list[dict[int, list[str]]]:
    """Of each picture, the titles of the boxes of each stage from left to right."""
    found = []
    for text in re.findall(r"<svg xmlns.*?</svg>", page, re.DOTALL):
        boxes = [
            (float(rect.attrib["y"]), float(rect.attrib["x"]), str(rect.find(f"{SVG}title").text))
            for rect in ElementTree.fromstring(text).iter(f"{SVG}rect")
        ]
        rows = sorted({y for y, _, _ in boxes})
        found.append({rows.index(y): [] for y in rows})
        for y, _, title in sorted(boxes):
            found[-1][rows.index(y)].append(title)
    return found


@pytest.mark.capability("D11")
@pytest.mark.parametrize(
    "strategy, ranks", [("pipeline=2 schedule=1f1b", 2), ("pipeline=2 schedule=gpipe lanes=2", 1)]
)
def test_the_report_draws_a_step_as_planned_and_as_it_ran(strategy: str, ranks: int, tmp_path: Path) -> None:
    run_ranks(train_stages, ranks, str(tmp_path / "run"), f"replicas=1 {strategy}")
    run = read_run(tmp_path / "run")
    (timeline,) = run.of("timeline")
    factory = one_f_one_b if "1f1b" in strategy else gpipe
    table = factory(2, MICRO_BATCHES)
    for stage, order in enumerate(table.orders):
        ran = [PipelineAction(*row[2:6]) for row in timeline["measured"] if row[1] == stage]
        assert ran == list(order)
    planned, measured = drawn(render_page([run]))
    assert planned == measured and [*map(len, planned.values())] == [2 * MICRO_BATCHES] * 2
    # Stages wait for each other as long as in the plan, and for messages, Python and other processes.
    bubble = simulate_schedule(table, MICRO_BATCHES).bubble
    assert timeline["planned_idle"] == pytest.approx(bubble)
    assert bubble - 0.03 < timeline["measured_idle"] < bubble + 0.4
    # No stage begins with what another has slept over for less than its time.
    begins = {(row[1], *row[2:4]): row[0] for row in timeline["measured"]}
    for row in timeline["measured"]:
        source = (row[1] - 1 if row[2] == "F" else row[1] + 1, *row[2:4])
        slept = SECONDS if row[2] == "F" else 2 * SECONDS
        assert source not in begins or row[0] >= begins[source] + slept - 1e-3


def test_a_timeline_that_no_run_writes_is_not_drawn(tmp_path: Path) -> None:
    good = [[0.0, 0, "F", 0, 0, 0, 1.0], [1.0, 0, "B", 0, 0, 0, 2.0]]
    records = {
        "good": (good, True),
        "empty": ([], False),
        "text": ("rows", False),
        "operation": ([[0.0, 0, "<script>", 0, 0, 0, 1.0]], False),
        "stages": ([[0.0, 10**9, "F", 0, 0, 0, 1.0]], False),
        "no time": ([[0.0, 0, "F", 0, 0, 0, 0.0]], False),
        "not finite": ([["nan", 0, "F", 0, 0, 0, 1.0]], False),
    }
    (tmp_path / "recipe.toml").write_text('task = "digits"\n')
    for rows, is_drawn in records.values():
        record = {"event": "timeline", "step": 2, "planned": good, "measured": rows}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        assert ("Pipeline schedule" in render_page([read_run(tmp_path)])) == is_drawn
