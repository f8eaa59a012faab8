"""The copy of this rank's share: begun at once, finished behind the next forward and backward.

Invariant: after `complete` or `settle` the buffer holds the state of the step at which `begin` was called.
What only the optimizer changes is copied beside the training, and the optimizer waits for it; everything else
(buffers, residuals, what lives on another device) is copied before `begin` returns.

In the buffer lie whole files, headers too, each from a page's beginning on: a disk can read them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.disk.direct_write import PAGE_BYTES
from paceline.checkpoint.write_plan import FileDraft

_BLOCK_BYTES = 8 * 2**20

AllocateBuffer = Callable[[int], np.ndarray]
"""Makes memory of so many bytes, uint8."""


@dataclass(frozen=True)
class StagedFile:
    """A file that can be written.

    Args:
        draft: what it is called and holds.
        content: its bytes, in order.
        begin: where it begins in the buffer, if all of it lies there.
    """

    draft: FileDraft
    content: Sequence[np.ndarray]
    begin: int = 0

    def blocks(self) -> Iterator[memoryview]:
        """Its bytes, in blocks."""
        for part in self.content:
            yield from (part.data[i : i + _BLOCK_BYTES] for i in range(0, part.nbytes, _BLOCK_BYTES))


class StagingBuffer:
    """A host buffer that is kept from save to save: touching new memory costs more than copying.

    Args:
        allocate: makes the buffer.
    """

    def __init__(
        self, allocate: AllocateBuffer = lambda num_bytes: np.empty(num_bytes, dtype=np.uint8)
    ) -> None:
        self._allocate = allocate
        self._buffer = np.empty(0, dtype=np.uint8)
        self._rest: Queue[tuple[np.ndarray, np.ndarray]] = Queue()
        self.files: list[StagedFile] = []

    def begin(self, drafts: Sequence[FileDraft], tensors: Sequence[Tensor], steady: Sequence[bool]) -> None:
        """Copy what may change at any time; remember what is steady until the next update.

        Args:
            drafts: the files.
            tensors: of all files, in their order.
            steady: by tensor, whether only the optimizer changes it.
        """
        begins = _lay_out(drafts)
        if begins[-1] > self._buffer.nbytes:
            self._buffer = np.empty(0, dtype=np.uint8)  # the old one is not needed beside the new one
            self._buffer = self._allocate(begins[-1])
        rest = iter(zip(tensors, steady, strict=True))
        self.files = [self._stage(draft, begin, rest) for draft, begin in zip(drafts, begins, strict=False)]

    def borrow(self, drafts: Sequence[FileDraft], tensors: Sequence[Tensor]) -> None:
        """Take the memory of the tensors themselves: nobody changes them before all is written."""
        rest = iter(tensors)
        self.files = [
            StagedFile(draft, [_header_of(draft), *(_on_host(next(rest)) for _ in draft.chunks)])
            for draft in drafts
        ]

    def complete(self) -> None:
        """Copy the rest, beside the training; returns when nothing is left."""
        self._copy(np.copyto)  # without Python's lock
        self._rest.join()

    @property
    def settled(self) -> bool:
        """Whether nothing is left to copy."""
        return not self._rest.unfinished_tasks

    def settle(self) -> None:
        """The state is about to change: copy what is left, with all threads of this process."""
        self._copy(lambda place, values: torch.from_numpy(place).copy_(torch.from_numpy(values)))
        self._rest.join()

    def give_back(self) -> None:
        """The save is written; release borrowed memory."""
        self.files = []

    def _stage(self, draft: FileDraft, begin: int, rest: Iterator[tuple[Tensor, bool]]) -> StagedFile:
        header, place = _header_of(draft), begin
        self._buffer[place : place + header.nbytes] = header
        place += header.nbytes
        for _ in draft.chunks:
            tensor, is_steady = next(rest)
            values = _on_host(tensor)
            if is_steady and values.ctypes.data == tensor.data_ptr():
                self._later(self._buffer[place : place + values.nbytes], values)
            else:
                self._buffer[place : place + values.nbytes] = values
            place += values.nbytes
        return StagedFile(draft, [self._buffer[begin:place]], begin)

    def _later(self, place: np.ndarray, values: np.ndarray) -> None:
        for i in range(0, values.nbytes, _BLOCK_BYTES):
            self._rest.put((place[i : i + _BLOCK_BYTES], values[i : i + _BLOCK_BYTES]))

    def _copy(self, copy: Callable[[np.ndarray, np.ndarray], object]) -> None:
        with suppress(Empty):
            while True:
                place, values = self._rest.get_nowait()
                try:
                    copy(place, values)
                finally:
                    self._rest.task_done()


def _lay_out(drafts: Sequence[FileDraft]) -> list[int]:
    """Where each file begins in the buffer, and where the last one ends."""
    begins = [0]
    for draft in drafts:
        begins.append(begins[-1] + -(-draft.num_bytes // PAGE_BYTES) * PAGE_BYTES)
    return begins


def _header_of(draft: FileDraft) -> np.ndarray:
    return np.frombuffer(draft.header, dtype=np.uint8)


def _on_host(tensor: Tensor) -> np.ndarray:
    """The values of a tensor, uint8 [num_bytes]; its own memory if that is contiguous and on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def optimizer_addresses(optimizer: torch.optim.Optimizer) -> set[int]:
    """Addresses of what only the optimizer's step changes: its parameters and their moments."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [v for p in parameters for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v)]
    return {t.data_ptr() for t in [*parameters, *moments]}
