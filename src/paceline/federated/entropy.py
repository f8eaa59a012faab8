"""The source of secret random bytes: masks, keys, coefficients of shares, and noise.

They come from the operating system and never from the seed of the run: whoever has the folder of a run could
compute them again, and subtract them. A test that must see the same bits twice sets `debug.entropy_seed`;
such a run says in its report, its manifest and its result that it has no privacy.

Invariant: nothing that is drawn here is written to a file, a log or a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK_BYTES = 1 << 16
_STREAM_KEY_BYTES = 32
KNOWN_ENTROPY = "no privacy: the noise is known"
"""What a run says of itself whose secret random bytes follow from a seed."""

PRIVACY_KEY = "federated.privacy"
RELEASED_FIELDS = [
    "the sum of the weighted updates, buffers and counters",
    "the sums of weights, samples, steps, losses, counts and metrics",
    "the names of the clients of a round, and which of them returned an update",
    "the number of bytes",
]
"""What the server of a round with masks learns."""


class PrivacyRecord:
    """What a run says of its privacy, as state that checkpoints keep.

    Args:
        record: as the event `privacy` has it.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = dict(record)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the record."""
        return self.record

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a warning of the saved run: secrets that were known once stay known."""
        self.record["warning"] = self.record.get("warning") or str(state_dict.get("warning", ""))


class Entropy:
    """Secret random bytes: of the operating system, or in tests of a seed.

    Args:
        seed: None: those of the operating system.
        purpose: of a seed; two purposes have independent bytes.
    """

    def __init__(self, seed: int | None = None, purpose: tuple[int | str, ...] = ()) -> None:
        self._seed, self._purpose = seed, purpose
        self._num_drawn = 0

    @property
    def is_known(self) -> bool:
        """Return whether the bytes follow from a seed, so that they protect nothing."""
        return self._seed is not None

    def of(self, *purpose: int | str) -> Entropy:
        """Return the source of a purpose; of a seed its bytes do not depend on what else was drawn."""
        return self if self._seed is None else Entropy(self._seed, (*self._purpose, *purpose))

    def bytes(self, num_bytes: int) -> bytes:
        """Return the next bytes."""
        if self._seed is None:
            return os.urandom(num_bytes)
        head = repr((self._seed, self._purpose, self._num_drawn)).encode()
        self._num_drawn += 1
        return hashlib.shake_256(head).digest(num_bytes)

    def integer(self, bits: int) -> int:
        """Return a uniform integer below 2^bits."""
        return int.from_bytes(self.bytes(-(-bits // 8)), "little") & ((1 << bits) - 1)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return uniform 64-bit words, [count]: the stream of AES-256 in counter mode under a fresh key."""
        return np.frombuffer(key_stream(self.bytes(_STREAM_KEY_BYTES), 8 * count), dtype="<u8")


def key_stream(key: bytes, num_bytes: int) -> bytearray:
    """Return the stream of AES-256 in counter mode, from counter 0.

    Args:
        key: 32 bytes that are used for nothing else.
    """
    # Here, as the other parts of federated rounds do not need it.
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    stream, zeros = bytearray(num_bytes), bytes(min(num_bytes, _BLOCK_BYTES))
    view = memoryview(stream)
    for start in range(0, num_bytes, _BLOCK_BYTES):
        block = view[start : start + _BLOCK_BYTES]
        encryptor.update_into(zeros[: len(block)], block)
    return stream
