"""Jobs that MPICH really starts, and its collectives: those of the suite are of Open MPI."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.job.cluster import process_environment
from tests.commands import run
from tests.fault.test_engine_jobs import PACELINE, SECONDS, hash_in, write_job
from tests.fault.test_mpi_jobs import read_records

# Open MPI has no program of this name
MPIEXEC = shutil.which("mpiexec.hydra")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        MPIEXEC is None, reason="needs MPICH on the PATH: pip install mpich, in an environment"
    ),
]


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks of `paceline train recipe.toml` by mpiexec."""
    assert MPIEXEC is not None
    libraries = str(Path(MPIEXEC).resolve().parents[1] / "lib")
    done = subprocess.run(
        [MPIEXEC, "-n", "2", *PACELINE, "train", "recipe.toml", *words],
        cwd=folder,
        env={**process_environment(), "LD_LIBRARY_PATH": libraries, "MPI4PY_MPIABI": "mpich"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.capability("O7", "B6")
def test_processes_of_mpich_are_one_job(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job")
    plain = run(folder, "train", "recipe.toml", "-n", 2)
    assert plain.returncode == 0, plain.stderr
    done = train(folder, "--set", "run_dir=mpich")
    assert hash_in(done.stdout) == hash_in(plain.stdout)
    assert '"ranks": 2' in (folder / "mpich" / "metrics.jsonl").read_text()


@pytest.mark.capability("G11", "K6")
def test_the_sums_of_mpich_are_those_of_the_native_route(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py (make engines)")
    folder = write_job(tmp_path / "job")
    words = ("--set", "reproducible=false", "--strategy")
    native = run(folder, "train", "recipe.toml", "-n", 2, "--set", "run_dir=native", *words, "route=native")
    assert native.returncode == 0, native.stderr
    train(folder, "--set", "run_dir=mpich", *words, "route=mpi")
    by_mpi, by_gloo = (read_records(folder / name) for name in ("mpich", "native"))
    losses = [[record["loss"] for record in run if record["event"] == "step"] for run in (by_mpi, by_gloo)]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    (mpi,) = [record for record in by_mpi if record["event"] == "mpi"]
    assert mpi["library"].startswith("MPICH") and mpi["ranks"] == [0, 1]
