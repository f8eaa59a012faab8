"""Bytes of the tensors that are alive at a time, as operations make them and Python lets go of them.

Every operation of PyTorch passes here, forward or backward, and says which memory it has made; the memory
itself says when it goes. Under fake tensors nothing of it exists, and the numbers are the same. Not seen:
what a kernel takes and gives back inside one operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts memory that is made inside.

    Args:
        there: bytes that were alive before.
    Attributes:
        now: bytes that are alive.
        place: where in the model this is, as `at` was told.
        peaks: by (place, bytes of gradients that were complete), the most bytes alive since `begin`.
        handed: by the same, for each gradient as it became complete, what was alive then and its bytes.
    """

    def __init__(self, there: int = 0) -> None:
        super().__init__()
        self.now, self.place = there, 0
        self.peaks = {(0, 0): there}
        self.handed: dict[tuple[int, int], tuple[int, int]] = {}
        self._completed = 0
        self._sizes: dict[int, int] = {}
        self._outside: set[int] = set()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Memory that is counted otherwise, as that of parameters."""
        self._outside |= {t.untyped_storage()._cdata for t in tensors}

    def begin(self) -> None:
        """Look for peaks from here on."""
        self._completed, self.peaks, self.handed = 0, {(self.place, 0): self.now}, {}

    def at(self, place: int) -> None:
        """From here on it is another place of the model."""
        self.place = place
        self._note()

    def complete(self, grad: Tensor) -> None:
        """A gradient is complete; it is counted apart from now on."""
        place = grad.untyped_storage()._cdata
        self.now -= self._sizes.pop(place, 0)
        self._outside.add(place)
        size = grad.numel() * grad.element_size()
        self._completed += size
        self.handed[self.place, self._completed] = self.now, size
        self._note()

    @property
    def peak(self) -> int:
        """The most that was alive at a time since `begin`, without gradients that were complete."""
        return max(self.peaks.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default and not any(isinstance(x, FakeTensor) for x in args):
            with unset_fake_temporarily():  # states of random numbers are real, and are compared
                return func(*args)
        found = func(*args, **(kwargs or {}))
        for t in tree_iter(found):
            if isinstance(t, Tensor):
                self.add(t)
        return found

    def add(self, t: Tensor) -> None:
        """Count the memory of a tensor, unless it is counted already."""
        storage = t.untyped_storage()
        place = storage._cdata
        if place in self._sizes or place in self._outside:
            return
        self._sizes[place] = storage.nbytes()
        self.now += self._sizes[place]
        weakref.finalize(storage, self._gone, place)
        self._note()

    def _gone(self, place: int) -> None:
        self.now -= self._sizes.pop(place, 0)
        self._outside.discard(place)  # the next memory may have its address

    def _note(self) -> None:
        here = self.place, self._completed
        self.peaks[here] = max(self.now, self.peaks.get(here, 0))
