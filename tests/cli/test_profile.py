"""`paceline profile`: on a job that runs, on one that has ended, and where nobody can answer."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.cli.profile import profile
from paceline.errors import DataError, DeadlineError, PacelineError
from paceline.observe.process_info import process_start_ticks
from paceline.report.run_profile import (
    OperationTime,
    ProfileRequest,
    RankProfile,
    read_request,
    remove_request,
    render_flame_graph,
    sum_functions,
    sum_operations,
    write_rank_profile,
    write_request,
)
from tests import command_jobs
from tests.unit.watch.records import append, run_record, step_record

STEPS, PROFILED = 250, 20
TASK = """
import time
from pathlib import Path
import torch
from torch import nn
from paceline import Loss, Task

REQUEST = Path(__file__).parent / "run" / "profile" / "request.json"

def injected(seconds):
    end, value = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        value += 1
    return value

def build(waits=False):
    calls = []
    def loss(model, batch):
        calls.append(1)
        if waits and len(calls) == 20:  # until it is requested, however long the command takes to start
            expires = time.monotonic() + 120
            while not REQUEST.exists() and time.monotonic() < expires:
                time.sleep(0.01)
        injected(0.02)
        return Loss((model(batch) ** 2).sum(), len(batch))
    torch.manual_seed(0)
    return Task(nn.Linear(4, 1), torch.rand(64, 4), loss)
