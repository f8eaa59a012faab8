"""Jobs that Open MPI really starts: on two hosts of a lab, and with the collectives of MPI itself."""

from __future__ import annotations

import json
import shutil
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.job.cluster import process_environment
from paceline.lab.topology import HOST_DEVICE
from paceline.lab.virtual_cluster import Lab
from tests.commands import run
from tests.fault.test_engine_jobs import PACELINE, SECONDS, hash_in, write_job

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun of Open MPI (make engines)"),
]

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
REMOTE_SHELL = """#!{python} -IS
import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    connection.sendall(f"{{sys.argv[1]}} {{' '.join(sys.argv[2:])}}".encode())
    connection.shutdown(socket.SHUT_WR)
    sys.exit(int(connection.recv(16) or 255))
"""


@contextmanager
def remote_shell(lab: Lab, folder: Path, environ: Mapping[str, str]) -> Iterator[tuple[Path, list[str]]]:
    """A program that runs a command in a host of a lab, as ssh would, and the hosts for which it was called.

    A lab has no ssh servers, and the processes of one host cannot enter another.
    """
    address, called = folder / "shell.socket", list[str]()

    class Request(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            host, _, command = self.rfile.read().decode().partition(" ")
            called.append(host)
            words = lab.command(host, ["sh", "-c", command])
            done = subprocess.run(words, env=dict(environ), cwd=folder, stdin=subprocess.DEVNULL, check=False)
            self.wfile.write(str(done.returncode).encode())

    program = folder / "shell"
    program.write_text(REMOTE_SHELL.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    with socketserver.ThreadingUnixStreamServer(str(address), Request) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield program, called
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.soak
@pytest.mark.capability("O7", "B6")
def test_mpirun_starts_one_job_on_two_hosts(lab, tmp_path: Path) -> None:
    """By the script of `paceline submit`; mpirun starts its daemon on the other host by a remote shell."""
    folder, cluster = write_job(tmp_path / "job"), lab(hosts=2)
    plain = run(folder, "train", "recipe.toml", "-n", 2)
    assert plain.returncode == 0, plain.stderr
    variables = {**process_environment(), **AS_ROOT, "GLOO_SOCKET_IFNAME": HOST_DEVICE}
    words = ("submit", "recipe.toml", "--on", "mpi", "--nodes", "2", "-n", "1", "--name", "two")
    with remote_shell(cluster, folder, variables) as (program, called):
        done = subprocess.run(
            cluster.command("h0", [*PACELINE, *words, "--hosts", ",".join(cluster.hosts)]),
            cwd=folder,
            env={**variables, "OMPI_MCA_plm_rsh_agent": str(program)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert hash_in(done.stdout) == hash_in(plain.stdout)
    assert called == ["h1"]
    assert '"ranks": 2' in (folder / "runs" / "two" / "metrics.jsonl").read_text()


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.capability("G11", "K6")
def test_a_job_whose_sums_are_those_of_mpi_ends_as_the_native_one_and_names_the_library(
    tmp_path: Path,
) -> None:
    """Of two ranks, since MPI adds more of them in an order of its own."""
    pytest.importorskip("mpi4py", reason="needs mpi4py (make engines)")
    folder = write_job(tmp_path / "job")
    settings = ("--set", "reproducible=false", "--strategy")
    native = run(
        folder, "train", "recipe.toml", "-n", 2, "--set", "run_dir=native", *settings, "route=native"
    )
    assert native.returncode == 0, native.stderr
    words = ("mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2", *PACELINE, "train", "recipe.toml")
    done = subprocess.run(
        [*words, "--set", "run_dir=mpi", *settings, "route=mpi"],
        cwd=folder,
        env={**process_environment(), **AS_ROOT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    by_mpi, by_gloo = (read_records(folder / name) for name in ("mpi", "native"))
    losses = [[record["loss"] for record in run if record["event"] == "step"] for run in (by_mpi, by_gloo)]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    (mpi,) = [record for record in by_mpi if record["event"] == "mpi"]
    assert "MPI" in mpi["library"] and "mpi4py" in mpi["library"] and mpi["ranks"] == [0, 1]
