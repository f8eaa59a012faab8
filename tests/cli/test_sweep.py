"""`paceline sweep` with real jobs: runs, table and plot; what fails is told, what is complete stays."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.commands import run, start

pytestmark = [pytest.mark.capability("A14"), pytest.mark.timeout(1600)]
ROOT = Path(__file__).parents[2]
SETTINGS = ["options.hidden=[16]", "options.shifts=false", "epochs=", "steps=8", "evaluate.every_steps=4"]
SETTINGS += ["schedule.warmup_steps=0", "runtime.threads=1", "optimizer.lr=0.02"]


def command_of(over: tuple[str, ...], settings: tuple[str, ...] = ()) -> list[str]:
    command = ["sweep", str(ROOT / "recipes" / "digits.toml"), "--out", "out", "--json"]
    command += [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    return command + [word for axis in over for word in ("--over", axis)]


def sweep(folder: Path, *over: str, settings: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run(folder, *command_of(over, settings))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Batch 4 is less than the 8 shards of the recipe: it cannot be, and the others run."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, sweep(folder, "batch=4,16", "replicas=1,2")


def test_every_cell_is_a_run_and_what_cannot_be_is_told(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = swept
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((folder / "out" / "results.json").read_text())
    assert [row["values"] for row in found["rows"]] == [{"batch": "16", "replicas": r} for r in ("1", "2")]
    assert found["failed"].keys() == {"batch=4 replicas=1", "batch=4 replicas=2"}
    assert all("batch.shards" in why for why in found["failed"].values())
    numbers = [{name: spread["mean"] for name, spread in row["numbers"].items()} for row in found["rows"]]
    assert all(one["steps"] == 8 and one["samples/s"] > 0 for one in numbers)
    assert {one["steps to target"] for one in numbers} <= {4.0, 8.0}
    assert numbers[0]["final loss"] == pytest.approx(numbers[1]["final loss"], rel=1e-5)
    run = folder / "out" / "batch=16_replicas=2"
    assert f'"loss": {numbers[1]["final loss"]}' in (run / "metrics.jsonl").read_text()
    assert "step 8/8" in (run / "logs" / "rank-0.log").read_text()


def test_the_table_and_the_plot(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = swept
    table = (folder / "out" / "table.txt").read_text()
    assert table in done.stderr and table.splitlines()[0].split()[:3] == ["batch", "replicas", "steps"]
    svg = ElementTree.parse(folder / "out" / "plot.svg")
    assert sum(element.tag.endswith("circle") for element in svg.iter()) == 2 * 3


def test_what_is_complete_is_not_run_again_and_an_axis_may_grow(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = swept
    before = {path: path.read_bytes() for path in (folder / "out").glob("*/metrics.jsonl")}
    assert len(before) == 2
    more = sweep(folder, "batch=16,32,64", "replicas=1")
    assert more.returncode == 0 and more.stderr.count("already complete") == 1
    assert all(path.read_bytes() == data for path, data in before.items())
    found = json.loads(more.stdout)
    assert [row["values"]["batch"] for row in found["rows"]] == ["16", "32", "64"]
    losses = [row["numbers"]["final loss"]["mean"] for row in found["rows"]]
    assert losses[0] > losses[2]  # equally many steps of four times the samples
    assert found["critical_batch"][0]["values"] == {"replicas": "1"}


@pytest.mark.soak
def test_digits_have_a_critical_batch_beyond_which_steps_are_hardly_saved(tmp_path: Path) -> None:
    """As in benchmarks/results/critical_batch.txt; an accumulated batch is the batch."""
    settings = ("options.hidden=[64]", "steps=240", "schedule.decay=constant", "optimizer.lr=5e-3")
    command = [*command_of(("batch=16,64,256,512", "accumulation=1,2", "replicas=1,2"), settings)]
    command += ["--target", "accuracy>=0.9"]
    done = run(tmp_path, *command, seconds=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["rows"]) == 16 and len(found["critical_batch"]) == 4
    for one in found["critical_batch"]:
        assert 4 <= one["batch"] <= 128, one
        assert all(saved < 0.75 * (after / before) for before, after, saved in one["savings"] if before >= 64)
    by_values = {tuple(row["values"].values()): row["numbers"]["final loss"]["mean"] for row in found["rows"]}
    for size in ("16", "512"):
        assert by_values[size, "2", "1"] == pytest.approx(by_values[size, "1", "2"], rel=1e-4)


def test_a_folder_of_another_recipe_is_refused(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = swept
    other = sweep(folder, "batch=16", "replicas=1", settings=("seed=9",))
    assert other.returncode == 2 and "choose another --out" in other.stderr


def test_a_sweep_that_was_stopped_goes_on_and_a_run_that_fails_does_not_end_it(tmp_path: Path) -> None:
    """The first run is interrupted and resumed; the second one has a rate that nothing survives."""
    more = ("steps=600", "batch.size=16", "evaluate.every_steps=300")
    metrics = tmp_path / "out" / "optimizer.lr=0.02" / "metrics.jsonl"
    command = command_of(("optimizer.lr=0.02,1e38",), more)
    with start(tmp_path, *command) as process:
        expires = time.monotonic() + 480
        while not (metrics.exists() and metrics.read_bytes()):
            assert process.poll() is None and time.monotonic() < expires
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 130 and "stopped; to continue, run the same command with --out" in said
    done = sweep(tmp_path, "optimizer.lr=0.02,1e38", settings=more)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [row["numbers"]["steps"]["mean"] for row in found["rows"]] == [600]
    assert "NumericError" in found["failed"]["optimizer.lr=1e38"]
    events = [json.loads(line)["event"] for line in metrics.read_text().splitlines()]
    assert events.count("resume") == 1 and events.count("step") == 600
