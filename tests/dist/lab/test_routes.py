"""Two hosts of two ranks on a slow link: what a route sends over it, by the kernel and by the ledger."""

import json
from pathlib import Path

import pytest

from paceline.comm import hierarchical_cost, native_cost
from paceline.lab import Lab, Links

ROOT = Path(__file__).parents[3]
STEPS = 12
NUM_VALUES = 64 * 300 + 300 + 300 * 300 + 300 + 300 * 10 + 10
SETTINGS = {"options.hidden": "[300,300]", "epochs": "", "steps": STEPS, "evaluate.every_steps": ""}


def train(lab: Lab, route: str, run_dir: Path) -> tuple[float, float]:
    """Bytes that a host sent over its link, and what rank 0 sent over it or by it, by the ledger."""
    command = ["paceline", "train", str(ROOT / "recipes" / "digits.toml"), "-n", "4"]
    command += ["--strategy", f"replicas=4 route={route}"]
    for name, value in {**SETTINGS, "run_dir": run_dir}.items():
        command += ["--set", f"{name}={value}"]
    found = lab.run(command, deadline_seconds=240)
    assert found.exit_code == 0, found.output
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ledger = next(row["rows"] for row in rows if row["event"] == "communication")
    name = "replica" if route == "native" else "replica-between-nodes"
    up = sum(traffic.up.num_bytes for traffic in found.traffic.values()) / 2
    return up, ledger[f"all_reduce {name}"]["sent_bytes"]


@pytest.mark.capability("G8", "A8", "O9")
def test_over_the_link_goes_what_the_ledger_says(lab, tmp_path) -> None:
    """A node of the native ring would send 2 (P-1)/P n, of the hierarchical route 2 (N-1)/N n: 1.5 n, 1 n."""
    up, ledger = train(lab(hosts=2, links=Links(rate="200mbit")), "hierarchical", tmp_path)
    gradients = 4 * NUM_VALUES
    between = hierarchical_cost(gradients, 2, 2)[1].sent_bytes
    assert ledger == pytest.approx(STEPS * between, rel=1e-4)  # buckets are filled up
    assert 2 * ledger <= up < 1.25 * STEPS * gradients, "both ranks of a host send their slice"


@pytest.mark.soak
@pytest.mark.capability("G8", "A8", "O9")
def test_less_goes_over_the_link_than_by_the_native_ring(lab, tmp_path) -> None:
    made = lab(hosts=2, links=Links(rate="200mbit"))
    native_up, native_ledger = train(made, "native", tmp_path / "native")
    up, _ = train(made, "hierarchical", tmp_path / "hierarchical")
    gradients = 4 * NUM_VALUES
    assert native_ledger == pytest.approx(STEPS * native_cost("all_reduce", gradients, 4).sent_bytes)
    saved = STEPS * (1.5 - 1.0) * gradients
    assert native_up - up == pytest.approx(saved, rel=0.2)
