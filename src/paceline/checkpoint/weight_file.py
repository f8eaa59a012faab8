"""One safetensors file of a folder, read tensor by tensor: into a model, through a checksum, or both.

Invariant: beside the model there is a block of the file in memory (`BLOCK_BYTES`; of a remote one a few
copies); where a tensor of the model does not lie in one piece, that tensor once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoint.checksums import Checksum
from paceline.checkpoint.files import Files
from paceline.checkpoint.same_vocabulary import VOCABULARY
from paceline.checkpoint.tensor_file import Entry, entries_of, metadata_of

VALUES = "values_sha256"  # in the header of an own export: of names, types, shapes and bytes, by name
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # as the safetensors library has it


class WeightFile:
    """An open file.

    Args:
        checksum: of the whole file, if anybody knows it.

    Attributes:
        vocabulary: of the weights, if an export says it.
    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """

    def __init__(self, files: Files, name: str, checksum: Checksum | None) -> None:
        self._ranges, self.name = files.ranges(name), name
        with ExitStack() as stack:
            stack.callback(self._ranges.close)
            self._head = self._read_head()
            header = self._head[_LENGTH_BYTES:]
            self.entries = entries_of(header, self._ranges.num_bytes - len(self._head))
            self._require_no_gaps()
            said = metadata_of(header)
            self._checksum, self._values = checksum, said.get(VALUES)
            self.vocabulary = said.get(VOCABULARY, "")
            stack.pop_all()
        self.vouched = checksum.by if checksum else "the export" if self._values else None

    def close(self) -> None:
        """Nothing can be read any more."""
        self._ranges.close()

    def verify(self) -> None:
        """Read it once, if that is cheap and there is something to compare with.

        Raises:
            ValueError: it is not what was written.
        """
        if self._ranges.local and self.vouched:
            self._pour({}, check=True)

    def fill(self, own: Mapping[str, Tensor]) -> None:
        """Take over all values; what was not verified before is verified on the way.

        Args:
            own: the tensors of the model, by name, of the shapes of the file.
        Raises:
            ValueError: it is not what was written; then the model is spoilt.
        """
        self._pour(own, check=not self._ranges.local)

    def _pour(self, own: Mapping[str, Tensor], *, check: bool) -> None:
        whole = hashlib.sha256(self._head) if check and self._checksum else None
        values = hashlib.sha256() if check and self._values and not whole else None
        digest = whole or values
        for name, entry in self._in_order(by_name=values is not None):
            if values is not None:
                values.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
            target = _Target(own[name], entry) if name in own else None
            for block in self._ranges.blocks(len(self._head) + entry.begin, len(self._head) + entry.end):
                if digest is not None:
                    digest.update(block)
                if target is not None:
                    target.take(block)
            if target is not None:
                target.finish()
        if digest is not None:
            self._compare(digest.hexdigest())

    def _compare(self, found: str) -> None:
        written = self._checksum.sha256 if self._checksum else self._values
        if found != written:
            by = f" (by {self.vouched})" if self._checksum else ""
            said = f"SHA-256 {found[:12]}..., written was {str(written)[:12]}...{by}"
            raise ValueError(f"{self.name.partition('?')[0]} is damaged: {said}")

    def _in_order(self, *, by_name: bool) -> list[tuple[str, Entry]]:
        """By name as an export is hashed, else as they lie in the file."""
        if by_name:
            return sorted(self.entries.items())
        return sorted(self.entries.items(), key=lambda item: item[1].begin)

    def _read_head(self) -> bytes:
        length = int.from_bytes(b"".join(self._part(0, _LENGTH_BYTES)), "little")
        if length > min(_MOST_HEADER_BYTES, self._ranges.num_bytes - _LENGTH_BYTES):
            raise ValueError(f"it is no safetensors file: a header of {length} bytes")
        return b"".join(self._part(0, _LENGTH_BYTES + length))

    def _part(self, begin: int, end: int) -> Iterator[bytes]:
        return map(bytes, self._ranges.blocks(begin, end))

    def _require_no_gaps(self) -> None:
        """What no tensor covers would be in no checksum."""
        end = 0
        for name, entry in self._in_order(by_name=False):
            if entry.begin != end:
                raise ValueError(f"it is no safetensors file: a gap or an overlap before '{name[:80]}'")
            end = entry.end
        if end != self._ranges.num_bytes - len(self._head):
            raise ValueError("it is no safetensors file: bytes at its end belong to no tensor")


@dataclass
class _Target:
    """A tensor of the model that is filled block by block, in the order of its values."""

    tensor: Tensor
    entry: Entry
    taken: int = 0

    def __post_init__(self) -> None:
        self._flat = self._room().view(-1)

    def _room(self) -> Tensor:
        if self.tensor.is_contiguous():
            return self.tensor
        return torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device=self.tensor.device)

    def take(self, block: memoryview) -> None:
        """The values that follow."""
        values = torch.frombuffer(block, dtype=self.entry.dtype)
        self._flat[self.taken : self.taken + len(values)].copy_(values)
        self.taken += len(values)

    def finish(self) -> None:
        """All are there."""
        if not self.tensor.is_contiguous():
            self.tensor.copy_(self._flat.view(self.tensor.shape))
