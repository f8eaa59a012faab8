"""A cache of samples that are costly to read: least recently used, bounded in bytes.

Invariant: the samples held never count for more than `capacity_bytes`. A sample that comes out is the very
object that went in, so collate functions must not modify samples in place. A source that draws random numbers
is not cached: its first draw would be repeated for ever, and which draw that is would depend on who read it
first (the reader refuses it).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

MISSING = object()


class SampleCache:
    """Samples by index, least recently used out first; `hits` and `lookups` count since it was made."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self.hits = 0
        self.lookups = 0
        self._samples: OrderedDict[int, tuple[Any, int]] = OrderedDict()

    def get(self, index: int) -> Any:
        """The sample, or MISSING; nothing is counted when the cache has no capacity."""
        if not self.capacity_bytes:
            return MISSING
        self.lookups += 1
        if index not in self._samples:
            return MISSING
        self.hits += 1
        self._samples.move_to_end(index)
        return self._samples[index][0]

    def put(self, index: int, sample: Any) -> None:
        """Keep a sample that `get` missed; one larger than the whole cache is not kept."""
        num_bytes = size_bytes(sample) if self.capacity_bytes else 0
        if not 0 < num_bytes <= self.capacity_bytes:
            return
        self._samples[index] = (sample, num_bytes)
        self.held_bytes += num_bytes
        while self.held_bytes > self.capacity_bytes:
            _, (_, released_bytes) = self._samples.popitem(last=False)
            self.held_bytes -= released_bytes


def size_bytes(sample: Any) -> int:
    """Bytes that a sample holds: the payload of tensors and arrays, and of containers what they contain."""
    own_bytes = sys.getsizeof(sample, 64)
    if isinstance(sample, Mapping):
        return own_bytes + sum(size_bytes(value) for value in sample.values())
    if isinstance(sample, list | tuple):
        return own_bytes + sum(map(size_bytes, sample))
    num_bytes = getattr(sample, "nbytes", 0)  # torch.Tensor, numpy.ndarray, memoryview
    return own_bytes + (num_bytes if isinstance(num_bytes, int) else 0)
