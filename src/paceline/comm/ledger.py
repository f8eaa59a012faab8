"""The byte ledger: every collective by operation and group, with its calls, bytes and seconds.

Invariant: nothing reaches a wire without a row here, and the bytes of a row are those of the closed form
(`paceline.comm.collective_cost`) for the payload that was really passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

from paceline.comm.collective_cost import native_cost
from paceline.errors import CommunicationError


@dataclass
class LedgerEntry:
    """Totals of one operation on one group since the ledger was opened.

    Args:
        calls: number of collectives.
        payload_bytes: bytes of the tensors that this rank passed in.
        sent_bytes: bytes that this rank put on the wire, by the closed form.
        busy_seconds: time during which at least one call was under way.
        exposed_seconds: what the caller really waited.
    """

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: float = 0.0
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # calls end on a thread of the backend
        self._under_way = 0
        self._busy_since = 0.0
        self._whole: LedgerEntry | None = None

    def nested_in(self, whole: LedgerEntry) -> LedgerEntry:
        """Let another entry know of what is under way here; returns this one."""
        self._whole = whole
        return self

    def begin_call(self) -> None:
        """A call is under way; the whole begins before its part does and ends after it."""
        if self._whole is not None:
            self._whole.begin_call()
        with self._lock:
            if self._under_way == 0:
                self._busy_since = time.perf_counter()
            self._under_way += 1

    def end_call(self) -> None:
        """A call is complete."""
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self.busy_seconds += time.perf_counter() - self._busy_since
        if self._whole is not None:
            self._whole.end_call()

    @property
    def hidden_fraction(self) -> float:
        """Share of the communication time that nobody waited for, 0 to 1."""
        if self.busy_seconds <= 0:
            return 0.0
        return max(0.0, 1.0 - self.exposed_seconds / self.busy_seconds)


_ENTRY_FIELDS = tuple(item.name for item in fields(LedgerEntry))


class ByteLedger:
    """Counts of this rank."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], LedgerEntry] = {}
        self._any = LedgerEntry()
        self._forms: dict[tuple[str, str], float] = {}

    def expect(self, op: str, group_name: str, num_bytes: float) -> None:
        """What the closed form of a route says will be counted; known before anything is sent."""
        self._forms[op, group_name] = self._forms.get((op, group_name), 0.0) + num_bytes

    def require_expected_bytes(self) -> None:
        """Hold what was counted against what was expected; nothing may be under way.

        Raises:
            CommunicationError: they differ; names operation, group and both numbers.
        """
        for (op, group_name), form in self._forms.items():
            entry = self._entries.get((op, group_name), LedgerEntry())
            if entry.sent_bytes != form:
                raise CommunicationError(
                    f"{op} over group '{group_name}' has sent {entry.sent_bytes:.0f} bytes, and the closed"
                    f" form of its route says {form:.0f}",
                    next_step="the route sends something else than it states: mend the one or the other",
                )

    def count_call(self, op: str, group_name: str, num_bytes: int, world: int) -> LedgerEntry:
        """Count one call and return its row, for the handle to add seconds to."""
        entry = self._entries.get((op, group_name))
        if entry is None:
            entry = self._entries[op, group_name] = LedgerEntry().nested_in(self._any)
        entry.calls += 1
        entry.payload_bytes += num_bytes
        entry.sent_bytes += native_cost(op, num_bytes, world).sent_bytes
        return entry

    @property
    def rows(self) -> Mapping[tuple[str, str], LedgerEntry]:
        """Rows by (operation, group name)."""
        return self._entries

    @property
    def busy_seconds(self) -> float:
        """Time during which any call was under way; calls that overlap count once."""
        return self._any.busy_seconds

    @property
    def sent_bytes(self) -> float:
        """Of all rows."""
        return sum([entry.sent_bytes for entry in self._entries.values()])

    def totals_so_far(self) -> tuple[float, float, float]:
        """Busy and exposed seconds and the bytes that were sent, so far; asked for after every round."""
        exposed = sent = 0.0
        for entry in self._entries.values():
            exposed += entry.exposed_seconds
            sent += entry.sent_bytes
        return self._any.busy_seconds, exposed, sent

    def total(self) -> LedgerEntry:
        """The sum of all rows."""
        rows = self._entries.values()
        return LedgerEntry(*(sum(getattr(entry, name) for entry in rows) for name in _ENTRY_FIELDS))
