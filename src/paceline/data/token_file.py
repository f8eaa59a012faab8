"""Token files: text files that are tokenised once to one flat file, which every process maps into memory.

The name of a token file is a hash of everything it is made of (the content of the files in order, the
tokenizer, the layout), so it is never outdated. A small file beside it, the seal, has its length and its
BLAKE2b hash.

Invariant: tokens are used only after every byte of their file was compared with the seal; a damaged file is
made again, and a seal that is missing or damaged proves nothing. Writing takes constant memory. This module
does not choose files (see `text_corpus`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.tokenizer import Tokenizer
from paceline.errors import DataError

_CHUNK_BYTES = 1 << 20
_MAX_SEAL_BYTES = 4096


def write_seal(partial: Path, path: Path) -> None:
    """Write the seal of `partial`, which is about to be renamed to `path`.

    Raises:
        OSError: the seal cannot be written.
    """
    draft = partial.with_name(f"{partial.name}.seal")
    try:
        with draft.open("w", encoding="utf-8") as out:
            out.write(
                json.dumps({"num_bytes": partial.stat().st_size, "blake2b": _file_hash(partial)}) + "\n"
            )
            out.flush()
            os.fsync(out.fileno())
        draft.replace(_seal_path(path))
    finally:
        draft.unlink(missing_ok=True)


def matches_seal(path: Path) -> bool:
    """Return whether a file exists and matches its seal; reads all of it.

    Raises:
        OSError: the file exists and cannot be read.
    """
    if not path.is_file():
        return False
    try:
        with _seal_path(path).open("rb") as small:
            record = json.loads(small.read(_MAX_SEAL_BYTES))
        expected = (record["num_bytes"], record["blake2b"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return path.stat().st_size == expected[0] and _file_hash(path) == expected[1]


def _seal_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.seal")


def _file_hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


_LAYOUT = "1"  # part of the name; change it when the format of token files changes
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class TextFile:
    """A text file with its size and the BLAKE2b hash of its content, in hexadecimal digits."""

    path: Path
    num_bytes: int
    digest: str


def hash_text_file(path: Path) -> TextFile:
    """Read a file, and return its size and digest.

    Raises:
        DataError: it cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    num_bytes = 0
    for chunk in _chunks(path):
        digest.update(chunk)
        num_bytes += len(chunk)
    return TextFile(path, num_bytes, digest.hexdigest())


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest of uint8, uint16 and uint32 that holds every token."""
    for kind in (np.uint8, np.uint16):
        if vocab_size - 1 <= np.iinfo(kind).max:
            return np.dtype(kind)
    return np.dtype(np.uint32)


def tokens_digest(files: Sequence[TextFile], tokenizer: Tokenizer) -> str:
    """Return the name of the tokens of `files`, which depends on their content but not on their paths."""
    fields = [_LAYOUT, tokenizer.fingerprint, str(tokenizer.separator), *(file.digest for file in files)]
    return hashlib.blake2b("\n".join(fields).encode(), digest_size=16).hexdigest()


def map_tokens(
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    cache_dir: Path,
    *,
    deadline_seconds: float = 600.0,
) -> NDArray[Any]:
    """Map the tokens of `files` read-only, with the tokenizer's separator after each file.

    The first process writes them under a lock; others wait, and later ones check the existing file.
    The tokens of a list of files are those of its parts, one after another, so files can be divided among
    nodes.

    Args:
        files: in the order in which their tokens come.
        tokenizer: encodes them, and decides the dtype (see `token_type`).
        cache_dir: folder of token files; created if missing; processes and nodes can share it.
        deadline_seconds: the longest wait for another process that is writing.
    Returns:
        uint8, uint16 or uint32 [N], backed by the page cache, not by this process's memory.
    Raises:
        DataError: a file is unreadable, changed or not valid text; the cache cannot be written or locked.
    """
    kind = token_type(tokenizer.vocab_size)
    path = cache_dir / f"{tokens_digest(files, tokenizer)}.{kind.name}"
    if not _is_whole(path):
        with _locked(cache_dir, deadline_seconds):
            if not _is_whole(path):  # no other process has made it meanwhile; a damaged file is replaced
                _write_token_file(files, tokenizer, kind, path)
    if not path.stat().st_size:  # no files: an empty file cannot be mapped
        return np.empty(0, kind)
    return np.asarray(np.memmap(path, kind, "r"))


def _is_whole(path: Path) -> bool:
    try:
        return matches_seal(path)
    except OSError as error:
        raise DataError(
            f"cannot read the tokens: {error}",
            where=str(path),
            next_step="remove the file, or set another cache",
        ) from error


def _write_token_file(
    files: Sequence[TextFile], tokenizer: Tokenizer, kind: np.dtype[Any], path: Path
) -> None:
    # One name is enough: the lock is held, and what a killed writer has left is overwritten.
    partial = path.with_suffix(".tmp")
    try:
        with partial.open("wb") as out:
            for file in files:
                _write_tokens(file, tokenizer, kind, out)
            out.flush()
            os.fsync(out.fileno())
        # The seal first: after a crash in between no file matches it, and the tokens are made again.
        write_seal(partial, path)
        partial.replace(path)
    except OSError as error:
        raise DataError(
            f"cannot write the tokens: {error}",
            where=str(path),
            next_step="free space there, or set another cache",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _write_tokens(file: TextFile, tokenizer: Tokenizer, kind: np.dtype[Any], out: IO[bytes]) -> None:
    digest = hashlib.blake2b(digest_size=16)

    def observed() -> Iterator[bytes]:
        for chunk in _chunks(file.path):
            digest.update(chunk)
            yield chunk

    try:
        for tokens in tokenizer.encode_chunks(observed()):
            out.write(tokens.astype(kind, copy=False).data)
    except UnicodeDecodeError as error:
        raise DataError(
            f"a file is not UTF-8 text: {error}",
            where=str(file.path),
            next_step="leave it out, convert it, or use the byte tokenizer, which takes any file",
        ) from error
    # The name of the token file is a hash of the content that was read first.
    if digest.hexdigest() != file.digest:
        raise DataError(
            "a file changed while it was read", where=str(file.path), next_step="start the run again"
        )
    out.write(np.array([tokenizer.separator], kind).data)


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise DataError(
            f"cannot read a text file: {error}", next_step="check its path and permissions"
        ) from error


@contextmanager
def _locked(cache_dir: Path, deadline_seconds: float) -> Iterator[None]:
    """Hold the lock of the folder. The kernel frees it when a process dies, so no dead process blocks it."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = (cache_dir / "lock").open("w")
    except OSError as error:
        raise DataError(
            f"cannot write to the token cache: {error}", next_step="choose a folder that can be written to"
        ) from error
    with lock:
        expires = time.monotonic() + deadline_seconds
        while not _try_lock(lock):
            if time.monotonic() > expires:
                raise DataError(
                    f"another process has been writing tokens for more than {deadline_seconds:g} s",
                    where=lock.name,
                    next_step="wait for it, or end it",
                )
            time.sleep(_POLL_SECONDS)
        yield


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise DataError(
            f"this file system does not support locks: {error}",
            where=lock.name,
            next_step="choose a cache folder on a local disk",
        ) from error
    return True
