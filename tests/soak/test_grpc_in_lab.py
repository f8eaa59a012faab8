"""gRPC between hosts that lose packets, and then each other: no update is lost or made twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.lab import FaultPlan, Lab, Links

pytestmark = [pytest.mark.soak, pytest.mark.capability("G12"), pytest.mark.timeout(600)]
SUM = str(Path(__file__).parents[2] / "recipes" / "sum.toml")
STEPS = 40


def records(made: Lab, folder: Path, faults: FaultPlan) -> list[dict[str, Any]]:
    words = ["paceline", "train", SUM, "-n", "3", "--strategy", "servers=1 sync=server channel=grpc"]
    settings = [f"run_dir={folder}", "epochs=", f"steps={STEPS}", "runtime.deadline_seconds=80"]
    found = made.run([*words, *(word for one in settings for word in ("--set", one))], faults=faults)
    assert found.exit_code == 0, found.output
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def told(found: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [record for record in found if record["event"] == event]


def test_lost_packets_and_a_link_that_is_gone_change_nothing(lab: Callable[..., Lab], tmp_path: Path) -> None:
    """A worker out of reach for 6 s, where 20 s are allowed; two workers' sums have one order."""
    made = lab(hosts=3, links=Links(rate="100mbit", loss="2%"))
    broken = FaultPlan(seed=1).partition(["h0"], ["h2"], step=3, seconds=6.0)
    whole, damaged = (
        records(made, tmp_path / name, plan) for name, plan in (("whole", FaultPlan()), ("damaged", broken))
    )
    assert not told(damaged, "lost")
    assert [one["loss"] for one in told(damaged, "step")] == [one["loss"] for one in told(whole, "step")]
    work = told(damaged, "work")[-1]
    assert (work["taken"], work["applied"], work["dropped"]) == (2 * STEPS, 2 * STEPS, 0)
