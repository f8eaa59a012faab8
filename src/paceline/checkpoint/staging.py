"""The copy of this rank's share: begun at once, finished behind the next forward and backward.

Invariant: `ready` is set only when the buffer holds the state of the step at which `begin` was called. What
only the optimizer changes is copied in the background, and the optimizer waits for it; everything else
(buffers, residuals, what lives on another device) is copied before `begin` returns.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_BLOCK_BYTES = 8 * 2**20


class Staging:
    """A host buffer that is kept from save to save: touching new memory costs more than copying."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.uint8)
        self._rest: list[tuple[int, np.ndarray]] = []
        self._parts: list[np.ndarray] = []
        self.ready = threading.Event()
        self.ready.set()

    def begin(self, tensors: Sequence[Tensor], steady: Sequence[bool]) -> None:
        """Copy what may change at any time; remember what is steady until the next update.

        Args:
            tensors: in the order of the file.
            steady: by tensor, whether only the optimizer changes it.
        """
        sizes = [t.numel() * t.element_size() for t in tensors]
        if sum(sizes) > self._buffer.nbytes:
            self._buffer = np.empty(sum(sizes), dtype=np.uint8)
        self.ready.clear()
        end, self._rest = 0, []
        for tensor, size, waits in zip(tensors, sizes, steady, strict=True):
            in_place = waits and tensor.device.type == "cpu" and tensor.is_contiguous()
            if in_place:
                self._rest.append((end, _bytes_of(tensor)))
            elif size:
                self._buffer[end : end + size] = _bytes_of(tensor.cpu().contiguous())
            end += size
        self._parts = [self._buffer[:end]]

    def borrow(self, tensors: Sequence[Tensor]) -> None:
        """Take the memory of the tensors themselves: nobody changes them before all is written."""
        self._parts = [_bytes_of(tensor.cpu().contiguous()) for tensor in tensors]

    def complete(self) -> None:
        """Copy the rest, and let the optimizer go on; called in the background."""
        try:
            for begin, values in self._rest:
                np.copyto(self._buffer[begin : begin + values.nbytes], values)  # without Python's lock
        finally:
            self._rest = []
            self.ready.set()

    def blocks(self, begin: int, end: int) -> list[memoryview]:
        """The bytes from `begin` to `end`, in blocks."""
        found: list[memoryview] = []
        place = 0
        for part in self._parts:
            first, last = max(begin - place, 0), min(end - place, part.nbytes)
            found += [part.data[i : min(i + _BLOCK_BYTES, last)] for i in range(first, last, _BLOCK_BYTES)]
            place += part.nbytes
        return found

    def give_back(self) -> None:
        """The save is written; release borrowed memory."""
        self._parts = []


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor on the host, uint8 [num_bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
