"""Commands on disks that are mounted for them, all in one namespace: `python -m tests.mounted` runs there.

A worker is forked only by a server in the same namespaces. So there is one for all of these commands, where
each would else load PyTorch by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.job.cluster import change_environment
from paceline.launch import fork_server
from tests import commands
from tests.command_jobs import in_namespaces
from tests.dist.launch.actors import as_users_have_it

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mounted:
    """A command, and what makes its disk.

    Args:
        folder: where both run.
        before: a script for a shell, as root of the namespace; empty: the disk is as it is.
        words: those after `paceline`.
    """

    folder: str
    before: str
    words: tuple[str, ...]


def run_mounted(jobs: Mapping[str, Mounted]) -> dict[str, subprocess.CompletedProcess[str]]:
    """How they ended, one after the other; by name, with the folder as `args`."""
    done = subprocess.run(
        [*in_namespaces("exec "), sys.executable, "-m", "tests.mounted"],
        input=json.dumps({name: asdict(job) for name, job in jobs.items()}),
        cwd=ROOT,
        env=as_users_have_it(),
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in found] == [*jobs], done.stderr
    return {
        name: subprocess.CompletedProcess(jobs[name].folder, code, out, err) for name, code, out, err in found
    }


def main() -> None:
    jobs = {name: Mounted(**job) for name, job in json.load(sys.stdin).items()}
    with fork_server(["tests.preloaded"]) as variables:
        change_environment(variables)
        for name, job in jobs.items():
            subprocess.run(["sh", "-ec", job.before], cwd=job.folder, check=True)
            done = commands.run(Path(job.folder), *job.words)
            sys.stdout.write(json.dumps([name, done.returncode, done.stdout, done.stderr]) + "\n")


if __name__ == "__main__":
    main()
