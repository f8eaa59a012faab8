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
    digest = blake2b(str(shape).encode(), digest_size=16)
    for leaf in leaves:
        digest.update(_bytes_of(leaf))
    return digest.hexdigest()


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        values = leaf.detach().cpu().contiguous()
        return (
            f"{values.dtype}{tuple(values.shape)}".encode()
            + values.reshape(-1).view(torch.uint8).numpy().tobytes()
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
    """A stream as map-style data: sample i is at position i of the endlessly repeated stream.

    Args:
        stream: yields its samples from the first one at each `iter`; its `set_epoch(n)`, if it has one, is
            called before pass n.
        size: samples per batch.
        parts: number of parts in which the stream is read, one for each shard of a batch; 1: as a whole.
        seed: of the run.
    """

    def __init__(self, stream: Iterable[Any], size: int, parts: int, seed: int) -> None:
        self.stream, self.size, self._parts, self._seed = stream, size, parts, seed
        self._places = [split_evenly(size, parts, part) for part in range(parts)]
        self._cursors: dict[int, StreamCursor] = {}

    def __len__(self) -> int:
        """Return the samples of a batch, which is as many as an inspection of the data needs.

        Larger positions are valid as well: the stream is endless.
        """
        return self.size

    def __getitem__(self, index: int) -> Any:
        step, position = divmod(index, self.size)
        part = next(k for k, positions in enumerate(self._places) if position in positions)
        return self._cursor(part).step(step)[position - self._places[part].start]

    @property
    def about(self) -> str:
        """Return one sentence for users about how the stream is read."""
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
        """Return the hash of the first sample.

        Raises:
            DataError: the first sample differs when the stream is read again.
        """
        # A new cursor each time, so that the stream is really read twice.
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
        shard = stream if self._parts == 1 else stream.shard(num_shards=self._parts, index=part)
        return StreamCursor(shard, len(self._places[part]), key(self._seed, "stream", part))


class StreamCursor:
    """A reader of one stream, or of one part of it, step by step.

    Args:
        stream: see `StreamPositions`.
        count: samples per step.
        stream_key: the seed of random numbers that the stream draws.
    """

    def __init__(self, stream: Iterable[Any], count: int, stream_key: int) -> None:
        self._stream, self._count, self._key = stream, count, stream_key
        self._numpy_bits = np.random.MT19937()
        self._step = self._epoch = -1
        self._samples: list[Any] = []
        self._iterator: Iterator[Any] = iter(())

    def step(self, number: int) -> list[Any]:
        """Return the samples of a step; those of the last step are cached."""
        # A stream cannot go back, so an earlier step is reached from the beginning.
        if number < self._step or not self._samples:
            self._rewind()
        for step in range(self._step + 1, number + 1):
            self._samples = []  # after an error it begins anew
            with seeded_generators(key(self._key, step), self._numpy_bits):
                self._samples = [self._next() for _ in range(self._count)]
            self._step = step
        return self._samples

    def _rewind(self) -> None:
        self._step = self._epoch = -1
        self._samples, self._iterator = [], iter(())

    def _next(self) -> Any:
        # A `for` that returns takes one sample, and does nothing at the end of a pass.
        for sample in self._iterator:
            return sample
        self._epoch += 1
        set_epoch = getattr(self._stream, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        self._iterator = iter(self._stream)
        for sample in self._iterator:
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
