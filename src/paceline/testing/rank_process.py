"""The inside of one rank of `run_ranks`: connect, run the function, send what came of it.

Invariant: a rank that has failed ends at once, so that its peers lose it and say so; a rank that is done
keeps its connections until all are done. It never outlives the fork server, nor that the test process.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from paceline.cluster import Cluster, change_environment, process_environment
from paceline.launch.process import die_with_parent
from paceline.launch.stacks import prepare_stack
from paceline.launch.worker import ErrorReport


@dataclass(frozen=True)
class RankOrder:
    """What a rank is told.

    Args:
        payload: (function, arguments), pickled by cloudpickle.
        cluster: its place; `store_fd` is not set yet.
        environ: the environment of the test, which may differ from the fork server's.
        stack_file: where its stack goes when it is asked.
        group_deadline: seconds, for meeting and for every collective.
    """

    payload: bytes
    cluster: Cluster
    environ: Mapping[str, str]
    stack_file: Path
    group_deadline: float


def run_rank(order: RankOrder, line: socket.socket, results: Connection) -> None:
    """The main of a rank; sends a pickled result, or an `ErrorReport`.

    Args:
        line: to the store.
        results: this rank's end of the pipe; whatever comes from the other end releases the rank.
    """
    os.setsid()
    die_with_parent(os.getppid())
    stack = prepare_stack(order.stack_file)
    with _Reported(results):
        import cloudpickle
        import torch

        change_environment({**dict.fromkeys(process_environment()), **order.environ, "OMP_NUM_THREADS": "1"})
        torch.set_num_threads(1)
        place = replace(order.cluster, store_fd=line.fileno())
        cluster = place.connect("cpu", order.group_deadline)
        function, arguments = cloudpickle.loads(order.payload)
        results.send(cloudpickle.dumps(function(cluster, *arguments)))
        results.recv()
        cluster.disconnect()
    line.close()
    stack.close()


class _Reported:
    """Sends an exception to the test and ends the process."""

    def __init__(self, results: Connection) -> None:
        self._results = results

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._results.send(ErrorReport.of(error))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
