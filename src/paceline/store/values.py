"""The values of a store, and what its words do to them. Pure: no sockets, no clock.

Invariant: keys and values together hold at most `MOST_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.store.messages import ADD, APPEND, CHECK, COMPARE, COUNT, DELETE, SET

MOST_BYTES = 1 << 28


class Values:
    """Bytes by key."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._num_bytes = 0
        self._words: dict[bytes, Callable[..., list[bytes]]] = {
            SET: self._set,
            ADD: self._add,
            APPEND: self._append,
            COMPARE: self._compare_set,
            DELETE: self._delete,
            CHECK: lambda *keys: [_flag(not self.missing(keys))],
            COUNT: lambda: [b"%d" % len(self._values)],
        }

    def answer(self, word: bytes, fields: Sequence[bytes]) -> list[bytes]:
        """Do what a message asks for.

        Raises:
            ValueError: it is no such message, or there is no room.
        """
        try:
            return self._words[word](*fields)
        except (KeyError, TypeError) as error:
            raise ValueError("no such question") from error

    def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """Values that are there."""
        return [self._values[key] for key in keys]

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keys that have no value yet."""
        return [key for key in keys if key not in self._values]

    def _set(self, key: bytes, value: bytes) -> list[bytes]:
        self._put(key, value)
        return []

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        self._put(key, total)
        return [total]

    def _append(self, key: bytes, more: bytes) -> list[bytes]:
        self._put(key, self._values.get(key, b"") + more)
        return []

    def _compare_set(self, key: bytes, expected: bytes, wanted: bytes) -> list[bytes]:
        """As torch's stores do it: a key that is not there is set if nothing was expected."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._put(key, wanted)
            return [wanted]
        return [expected if present is None else present]

    def _delete(self, key: bytes) -> list[bytes]:
        value = self._values.pop(key, None)
        self._num_bytes -= 0 if value is None else len(key) + len(value)
        return [_flag(value is not None)]

    def _put(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        grown = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._num_bytes + grown > MOST_BYTES:
            raise ValueError(f"the store of the job holds at most {MOST_BYTES} bytes")
        self._num_bytes += grown
        self._values[key] = value


def _flag(truth: bool) -> bytes:
    return b"1" if truth else b"0"