"""


def is_wait(name: str) -> bool:
    """Return whether a function waits for the other rank, for which a busy machine may have no time."""
    return "paceline/comm/" in name


def top_frame(svg: str) -> str:
    """The function in which most time is spent, of those that a flame graph shows and that are no wait."""
    root = ElementTree.fromstring(svg)
    frames = [element.attrib for element in root.iter() if "data-own" in element.attrib]
    frames = [frame for frame in frames if not is_wait(frame["data-name"])]
    return max(frames, key=lambda frame: float(frame["data-own"]))["data-name"]


def final_hash(out: str) -> str:
    found = re.search(r"state sha256: (\w+)", out)
    assert found is not None, out
    return found[1]


@pytest.mark.capability("P7", clause="requested of a running job of two ranks")
@pytest.mark.capability("P8")
def test_the_top_frame_is_the_injected_function_and_the_weights_keep_their_bits(tmp_path: Path) -> None:
    words = ("train", "recipe.toml", "-n", "2", "--set", f"steps={STEPS}", "--set", "reproducible=true")
    hashes = {}
    for name in ("profiled", "plain"):
        folder = tmp_path / name
        command_jobs.prepare(folder, TASK)
        more = ("--set", "checkpoint.every_steps=0")
        if name == "plain":
            with command_jobs.start(folder, *words, *more) as job:
                hashes[name] = final_hash(job.communicate()[0])
            continue
        with command_jobs.start(folder, *words, *more, "--set", "options.waits=true") as job:
            expires = time.monotonic() + 120
            while '"event": "step"' not in _text(folder / "run" / "metrics.jsonl"):
                assert job.poll() is None and time.monotonic() < expires
                time.sleep(0.05)
            with command_jobs.start(folder, "profile", "run", "--steps", str(PROFILED), "--json") as command:
                out, err = command.communicate()
                assert command.wait() == 0, err
            hashes[name] = final_hash(job.communicate()[0])
        found = json.loads(out)
        assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
        for rank in found["ranks"]:
            assert rank["end_step"] - rank["first_step"] == PROFILED and rank["num_samples"] > 20
            assert rank["seconds"] >= 0.02 * PROFILED
            (linear,) = (row for row in rank["operations"] if row["name"] == "aten::linear")
            assert linear["calls"] == PROFILED
            top = next(row["name"] for row in rank["functions"] if not is_wait(row["name"]))
            assert top.startswith("injected (")
        assert found["ranks"][0]["first_step"] == found["ranks"][1]["first_step"]
        svg = (folder / "run" / "profile" / "flame.svg").read_text("utf-8")
        assert re.fullmatch(r"injected \(.*task\.py:\d+\)", top_frame(svg))
        assert "rank 1" in svg and not re.search(r"(href|src)=|https?://(?!www\.w3\.org/2000/svg)", svg)
        assert read_request(folder / "run") is None
    assert hashes["profiled"] == hashes["plain"]


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def made_run(folder: Path, **start: Any) -> Path:
    folder.mkdir()
    (folder / "recipe.toml").write_text("")
    append(folder, {**run_record(), **start}, *(step_record(step) for step in range(3)))
    return folder


def here() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": os.uname().nodename, "pid": pid, "process_start": process_start_ticks(pid)}


def rank_profile(rank: int, **functions: float) -> RankProfile:
    operations = (OperationTime("aten::mm", 3, 0.5), OperationTime("aten::add", 9, 0.1))
    stacks = {("fit (a.py:1)", f"{name} (b.py:2)"): seconds for name, seconds in functions.items()}
    return RankProfile("", rank, 10, 13, 1.0, 500, operations, stacks)


def test_what_cannot_be_profiled_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    def error(folder: Path, rank: str = "all") -> str:
        with pytest.raises(PacelineError) as caught:
            profile(folder, rank=rank, timeout=1.0)
        assert caught.value.next_step and isinstance(caught.value, DataError | DeadlineError)
        return str(caught.value)

    ended, running = made_run(tmp_path / "ended", **here()), made_run(tmp_path / "running", **here())
    append(ended, {"event": "end", "step": 3, "stopped": False})
    far = made_run(tmp_path / "far")
    assert "is not a run folder" in error(tmp_path / "none")
    assert "is not running (finished)" in error(ended) and "runtime.profile=10:20" in error(ended)
    assert "ranks 0, 1 of the run did not answer within 1 s" in error(running)
    assert "--rank 2: the run has 2 ranks" in error(running, rank="2")
    late = error(far, rank="1")
    assert "rank 1 of the run on host far did not answer" in late and "call this command there" in late
    assert read_request(running) is None
    request = ProfileRequest("other", 0, 1, (), here())
    write_request(running, request)
    assert f"process {os.getpid()} is profiling" in error(running)
    assert read_request(running) == request
    remove_request(running, request)
    append(ended, {**run_record(3), **here(), "process_start": 1})
    assert "is not running (lost)" in error(ended)


def test_an_ended_run_shows_the_profile_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_run(tmp_path / "run", **here())
    append(run, {"event": "end", "step": 3, "stopped": False})
    hostile = "</title><script>x</script>\x1b[2J"
    write_rank_profile(run, rank_profile(0, busy=0.5))
    write_rank_profile(run, rank_profile(1, busy=0.2, **{hostile: 0.1}))
    (run / "profile" / "rank-2.operations.json").write_text('{"request_id": 3')
    profile(run, flame_graph=tmp_path / "graph.svg")
    printed = capsys.readouterr().out
    assert re.search(r"aten::mm +1 s +83 % +6 +500 ms +500 ms", printed), printed
    assert "busy (b.py:2)" in printed and "\x1b[2J" not in printed and "steps 10 to 12 of 2 ranks" in printed
    svg = (tmp_path / "graph.svg").read_text("utf-8")
    assert top_frame(svg) == "busy (b.py:2)" and "<script>x" not in svg
    with pytest.raises(DataError, match="cannot write the flame graph"):
        profile(run, flame_graph=tmp_path / "none" / "graph.svg")


def test_tables_add_ranks_and_a_flame_graph_has_callees_above_callers() -> None:
    profiles = [rank_profile(rank, left=0.75, right=0.25) for rank in range(9)]
    assert sum_operations(profiles)[0] == OperationTime("aten::mm", 27, 4.5)
    name, seconds = sum_functions(profiles)[0]
    assert (name, round(seconds, 6)) == ("left (b.py:2)", 6.75)
    root = ElementTree.fromstring(render_flame_graph(profiles, "title"))
    frames = {e.attrib["data-name"]: e for e in root.iter() if "data-own" in e.attrib}
    assert sorted(frames) == ["fit (a.py:1)", "left (b.py:2)", "right (b.py:2)"]  # nine ranks are merged
    widths = {name[:3]: float(frame.attrib["data-w"]) for name, frame in frames.items()}
    assert widths == {"fit": 1200.0, "lef": 900.0, "rig": 300.0}
    heights = {name[:3]: float(frame[1].attrib["y"]) for name, frame in frames.items()}
    assert heights["lef"] == heights["rig"] < heights["fit"]
    assert ElementTree.fromstring(render_flame_graph([], "no samples")) is not None
