"""A line: one thread that takes the later hops of collectives while training goes on.

Each hop waits for the one before it, so the caller can launch the first only. Every process group is used by
one thread, and buffers pass through it in the order of their launch: so there is one order on every rank.
Rounds of two buffers may take turns: while the bytes of one are under way, the other is coded. One rank may
have run a buffer to its end when another begins the next one. So a buffer waits twice at most: whoever waits
for the first round of the next one has then launched all rounds of this one, and nobody waits in a circle.
Invariant: after an error, nothing that waits behind it is started before `clear_error`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from paceline.comm.handle import Handle
from paceline.errors import CommunicationError

NUM_SLOTS = 2  # of buffers that are under way at once
_MAX_WAITS = 2  # of a buffer

CommRounds = Generator[Handle, Any, Any]
"""Yields what it waits for, is sent its result, and returns the whole's."""


@dataclass(eq=False)
class _BufferTask:
    """A buffer on its way.

    Args:
        places: that nobody else may have meanwhile.
        waits_for: the end of the round that is under way.
        num_waits: rounds that were launched.
    """

    rounds: CommRounds
    places: frozenset[int]
    waits_for: Handle = field(default_factory=lambda: Handle.ready(None))
    num_waits: int = 0
    result: Future[Any] = field(default_factory=Future)

    def __enter__(self) -> None:
        """Errors of what is done for this buffer go to whoever waits for it."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.result.set_exception(error)
        return True


class CommThread:
    """Runs hops one after another, and rounds by turns.

    Args:
        name: of the thread.
        count_seconds: is told how long a caller waited for the line.
    """

    def __init__(self, name: str, count_seconds: Callable[[str, float], None]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._count_seconds = count_seconds
        self._broken: CommunicationError | None = None
        self._places = itertools.cycle(range(NUM_SLOTS))
        self._num_submitted = self._num_begun = 0
        self._under_way: deque[_BufferTask] = deque()  # of the thread: who has waited longest is first

    def submit(self, op: str, hops: Callable[[], Any]) -> Handle:
        """Run hops in their turn, with nothing beside them; the handle returns what they return.

        Each of their waits has a deadline.
        """

        def whole() -> CommRounds:
            yield from ()
            return hops()

        return self._queued(op, _BufferTask(whole(), frozenset(range(NUM_SLOTS))))

    def submit_rounds(self, op: str, rounds: Callable[[int], CommRounds]) -> Handle:
        """Run rounds in their turn; while one of them waits, those of the next buffer run.

        So ranks may launch rounds of two buffers in different orders, and what they send has to say to which
        of the two places it belongs. One thread submits.

        Args:
            rounds: is told its place, 0 or 1, the same on every rank; nobody else has it meanwhile. It
                waits twice at most; the handle raises CommunicationError where it waits more often.
        """
        place = next(self._places)
        return self._queued(op, _BufferTask(rounds(place), frozenset({place})))

    def clear_error(self) -> None:
        """Forget that something broke."""
        self._broken = None

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._pool.shutdown()

    def _queued(self, op: str, task: _BufferTask) -> Handle:
        self._num_submitted += 1
        self._pool.submit(self._turn, task)

        def resolve(deadline_seconds: float | None, exposed: bool) -> Any:
            began = time.perf_counter()
            try:
                return task.result.result()
            finally:
                if exposed:
                    self._count_seconds(op, time.perf_counter() - began)

        return Handle(resolve, task.result.done)

    def _turn(self, task: _BufferTask) -> None:
        """Begin a buffer once its place is free; go on with all where no other waits to begin."""
        self._num_begun += 1
        while any(task.places & other.places for other in self._under_way):
            self._go_on()
        self._under_way.appendleft(task)
        self._go_on()
        while self._under_way and self._num_begun == self._num_submitted:
            self._go_on()

    def _go_on(self) -> None:
        """Wait for the round that has been under way longest, and run what follows it up to its next wait."""
        task = self._under_way.popleft()
        with task:
            try:
                found = task.waits_for.wait(exposed=False)
                if self._broken is not None:
                    raise self._broken
                task.waits_for = task.rounds.send(found)
                task.num_waits += 1
                if task.num_waits > _MAX_WAITS:
                    raise _too_many_waits_error()
                self._under_way.append(task)
            except StopIteration as end:
                task.result.set_result(end.value)
            except CommunicationError as error:
                self._broken = error
                raise


def _too_many_waits_error() -> CommunicationError:
    return CommunicationError(
        f"a sum by turns waits more than {_MAX_WAITS} times, so ranks could wait for each other in a circle",
        next_step="this is a mistake of the collective, not of the recipe: submit it with nothing beside it",
    )


def run_rounds(rounds: CommRounds) -> Any:
    """Run rounds with nothing beside them; what they return."""
    try:
        waits_for = next(rounds)
        while True:
            waits_for = rounds.send(waits_for.wait(exposed=False))
    except StopIteration as end:
        return end.value
