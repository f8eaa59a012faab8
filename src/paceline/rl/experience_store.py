"""Experience stores: rows in memory that processes of a host share, in a FIFO, in a ring, and by priority.

Each row has a sequence number at both ends. A writer sets the one in front, the row, and the one behind; a
reader reads them in the opposite order. A row whose numbers are both the expected one is whole: it is not
torn, not one of an earlier lap, and not one of a later lap.

Invariant: the place of a row follows from its number, and a number belongs to one writer. So writers need no
lock, and the order in which rows are read does not depend on which writer is fast.
This module assumes that a processor shows its stores to others in their order, as x86-64 does.
Source: Lamport 1977, Concurrent Reading and Writing, Communications of the ACM 20(11); Schaul et al. 2016,
Prioritized Experience Replay, arXiv:1511.05952, section 3.3 and appendix B.2.1.
"""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DeadlineError, PacelineError

_PAUSE_SECONDS = 0.0005
Numbers = NDArray[np.int64]


class ExperienceStore:
    """A ring of rows, whose newest `capacity` are kept; a writer never waits.

    Args:
        row: NumPy dtype of a row.
        capacity: rows that are kept.
        memory: `num_bytes(row, capacity)` bytes that are zero, uint8, such as a view of shared memory; None:
            memory of this process.
    """

    def __init__(self, row: np.dtype[Any], capacity: int, memory: NDArray[np.uint8] | None = None) -> None:
        self.row, self.capacity = row, capacity
        size = self.num_bytes(row, capacity)
        memory = np.zeros(size, dtype=np.uint8) if memory is None else memory
        slots = memory[:size].view(_slot_of(row))
        # Views of the columns, which are found by name once.
        self._front, self._rows, self._behind = slots["front"], slots["row"], slots["behind"]

    @staticmethod
    def num_bytes(row: np.dtype[Any], capacity: int) -> int:
        """Return the bytes of a store."""
        return _slot_of(row).itemsize * capacity

    def write(self, numbers: Numbers, rows: NDArray[Any]) -> None:
        """Write rows in the places of those that came `capacity` before.

        Args:
            numbers: of the rows, counted from 0 over all writers, int64 [N]; at most `capacity`, distinct.
            rows: [N] of the dtype of a row.
        """
        places = numbers % self.capacity
        self._front[places] = numbers + 1
        self._rows[places] = rows
        self._behind[places] = numbers + 1

    def read(self, numbers: Numbers) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return rows by number, and which of them are whole.

        Returns:
            Copies of the rows [N], and bool [N]: False where the row is not written yet, is being written, or
            was overwritten.
        """
        places = numbers % self.capacity
        behind = self._behind[places]
        rows = self._rows[places]
        whole = (behind == numbers + 1) & (self._front[places] == numbers + 1)
        return rows, whole

    def require(self, numbers: Numbers) -> NDArray[Any]:
        """Return rows that must be whole.

        Raises:
            PacelineError: one of them is not.
        """
        rows, whole = self.read(numbers)
        if not whole.all():
            number = int(numbers[~whole][0])
            raise PacelineError(
                f"row {number} of the experience store is not the one that was written (its place has"
                f" sequence numbers {self._front[number % self.capacity] - 1} and"
                f" {self._behind[number % self.capacity] - 1})",
                next_step="resume from the last checkpoint, which has the rows; the memory of this host was"
                " changed by another process",
            )
        return rows


class ExperienceFifo:
    """A queue of rows from several writers, each of which is read once, in the order of their numbers.

    Row `i` of writer `k` has the number `i * writers + k`, so writers take turns and a fast one waits for the
    reader, not for the others, up to `capacity`.

    Args:
        row: NumPy dtype of a row.
        capacity: rows that fit; a multiple of `writers`.
        writers: K.
        memory: `num_bytes(row, capacity)` zeroed bytes; None: memory of this process.
    """

    def __init__(
        self, row: np.dtype[Any], capacity: int, writers: int, memory: NDArray[np.uint8] | None = None
    ) -> None:
        if memory is None:
            memory = np.zeros(self.num_bytes(row, capacity), dtype=np.uint8)
        self.writers = writers
        self._num_read = memory[:8].view(np.int64)  # written by the reader only
        self._store = ExperienceStore(row, capacity, memory[8:])
        self._num_written = [0] * writers

    @staticmethod
    def num_bytes(row: np.dtype[Any], capacity: int) -> int:
        """Return the bytes of a queue."""
        return 8 + ExperienceStore.num_bytes(row, capacity)

    def put(self, writer: int, row: Any, deadline_seconds: float) -> None:
        """Append a row, once there is a place for it.

        Raises:
            DeadlineError: the reader has not made one within the deadline.
        """
        number = self._num_written[writer] * self.writers + writer
        expires = time.monotonic() + deadline_seconds
        while number >= int(self._num_read[0]) + self._store.capacity:
            self._pause(expires, f"row {number} of writer {writer} waits for the reader")
        self._store.write(np.array([number]), np.array([row], dtype=self._store.row))
        self._num_written[writer] += 1

    def take(self, deadline_seconds: float) -> Any:
        """Return the next row, once it is written.

        Raises:
            DeadlineError: its writer has not written it within the deadline.
        """
        number = int(self._num_read[0])
        expires = time.monotonic() + deadline_seconds
        while True:
            rows, whole = self._store.read(np.array([number]))
            if whole[0]:
                break
            self._pause(expires, f"row {number} waits for writer {number % self.writers}")
        self._num_read[0] = number + 1
        return rows[0]

    @staticmethod
    def _pause(expires: float, what: str) -> None:
        if time.monotonic() > expires:
            raise DeadlineError(
                f"{what}, and the deadline has passed", next_step="read the error of the process that is gone"
            )
        time.sleep(_PAUSE_SECONDS)


class SumTree:
    """Priorities of places, which are drawn in proportion to them in logarithmic time.

    Every inner node is the sum of its two children, computed anew and not by differences: so the bits of the
    tree depend on the present priorities, and not on their history.

    Args:
        capacity: number of places.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._depth = max(1, (capacity - 1).bit_length())
        self._nodes = np.zeros(2 << self._depth)

    @property
    def priorities(self) -> NDArray[np.float64]:
        """The priority of every place, float64 [capacity]; read-only."""
        return self._nodes[self._first : self._first + self.capacity]

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._nodes[1])

    @property
    def _first(self) -> int:
        return 1 << self._depth

    def update(self, places: Numbers, priorities: NDArray[np.float64]) -> None:
        """Set priorities, float64 [N] >= 0, of places, int64 [N]."""
        nodes = places + self._first
        self._nodes[nodes] = priorities
        for _ in range(self._depth):
            nodes = np.unique(nodes >> 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, uniforms: NDArray[np.float64]) -> Numbers:
        """Return the places whose share of the total has the uniform numbers, float64 [N] in [0, 1)."""
        mass, nodes = uniforms * self.total, np.ones(len(uniforms), dtype=np.int64)
        for _ in range(self._depth):
            left, right = self._nodes[2 * nodes], self._nodes[2 * nodes + 1]
            # Rounding must not lead to a place without a priority.
            goes_right = (mass >= left) & (right > 0)
            mass = np.where(goes_right, mass - left, np.minimum(mass, left))
            nodes = 2 * nodes + goes_right
        return cast("Numbers", nodes - self._first)


def _slot_of(row: np.dtype[Any]) -> np.dtype[Any]:
    """Return a row with its sequence numbers: one above the number of the row, so that 0 is no row."""
    return np.dtype([("front", np.int64), ("row", row), ("behind", np.int64)])
