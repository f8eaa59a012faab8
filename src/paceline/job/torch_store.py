"""The job's store with the interface of torch, which creates its process groups through it.

This is the only module of the package that imports torch at the top.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import Store as TorchStore

from paceline.job.store_client import KeyTimeoutError, StoreClient
from paceline.job.store_protocol import ADD, APPEND, CHECK, COMPARE, COUNT, DELETE, SET

if TYPE_CHECKING:
    from paceline.job.rendezvous import StoreAccess

_POLL_SECONDS = 0.02


class JobStore(TorchStore):
    """A member's view of the job's store. Keep a reference to it as long as torch can use it.

    Args:
        client: the connection to the server.
        seconds: default time-out of `get` and `wait`.
        access: of this member; None: it is not known.
    """

    def __init__(self, client: StoreClient, seconds: float, access: StoreAccess | None = None) -> None:
        super().__init__()
        self.client, self._seconds, self.access = client, seconds, access
        self._watched: tuple[int, ...] = ()

    @contextmanager
    def watching(self, members: Sequence[int]) -> Iterator[None]:
        """Make every wait in the block fail at once if one of these members is gone."""
        before, self._watched = self._watched, tuple(members)
        try:
            yield
        finally:
            self._watched = before

    @property
    def torch(self) -> TorchStore:
        """The store that torch gets."""
        return self

    def lost(self) -> frozenset[int]:
        """Return the members that are gone."""
        return self.client.lost()

    def log_text(self, text: str) -> None:
        """Print a line in the process that serves the store."""
        self.client.log_text(text)

    def close(self) -> None:
        """Leave the job; the other members then see this one as gone."""
        self.client.close()

    def wait_for_keys(self, keys: Sequence[str], seconds: float, watched: Sequence[int] = ()) -> list[bytes]:
        """Wait until all `keys` exist; as `StoreClient.wait`."""
        return self.client.wait(keys, seconds, watched)

    def set(self, key: str, value: str | bytes) -> None:
        self.client.request(SET, key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self.client.wait([key], self._seconds, self._watched)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        self.client.wait(keys, seconds, self._watched)

    def add(self, key: str, value: int) -> int:
        return int(self.client.request(ADD, key.encode(), b"%d" % value)[0])

    def append(self, key: str, value: str | bytes) -> None:
        self.client.request(APPEND, key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        both = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, wanted))
        return self.client.request(COMPARE, key.encode(), *both)[0]

    def check(self, keys: list[str]) -> bool:
        return self.client.request(CHECK, *(key.encode() for key in keys))[0] == b"1"

    def delete_key(self, key: str) -> bool:
        return self.client.request(DELETE, key.encode())[0] == b"1"

    def num_keys(self) -> int:
        return int(self.client.request(COUNT)[0])

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def clone(self) -> JobStore:
        return self

    def has_extended_api(self) -> bool:
        return False

    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set
    setTimeout = set_timeout


class AgentStore:
    """The store that torchrun's agent serves: torch's own, which does not know members, so none is ever lost.

    Args:
        store: torch's store, connected.
    """

    access: StoreAccess | None = None

    def __init__(self, store: Any) -> None:
        self.torch: TorchStore = store
        self.set, self.get, self.add = store.set, store.get, store.add
        self.append, self.compare_set, self.check = store.append, store.compare_set, store.check
        self.delete_key = store.delete_key

    @contextmanager
    def watching(self, members: Sequence[int]) -> Iterator[None]:
        yield

    def lost(self) -> frozenset[int]:
        return frozenset()

    def log_text(self, text: str) -> None:
        """Do nothing: torchrun's agent prints no texts of members."""

    def close(self) -> None:
        """Do nothing: the agent closes its store."""

    def wait_for_keys(self, keys: Sequence[str], seconds: float, watched: Sequence[int] = ()) -> list[bytes]:
        """Wait until all `keys` exist; as `StoreClient.wait`."""
        # by polling: torch's own wait writes C++ stacks to the log when it times out
        expires = time.monotonic() + seconds
        while not self.check(list(keys)):
            if time.monotonic() > expires:
                raise KeyTimeoutError([key for key in keys if not self.check([key])])
            time.sleep(_POLL_SECONDS)
        return [self.get(key) for key in keys]


Store = JobStore | AgentStore
