"""`paceline tune` with real jobs: any number of workers, rungs, kills, and a test set that stays shut."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import load_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.recipe import Recipe
from paceline.report.run_reader import read_run
from paceline.search import Study, open_study
from paceline.search.study_log import without_times
from tests.commands import Command, run, start

pytestmark = pytest.mark.timeout(900)

TASK = """
import os, time
from pathlib import Path
import torch
from torch import nn
from paceline import Loss, Metric, Task

HERE = Path(__file__).parent

class Samples:
    def __init__(self, n, name):
        self.x = torch.rand(n, 8, generator=torch.Generator().manual_seed(n))
        self.name = name
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        if self.name:
            with open(HERE / self.name, "a") as file:
                file.write(f"{os.getpid()}\\n")
        return self.x[index]

def build(seconds=0.0, width=8):
    def loss(model, batch):
        time.sleep(seconds)
        found = model(batch).squeeze(-1)
        right = ((found > 4) == (batch.sum(1) > 4)).sum()
        return Loss((found - batch.sum(1)).square().sum(), len(batch), metrics={"right": right})
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))
    return Task(model, Samples(80, ""), loss, held_out=Samples(20, "opened"))
"""
RECIPE = """
task = "task.py:build"
epochs = 8
[batch]
size = 16
shards = 4
[schedule]
decay = "cosine"
warmup_steps = 3
[options]
seconds = 0.0
"""
SPACE = """
[study]
objective = "validation loss"
search = "random"
proposals = 3
confirm = { top = 1, seeds = 2 }
validation = 0.2
[stop]
rule = "halving"
first = "epochs:1"
[space]
"optimizer.lr" = { log = [1e-3, 1e-1] }
"batch.size" = { choice = [8, 16] }
"""


def prepare(folder: Path, space: str = SPACE, recipe: str = RECIPE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("task.py", TASK), ("recipe.toml", recipe), ("space.toml", space)):
        (folder / name).write_text(text)
    return folder


def words(trials: int = 6, workers: int = 2, *more: str) -> list[str]:
    counts = ["--trials", str(trials), "--workers", str(workers)]
    return ["tune", "recipe.toml", "--space", "space.toml", "--out", "out", *counts, *more]


def state(run_dir: Path) -> dict[str, Any]:
    files = StorageFolder(str(run_dir / "checkpoints"))
    return load_checkpoint(files, CheckpointCatalog.read(files).whole[-1].name).tensors


def equal_states(one: Path, other: Path) -> bool:
    a, b = state(one), state(other)
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same study in `1` and `3`, with that many workers."""
    folder = prepare(tmp_path_factory.mktemp("studies"))
    for workers in (1, 3):
        done = run(folder, *words(6, workers, "--json", "--out", str(workers)))
        assert done.returncode == 0, done.stderr
        (folder / "said.json").write_text(done.stdout)
    return folder


@pytest.mark.capability("S4", "S5")
def test_workers_change_neither_the_log_nor_a_bit(folder: Path) -> None:
    one, three = (open_study(folder / str(workers)) for workers in (1, 3))
    assert without_times(one.events) == without_times(three.events)
    assert one.replay() == [trial.params for trial in one.trials]
    runs = sorted(path.parent.name for path in one.folder.glob("*/checkpoints"))
    assert len(runs) == 8 and sum(name.startswith("confirm") for name in runs) == 2
    assert all(equal_states(one.folder / name, three.folder / name) for name in runs)
    assert {lease.end for lease in three.leases} == {"done", "paused"}
    statuses = Counter(trial.status for trial in one.trials)
    assert statuses == {"complete": 2, "stopped": 4}


