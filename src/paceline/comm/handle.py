"""Something under way: waiting for it has a deadline, and its failure names rank, operation and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from paceline.errors import CommunicationError


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


def wait_ignoring_errors(handles: Iterable[Handle | None]) -> None:
    """Wait for each with its own deadline; errors are ignored, as the step is dropped."""
    for handle in handles:
        if handle is not None:
            with suppress(CommunicationError):
                found = handle.wait()
                if isinstance(found, Handle):
                    found.wait()
