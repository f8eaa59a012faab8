"""`python -m paceline.launch SCRIPT ARGUMENTS...`: a worker that runs a user's own script under `guard`.

Invariant: the script finds what torchrun would give it, so it may use `Cluster.from_env()` or torch's own
`init_process_group()`. Jobs are started by the command line of Paceline, not by this module.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from paceline.cluster import Cluster, change_environment
from paceline.launch.worker import guard

_SERVE_SECONDS = 60.0
_AGENT_STORE = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "PACELINE_LISTEN_FD": None,
}


def main(argv: list[str]) -> None:
    """Run a script, or a module after "-m".

    The launcher's listening socket would be in the way of torch's own, so the store is served here, the
    way torchrun's agent serves it.
    """
    cluster = Cluster.from_env()
    with guard(cluster):
        store = None if cluster.listen_fd is None else cluster.open_store(_SERVE_SECONDS)
        if cluster.world_size > 1:
            change_environment(_AGENT_STORE)
        _run(argv)
        cluster.disconnect()
        del store  # not earlier: the other ranks may still need it


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
