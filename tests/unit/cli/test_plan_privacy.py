"""`paceline plan privacy`: the noise that it prints meets the epsilon, and no less does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import build_app
from paceline.privacy.accountant import NoisyRelease, compute_epsilon

pytest.importorskip("dp_accounting", reason="needs paceline[private]")
RECIPE = """
task = "digits"
steps = 30
options = { model = "mlp", hidden = [8] }
strategy = "sync=federated:1"
federated = { clients = 50, cohort = 5, weights = "equal" }
"""


def test_the_printed_noise_meets_the_epsilon(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(RECIPE)
    words = ["plan", "privacy", str(tmp_path / "a.toml"), "--epsilon", "5"]
    printed = CliRunner().invoke(build_app(words), words)
    record = json.loads(CliRunner().invoke(build_app(words), [*words, "--json"]).output)
    release = NoisyRelease(record["noise"], "fixed", size=5, num_units=50)
    less = release._replace(noise=record["noise"] - 0.001)
    assert compute_epsilon({release: 30}, 1e-5) == record["epsilon_of_noise"] <= 5.0
    assert compute_epsilon({less: 30}, 1e-5) > 5.0
    assert printed.output.startswith(f"private.noise = {record['noise']:g} gives epsilon")
    assert record["relation"] == "replace one client" and record["rounds"] == 30
