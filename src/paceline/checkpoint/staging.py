"""The copy of this rank's part of the state: started at once, finished during the next forward and backward.

The buffer holds whole files with their headers, each from the start of a page, so that a disk can read them
from there.

Invariant: after `complete` or `settle` the buffer holds the state at the call of `begin`. What only the
optimizer changes is copied while training computes, and the optimizer waits for it; everything else (buffers,
residuals, tensors on another device) is copied before `begin` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from queue import Empty, Queue

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.disk.checksum import FileChecksum
from paceline.checkpoint.disk.direct_write import PAGE_BYTES
from paceline.checkpoint.safetensors_file import chunk_keys
from paceline.checkpoint.write_plan import FileDraft

_BLOCK_BYTES = 8 * 2**20

AllocateBuffer = Callable[[int], np.ndarray]
"""Returns memory of the given number of bytes, uint8."""


@dataclass(frozen=True)
class StagedFile:
    """A file that can be written.

    Args:
        draft: its name and tensors.
        content: its bytes, in order.
        begin: its offset in the buffer, if all of it lies there.
    """

    draft: FileDraft
    content: Sequence[np.ndarray]
    begin: int = 0

    def blocks(self) -> Iterator[memoryview]:
        """Yield its bytes in blocks."""
        for part in self.content:
            yield from (part.data[i : i + _BLOCK_BYTES] for i in range(0, part.nbytes, _BLOCK_BYTES))


def chunk_checksums(file: StagedFile) -> dict[str, str]:
    """Return the checksum of the bytes of each chunk of a file, by its name in the file."""
    draft = file.draft
    ends = [*accumulate((chunk.num_bytes for chunk in draft.chunks), initial=len(draft.header))]
    # A file in the buffer is one array; one that is written from tensors has an array for each of them.
    if len(file.content) == 1:
        arrays = [file.content[0][begin:end] for begin, end in pairwise(ends)]
    else:
        arrays = [*file.content[1:]]
    checksums: dict[str, str] = {}
    for key, array in zip(chunk_keys(draft.chunks), arrays, strict=True):
        checksum = FileChecksum()
        checksum.update(array.data)
        checksums[key] = checksum.text()
    return checksums


class StagingBuffer:
    """A host buffer that is kept from save to save, because touching new memory costs more than copying.

    Args:
        allocate: returns the buffer.
    """

    def __init__(
        self, allocate: AllocateBuffer = lambda num_bytes: np.empty(num_bytes, dtype=np.uint8)
    ) -> None:
        self._allocate = allocate
        self._buffer = np.empty(0, dtype=np.uint8)
        self._to_copy: Queue[tuple[np.ndarray, np.ndarray]] = Queue()
        self.files: list[StagedFile] = []

    def begin(self, drafts: Sequence[FileDraft], tensors: Sequence[Tensor], steady: Sequence[bool]) -> None:
        """Copy what can change at any time; remember the rest until `complete` or `settle`.

        Args:
            drafts: the files.
            tensors: of all files, in their order.
            steady: by tensor, whether only the optimizer changes it.
        """
        begins = _lay_out(drafts)
        if begins[-1] > self._buffer.nbytes:
            self._buffer = np.empty(0, dtype=np.uint8)  # free the old one first: both would not fit
            self._buffer = self._allocate(begins[-1])
        tensors_left = iter(zip(tensors, steady, strict=True))
        self.files = [
            self._stage(draft, begin, tensors_left) for draft, begin in zip(drafts, begins, strict=False)
        ]

    def use_tensor_memory(self, drafts: Sequence[FileDraft], tensors: Sequence[Tensor]) -> None:
        """Write from the tensors themselves, which do not change until all is written."""
        tensors_left = iter(tensors)
        self.files = [
            StagedFile(draft, [_header_of(draft), *(_on_host(next(tensors_left)) for _ in draft.chunks)])
            for draft in drafts
        ]

    def complete(self) -> None:
        """Copy the rest while training computes; returns when nothing is left."""
        self._copy(np.copyto)  # releases the GIL
        # The other thread may still be copying a block that it has taken from the queue.
        self._to_copy.join()

    @property
    def settled(self) -> bool:
        """Return whether nothing is left to copy."""
        return not self._to_copy.unfinished_tasks

    def settle(self) -> None:
        """Copy what is left with all threads of this process, because the state is about to change."""
        self._copy(lambda place, values: torch.from_numpy(place).copy_(torch.from_numpy(values)))
        self._to_copy.join()

    def release(self) -> None:
        """Drop the files of a save that is written, with the memory of tensors."""
        self.files = []

    def _stage(self, draft: FileDraft, begin: int, tensors_left: Iterator[tuple[Tensor, bool]]) -> StagedFile:
        header, offset = _header_of(draft), begin
        self._buffer[offset : offset + header.nbytes] = header
        offset += header.nbytes
        for _ in draft.chunks:
            tensor, is_steady = next(tensors_left)
            values = _on_host(tensor)
            # Only a view can be copied later; a copy from another device already holds the present values.
            if is_steady and values.ctypes.data == tensor.data_ptr():
                self._copy_later(self._buffer[offset : offset + values.nbytes], values)
            else:
                self._buffer[offset : offset + values.nbytes] = values
            offset += values.nbytes
        return StagedFile(draft, [self._buffer[begin:offset]], begin)

    def _copy_later(self, target: np.ndarray, values: np.ndarray) -> None:
        for i in range(0, values.nbytes, _BLOCK_BYTES):
            self._to_copy.put((target[i : i + _BLOCK_BYTES], values[i : i + _BLOCK_BYTES]))

    def _copy(self, copy: Callable[[np.ndarray, np.ndarray], object]) -> None:
        with suppress(Empty):
            while True:
                target, values = self._to_copy.get_nowait()
                try:
                    copy(target, values)
                finally:
                    self._to_copy.task_done()


def _lay_out(drafts: Sequence[FileDraft]) -> list[int]:
    """Return the offset of each file in the buffer, and the end of the last one."""
    begins = [0]
    for draft in drafts:
        begins.append(begins[-1] + -(-draft.num_bytes // PAGE_BYTES) * PAGE_BYTES)
    return begins


def _header_of(draft: FileDraft) -> np.ndarray:
    return np.frombuffer(draft.header, dtype=np.uint8)


def _on_host(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor, uint8; a view of it if it is contiguous and on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def optimizer_addresses(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the addresses of what only the optimizer's step changes: its parameters and their moments."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [v for p in parameters for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v)]
    return {t.data_ptr() for t in [*parameters, *moments]}
