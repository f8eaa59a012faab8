"""`python -m paceline.launch SCRIPT ARGUMENTS...`: a worker that runs a user's own script under `guard`.

Invariant: the script finds what torchrun would give it, so it may use `Cluster.from_env()` or torch's own
`init_process_group()`. Jobs are started by the command line of Paceline, not by this module.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

from paceline.job.cluster import Cluster, change_environment
from paceline.job.launcher_reports import read_phase
from paceline.job.process_group import destroy_leftover_groups
from paceline.job.rendezvous import open_torch_store, read_store_value
from paceline.launch.job_spec import TORCH_PORT
from paceline.launch.worker_guard import guard

_SERVE_SECONDS = 60.0
_AGENT_STORE = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "PACELINE_LISTEN_FD": None,
}


def main(argv: list[str]) -> None:
    """Run a script, or a module after "-m"."""
    cluster = Cluster.from_env()
    with guard(cluster):
        store = _provide_torch_store(cluster) if cluster.world_size > 1 else None
        num_keys = store.num_keys() if store is not None else 0
        try:
            _run_script(argv)
        except SystemExit as end:
            if end.code in (None, 0):
                _report_copies(cluster, store, num_keys)
            raise
        _report_copies(cluster, store, num_keys)
        if "torch" in sys.modules:
            destroy_leftover_groups()
        del store  # not earlier: the other ranks can still need it


def _report_copies(cluster: Cluster, store: Any, num_keys: int) -> None:
    """Print a line if the script has joined neither Paceline's nor torch's process group, on global rank 0.

    Args:
        store: torch's own store, which this rank serves; None: it does not.
        num_keys: number of its keys before the script ran.
    """
    reached = cluster.error_dir is not None and read_phase(cluster.error_dir, cluster.global_rank) is not None
    if store is None or reached or store.num_keys() > num_keys:
        return
    sys.stderr.write(
        f"paceline run: the script ran {cluster.world_size} times, each on its own: it has joined no process"
        " group. Use paceline.own_loop, paceline.train or torch.distributed in it, or -n 1.\n"
    )


def _provide_torch_store(cluster: Cluster) -> Any:
    """Serve torch's own store on global rank 0, as torchrun's agent does, and let the script find it.

    The store of the job has another protocol; it only tells the other nodes the port of torch's store.
    """
    change_environment(_AGENT_STORE)
    if cluster.node_rank > 0:
        port = read_store_value(cluster.store_access, TORCH_PORT, _SERVE_SECONDS)
        change_environment({"MASTER_PORT": port})
    if cluster.listen_fd is None:
        return None
    with socket.socket(fileno=os.dup(cluster.listen_fd)) as listener:
        port = listener.getsockname()[1]
    return open_torch_store(cluster.address, port, _SERVE_SECONDS, cluster.listen_fd)


def _run_script(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
