"""The order of samples that a sampler of `torch.utils.data` gives, epoch by epoch.

Invariant: the order of an epoch is a function of the seed and the epoch: the sampler is asked under
generators that are seeded by both, as `Order` is keyed. A sampler that keeps a generator of its own is
refused, since its order would depend on how often it was asked.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DistributedSampler

from paceline.data.order import Indices, Order
from paceline.data.reader import seeded
from paceline.errors import DataError
from paceline.keys import key


class SampledOrder:
    """Batches in the order of a sampler; see `Batches`.

    Args:
        sampler: gives indices; `set_epoch(n)` is called before each epoch if there is one.
        num_samples: of the data.
        size, drop_last, seed: see `Order`.
    Raises:
        DataError: the sampler cannot be asked twice, or gives no indices of this data.
    """

    def __init__(self, sampler: Any, num_samples: int, size: int, seed: int, *, drop_last: bool) -> None:
        _refuse(sampler)
        self._sampler, self._num_samples, self._seed = sampler, num_samples, seed
        self._places = Order(len(sampler), size, seed, shuffle=False, drop_last=drop_last)
        self._epoch, self._indices = -1, np.empty(0, dtype=np.int64)
        self._refuse_forgetful()

    @property
    def about(self) -> str:
        """See `Batches`."""
        name = type(self._sampler).__name__
        return f"every epoch has the samples that {name} gives, in its order; batch.shuffle has no say"

    @property
    def steps_per_epoch(self) -> int:
        """See `Batches`."""
        return self._places.steps_per_epoch

    def fingerprint(self) -> str:
        """See `Batches`; of the first epoch."""
        return blake2b(self._ask(0).tobytes(), digest_size=16).hexdigest()

    def batch_size(self, step: int) -> int:
        """See `Batches`."""
        return self._places.batch_size(step)

    def batch(self, step: int, part: range | None = None) -> Indices:
        """See `Batches`."""
        epoch = self._places.epoch_of(step)
        if epoch != self._epoch:
            self._indices, self._epoch = self._ask(epoch), epoch
        return self._indices[self._places.batch(step, part)]

    def _ask(self, epoch: int) -> Indices:
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        with seeded(key(self._seed, "sampler", epoch), np.random.MT19937()):
            found = np.fromiter(map(int, self._sampler), dtype=np.int64)
        if len(found) != len(self._places_of_epoch):
            raise self._wrong(f"gave {len(found)} indices and says that it has {len(self._places_of_epoch)}")
        if len(found) and not 0 <= found.min() <= found.max() < self._num_samples:
            raise self._wrong(f"gave the index {found.max()}, and there are {self._num_samples} samples")
        return found

    @property
    def _places_of_epoch(self) -> range:
        return range(self._places.num_samples)

    def _refuse_forgetful(self) -> None:
        if not np.array_equal(self._ask(0), self._ask(0)):
            raise self._wrong("gives another order when it is asked again under the same seed")

    def _wrong(self, what: str) -> DataError:
        return DataError(
            f"the sampler {what}",
            where=type(self._sampler).__name__,
            next_step="let it draw from torch's, NumPy's or Python's global generator, which are seeded here"
            " by the run's seed and the epoch",
        )


_NAMED = {
    DistributedSampler: "deals samples to ranks, which Paceline does: every sample would be dealt twice",
    BatchSampler: "gives batches, and batches are cut by batch.size and batch.drop_last",
}


def _refuse(sampler: Any) -> None:
    """Raises: DataError: it does what Paceline does, or its order is no function of seed and epoch."""
    why = next((text for kind, text in _NAMED.items() if isinstance(sampler, kind)), "")
    if not why and not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        why = "lacks __len__ or __iter__"
    if not why and getattr(sampler, "generator", None) is not None:
        why = "has a generator of its own, so its order would depend on how often it was asked"
    if why:
        raise DataError(
            f"the sampler {type(sampler).__name__} {why}",
            where="Task(sampler=...)",
            next_step="give one that yields indices, made without generator; batch.shuffle needs none",
        )
