"""The process that writes ends with the one that started it, and with nothing else."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from paceline.checkpoint.disk.direct_write import BLOCK_BYTES
from paceline.checkpoint.disk.writer_process import WriterProcess

pytestmark = pytest.mark.capability("N4")
JOB = """
import sys
from paceline.checkpoint.disk.writer_process import WriterProcess
process = WriterProcess({})
process.begin()
process.memory(4096)[:] = bytes(4096)
process.write([(sys.argv[1], 0, 8)], 60.0)
print(process._process.pid, flush=True)
process.write([(sys.argv[2], 0, 8)], 60.0)
sys.stdin.read()
"""


@pytest.mark.parametrize("moment", ["at rest", "in a file"])
def test_it_ends_with_the_training_however_that_ends(moment: str, tmp_path: Path) -> None:
    """Signals that ask the training to stop do not end it: there is a save to come."""
    if moment == "in a file":
        os.mkfifo(tmp_path / "second")  # nobody reads it
    words = [sys.executable, "-c", JOB, str(tmp_path / "first"), str(tmp_path / "second")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        pid = int(job.stdout.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        time.sleep(0.05)
        assert alive(pid)
        job.kill()
    expires = time.monotonic() + 100
    while alive(pid) and time.monotonic() < expires:
        time.sleep(0.01)
    assert not alive(pid)


def policies(pid: int) -> list[int]:
    """Of the threads that write; the first one, which listens, keeps what it has."""
    tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    found = {int(path.name): os.sched_getscheduler(int(path.name)) for path in tasks}
    first, *others = found.values()
    assert first == os.SCHED_OTHER
    idle = [task for task, policy in found.items() if policy == os.SCHED_IDLE]
    assert all(os.getpriority(os.PRIO_PROCESS, task) == 19 for task in idle)
    return others


def wait_until(what: Callable[[], bool]) -> None:
    expires = time.monotonic() + 100
    while not what():
        assert time.monotonic() < expires
        time.sleep(0.005)


@pytest.mark.parametrize("asked", ["by the training", "after its patience"])
def test_it_stands_back_until_it_is_waited_for(
    asked: str, started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """The file is a pipe: it is written as fast as it is read here, and no disk, which is told in the end."""
    os.mkfifo(tmp_path / "pipe")
    process = WriterProcess(dict(os.environ))
    process.begin()
    data = os.urandom(3 * BLOCK_BYTES)
    process.memory(len(data))[:] = data
    patience = 60.0 if asked == "by the training" else 0.5
    with ThreadPoolExecutor(1) as pool, closing(process):
        written = pool.submit(process.write, [(str(tmp_path / "pipe"), 0, len(data))], patience)
        with (tmp_path / "pipe").open("rb", buffering=0) as pipe:
            found = pipe.read(1)
            pid = started[-1].pid
            wait_until(lambda: policies(pid) == [os.SCHED_IDLE])
            if patience == 60.0:
                process.hurry()
            wait_until(lambda: process._hurry)
            while policies(pid) != [os.SCHED_OTHER]:  # what a slow thread has begun it ends
                found += pipe.read(2**15)
                assert len(found) < len(data), "nobody took over"
                time.sleep(0.005)
            while more := pipe.read(2**16):
                found += more
        with pytest.raises(OSError, match="Invalid argument"):
            written.result(100)
    assert found == data


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
