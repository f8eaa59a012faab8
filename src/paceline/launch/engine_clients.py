"""Clients of the engines that start jobs: run one to its end, and explain what it printed if it fails."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from paceline.errors import PacelineError

_CLIENT_SECONDS = 60.0
_PACKAGES = {
    "sbatch": "the clients of Slurm (Debian: slurm-client), or run this command on a login node",
    "scancel": "the clients of Slurm (Debian: slurm-client), or run this command on a login node",
    "salloc": "the clients of Slurm (Debian: slurm-client), or run this command on a login node",
    "mpirun": "Open MPI (Debian: openmpi-bin)",
    "ssh": "an SSH client (Debian: openssh-client)",
    "sky": "SkyPilot: pip install 'skypilot[aws]' (or gcp, azure, ...), then `sky check`",
    "kubectl": "kubectl, and name your cluster in ~/.kube/config",
}


def require_client(program: str) -> None:
    """Raise an error that names the package if a client is not installed."""
    if shutil.which(program) is None:
        raise PacelineError(
            f"{program} is not installed on this machine", next_step=f"install {_PACKAGES[program]}"
        )


def call_client(words: Sequence[str], text: str = "") -> str:
    """Run a client to its end; returns what it printed.

    Raises:
        PacelineError: it failed; the next step follows from what it printed.
    """
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=_CLIENT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PacelineError(
            f"{words[0]} has not answered within {_CLIENT_SECONDS:g} s",
            next_step="check that this machine reaches the controller of the cluster",
        ) from error
    if done.returncode:
        raise explain_client_error(words[0], done.stderr)
    return done.stdout


_ADVICE = (
    (
        r"ErrImagePull|ImagePullBackOff|failing to pull image|manifest unknown",
        "check --option image: it does not exist, or the cluster has no credentials to pull it",
    ),
    (
        r"denied|forbidden|not permitted|Unauthorized|Invalid account",
        "ask for access, or name another account, partition or namespace: --option",
    ),
    (r"invalid partition", "list the partitions by `sinfo`, and name one: --option partition=NAME"),
    (
        r"node configuration is not available|More processors requested|Memory specification",
        "no node is that large: fewer processes on each node (-n), or another partition (`sinfo -N -l`)",
    ),
    (r"time limit", "ask for less time: --option time=HH:MM:SS (limits: `sinfo -o '%P %l'`)"),
    (
        r"contact slurm controller|Connection refused|no such host|was refused|Unable to connect",
        "check that this machine reaches the controller of the cluster, and its configuration",
    ),
    (r"AlreadyExists|already exists", "a job of this name exists: another --name, or --cancel NAME first"),
    (r"no matches for kind \"JobSet\"", "install JobSet in the cluster, or --option kind=job"),
    (
        r"no matches for kind \"Train",
        "install Kubeflow Trainer 2 in the cluster, or --option kind=jobset or kind=job",
    ),
)


def explain_client_error(program: str, printed: str) -> PacelineError:
    """Return the error for what a client has printed, with the next step for errors that are known; pure."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    what = lines[-1] if lines else "it printed nothing"
    advice = next((step for pattern, step in _ADVICE if re.search(pattern, printed, re.IGNORECASE)), "")
    return PacelineError(
        f"{program} failed: {what}", next_step=advice or f"look up this message of {program}"
    )
