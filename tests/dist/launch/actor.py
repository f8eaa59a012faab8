"""A worker without torch that does what the test scripts: `actor.py FOLDER RANK=ACTION ...`, others wait.

It leaves its number in FOLDER/pid-RANK, that of its child in FOLDER/child-RANK.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from paceline.errors import CommunicationError, DataError
from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import TRAINING_FOR_SERVER
from paceline.launch import guard


def wait() -> None:
    time.sleep(1000)


def raise_value() -> None:
    raise ValueError("boom")


def raise_data() -> None:
    raise DataError("no such file", where="data.toml:3", next_step="make it")


def lose() -> None:
    """What a peer does: it notices after the cause, or before the cause could speak."""
    raise CommunicationError("rank 1 is gone")


def late_raise() -> None:
    time.sleep(0.2)
    raise_value()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def late_kill() -> None:
    time.sleep(0.2)
    kill()


def end_well() -> None:
    time.sleep(0.5)


def kill_served() -> None:
    """Die as soon as it has said that it trains."""
    cluster.enter_phase(TRAINING_FOR_SERVER)
    kill()


def leave() -> None:
    sys.stdout.write("last words\n")
    os._exit(7)


def obey() -> None:
    """Finish the step, then end with the code of the signal."""

    def finish(number: int, _: object) -> None:
        time.sleep(0.2)
        (folder / f"finished-{rank}").touch()
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, finish)
    ready()
    wait()


def defy() -> None:
    signal.signal(signal.SIGTERM, lambda *_: (folder / f"defied-{rank}").touch())
    ready()
    wait()


def report() -> None:
    (folder / f"environ-{rank}").write_text(json.dumps(dict(os.environ)))
    sys.stdout.write(f"out of {rank}, terminal: {sys.stdout.isatty()}\n")
    sys.stderr.write(f"err of {rank}\n")


def own_facts() -> dict[str, object]:
    """What every process has of its own."""
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    return {
        "forked": "paceline.launch.fork_server" in parent,
        "limit": resource.getrlimit(resource.RLIMIT_CORE)[0],
    }


def say_whence() -> None:
    """Whether it was forked; without what takes long to import."""
    (folder / f"said-{rank}").write_text(json.dumps(own_facts()))


def describe() -> None:
    """What a forked process might have from another."""
    import numpy as np
    import torch

    said = {
        **own_facts(),
        "session": os.getsid(0) == os.getpid(),
        "directory": str(Path.cwd()),
        "path": sys.path[0],
        "arguments": sys.argv[1:],
        "threads": torch.get_num_threads(),
        "drawn": [random.random(), np.random.random()],
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "name": Path("/proc/self/comm").read_text().strip(),
        "open": sorted(str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.exists()),
    }
    (folder / f"said-{rank}").write_text(json.dumps(said))


def ready() -> None:
    """Say so, and wait for the others: what a test compares must not depend on who started first."""
    (folder / f"hidden-{rank}").write_text(str(os.getpid()))
    (folder / f"hidden-{rank}").rename(folder / f"pid-{rank}")
    while len(list(folder.glob("pid-*"))) < cluster.world_size:
        time.sleep(0.01)


folder = Path(sys.argv[1])
cluster = Cluster.from_env()
rank = cluster.global_rank
actions = dict(argument.split("=") for argument in sys.argv[2:])
names = actions.get(str(rank), actions.get("all", "wait")).split("+")
if "bare" in names:
    names.remove("bare")
    ready()
    globals()[names[0]]()
with guard(cluster):
    if "child" in names:
        names.remove("child")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        (folder / f"child-{rank}").write_text(str(child.pid))
    if names[0] not in ("obey", "defy"):
        ready()
    globals()[names[0]]()
