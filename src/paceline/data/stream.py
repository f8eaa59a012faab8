"""Streams: data whose samples can only be read one after another, addressed by their position.

Step t trains on samples t x size to (t + 1) x size - 1 of the stream, which starts again at its end.

Invariant: a sample is a function of its position: what the stream draws with `random`, `numpy.random` or
torch is seeded by the step, and a reader that has to go back starts from the beginning. So the position of
a run is its step, and a resumed run reads up to there. A stream that does not repeat (a network, a
generator of its own) is detected as far as its first sample shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from paceline.data.sample_order import SampleIndices
from paceline.data.sample_reader import seeded_generators
from paceline.data.work import split_evenly
from paceline.errors import DataError
from paceline.state.keys import key

_PLAIN = (str, bytes, int, float, bool, type(None))


def sample_digest(sample: Any) -> str:
    """Return a hash of the numbers, strings and tensors of a sample; of other values only their type."""
    leaves, shape = tree_flatten(sample)
    found = blake2b(str(shape).encode(), digest_size=16)
    for leaf in leaves:
        found.update(_bytes_of(leaf))
    return found.hexdigest()


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        kept = leaf.detach().cpu().contiguous()
        return (
            f"{kept.dtype}{tuple(kept.shape)}".encode() + kept.reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes()
    return (repr(leaf) if type(leaf) in _PLAIN else type(leaf).__name__).encode()


class StreamOrder:
    """Positions in a stream, batch by batch; see `BatchOrder`."""

    steps_per_epoch = 0

    def __init__(self, positions: StreamPositions) -> None:
        self._positions, self._size = positions, positions.size

    @property
    def about(self) -> str:
        return self._positions.about

    def fingerprint(self) -> str:
        return self._positions.fingerprint()

    def batch_size(self, step: int) -> int:
        return self._size

    def batch(self, step: int, part: range | None = None) -> SampleIndices:
        wanted = range(self._size) if part is None else part
        return np.arange(wanted.start, wanted.stop, dtype=np.int64) + step * self._size


class StreamPositions:
    """A stream as a `Source`: sample i is the one at position i of the endless stream.

    Args:
        stream: gives its samples anew at each `iter`; `set_epoch(n)` is called before the n-th time if there
            is one.
        size: samples a batch.
        parts: the stream is read in so many parts, one for each shard of a batch; 1: as a whole.
        seed: of the run.
    """

    def __init__(self, stream: Iterable[Any], size: int, parts: int, seed: int) -> None:
        self.stream, self.size, self._parts, self._seed = stream, size, parts, seed
        self._places = [split_evenly(size, parts, part) for part in range(parts)]
        self._cursors: dict[int, StreamCursor] = {}

    def __len__(self) -> int:
        """Samples of a batch: as many as a look at the data takes. Positions go on behind that."""
        return self.size

    def __getitem__(self, index: int) -> Any:
        step, place = divmod(index, self.size)
        part = next(k for k, places in enumerate(self._places) if place in places)
        return self._cursor(part).step(step)[place - self._places[part].start]

    @property
    def about(self) -> str:
        """What a user should know of how it is read."""
        how = (
            "every rank reads all of it and trains on its part"
            if self._parts == 1
            else f"it is read in {self._parts} parts, one for each shard of a batch, by the rank that runs it"
        )
        return (
            f"the data is a stream ({type(self.stream).__name__}), which keeps its own order and begins"
            f" again at its end; {how}"
        )

    def fingerprint(self) -> str:
        """Of the first sample of all.

        Raises:
            DataError: it is another one when the stream is read again.
        """
        once, again = (sample_digest(self._open(0).step(0)[0]) for _ in range(2))
        if once != again:
            raise DataError(
                "the stream has another first sample when it is read again, so no run could go on from a"
                " checkpoint",
                where=type(self.stream).__name__,
                next_step="let what it draws follow from torch's, NumPy's or Python's global generator, which"
                " are seeded here, and what changes with a pass from set_epoch(n)",
            )
        return once

    def _cursor(self, part: int) -> StreamCursor:
        if part not in self._cursors:
            self._cursors[part] = self._open(part)
        return self._cursors[part]

    def _open(self, part: int) -> StreamCursor:
        stream: Any = self.stream
        own = stream if self._parts == 1 else stream.shard(num_shards=self._parts, index=part)
        return StreamCursor(own, len(self._places[part]), key(self._seed, "stream", part))


class StreamCursor:
    """Reads one stream, or one part of it, a step at a time.

    Args:
        stream: see `StreamPositions`.
        count: samples a step.
        stream_key: seeds what the stream draws.
    """

    def __init__(self, stream: Iterable[Any], count: int, stream_key: int) -> None:
        self._stream, self._count, self._key = stream, count, stream_key
        self._numpy_bits = np.random.MT19937()
        self._at = self._epoch = -1
        self._samples: list[Any] = []
        self._rest: Iterator[Any] = iter(())

    def step(self, number: int) -> list[Any]:
        """The samples of a step; those of the last one are kept."""
        if number < self._at or not self._samples:
            self._rewind()
        for step in range(self._at + 1, number + 1):
            self._samples = []  # after an error it begins anew
            with seeded_generators(key(self._key, step), self._numpy_bits):
                self._samples = [self._next() for _ in range(self._count)]
            self._at = step
        return self._samples

    def _rewind(self) -> None:
        self._at = self._epoch = -1
        self._samples, self._rest = [], iter(())

    def _next(self) -> Any:
        for sample in self._rest:
            return sample
        self._epoch += 1
        set_epoch = getattr(self._stream, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        self._rest = iter(self._stream)
        for sample in self._rest:
            return sample
        return self._refuse_empty()

    def _refuse_empty(self) -> NoReturn:
        raise DataError(
            "the stream is empty: it ends before its first sample"
            if self._epoch == 0
            else f"the stream is empty when it is read for the {self._epoch + 1}. time",
            where=type(self._stream).__name__,
            next_step="give every iter() the samples from the first on; a part of a stream needs one too",
        )
