"""The byte ledger: calls, bytes and seconds of every collective, by operation and group.

Invariant: nothing is sent without a row here, and the bytes of a row are those of the closed form
(`paceline.comm.collective_cost`) for the payload that was really passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

from paceline.comm.collective_cost import native_cost
from paceline.errors import CommunicationError
from paceline.observe.rank_activity import RankActivity


@dataclass
class LedgerEntry:
    """Totals of one operation on one group since the ledger was opened.

    Args:
        calls: number of collectives.
        payload_bytes: bytes of the tensors that this rank passed in.
        sent_bytes: bytes that this rank sent, by the closed form.
        busy_seconds: time during which at least one call was in flight.
        exposed_seconds: time during which the caller waited.
    Attributes:
        latest_bytes: payload of the latest call.
    """

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: float = 0.0
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0

    def __post_init__(self) -> None:
        # Calls end on a thread of the backend.
        self._lock = threading.Lock()
        self._num_in_flight = 0
        self._busy_since = 0.0
        self.latest_bytes = 0
        self._enclosing: LedgerEntry | None = None

    def nested_in(self, enclosing: LedgerEntry) -> LedgerEntry:
        """Report calls to an enclosing entry too, and return this one."""
        self._enclosing = enclosing
        return self

    def begin_call(self) -> None:
        """Record that a call is in flight."""
        # The enclosing entry begins before this one and ends after it, so it never shows less time.
        if self._enclosing is not None:
            self._enclosing.begin_call()
        with self._lock:
            if self._num_in_flight == 0:
                self._busy_since = time.perf_counter()
            self._num_in_flight += 1

    def end_call(self) -> None:
        """Record that a call is complete."""
        with self._lock:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self.busy_seconds += time.perf_counter() - self._busy_since
        if self._enclosing is not None:
            self._enclosing.end_call()

    @property
    def hidden_fraction(self) -> float:
        """Share of the communication time during which the caller did not wait, 0 to 1."""
        if self.busy_seconds <= 0:
            return 0.0
        return max(0.0, 1.0 - self.exposed_seconds / self.busy_seconds)


_ENTRY_FIELDS = tuple(item.name for item in fields(LedgerEntry))


class ByteLedger:
    """Counters of this rank's communication.

    Args:
        activity: shows the latest collective of each group to other processes; None: it is not shown.
    """

    def __init__(self, activity: RankActivity | None = None) -> None:
        self._activity = activity or RankActivity()
        self._entries: dict[tuple[str, str], LedgerEntry] = {}
        # Every entry is nested in this one, so calls of different operations that overlap count once.
        self._any_call = LedgerEntry()
        self._expected_bytes: dict[tuple[str, str], float] = {}

    def expect(self, op: str, group_name: str, num_bytes: float) -> None:
        """Add bytes to those that the closed form of a route predicts; called before anything is sent."""
        self._expected_bytes[op, group_name] = self._expected_bytes.get((op, group_name), 0.0) + num_bytes

    def require_expected_bytes(self) -> None:
        """Compare the bytes that were counted with those that were predicted; nothing may be in flight.

        Raises:
            CommunicationError: they differ; names the operation, the group and both numbers.
        """
        for (op, group_name), expected in self._expected_bytes.items():
            entry = self._entries.get((op, group_name), LedgerEntry())
            if entry.sent_bytes != expected:
                raise CommunicationError(
                    f"{op} over group '{group_name}' sent {entry.sent_bytes:.0f} bytes, but the closed form"
                    f" of its route predicts {expected:.0f}",
                    next_step="fix the messages of the route or its closed form: they disagree",
                )

    def count_call(self, op: str, group_name: str, num_bytes: int, world: int) -> LedgerEntry:
        """Count one call and return its row, to which the handle adds seconds."""
        entry = self._entries.get((op, group_name))
        if entry is None:
            entry = self._entries[op, group_name] = LedgerEntry().nested_in(self._any_call)
        entry.calls += 1
        entry.payload_bytes += num_bytes
        entry.latest_bytes = num_bytes
        entry.sent_bytes += native_cost(op, num_bytes, world).sent_bytes
        if op != "send":  # what only one of two ranks counts says nothing about who is missing
            self._activity.count_call(op, group_name, num_bytes)
        return entry

    @property
    def rows(self) -> Mapping[tuple[str, str], LedgerEntry]:
        """Rows by (operation, group name)."""
        return self._entries

    @property
    def busy_seconds(self) -> float:
        """Time during which any call was in flight; calls that overlap count once."""
        return self._any_call.busy_seconds

    @property
    def sent_bytes(self) -> float:
        """Bytes sent, summed over all rows."""
        return sum([entry.sent_bytes for entry in self._entries.values()])

    def totals_so_far(self) -> tuple[float, float, float]:
        """Return busy seconds, exposed seconds and sent bytes; cheap, as it is called after every round."""
        exposed = sent = 0.0
        for entry in self._entries.values():
            exposed += entry.exposed_seconds
            sent += entry.sent_bytes
        return self._any_call.busy_seconds, exposed, sent

    def total(self) -> LedgerEntry:
        """Return the sum of all rows."""
        rows = self._entries.values()
        return LedgerEntry(*(sum(getattr(entry, name) for entry in rows) for name in _ENTRY_FIELDS))
