"""What the bytes of weight files should be, where somebody says so.

Invariant: who says it is one of these, the first that there is: the user (`#sha256=` behind the place), a
file `SHA256SUMS` beside the weights, as `sha256sum *.safetensors > SHA256SUMS` writes it, and what Hugging
Face's library has noted when it downloaded: a link to a blob that is named by its hash, or a note in
`.cache`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.files import Files

SUMS = "SHA256SUMS"
PIN = "#sha256="
_HEX = re.compile(r"[0-9a-f]{64}")
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")
_NOTES = Path(".cache/huggingface/download")  # huggingface_hub/_local_folder.py
_MOST_BYTES = 2**26


@dataclass(frozen=True)
class Checksum:
    """The SHA-256 of a file, in hexadecimal, and who says so."""

    sha256: str
    by: str


def known_checksums(files: Files, names: Sequence[str], pin: str | None) -> dict[str, Checksum]:
    """Of those files of a folder of which somebody says it.

    Args:
        pin: the user's.
    Raises:
        ValueError: what is said makes no sense, or is said of some files only.
    """
    if pin is not None:
        return {names[0]: Checksum(_pinned(pin, names), "the user")}
    if files.size(SUMS) is not None:
        return _summed(read_small(files, SUMS).decode(), names)
    noted = {name: _noted(files.local_path(name)) for name in names}
    return {name: Checksum(sha256, "Hugging Face's download") for name, sha256 in noted.items() if sha256}


def read_small(files: Files, name: str) -> bytes:
    """All of a file that describes others.

    Raises:
        ValueError: it is too long for one.
    """
    ranges = files.ranges(name)
    try:
        if ranges.num_bytes > _MOST_BYTES:
            raise ValueError(f"{name} has more than {_MOST_BYTES} bytes")
        return b"".join(ranges.blocks(0, ranges.num_bytes))
    finally:
        ranges.close()


def _pinned(pin: str, names: Sequence[str]) -> str:
    if not _HEX.fullmatch(pin.lower()):
        raise ValueError(f"'{pin[:80]}' is no SHA-256 in hexadecimal")
    if len(names) > 1:
        raise ValueError(f"{PIN} is of one file, and these are {len(names)}: put a {SUMS} beside them")
    return pin.lower()


def _summed(text: str, names: Sequence[str]) -> dict[str, Checksum]:
    lines = [_LINE.fullmatch(line.rstrip("\r")) for line in text.split("\n")]
    said = {line[2]: line[1].lower() for line in lines if line}
    missing = [name for name in names if name not in said]
    if missing:
        raise ValueError(f"{SUMS} does not name {missing[0]}")
    return {name: Checksum(said[name], SUMS) for name in names}


def _noted(path: Path | None) -> str | None:
    """What Hugging Face's library knows of a file: files in its large storage have their SHA-256 as tag."""
    if path is None:
        return None
    if path.is_symlink() and _HEX.fullmatch(path.readlink().name):
        return path.readlink().name
    note = path.parent / _NOTES / f"{path.name}.metadata"
    if not note.is_file():
        return None
    tags = note.read_text(encoding="utf-8").splitlines()[1:2]
    return tags[0] if tags and _HEX.fullmatch(tags[0]) else None
