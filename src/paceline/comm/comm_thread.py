"""A thread that runs the later hops of collectives while training goes on.

Each hop waits for the one before it, so the caller can launch only the first. Every process group is used by
one thread, and buffers pass through it in the order of their launch, so the order is the same on every rank.
Rounds of two buffers may be interleaved: while the bytes of one are in flight, the other is encoded. One rank
may have run a buffer to its end when another begins the next one. A buffer therefore waits at most twice: a
rank that waits for the first round of the next buffer has then launched all rounds of this one, and there is
no cycle of waits.
Invariant: after an error, nothing that is queued behind it is started before `clear_error`.
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
from paceline.observe.rank_activity import RankActivity

# Two buffers in flight hide the encoding of one behind the transfer of the other; more would only take
# memory.
NUM_SLOTS = 2
# A buffer that waited a third time could be waited for by a rank that this one waits for.
_MAX_WAITS = 2

CommRounds = Generator[Handle, Any, Any]
"""A generator that yields the handle it waits for, is sent its result, and returns the result of all."""


@dataclass(eq=False)
class _BufferTask:
    """The rounds of one buffer in flight.

    Args:
        slots: slots that no other buffer may use meanwhile.
        waits_for: handle of the round that is in flight.
        num_waits: number of rounds that were launched.
    """

    rounds: CommRounds
    slots: frozenset[int]
    waits_for: Handle = field(default_factory=lambda: Handle.ready(None))
    num_waits: int = 0
    result: Future[Any] = field(default_factory=Future)

    def __enter__(self) -> None:
        """Route errors raised in the block to the handle of this buffer."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.result.set_exception(error)
        return True


class CommThread:
    """A thread that runs hops one after another, and interleaves rounds.

    Args:
        name: name of the thread.
        count_seconds: called with the operation and the seconds that a caller waited.
        activity: shows what the caller waits for, and records the sums of buckets; None: it is not shown.
    """

    def __init__(
        self, name: str, count_seconds: Callable[[str, float], None], activity: RankActivity | None = None
    ) -> None:
        self._name, self._activity = name, activity or RankActivity()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._count_seconds = count_seconds
        self._broken: CommunicationError | None = None
        self._slots = itertools.cycle(range(NUM_SLOTS))
        self._num_submitted = self._num_begun = 0
        # Used by the thread alone; the task that has waited longest is first.
        self._in_flight: deque[_BufferTask] = deque()

    def submit(self, op: str, hops: Callable[[], Any]) -> Handle:
        """Run hops in their turn, with nothing in between; the handle returns what they return.

        Each of their waits has a deadline.
        """

        def run_hops() -> CommRounds:
            # An empty generator that only returns: hops have no round that another buffer could run beside.
            yield from ()
            return hops()

        return self._enqueue(op, _BufferTask(run_hops(), frozenset(range(NUM_SLOTS))))

    def submit_rounds(self, op: str, rounds: Callable[[int], CommRounds]) -> Handle:
        """Run rounds in their turn; while one of them waits, those of the next buffer run.

        Ranks may then launch rounds of two buffers in different orders, so messages have to say to which of
        the two slots they belong. Only one thread may submit.

        Args:
            rounds: called with its slot, 0 or 1, which is the same on every rank and not shared meanwhile. It
                may wait twice; the handle raises CommunicationError if it waits more often.
        """
        slot = next(self._slots)
        return self._enqueue(op, _BufferTask(rounds(slot), frozenset({slot})))

    def clear_error(self) -> None:
        """Allow tasks to start again after an error."""
        self._broken = None

    def close(self) -> None:
        """End the thread; everything that was launched has been waited for."""
        self._pool.shutdown()

    def _enqueue(self, op: str, task: _BufferTask) -> Handle:
        self._num_submitted += 1
        bucket, place = self._activity.bucket, self._activity.place_of(self._name)
        self._activity.count_call(op, self._name, 0)
        call = self._activity.latest_call(self._name)
        if bucket is not None:
            task.result.add_done_callback(lambda _: bucket.complete())
        self._pool.submit(self._begin_task, task)

        def resolve(deadline_seconds: float | None, exposed: bool) -> Any:
            began = time.perf_counter()
            waited_for = self._activity.begin_wait(op, place, self._name, call) if exposed else ""
            try:
                return task.result.result()
            finally:
                if exposed:
                    now = time.perf_counter()
                    self._activity.end_wait(waited_for, began, now)
                    self._count_seconds(op, now - began)

        return Handle(resolve, task.result.done)

    def _begin_task(self, task: _BufferTask) -> None:
        """Begin a buffer once its slot is free; run all of them further while no other is waiting to
        begin.
        """
        self._num_begun += 1
        while any(task.slots & other.slots for other in self._in_flight):
            self._advance()
        self._in_flight.appendleft(task)
        self._advance()
        while self._in_flight and self._num_begun == self._num_submitted:
            self._advance()

    def _advance(self) -> None:
        """Wait for the round that has been in flight longest, and run its buffer up to the next wait."""
        task = self._in_flight.popleft()
        with task:
            try:
                result = task.waits_for.wait(exposed=False)
                # Wait first: the round in flight has to end before its buffer may be dropped.
                if self._broken is not None:
                    raise self._broken
                task.waits_for = task.rounds.send(result)
                task.num_waits += 1
                if task.num_waits > _MAX_WAITS:
                    raise _too_many_waits_error()
                self._in_flight.append(task)
            except StopIteration as stop:
                task.result.set_result(stop.value)
            except CommunicationError as error:
                self._broken = error
                raise


def _too_many_waits_error() -> CommunicationError:
    return CommunicationError(
        f"interleaved rounds wait more than {_MAX_WAITS} times, so ranks could deadlock",
        next_step="this is a bug of the collective, not of the recipe: it has to call submit instead",
    )


def run_rounds(rounds: CommRounds) -> Any:
    """Run rounds with nothing in between, and return what they return."""
    try:
        waits_for = next(rounds)
        while True:
            waits_for = rounds.send(waits_for.wait(exposed=False))
    except StopIteration as stop:
        return stop.value
