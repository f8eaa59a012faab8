"""Turns a stream of micro-batches into a stream of batches, on time and in the given order.

Invariant: the batches, their order and the random numbers drawn for them do not depend on the number of
workers. Micro-batches are pulled lazily, never more than `prefetch * workers` ahead. No worker process is
left after `Stream.close()`, after the last batch or after an error. Built on `torch.utils.data.DataLoader`;
which samples form a micro-batch is decided elsewhere (`order.py`, `work.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from paceline.data.cache import SampleCache
from paceline.data.device import to_device
from paceline.data.produced import ProducedStream
from paceline.data.reader import Collate, MicroBatchReader, Reply, Request
from paceline.data.work import LoadedBatch, MicroBatch
from paceline.errors import DataError
from paceline.task import Source

if TYPE_CHECKING:
    from paceline.recipe import LoaderRecipe

_PARENT_POLL_SECONDS = 0.5
_LOOK_SECONDS = 1.0
"""After so long a stream that waits looks whether its workers live."""
_REAP_SECONDS = 0.5
_LATE = "DataLoader timed out"  # as PyTorch says it


class Loader:
    """Reads micro-batches of one source; opens streams, which own the worker processes.

    Args:
        source: map-style data; `__getitems__` (Hugging Face datasets, torch subsets) is used where it exists.
        collate: list of samples to batch; PyTorch's default if None.
        recipe: `workers` processes (0: read inline), `prefetch` micro-batches read ahead by each,
            `cache_bytes` of samples kept in all, divided among the workers. Workers and their caches live as
            long as the stream, so open one stream for many epochs; inline the cache lives as long as the
            loader.
        device: where batches go; pinned memory and copies that do not wait if it is a GPU.
        deadline_seconds: the longest wait for one batch from the workers.
    """

    def __init__(
        self,
        source: Source,
        collate: Collate | None,
        recipe: LoaderRecipe,
        device: torch.device,
        *,
        deadline_seconds: float = 120.0,
    ) -> None:
        self._source = source
        self._collate = collate or default_collate
        self._device = device
        self.deadline_seconds = deadline_seconds
        self.num_workers = recipe.workers
        self._prefetch = recipe.prefetch
        self._cache = SampleCache(recipe.cache_bytes // max(recipe.workers, 1))
        self.cache_hits = 0
        self.cache_lookups = 0

    def open(self, micro_batches: Iterable[MicroBatch]) -> Stream | ProducedStream:
        """Start reading, finitely or endlessly. Close the stream when done, or use it in a `with`."""
        cache = SampleCache(self._cache.capacity_bytes) if self.num_workers else self._cache
        reader = MicroBatchReader(self._source, self._collate, cache)
        if not self.num_workers and self._device.type != "cuda":
            return ProducedStream(self._read_here(reader, micro_batches))
        feed = _MicroBatchFeed(micro_batches)
        return Stream(self, feed, self._data_loader(reader, feed))

    def _read_here(
        self, reader: MicroBatchReader, micro_batches: Iterable[MicroBatch]
    ) -> Iterator[LoadedBatch]:
        """Each when it is asked for."""
        for micro_batch in micro_batches:
            batch = reader.read(micro_batch.indices.tolist(), micro_batch.key)
            self.cache_hits, self.cache_lookups = self._cache.hits, self._cache.lookups
            yield LoadedBatch(micro_batch, to_device(batch, self._device))

    def _data_loader(self, reader: MicroBatchReader, feed: _MicroBatchFeed) -> DataLoader[Reply]:
        return DataLoader(
            reader,
            sampler=feed,
            batch_size=None,  # a reply already is a batch
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            prefetch_factor=self._prefetch if self.num_workers else None,
            timeout=min(_LOOK_SECONDS, self.deadline_seconds) if self.num_workers else 0,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=_start_worker,
            multiprocessing_context=_start_method() if self.num_workers else None,
            generator=torch.Generator(),  # else DataLoader would draw from the global one
        )

    def _deliver(self, micro_batch: MicroBatch, reply: Reply) -> LoadedBatch:
        self.cache_hits += reply.hits
        self.cache_lookups += reply.lookups
        return LoadedBatch(micro_batch, to_device(reply.batch, self._device))


class Stream(Iterator[LoadedBatch]):
    """The loaded micro-batches in the order of their micro-batches. Not for use by several threads at once.

    Raises, from `next`:
        DataError: a sample cannot be read or collated (names its index), a worker process died, or no batch
            came within the deadline. The stream is closed by then.
    """

    def __init__(self, loader: Loader, feed: _MicroBatchFeed, batches: Iterable[Reply]) -> None:
        self._loader = loader
        self._feed = feed
        with _signals_kept():
            self._batches: Iterator[Reply] | None = iter(batches)  # starts the workers

    def __next__(self) -> LoadedBatch:
        if self._batches is None:
            raise StopIteration
        try:
            reply = self._wait(self._batches)
        except (RuntimeError, ConnectionError, EOFError) as error:  # DataLoader's: a worker died, or is late
            failure = self._failure(_death_of_worker(self._batches) or str(error) or type(error).__name__)
            self.close()
            raise failure from error
        except BaseException:  # the end of the micro-batches (StopIteration), or an interrupt
            self.close()
            raise
        micro_batch = self._feed.ahead.popleft()
        if reply.failure is not None:
            self.close()
            if reply.failure.__cause__ is None:
                reply.failure.add_note(reply.trace)
            raise reply.failure
        return self._loader._deliver(micro_batch, reply)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes, by force if they do not end by themselves; may be called twice."""
        batches, self._batches = self._batches, None
        if isinstance(batches, _MultiProcessingDataLoaderIter):
            batches._shutdown_workers()  # what `del` would do, but a traceback may still hold the iterator
            for worker in batches._workers:
                worker.kill()
                worker.join()

    def _wait(self, batches: Iterator[Reply]) -> Reply:
        """The next reply; PyTorch's own limit only lets it look at its workers now and then."""
        expires = time.monotonic() + self._loader.deadline_seconds
        while True:
            try:
                return next(batches)
            except RuntimeError as error:
                if not str(error).startswith(_LATE):
                    raise
                if time.monotonic() >= expires:
                    raise RuntimeError(f"no batch in {self._loader.deadline_seconds:g} s") from None

    def _failure(self, why: str) -> DataError:
        waited_for = f"step {self._feed.ahead[0].step}" if self._feed.ahead else "the first micro-batch"
        return DataError(
            f"the loader failed: {why}",
            where=f"waiting for {waited_for}, with {self._loader.num_workers} workers",
            next_step="set loader.workers = 0 to see it happen in the training process; "
            "if a sample just takes long, raise runtime.deadline_seconds",
        )


