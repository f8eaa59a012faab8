"""Files that are made once and read for years: whether one is still what was written.

Beside the file stands a small one with its length and its BLAKE2b hash. Invariant: a file is vouched for only
if both agree with every byte of it; a small file that is missing or damaged vouches for nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 4096


def vouch_for(partial: Path, path: Path) -> None:
    """Write down what `partial` holds, for the time when it is called `path`.

    Raises:
        OSError: that cannot be written.
    """
    draft = partial.with_name(f"{partial.name}.seal")
    try:
        with draft.open("w", encoding="utf-8") as out:
            out.write(json.dumps({"num_bytes": partial.stat().st_size, "blake2b": _hash(partial)}) + "\n")
            out.flush()
            os.fsync(out.fileno())
        draft.replace(_place(path))
    finally:
        draft.unlink(missing_ok=True)


def is_vouched_for(path: Path) -> bool:
    """Whether a file is there, and is what was written; reads all of it.

    Raises:
        OSError: it is there and cannot be read.
    """
    if not path.is_file():
        return False
    try:
        with _place(path).open("rb") as small:
            said = json.loads(small.read(_MOST_BYTES))
        expected = (said["num_bytes"], said["blake2b"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return path.stat().st_size == expected[0] and _hash(path) == expected[1]


def _place(path: Path) -> Path:
    return path.with_name(f"{path.name}.seal")


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
