"""What a process inherits from the one that starts it, apart from its arguments, folder and open files.

Invariant: two processes with equal circumstances would run the same command in the same way; so a process
that another one forks may stand for one that this process starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import paceline

# Set anew for every job, or read when they are needed, not when a process begins.
_OF_THE_JOB = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        *("PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "TMPDIR", "TEMP", "TMP"),
    }
)
_OF_THE_JOB_PREFIXES = ("PACELINE_", "PYTEST_", "KMP_", "TORCHINDUCTOR_")  # the last two are set by imports
_STATUS = (
    *("Uid", "Gid", "Groups", "Umask", "CapEff", "Seccomp", "NoNewPrivs"),
    *("Cpus_allowed_list", "SigIgn", "SigBlk"),
)


def circumstances(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of a process that this one starts with the variables `environ`; Linux only.

    Returns:
        By name; variables that a forked process gets in time are left out.
    """
    process = Path("/proc/self")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    return {
        **{f"${name}": value for name, value in environ.items() if not _is_of_the_job(name)},
        **{name: status.get(name, "") for name in _STATUS},
        **{f"namespace {link.name}": str(link.readlink()) for link in (process / "ns").iterdir()},
        "python": sys.executable,
        "package": str(paceline.__file__),
        "root": str((process / "root").readlink()),
        "cgroup": (process / "cgroup").read_text(),
        "limits": (process / "limits").read_text(),
        "priority": str(os.nice(0)),
        "killed first": (process / "oom_score_adj").read_text(),
    }


def _is_of_the_job(name: str) -> bool:
    return name in _OF_THE_JOB or name.startswith(_OF_THE_JOB_PREFIXES)