def test_a_paused_trial_has_the_bits_of_one_that_never_paused(folder: Path) -> None:
    study = open_study(folder / "1")
    trial = next(trial for trial in study.trials if trial.status == "complete")
    assert len(trial.rungs) == 3  # after one, two and four epochs
    whole = folder / "whole"
    done = run(
        folder,
        "train",
        f"1/{trial.name}/resolved.toml",
        "--set",
        f'run_dir="{whole}"',
        "--set",
        "runtime.threads=1",
    )
    assert done.returncode == 0, done.stderr
    assert equal_states(study.folder / trial.name, whole)
    rates = [step["lr"] for step in read_run(whole).steps]
    assert [step["lr"] for step in read_run(study.folder / trial.name).steps] == rates
    # the twin: the length of the schedule taken from the rung
    short = folder / "short"
    options = ["--set", f'run_dir="{short}"', "--set", "runtime.threads=1", "--set", "epochs=1"]
    run(folder, "train", f"1/{trial.name}/resolved.toml", *options)
    run(folder, "train", "--resume", str(short), "--set", "epochs=8")
    assert not equal_states(short, whole)


@pytest.mark.capability("S6")
def test_the_test_set_is_opened_once_after_the_confirmation(folder: Path) -> None:
    opened = Counter((folder / "opened").read_text().split())
    # both studies have read each of the 20 samples once, by one process each, and nothing else has
    assert sorted(opened.values()) == [20, 20]
    kinds = [event["event"] for event in open_study(folder / "3").events]
    assert kinds.count("tested") == 1 and kinds[-2:] == ["confirmed", "tested"]
    again = run(folder, *words(6, 3, "--out", "3"))
    assert again.returncode == 0 and len((folder / "opened").read_text().split()) == 40
    more = run(folder, *words(9, 3, "--out", "3"))
    assert more.returncode == 2 and "test set of this study has been opened" in more.stderr
    # the twin: a study that is tuned on the test set opens it from the first trial on
    leak = prepare(folder / "leak")
    run(leak, "train", "recipe.toml", "--set", 'run_dir="held"')
    assert len((leak / "opened").read_text().split()) == 20


def test_the_folder_of_a_trial_is_a_run(folder: Path) -> None:
    said = json.loads((folder / "said.json").read_text())
    assert said == json.loads((folder / "3" / "results.json").read_text())
    best = f"3/trial-{said['best']['trial']:04d}"
    evaluated = run(folder, "evaluate", best, "--json")
    assert json.loads(evaluated.stdout)["samples"] == 16
    assert json.loads(evaluated.stdout)["loss"] == pytest.approx(said["best"]["value"], rel=1e-6)
    test = json.loads(run(folder, "evaluate", best, "--data", "test", "--json").stdout)
    assert test["samples"] == 20 and test["loss"] == pytest.approx(said["test"]["loss"], rel=1e-6)
    assert run(folder, "report", best).returncode == 0
    verified = run(folder, "verify", best, "--steps", "3")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    longer = run(folder, "train", "--resume", best, "--set", "epochs=9")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    page = (folder / "3" / "study.html").read_text()
    assert "Exploration and improvement" in page and said["compute_saved"] > 0.3
    assert said["confirmed"]["deviation"] > 0


def test_equal_recipes_of_another_study_are_taken(tmp_path: Path) -> None:
    space = SPACE.replace('[stop]\nrule = "halving"\nfirst = "epochs:1"\n', "").replace(
        "confirm", "# confirm"
    )
    first, second = prepare(tmp_path / "a", space), prepare(tmp_path / "b", space)
    (second / "recipe.toml").write_text(RECIPE.replace("task.py", str(first / "task.py")))
    done = run(first, *words(3, 1))
    assert done.returncode == 0, done.stderr
    again = run(second, *words(3, 1, "--reuse", str(first / "out")))
    assert again.returncode == 0, again.stderr
    one, two = open_study(first / "out"), open_study(second / "out")
    assert [trial.value for trial in two.trials] == [trial.value for trial in one.trials]
    assert not two.leases and not list(two.folder.glob("trial-*"))


