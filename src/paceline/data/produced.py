"""Batches that somebody makes when they are asked for: an actor, a simulation, a generator.

Invariant: nothing is made ahead of time, so what is made can follow the weights as they are at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from paceline.data.device import to_device
from paceline.data.work import LoadedBatch, MicroBatch


class Produced:
    """Opens streams of batches that are made one by one.

    Args:
        make: the batch of a micro-batch, a function of it (its key, its version) and of the weights.
        device: where batches go.
    """

    cache_hits = cache_lookups = 0

    def __init__(self, make: Callable[[MicroBatch], Any], device: torch.device) -> None:
        self._make, self._device = make, device

    def open(self, micro_batches: Iterable[MicroBatch]) -> ProducedStream:
        """See `Reader`."""
        return ProducedStream(
            LoadedBatch(micro_batch, to_device(self._make(micro_batch), self._device))
            for micro_batch in micro_batches
        )


class ProducedStream(Iterator[LoadedBatch]):
    """Makes the next batch when it is asked for."""

    def __init__(self, batches: Iterator[LoadedBatch]) -> None:
        self._batches: Iterator[LoadedBatch] = batches

    def __next__(self) -> LoadedBatch:
        return next(self._batches)

    def __enter__(self) -> ProducedStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """See `Stream`."""
        self._batches = iter(())
