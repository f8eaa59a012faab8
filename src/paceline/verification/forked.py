"""Run something from here in two processes that remember the same."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

_SECONDS = 20.0


def same_when_forked(probe: Callable[[], str]) -> bool:
    """Whether a copy of this process gets what this process gets, both from the present moment.

    What depends on the number of earlier calls is the same in both; what draws from the clock or the system
    is not. True if it cannot be said: the copy did not answer in time.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, probe().encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], _SECONDS)
        theirs = os.read(reading, 65536).decode() if ready else ""
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not theirs or theirs == probe()
