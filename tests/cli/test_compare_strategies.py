"""`paceline compare` with real jobs: tables, page, JSON; what cannot be is told, what is complete stays."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.commands import run

pytestmark = [pytest.mark.capability("B7", "I12", "Z18"), pytest.mark.timeout(1600)]
ROOT = Path(__file__).parents[2]
SETTINGS = ["options.hidden=[16]", "options.shifts=false", "epochs=", "steps=8", "evaluate.every_steps=4"]
SETTINGS += ["schedule.warmup_steps=0", "runtime.threads=1", "optimizer.lr=0.02", "batch.size=16"]
FILE = """
exact = "replicas=2"
stale = { strategy = "replicas=1 servers=1 sync=server-async", set = ["optimizer.lr=0.01"] }
never = "replicas=9"
"""


def compare(folder: Path, *words: str, text: str = FILE) -> subprocess.CompletedProcess[str]:
    (folder / "strategies.toml").write_text(text)
    command = ["compare", str(ROOT / "recipes" / "digits.toml")]
    command += ["--strategies", "strategies.toml", "--out", "out", "--json", *words]
    command += [word for setting in SETTINGS for word in ("--set", setting)]
    return run(folder, *command, seconds=900)


def test_strategies_side_by_side(tmp_path: Path) -> None:
    done = compare(tmp_path, "--seeds", "1", "--kills", "0")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out" / "results.json").read_text())
    exact, stale, never = found["rows"]
    assert "batch.shards=8" in never["failed"][0] and never["runs"] == 0
    assert exact["roles"] == [2, 0] and stale["roles"] == [1, 1]
    assert stale["numbers"]["staleness"]["mean"] == 0  # of one worker
    assert exact["numbers"]["bytes a sample"]["mean"] > 0 and len(exact["nine_rows"]) == 9
    assert (tmp_path / "out" / "table.txt").read_text() in done.stderr
    page = (tmp_path / "out" / "compared.html").read_text()
    assert page.count("&quot;name&quot;:&quot;exact&quot;") == 3  # loss, accuracy, throughput
    again = compare(tmp_path, "--seeds", "1", "--kills", "0")
    assert again.stderr.count("already complete") == 2 and json.loads(again.stdout) == found


@pytest.mark.soak
def test_a_server_goes_on_after_a_kill_and_replicas_are_resumed(tmp_path: Path) -> None:
    text = 'exact = "replicas=2"\nserved = "replicas=2 servers=1 sync=server"\n'
    done = compare(tmp_path, "--seeds", "2", "--set", "steps=600", text=text)
    assert done.returncode == 0, done.stderr
    exact, served = json.loads(done.stdout)["rows"]
    (first,), (second,) = exact["recovery"], served["recovery"]
    assert first["how"] == "resumed" and first["seconds"] > 0 and 0 <= first["steps_again"] <= 60
    assert second["how"] == "goes on" and second["seconds"] > 0 and second["steps_again"] == 0
    assert exact["numbers"]["final loss"]["deviation"] > 0 and exact["runs"] == 2
