"""`log.trace` on two ranks: what the merged file has, and what tracing does not change."""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.job.cluster import Cluster
from paceline.observe.metrics_schema import find_schema_errors
from paceline.observe.step_trace import TraceRequest, merge_spans, read_spans
from paceline.recipe import Recipe, Strategy
from paceline.session import fit
from paceline.session.sink_setup import build_sinks
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session, make_task, trajectory_of

FIRST, END, DELAY = 2, 5, 0.05
SLOW_RANK = 1


def recipe_of(strategy: str, trace: str | None) -> Recipe:
    return Recipe(
        task="digits",
        steps=6,
        strategy=Strategy.parse(strategy),
        options={"model": "mlp", "hidden": [8, 8]},
        batch={"size": 8, "shards": 4},
        runtime={"bucket_bytes": 256},
        evaluate={"every_steps": 3},
        checkpoint={"every_steps": 4, "mode": "blocking"},
        log={} if trace is None else {"trace": trace},
    )


def train(
    cluster: Cluster, folder: Path, strategy: str, trace: str | None
) -> tuple[dict[str, Any], int, dict[str, int]]:
    """Train with a forward that one rank delays; return weights, number of buckets, and gradient bytes."""
    recipe = recipe_of(strategy, trace)

    def slow_task() -> Task:
        task = make_task(recipe)

        def loss(model: Any, batch: Any) -> Any:
            if cluster.global_rank == SLOW_RANK and model.training:
                time.sleep(DELAY)
            return task.loss(model, batch)

        return replace(task, loss=loss)

    session = build_test_session(cluster, recipe, slow_task)
    fit(session, folder, build_sinks(session, folder, None))
    sizes = {name: p.nbytes for name, p in session.runner.sharded_model.model.named_parameters()}
    buckets = getattr(getattr(session.rule, "reduction", None), "num_buckets", 0)
    return trajectory_of([], session).parameters, buckets, sizes


def run_cases(cluster: Cluster, root: Path) -> list[Any]:
    window = f"{FIRST}:{END}"
    return [
        train(cluster, root / "plain", "replicas=2 route=native", None),
        train(cluster, root / "native", "replicas=2 route=native", window),
        train(cluster, root / "memory", "replicas=2 route=shared-memory", window),
        train(cluster, root / "zero", "replicas=1 shard=2 zero=2", window),
        train(cluster, root / "stages", "pipeline=2", window),
        train(cluster, root / "small", "replicas=2 route=native", None),  # has a request with a limit
    ]


def spans_of(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Merge, and check what every trace has: whole events, nested spans, the steps of the window."""
    merge_spans(read_spans(folder), folder / "trace.json.gz")
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for span in spans:
        assert span["name"] and span["ts"] >= 0 and span["dur"] >= 0 and span["pid"] in (0, 1)
        assert FIRST <= span["args"]["step"] < END and isinstance(span["tid"], int)
    titles = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert "steps" in titles
    threads = defaultdict(list)
    for span in spans:
        threads[span["pid"], span["tid"]].append((span["ts"], -span["dur"], span["name"]))
    for members in threads.values():
        inside: list[float] = []
        for begin, minus_duration, name in sorted(members):
            # Nanoseconds: sums of microseconds in floats are not exact.
            start, end = round(1000 * begin), round(1000 * begin) - round(1000 * minus_duration)
            while inside and inside[-1] <= start:
                inside.pop()
            assert not inside or end <= inside[-1], name
            inside.append(end)
    return spans, trace["otherData"]


def overlap(spans: list[dict[str, Any]]) -> bool:
    return max(span["ts"] for span in spans) <= min(span["ts"] + span["dur"] for span in spans)


def find(spans: list[dict[str, Any]], name: str, **where: Any) -> list[dict[str, Any]]:
    return [
        span
        for span in spans
        if span["name"] == name
        and all(span["args"].get(key, span.get(key)) == value for key, value in where.items())
    ]


@pytest.mark.capability("P9")
def test_a_trace_has_the_spans_of_all_ranks_on_one_clock_and_changes_no_bit(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("plain", "native", "memory", "zero", "stages", "small")}
    for folder in folders.values():
        folder.mkdir()
    TraceRequest("small", FIRST, END, max_spans=10).write(folders["small"])
    plain, native, memory, *_ = run_ranks(run_cases, 2, tmp_path)[0]
    for name, values in plain[0].items():
        assert native[0][name].equal(values), name
    assert not (folders["plain"] / "trace").exists() and not (folders["native"] / "activity").exists()
    for name, (_, num_buckets, sizes) in (("native", native), ("memory", memory)):
        spans, facts = spans_of(folders[name])
        assert facts["spans_dropped"] == facts["clock_uncertainty_seconds"] == 0 and num_buckets > 2
        for step in range(FIRST, END):
            for bucket in range(num_buckets):
                of_ranks = find(spans, f"bucket {bucket}", step=step)
                assert [span["pid"] for span in of_ranks] in ([0, 1], [1, 0])
                assert overlap(of_ranks), (name, step, bucket)
            for rank in (0, 1):
                buckets = [span for span in spans if span["cat"] == "buckets" and span["pid"] == rank]
                passed = sum(span["args"]["bytes"] for span in buckets if span["args"]["step"] == step)
                assert passed >= sum(sizes.values())
                assert len(find(spans, "forward", step=step, pid=rank)) >= 2
            slow, fast = (
                sum(span["dur"] for span in find(spans, "forward", step=step, pid=rank)) for rank in (1, 0)
            )
            assert slow >= 1e6 * 2 * DELAY > fast
        of_ranks = find(spans, "all_reduce, world", step=FIRST, cat="collectives")
        assert len(of_ranks) >= 2 and {span["pid"] for span in of_ranks} == {0, 1}
        for phase in ("data", "backward", "optimizer", "evaluation", "checkpoint", f"step {FIRST}"):
            assert {span["pid"] for span in find(spans, phase)} == {0, 1}, phase
    _check_other_layouts(folders)


def _check_other_layouts(folders: dict[str, Path]) -> None:
    spans, _ = spans_of(folders["zero"])
    for rank in (0, 1):
        scattered = [span for span in spans if span["cat"] == "buckets" and span["pid"] == rank]
        assert {span["args"]["step"] for span in scattered} == {*range(FIRST, END)}
    spans, _ = spans_of(folders["stages"])
    for stage in (0, 1):
        for word in ("forward", "backward"):
            assert {span["name"] for span in spans if span["cat"] == f"stage {stage}"} >= {
                f"{word} {k}" for k in range(4)
            }
    spans, facts = spans_of(folders["small"])
    recorded = read_spans(folders["small"])
    assert all(len(rank.spans) <= 10 and rank.num_dropped > 0 for rank in recorded)
    assert facts["spans_dropped"] == sum(rank.num_dropped for rank in recorded)
    lines = (folders["native"] / "metrics.jsonl").read_text("utf-8").splitlines()
    (record,) = (record for record in map(json.loads, lines) if record["event"] == "trace")
    assert (record["step"], record["end"]) == (FIRST, END) and not find_schema_errors(record)
