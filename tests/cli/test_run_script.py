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


COPIES = "the script ran 2 times, each on its own"
WITH_TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "is_reported"),
    [("print('trained')", True), ("raise SystemExit(0)", True), (SCRIPT, False), (WITH_TORCH, False)],
)
def test_a_script_that_joins_no_group_is_reported_in_a_closing_line(
    script: str, is_reported: bool, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(script)
    done = run(tmp_path, "run", "-n", 2, "script.py")
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(COPIES) == is_reported


def test_a_command_whose_variables_of_srun_are_not_whole_is_refused(tmp_path: Path) -> None:
    """It could be one of two tasks, which would train the same job twice."""
    variables = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    (tmp_path / "r.toml").write_text('task = "sum"\nsteps = 1\n')
    (tmp_path / "x.py").write_text("")
    for words in (["train", "r.toml"], ["run", "x.py"]):
        done = run(tmp_path, *words, **variables)
        assert done.returncode == 4, done.stderr
        assert "SLURM_LOCALID is not set, but SLURM_PROCID=1, SLURM_NTASKS=2 is" in done.stderr
    assert not (tmp_path / "runs").exists()
