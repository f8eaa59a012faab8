"""A job with as many processes as cores has a fork server of its own, unless it is told not to."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from paceline.launch import script_command
from paceline.launch.fork_client import is_worthwhile
from paceline.launch.job_spec import WorkerSpec
from tests.dist.launch.actors import as_users_have_it, without_fork_server
from tests.marks import soak_param

TASK = """
import os
from pathlib import Path
import torch
from paceline import Loss

def build():
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    Path(f"forked-{os.environ['RANK']}").write_text(str("fork_server" in parent))
    return torch.nn.Linear(1, 1), [torch.ones(1)] * 64, lambda model, x: Loss(model(x).sum(), len(x))
"""
COMMAND = (sys.executable, "-m", "paceline", "train", "recipe.toml")
CORES = sorted(os.sched_getaffinity(0))[:2]


@pytest.mark.capability("O1")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("num_processes", "environ", "forked"),
    [
        (2, as_users_have_it(), True),
        soak_param(2, without_fork_server(), False),
        pytest.param(1, as_users_have_it(), False, marks=pytest.mark.soak),
    ],
    ids=["as many as cores", "told not to", "one"],
)
def test_a_job_with_as_many_processes_as_cores_imports_once(
    num_processes: int, environ: dict[str, str], forked: bool, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    batch = f"[batch]\nsize = 64\nshards = {num_processes}\n"
    (tmp_path / "recipe.toml").write_text(f'task = "task.py:build"\nsteps = 2\nrun_dir = "run"\n{batch}')
    done = subprocess.run(
        [*COMMAND, "-n", str(num_processes)],
        cwd=tmp_path,
        env=environ,
        preexec_fn=partial(os.sched_setaffinity, 0, CORES),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"forked-{rank}").read_text() for rank in range(num_processes)] == [
        str(forked)
    ] * num_processes


@pytest.mark.capability("O1")
@pytest.mark.parametrize(
    ("num_processes", "cores", "does"),
    [(1, 1, False), (2, 1, True), (2, 2, True), (2, 3, False), (8, 4, True)],
)
def test_a_server_pays_for_a_command_of_several_processes_that_would_wait_for_each_other(
    num_processes: int, cores: int, does: bool
) -> None:
    for command, may in ((COMMAND, True), (script_command("own.py"), False)):
        workers = [
            WorkerSpec(i, i, command, {}, {}, None, Path("error"), Path("stack"))
            for i in range(num_processes)
        ]
        assert is_worthwhile(workers, cores) is (does and may)
