"""The store as torch sees it, which makes its process groups there. Imports torch; nobody else here does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store as TorchStore

from paceline.job.store_client import KeyTimeoutError, StoreClient
from paceline.job.store_protocol import ADD, APPEND, CHECK, COMPARE, COUNT, DELETE, SET

_POLL_SECONDS = 0.02


class JobStore(TorchStore):
    """A member's view of the job's store. Keep a reference to it as long as torch may use it.

    Args:
        client: asks the server.
        seconds: how long `get` and `wait` wait if nobody says.
    """

    def __init__(self, client: StoreClient, seconds: float) -> None:
        super().__init__()
        self.client, self._seconds = client, seconds
        self._watched: tuple[int, ...] = ()

    @contextmanager
    def watching(self, members: Sequence[int]) -> Iterator[None]:
        """Meanwhile every wait fails at once if one of these members is gone."""
        before, self._watched = self._watched, tuple(members)
        try:
            yield
        finally:
            self._watched = before

    @property
    def torch(self) -> TorchStore:
        """What torch is given."""
        return self

    def lost(self) -> frozenset[int]:
        """Members that are gone."""
        return self.client.lost()

    def tell(self, text: str) -> None:
        """Have something said where the store is served."""
        self.client.tell(text)

    def close(self) -> None:
        """Leave; for the others this member is gone."""
        self.client.close()

    def wait_for_keys(self, keys: Sequence[str], seconds: float, watched: Sequence[int] = ()) -> list[bytes]:
        """See `StoreClient.wait`."""
        return self.client.wait(keys, seconds, watched)

    def set(self, key: str, value: str | bytes) -> None:
        self.client.ask(SET, key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self.client.wait([key], self._seconds, self._watched)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        self.client.wait(keys, seconds, self._watched)

    def add(self, key: str, value: int) -> int:
        return int(self.client.ask(ADD, key.encode(), b"%d" % value)[0])

    def append(self, key: str, value: str | bytes) -> None:
        self.client.ask(APPEND, key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        both = (one.encode() if isinstance(one, str) else bytes(one) for one in (expected, wanted))
        return self.client.ask(COMPARE, key.encode(), *both)[0]

    def check(self, keys: list[str]) -> bool:
        return self.client.ask(CHECK, *(key.encode() for key in keys))[0] == b"1"

    def delete_key(self, key: str) -> bool:
        return self.client.ask(DELETE, key.encode())[0] == b"1"

    def num_keys(self) -> int:
        return int(self.client.ask(COUNT)[0])

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def clone(self) -> JobStore:
        return self

    def has_extended_api(self) -> bool:
        return False

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set
    setTimeout = set_timeout


class AgentStore:
    """The store that torchrun's agent serves: torch's own, which knows no members, so none is ever lost.

    Args:
        store: reached already.
    """

    def __init__(self, store: Any) -> None:
        self.torch: TorchStore = store
        self.set, self.get, self.add = store.set, store.get, store.add
        self.append, self.compare_set, self.check = store.append, store.compare_set, store.check
        self.delete_key = store.delete_key

    @contextmanager
    def watching(self, members: Sequence[int]) -> Iterator[None]:
        """See `JobStore`; here nobody is seen to leave."""
        yield

    def lost(self) -> frozenset[int]:
        """See `JobStore`."""
        return frozenset()

    def tell(self, text: str) -> None:
        """See `JobStore`; torchrun's agent says nothing."""

    def close(self) -> None:
        """See `JobStore`."""

    def wait_for_keys(self, keys: Sequence[str], seconds: float, watched: Sequence[int] = ()) -> list[bytes]:
        """See `StoreClient.wait`; by polling: torch's own wait would write C++ stacks into the log."""
        expires = time.monotonic() + seconds
        while not self.check(list(keys)):
            if time.monotonic() > expires:
                raise KeyTimeoutError([key for key in keys if not self.check([key])])
            time.sleep(_POLL_SECONDS)
        return [self.get(key) for key in keys]


Store = JobStore | AgentStore