class _MicroBatchFeed:
    """Hands requests to the DataLoader and remembers, in order, the micro-batches they stand for."""

    def __init__(self, micro_batches: Iterable[MicroBatch]) -> None:
        self._micro_batches = micro_batches
        self.ahead: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[Request]:
        for micro_batch in self._micro_batches:
            self.ahead.append(micro_batch)
            yield Request(micro_batch.indices.tolist(), micro_batch.key)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Undo PyTorch's handler for the death of a child: it raises at any line, in a save or in a step."""
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)


def _death_of_worker(batches: Iterator[Reply]) -> str:
    """The signal that has ended a worker; empty if none has been ended by one."""
    workers = batches._workers if isinstance(batches, _MultiProcessingDataLoaderIter) else []
    wait([one.sentinel for one in workers], _REAP_SECONDS)  # what broke may be heard of before it has ended
    for one in workers:
        if one.exitcode is not None and one.exitcode < 0:
            name = signal.strsignal(-one.exitcode)
            hint = ": out of shared memory?" if -one.exitcode == signal.SIGBUS else ""
            return f"DataLoader worker (pid {one.pid}) is killed by signal: {name}{hint}"
    return ""


def _as_it_is(reply: Any) -> Any:
    return reply


def _start_method() -> str | None:
    """Fork where it is sound: tasks from a user's file, closures and memory maps then need no pickling."""
    return "fork" if sys.platform == "linux" else None


def _start_worker(worker_index: int) -> None:
    """Runs first in a worker. Ctrl-C reaches every process, but the parent decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, name=f"loader-{worker_index}-watch", daemon=True).start()


def _leave_with_parent() -> None:
    """End this worker when its parent was killed, even if the source blocks (PyTorch would not)."""
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(1)
