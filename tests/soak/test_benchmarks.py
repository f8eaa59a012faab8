"""Benchmarks of layouts run: every side trains, and the sides of a case start with the same loss."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.soak
@pytest.mark.parametrize("name", ["layouts", "pipelines"])
def test_a_benchmark_runs_and_its_sides_do_the_same_work(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", "--precision", "fp32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout[done.stdout.index("{") :])["cases"]
    assert len(cases) >= 3
    for case in cases.values():
        first = [series["losses"][0] for series in case]
        assert first == pytest.approx([first[0]] * len(first), rel=1e-4)
