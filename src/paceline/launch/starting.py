"""Starting the workers of a node, with nothing of an earlier job in their way, and tidying up after them.

Invariant: every worker that was started is in the list of those that run, whatever happens next.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from paceline.launch.forked import ForkClient
from paceline.launch.process import Keeper, Running, start_worker
from paceline.launch.render import Worker, sockets_folder
from paceline.launch.stop import Stop
from paceline.phase import clear_phase
from paceline.roster import clear_roster

UNKILLABLE_SECONDS = 5.0  # a process in an uninterruptible call (a lost disk, a lost GPU) cannot be killed


def start_all(
    running: list[Running], workers: Sequence[Worker], keeper: Keeper, forks: ForkClient, stop: Stop
) -> None:
    """Start one after the other, until a signal says that nobody wants them any more.

    A fork server that does not answer takes those along that it has forked: they are started anew.

    Args:
        running: those that run; each is put there as soon as it does.
    """
    for worker in workers:
        _clear(worker)
        if not stop.is_asked():
            running.append(start_worker(worker, keeper, forks))
    for i, one in enumerate(running):
        if forks.lost and one.forked:
            one.kill(UNKILLABLE_SECONDS)
            _clear(one.worker)
            running[i] = start_worker(one.worker, keeper, forks)


def _clear(worker: Worker) -> None:
    """Remove what an earlier job left in the same log folder."""
    worker.error_file.unlink(missing_ok=True)
    worker.stack_file.unlink(missing_ok=True)
    clear_phase(worker.error_file.parent, worker.global_rank)
    clear_roster(worker.error_file.parent)


def clean_after(worker: Worker) -> None:
    """Remove what is of no use once the process has ended."""
    worker.stack_file.unlink(missing_ok=True)
    shutil.rmtree(sockets_folder(worker.error_file.parent, worker.global_rank), ignore_errors=True)
