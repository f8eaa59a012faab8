"""Studies of federated rounds by `paceline sweep` and `compare`, with real jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run

pytestmark = [pytest.mark.timeout(1600)]
ROOT = Path(__file__).parents[2]
SETTINGS = [
    "options.hidden=[32]",
    "steps=10",
    "evaluate.every_steps=5",
    "runtime.threads=1",
    "optimizer.lr=0.2",
]


def study(folder: Path, command: str, *words: str) -> Any:
    command_line = [command, str(ROOT / "recipes" / "federated.toml"), "--out", "out", "--json", *words]
    command_line += [word for setting in SETTINGS for word in ("--set", setting)]
    done = run(folder, *command_line, seconds=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.capability("Q4")
def test_a_sweep_over_passes_and_cohort_shows_the_steps_to_a_loss(tmp_path: Path) -> None:
    found = study(
        tmp_path, "sweep", "--over", "sync=federated:1,federated:4", "--over", "federated.cohort=5,20"
    )
    losses = {
        (row["values"]["sync"], row["values"]["federated.cohort"]): row["numbers"]["final loss"]["mean"]
        for row in found["rows"]
    }
    assert len(losses) == 4
    # As many rounds with more local passes, which cost no more bytes, go further.
    assert all(losses["federated:4", size] < 0.8 * losses["federated:1", size] for size in ("5", "20"))


@pytest.mark.capability("Q3")
def test_a_sweep_over_partitions_shows_the_effect_of_skew(tmp_path: Path) -> None:
    found = study(
        tmp_path, "sweep", "--over", "federated.partition=iid,labels:1", "--set", "strategy.sync=federated:5"
    )
    iid, skewed = (row["numbers"]["final loss"]["mean"] for row in found["rows"])
    assert skewed > 1.5 * iid


@pytest.mark.capability("Q7")
def test_federated_rounds_are_compared_with_training_on_all_data(tmp_path: Path) -> None:
    (tmp_path / "strategies.toml").write_text("""
central = { strategy = "replicas=2", set = ["batch.size=10", "batch.shards=2", "steps=150"] }
federated = { strategy = "replicas=2 sync=federated:1" }
""")
    found = study(tmp_path, "compare", "--strategies", "strategies.toml", "--seeds", "1", "--kills", "0")
    central, federated = (row["numbers"] for row in found["rows"])
    assert central["final loss"]["mean"] < federated["final loss"]["mean"]
    assert federated["bytes a sample"]["mean"] < 0.5 * central["bytes a sample"]["mean"]
