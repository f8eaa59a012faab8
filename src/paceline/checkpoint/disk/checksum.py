"""Checksums of checkpoint files: XXH3 with 128 bits.

It finds damage, except with a probability of 2**-128, in a tenth of the CPU time of SHA-256. It does not
protect against deliberate changes of a file; neither would SHA-256, because the manifest could be
changed as well.

Source: XXH3 of the xxHash library, through its Python package.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Protocol

from xxhash import xxh3_128

CHECKSUM_KIND = "xxh3-128"


class _HashFunction(Protocol):
    def update(self, block: bytes | bytearray | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


_CHECKSUM_KINDS: dict[str, tuple[Callable[[], _HashFunction], int]] = {
    CHECKSUM_KIND: (xxh3_128, 32),
    "sha256": (hashlib.sha256, 64),  # in checkpoints before format 3; no longer written
}
_CHECKSUM_PATTERN = re.compile(
    "|".join(f"{kind}:[0-9a-f]{{{length}}}" for kind, (_, length) in _CHECKSUM_KINDS.items()), re.ASCII
)


class FileChecksum:
    """The checksum of bytes that arrive in blocks.

    Args:
        kind: "xxh3-128" or "sha256".
    """

    def __init__(self, kind: str = CHECKSUM_KIND) -> None:
        self._kind, self._hash = kind, _CHECKSUM_KINDS[kind][0]()

    def update(self, block: bytes | bytearray | memoryview) -> None:
        """Add the next bytes."""
        self._hash.update(block)

    def text(self) -> str:
        """Return the kind, a colon, and the value in hexadecimal of the bytes so far."""
        return f"{self._kind}:{self._hash.hexdigest()}"


def is_checksum(text: str) -> bool:
    """Return whether a text is a checksum of a known kind."""
    return _CHECKSUM_PATTERN.fullmatch(text) is not None


def recompute_checksum(data: bytes | bytearray | memoryview, text: str) -> str:
    """Return the checksum of data, of the same kind as the checksum `text`."""
    checksum = FileChecksum(text.partition(":")[0])
    checksum.update(data)
    return checksum.text()