def test_a_study_that_cannot_be_is_refused_before_a_trial(tmp_path: Path) -> None:
    cases = {
        "accuracy": (
            SPACE.replace("validation loss", "validation accuracy"),
            "have no metric 'accuracy'",
            (),
        ),
        "late": (SPACE, "later than the first rung", ("--set", "evaluate.every_steps=20")),
        "workers": (SPACE, "4 workers for 3 proposals", ("--workers", "4")),
    }
    for name, (space, says, more) in cases.items():
        folder = prepare(tmp_path / name, space)
        done = run(folder, *words(3, 1, *more))
        assert done.returncode == 2 and says in done.stderr, done.stderr
        assert not list((folder / "out").glob("trial-*"))


# Kills


SLOW = RECIPE.replace("seconds = 0.0", "seconds = 0.01") + "[checkpoint]\nevery_steps = 4\n"


def processes(folder: Path, kind: str, command: Command) -> list[int]:
    """The coordinator, the slots or the ranks of a study's trials."""
    if kind in ("coordinator", "interrupt"):
        return [command.pid]
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environ = (path / "environ").read_bytes()
            parents = (path / "status").read_text()
            if kind == "slot" and "worker_slots" in text and f"PPid:\t{command.pid}\n" in parents:
                found.append(int(path.name))
            if (
                kind == "rank"
                and str(folder).encode() in environ + (path / "cwd").readlink().as_posix().encode()
            ):
                name = (path / "comm").read_text().strip()
                found += [int(path.name)] if name.startswith("rank ") else []
    return found


def kill_and_continue(folder: Path, kind: str, seconds: float) -> Study:
    """Run a study, kill one of its processes after a while, and start it again until it is complete."""
    with start(folder, *words(3, 2)) as command:
        wait_for(lambda: any((folder / "out").glob("trial-*/metrics.jsonl")), command)
        time.sleep(seconds)
        for pid in processes(folder, kind, command)[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT if kind == "interrupt" else signal.SIGKILL)
        command.wait()
        assert kind != "interrupt" or command.returncode == 130
    done = run(folder, *words(3, 2))
    assert done.returncode == 0, done.stderr
    return open_study(folder / "out")


def wait_for(ready: Callable[[], bool], command: Command) -> None:
    expires = time.monotonic() + 120
    while not ready() and command.poll() is None and time.monotonic() < expires:
        time.sleep(0.01)


def require_whole(study: Study, clean: Study) -> None:
    """No finished trial is lost, none finishes twice, and every lease has one end."""
    for trial in study.trials:
        expected = clean.trials[trial.number]
        assert (trial.params, trial.status, trial.value) == (expected.params, expected.status, expected.value)
        ends = [record for record in read_run(study.folder / trial.name).of("end") if not record["stopped"]]
        assert len(ends) == int(trial.status == "complete")
        if trial.status == "complete":
            assert equal_states(study.folder / trial.name, clean.folder / trial.name)
    assert all(lease.end is not None for lease in study.leases)
    done = Counter((lease.run, lease.until) for lease in study.leases if lease.end in ("done", "paused"))
    assert set(done.values()) <= {1}


@pytest.mark.capability("S4")
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("coordinator", 0.5),
        *(
            pytest.param(*one, marks=pytest.mark.soak)
            for one in (("slot", 0.3), ("rank", 0.6), ("interrupt", 0.4))
        ),
    ],
)
def test_a_kill_loses_no_finished_trial(tmp_path: Path, kind: str, seconds: float) -> None:
    space = SPACE.replace("confirm", "# confirm")
    clean = prepare(tmp_path / "clean", space, SLOW)
    assert run(clean, *words(3, 2)).returncode == 0
    killed = kill_and_continue(prepare(tmp_path / "killed", space, SLOW), kind, seconds)
    require_whole(killed, open_study(clean / "out"))
    ends = Counter(lease.end for lease in killed.leases)
    assert ends[{"coordinator": "lost", "interrupt": "stopped"}.get(kind, "killed")] >= 1, ends


