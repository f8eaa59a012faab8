"""Two that take turns: a function on a thread of its own, which runs only while somebody waits for it.

Invariant: never do both run at once, so whatever is global (generators, the number of threads) is seen in the
order of the turns. An error of the function is raised where its turn was waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from paceline.errors import StrategyError


class _Over(BaseException):
    """Ends the function where it hands over."""


class Turns:
    """Runs a function from one `hand_over` to the next.

    Args:
        function: calls `hand_over` wherever the other side is to go on.
    """

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self._function, self._pid = function, os.getpid()
        self._mine: SimpleQueue[Any] = SimpleQueue()
        self._theirs: SimpleQueue[Any] = SimpleQueue()
        self._pool, self._running = ThreadPoolExecutor(1, name), Future[None]()
        self._has_begun = self._ends = self.is_over = False

    def resume(self, value: Any = None) -> Any:
        """Let the function go on with a value; returns what it hands over next, None when it has ended.

        Raises:
            StrategyError: this is a fork, which has no such thread.
        """
        if os.getpid() != self._pid:
            raise StrategyError("a loop cannot go on in a process that was forked from its own")
        if self.is_over:
            return None
        if self._has_begun:
            self._mine.put(value)
        else:
            self._has_begun, self._running = True, self._pool.submit(self._function)
            self._running.add_done_callback(lambda done: self._theirs.put(None))
        said = self._theirs.get()
        if said is None:  # the function has ended, well or not
            self.is_over = True
            self._pool.shutdown()
            self._running.result()
        return said[0] if said else None

    def hand_over(self, value: Any = None) -> Any:
        """From the function: let the other side go on; returns what it answers."""
        self._theirs.put((value,))
        found = self._mine.get()
        if self._ends:
            raise _Over
        return found

    def end(self) -> None:
        """Leave the function where it stands; may be called twice, and before it has begun."""
        if os.getpid() != self._pid or self.is_over:
            return
        self.is_over = self._ends = True
        if self._has_begun:
            self._mine.put(None)
        self._pool.shutdown()
