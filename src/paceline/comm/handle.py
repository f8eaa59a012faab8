"""Handles of asynchronous calls: a wait has a deadline, and a failure names the rank, the operation and the
step.

The result is computed by the first `wait`, on the thread that waits. Handles do not know the backend or the
ledger: `paceline.comm.net` makes those that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from paceline.errors import CommunicationError


class HandleResolver(Protocol):
    """A function that computes the result, once; it blocks."""

    def __call__(self, deadline_seconds: float | None, exposed: bool) -> Any: ...


class Handle:
    """A future: the result of a call in flight, or a function of it. There is no other future class.

    Do not touch the tensors of a collective between launch and `wait`. The first wait computes the result on
    the thread that waits and keeps it; further waits return it, or raise the same error again.
    """

    __slots__ = ("_error", "_poll", "_resolve", "_result")

    def __init__(self, resolve: HandleResolver, poll: Callable[[], bool] = lambda: False) -> None:
        self._resolve: HandleResolver | None = resolve
        self._poll = poll
        self._result: Any = None
        self._error: Exception | None = None

    @classmethod
    def ready(cls, result: Any) -> Handle:
        """Return a handle whose result is already known."""
        handle = cls.__new__(cls)
        handle._resolve, handle._result, handle._error = None, result, None
        handle._poll = _always_complete
        return handle

    def wait(self, deadline_seconds: float | None = None, *, exposed: bool = True) -> Any:
        """Block until the result is there, and return it.

        Args:
            deadline_seconds: the longest wait; the net's own if None.
            exposed: training does not go on meanwhile, so the ledger counts the wait.
        Raises:
            DeadlineError: it took longer.
            CommunicationError: a peer is gone or the call failed; names the rank, operation and step.
        """
        if self._error is not None:
            raise self._error
        if self._resolve is not None:
            # Drop both functions now: their closures hold tensors, which must be freed with the call.
            resolve, self._resolve, self._poll = self._resolve, None, _always_complete
            try:
                self._result = resolve(deadline_seconds, exposed)
            except Exception as error:
                self._error = error
                raise
        return self._result

    def then(self, function: Callable[[Any], Any]) -> Handle:
        """Return a handle of `function(result)`; the function runs on the thread that waits."""

        def resolve(deadline_seconds: float | None, exposed: bool) -> Any:
            return function(self.wait(deadline_seconds, exposed=exposed))

        return Handle(resolve, self.is_complete)

    def is_complete(self) -> bool:
        """Return whether `wait` is known to return at once; a result that `wait` has to compute does not
        count.
        """
        return self._resolve is None or self._poll()


def _always_complete() -> bool:
    return True


def join_handles(handles: Sequence[Handle]) -> Handle:
    """Return a handle of several, with the result of the last; when one fails, the others are waited for all
    the same.
    """
    if len(handles) == 1:
        return handles[0]

    def resolve(deadline_seconds: float | None, exposed: bool) -> Any:
        result, error = None, None
        for handle in handles:
            try:
                # Wait for all of them even after an error: their tensors are in use until they have ended.
                result = handle.wait(deadline_seconds, exposed=exposed)
            except CommunicationError as failure:
                error = error or failure
        if error is not None:
            raise error
        return result

    return Handle(resolve, lambda: all(handle.is_complete() for handle in handles))


def wait_ignoring_errors(handles: Iterable[Handle | None]) -> None:
    """Wait for each handle, up to its own deadline, and ignore errors; for steps that are dropped."""
    for handle in handles:
        if handle is not None:
            with suppress(CommunicationError):
                result = handle.wait()
                # Some handles return the handle of a second stage, which has to end as well.
                if isinstance(result, Handle):
                    result.wait()