def test_a_trial_that_is_killed_twice_has_failed_and_the_study_continues(tmp_path: Path) -> None:
    text = TASK.replace("time.sleep(seconds)", "os.kill(os.getpid(), 9) if width == 9 else None")
    space = """
[study]
objective = "validation right"
search = "grid"
proposals = 2
[space]
"options.width" = { choice = [9, 4] }
"""
    folder = prepare(tmp_path, space)
    (folder / "task.py").write_text(text)
    done = run(folder, *words(2, 1))
    assert done.returncode == 0, done.stderr
    study = open_study(folder / "out")
    assert [trial.status for trial in study.trials] == ["failed", "complete"]
    assert "killed 2 times" in study.trials[0].reason
    assert [lease.end for lease in study.leases] == ["killed", "killed", "done"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["coordinator", "slot", "rank"])
def test_kills_at_twenty_moments(tmp_path: Path, kind: str) -> None:
    space = SPACE.replace("confirm", "# confirm")
    clean = prepare(tmp_path / "clean", space, SLOW)
    assert run(clean, *words(3, 2)).returncode == 0
    for moment in range(20):
        folder = prepare(tmp_path / str(moment), space, SLOW)
        require_whole(kill_and_continue(folder, kind, 0.15 * moment), open_study(clean / "out"))


# From Python


def test_a_study_of_a_function_that_builds_the_task(tmp_path: Path) -> None:
    prepare(tmp_path)
    scope: dict[str, Any] = {"__file__": str(tmp_path / "task.py"), "__name__": "__main__"}
    exec(TASK, scope)
    study = paceline.tune(
        Recipe(epochs=2),
        {
            "study": {"objective": "validation loss", "search": "random", "proposals": 2, "seeds": 2},
            "space": {"optimizer.lr": {"log": [1e-3, 1e-1]}},
        },
        scope["build"],
        trials=2,
        workers=2,
        out=tmp_path / "out",
    )
    assert [trial.status for trial in study.trials] == ["complete", "complete"]
    assert study.replay() == [trial.params for trial in study.trials]
    assert {lease.run for lease in study.leases} == {
        f"trial-{number:04d}{seed}" for number in (0, 1) for seed in ("", "-seed-2")
    }


# Settings of distribution, with time to a target (S9, Z21)


DISTRIBUTED = """
[study]
objective = "seconds to loss<=12"
search = "grid"
proposals = 3
validation = 0.2
[space]
"strategy" = { choice = ["replicas=1", "replicas=2 codec=int8", "sync=local:2"] }
"schedule.decay" = { choice = ["cosine", "linear"] }
"""


@pytest.mark.capability("S9", "Z21")
def test_settings_of_distribution_are_searched_by_the_time_to_a_target(tmp_path: Path) -> None:
    recipe = RECIPE.replace("epochs = 8", "epochs = 6").replace("seconds = 0.0", "seconds = 0.01")
    folder = prepare(tmp_path, DISTRIBUTED, recipe)
    done = run(folder, *words(6, 2, "--json", "--set", "optimizer.lr=0.05", "--set", "runtime.threads=1"))
    assert done.returncode == 0, done.stderr
    said, study = json.loads(done.stdout), open_study(folder / "out")
    assert [trial.status for trial in study.trials] == ["complete"] * 6
    assert len(said["strategies"]) == 3 and all(row[0] == 2 for row in said["strategies"].values())
    # a value is the time of that trial's first evaluation at or below the target
    for trial in study.trials:
        recorded = read_run(study.folder / trial.name)
        loss = next((e for e in recorded.evaluations if e["loss"] <= 12), None)
        assert (trial.value is None) == (loss is None)
        steps = [step for step in recorded.steps if loss is not None and step["step"] < loss["step"]]
        assert trial.value is None or trial.value >= 0.9 * sum(step["seconds"] for step in steps)
    values = {trial.number: trial.value for trial in study.trials if trial.value is not None}
    assert values and study.best is not None and study.best.value == min(values.values())
    # alone: no trial's time has another trial in it, although there are two workers
    spans = sorted((lease.began, lease.began + lease.seconds) for lease in study.leases)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    sizes = {read_run(study.folder / trial.name).ranks for trial in study.trials}
    assert sizes == {1, 2}
