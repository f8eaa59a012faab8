"""A collective under way: waiting for it has a deadline, and its failure names rank, operation and step."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.comm.ledger import Entry
from paceline.errors import CommunicationError, DeadlineError
from paceline.mesh import Group

if TYPE_CHECKING:
    from paceline.comm.net import Net


class Handle:
    """A collective under way.

    Do not touch its tensors between launch and `wait`.
    """

    def __init__(
        self, op: str, group: Group, net: Net, work: Any, entry: Entry | None, finish: Callable[[], Any]
    ) -> None:
        self._op, self._group, self._net, self._entry = op, group, net, entry
        self._work, self._finish = work, finish
        if work is not None and entry is not None and net.times_calls:
            entry.began()
            work.get_future().add_done_callback(_end_of(entry))

    def wait(self, deadline_seconds: float | None = None, *, exposed: bool = True) -> Any:
        """Block until the result is there, and return it.

        Args:
            deadline_seconds: the longest wait; the net's own if None.
            exposed: training stands still meanwhile, so the ledger counts the wait.
        Raises:
            DeadlineError: it took longer.
            CommunicationError: a peer is gone or the call failed; names the rank, operation and step.
        """
        if self._work is None:
            return self._finish()
        limit = self._net.deadline_seconds if deadline_seconds is None else deadline_seconds
        began = time.perf_counter()
        try:
            self._work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            late = time.perf_counter() - began >= limit
            raise failure(self._op, self._group, self._net, error, limit, late=late) from error
        finally:
            if self._entry is not None and exposed:
                self._entry.exposed_seconds += time.perf_counter() - began
        return self._finish()


def failure(
    op: str, group: Group, net: Net, error: Exception, limit_seconds: float, *, late: bool = False
) -> CommunicationError:
    """What to raise when a collective failed: a deadline, or a peer that is gone.

    Args:
        limit_seconds: the longest wait that was allowed.
        late: it took longer than that.
    """
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    where = f"rank {group.ranks[group.rank]}, {op} over group '{group.name}' {group.ranks}, step {net.step}"
    if late or "imed out" in text:
        return DeadlineError(
            f"{op} did not finish within {limit_seconds:g} s: {text}",
            where=where,
            next_step="look for the rank that did not call it, or raise runtime.deadline_seconds",
        )
    return CommunicationError(
        f"{op} failed: {text}", where=where, next_step="look at the first rank that ended: it is the cause"
    )


def _end_of(entry: Entry) -> Callable[[Any], None]:
    """A callback that ends a call in the ledger.

    It runs on a thread of the backend and must not hold the process group: the last reference dropped
    there would make the group wait for its own thread, which aborts the process.
    """

    def completed(_future: Any) -> None:
        entry.ended()

    return completed
