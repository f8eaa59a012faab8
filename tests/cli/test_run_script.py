"""Scripts of the user's own that `paceline run` starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import run

SCRIPT = """
from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import read_phase

started = Cluster.from_env()
cluster = started.connect("cpu", 60.0)
phase = read_phase(started.error_dir, started.global_rank)
print(f"rank {cluster.global_rank}: {phase.until}, {phase.what}")
"""


@pytest.mark.timeout(400)
@pytest.mark.capability("N5")
def test_a_script_that_has_met_the_others_may_take_its_time(tmp_path: Path) -> None:
    """Its launcher had ended it soon after the deadline for making groups, as if it made them still."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path, "run", "-n", 2, "script.py")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: None, running with the others" in done.stdout + done.stderr
