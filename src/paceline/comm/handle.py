"""Something under way: waiting for it has a deadline, and its failure names rank, operation and step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from paceline.comm.ledger import LedgerEntry
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.mesh import RankGroup

if TYPE_CHECKING:
    from paceline.comm.net import Net


class HandleResolver(Protocol):
    """Makes the result, once; blocks."""

    def __call__(self, deadline_seconds: float | None, exposed: bool) -> Any: ...


class Handle:
    """A future: a collective under way and a function of its result. No other class is one.

    Do not touch the tensors of a collective between launch and `wait`. The result is made by the first wait,
    on the thread that waits, and kept; a failure is raised again by every further wait.
    """

    __slots__ = ("_error", "_poll", "_resolve", "_result")

    def __init__(self, resolve: HandleResolver, poll: Callable[[], bool] = lambda: False) -> None:
        self._resolve: HandleResolver | None = resolve
        self._poll = poll
        self._result: Any = None
        self._error: Exception | None = None

    @classmethod
    def ready(cls, result: Any) -> Handle:
        """A result that is there already."""
        handle = cls.__new__(cls)
        handle._resolve, handle._result, handle._error = None, result, None
        handle._poll = _always_complete
        return handle

    def wait(self, deadline_seconds: float | None = None, *, exposed: bool = True) -> Any:
        """Block until the result is there, and return it.

        Args:
            deadline_seconds: the longest wait; the net's own if None.
            exposed: training stands still meanwhile, so the ledger counts the wait.
        Raises:
            DeadlineError: it took longer.
            CommunicationError: a peer is gone or the call failed; names the rank, operation and step.
        """
        if self._error is not None:
            raise self._error
        if self._resolve is not None:
            resolve, self._resolve, self._poll = self._resolve, None, _always_complete  # nor what these hold
            try:
                self._result = resolve(deadline_seconds, exposed)
            except Exception as error:
                self._error = error
                raise
        return self._result

    def then(self, function: Callable[[Any], Any]) -> Handle:
        """A handle of `function(result)`; the function runs on the thread that waits."""

        def resolve(deadline_seconds: float | None, exposed: bool) -> Any:
            return function(self.wait(deadline_seconds, exposed=exposed))

        return Handle(resolve, self.is_complete)

    def is_complete(self) -> bool:
        """Whether `wait` would return at once, as far as that is known; a result that `wait` makes is not."""
        return self._resolve is None or self._poll()


def _always_complete() -> bool:
    return True


def join_handles(handles: Sequence[Handle]) -> Handle:
    """A handle of several, which returns what the last one does; all have ended when one has failed."""
    if len(handles) == 1:
        return handles[0]

    def resolve(deadline_seconds: float | None, exposed: bool) -> Any:
        found, failed = None, None
        for handle in handles:
            try:
                found = handle.wait(deadline_seconds, exposed=exposed)
            except CommunicationError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return found

    return Handle(resolve, lambda: all(handle.is_complete() for handle in handles))


def handle_of_work(
    op: str, group: RankGroup, net: Net, work: Any, entry: LedgerEntry | None, finish: Callable[[], Any]
) -> Handle:
    """The handle of a call of the backend.

    Args:
        work: what the backend returned.
        entry: the ledger's row that gets the seconds; None: nobody counts.
        finish: makes the result once the call is complete.
    """
    if entry is not None and net.times_calls:
        entry.began()
        work.get_future().add_done_callback(_ledger_callback(entry))

    def resolve(deadline_seconds: float | None, exposed: bool) -> Any:
        limit = net.deadline_seconds if deadline_seconds is None else deadline_seconds
        began = time.perf_counter()
        try:
            work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            late = time.perf_counter() - began >= limit
            raise collective_error(op, group, net, error, limit, late=late) from error
        finally:
            if entry is not None and exposed:
                entry.exposed_seconds += time.perf_counter() - began
        return finish()

    return Handle(resolve, lambda: bool(work.is_completed()))


def collective_error(
    op: str, group: RankGroup, net: Net, error: Exception, limit_seconds: float, *, late: bool = False
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


def _ledger_callback(entry: LedgerEntry) -> Callable[[Any], None]:
    """A callback that ends a call in the ledger.

    It runs on a thread of the backend and must not hold the process group: the last reference dropped
    there would make the group wait for its own thread, which aborts the process.
    """

    def completed(_future: Any) -> None:
        entry.ended()

    return completed
