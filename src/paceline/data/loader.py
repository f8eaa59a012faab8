"""Loading of micro-batches: in the training process, in worker processes, or made on request.

A `SampleLoader` turns a stream of micro-batches into a stream of batches on the device, in the given order.
`GeneratedBatches` makes a batch when it is requested, for an actor, a simulation or a generator: nothing is
made ahead of time, so it can use the current weights.

Invariant: the batches, their order and the random numbers drawn for them do not depend on the number of
workers. Micro-batches are read at most `prefetch * workers` ahead. No worker process is left after
`LoaderStream.close()`, after the last batch or after an error. Built on `torch.utils.data.DataLoader`;
which samples form a micro-batch is decided elsewhere (`sample_order`, `work`).
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from paceline.data.sample_reader import CollateFunction, MicroBatchReader, ReadReply, ReadRequest, SampleCache
from paceline.data.work import LoadedBatch, MicroBatch
from paceline.errors import DataError
from paceline.observe.file_writing import warn_on_stderr
from paceline.observe.process_info import is_stopped
from paceline.task import SampleSource, Task

if TYPE_CHECKING:
    from paceline.recipe.tables import LoaderRecipe

_SEQUENCES = (list, tuple)


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch to `device`; values that are no tensors, or are there already, are kept.

    Copies to a GPU are asynchronous: from pinned memory they overlap with work that was queued before.

    Args:
        batch: a tensor, or nested mappings, lists, tuples and named tuples of tensors; also any object with a
            method `to(device)` (a PackedSequence, a tokenizer's BatchEncoding).
        device: of the model.
    """
    if isinstance(batch, Tensor):
        is_there = type(batch) is Tensor and batch.device == device
        return batch if is_there else batch.to(device, non_blocking=device.type == "cuda")
    if isinstance(batch, _SEQUENCES) and not hasattr(batch, "to"):
        items = [to_device(item, device) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return _move_mapping(batch, device)
    move = getattr(batch, "to", None)
    return move(device) if callable(move) else batch


def _move_mapping(batch: Mapping[Any, Any], device: torch.device) -> Mapping[Any, Any]:
    items = {name: to_device(item, device) for name, item in batch.items()}
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return items
    clone = copy.copy(batch)  # a subclass may have attributes besides its items
    clone.update(items)
    return clone


def collate_samples(task: Task, samples: list[Any], device: torch.device) -> Any:
    """Collate samples to a batch for the task's loss."""
    return to_device((task.collate or default_collate)(samples), device)


class GeneratedBatches:
    """A `BatchReader` whose batches are made on request.

    Args:
        make: makes the batch of a micro-batch from its key, its version and the current weights.
        device: of the batches.
    """

    cache_hits = cache_lookups = 0

    def __init__(self, make: Callable[[MicroBatch], Any], device: torch.device) -> None:
        self._make, self._device = make, device

    def open(self, micro_batches: Iterable[MicroBatch]) -> LazyBatchStream:
        return LazyBatchStream(
            LoadedBatch(micro_batch, to_device(self._make(micro_batch), self._device))
            for micro_batch in micro_batches
        )


class LazyBatchStream(Iterator[LoadedBatch]):
    """A stream that makes each batch on request."""

    def __init__(self, batches: Iterator[LoadedBatch]) -> None:
        self._batches: Iterator[LoadedBatch] = batches

    def __next__(self) -> LoadedBatch:
        return next(self._batches)

    def __enter__(self) -> LazyBatchStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._batches = iter(())


_PARENT_POLL_SECONDS = 0.5
_WORKER_CHECK_SECONDS = 1.0
"""Interval in which a waiting stream checks that its workers are alive."""
_REAP_SECONDS = 0.5
_TIMEOUT_MESSAGE = "DataLoader timed out"  # the message of PyTorch


class SampleLoader:
    """A reader of the micro-batches of one source; its streams own the worker processes.

    Args:
        source: map-style data; `__getitems__` (Hugging Face datasets, torch subsets) is used if it exists.
        collate: list of samples to batch; PyTorch's default if None.
        recipe: `workers` processes (0: read inline), `prefetch` micro-batches read ahead by each,
            `cache_bytes` of samples kept in all, divided among the workers. Workers and their caches live as
            long as the stream, so open one stream for many epochs; inline the cache lives as long as the
            loader.
        device: of the batches; for a GPU with pinned memory and asynchronous copies.
        deadline_seconds: the longest wait for one batch from the workers.
    """

    def __init__(
        self,
        source: SampleSource,
        collate: CollateFunction | None,
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

    def open(self, micro_batches: Iterable[MicroBatch]) -> LoaderStream | LazyBatchStream:
        """Start to read micro-batches, which may be endless; close the stream, or use it in a `with`."""
        # Workers get a copy of their cache at the start, so each stream has its own.
        cache = SampleCache(self._cache.capacity_bytes) if self.num_workers else self._cache
        reader = MicroBatchReader(self._source, self._collate, cache)
        # For a GPU even reading in this process goes through DataLoader, which pins the memory.
        if not self.num_workers and self._device.type != "cuda":
            return LazyBatchStream(self._read_inline(reader, micro_batches))
        feed = _RequestSampler(micro_batches)
        return LoaderStream(self, feed, self._data_loader(reader, feed))

    def _read_inline(
        self, reader: MicroBatchReader, micro_batches: Iterable[MicroBatch]
    ) -> Iterator[LoadedBatch]:
        for micro_batch in micro_batches:
            batch = reader.read(*_request(micro_batch))
            self.cache_hits, self.cache_lookups = self._cache.hits, self._cache.lookups
            yield LoadedBatch(micro_batch, to_device(batch, self._device))

    def _data_loader(self, reader: MicroBatchReader, feed: _RequestSampler) -> DataLoader[ReadReply]:
        return DataLoader(
            reader,
            sampler=feed,
            batch_size=None,  # a reply is a batch already
            collate_fn=_identity,
            num_workers=self.num_workers,
            prefetch_factor=self._prefetch if self.num_workers else None,
            timeout=min(_WORKER_CHECK_SECONDS, self.deadline_seconds) if self.num_workers else 0,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=_start_worker,
            multiprocessing_context=_start_method() if self.num_workers else None,
            generator=torch.Generator(),  # otherwise DataLoader draws from the global generator
        )

    def _deliver(self, micro_batch: MicroBatch, reply: ReadReply) -> LoadedBatch:
        self.cache_hits += reply.hits
        self.cache_lookups += reply.lookups
        return LoadedBatch(micro_batch, to_device(reply.batch, self._device))


class LoaderStream(Iterator[LoadedBatch]):
    """A stream of loaded batches in the order of their micro-batches; not thread-safe.

    Raises, from `next`:
        DataError: a sample cannot be read or collated (names its index), a worker process died, or no batch
            came within the deadline. The stream is closed first.
    """

    def __init__(self, loader: SampleLoader, feed: _RequestSampler, batches: Iterable[ReadReply]) -> None:
        self._loader = loader
        self._feed = feed
        with _keep_signal_handler():
            self._batches: Iterator[ReadReply] | None = iter(batches)  # starts the workers

    def __next__(self) -> LoadedBatch:
        if self._batches is None:
            raise StopIteration
        try:
            reply = self._wait(self._batches)
        except (RuntimeError, ConnectionError, EOFError) as error:  # of DataLoader: a worker died, or is late
            failure = self._failure(_worker_death(self._batches) or str(error) or type(error).__name__)
            self.close()
            raise failure from error
        except BaseException:  # the end of the micro-batches (StopIteration), or an interrupt
            self.close()
            raise
        micro_batch = self._feed.ahead.popleft()
        if reply.failure is not None:
            self.close()
            # An error that was sent by another process has lost its cause, so its trace becomes a note.
            if reply.failure.__cause__ is None:
                reply.failure.add_note(reply.trace)
            raise reply.failure
        return self._loader._deliver(micro_batch, reply)

    def __enter__(self) -> LoaderStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes, and kill those that do not end; can be called twice."""
        batches, self._batches = self._batches, None
        if isinstance(batches, _MultiProcessingDataLoaderIter):
            batches._shutdown_workers()  # `del` would do it, but a traceback may still refer to the iterator
            for worker in batches._workers:
                # A worker that is blocked in the source does not react to the request to end.
                worker.kill()
                worker.join()

    def _wait(self, batches: Iterator[ReadReply]) -> ReadReply:
        """Return the next reply. PyTorch's timeout only makes it check its workers regularly."""
        expires, warned = time.monotonic() + self._loader.deadline_seconds, ""
        while True:
            try:
                return next(batches)
            except RuntimeError as error:
                # PyTorch raises a plain RuntimeError, so only its message tells a time-out from a crash.
                if not str(error).startswith(_TIMEOUT_MESSAGE):
                    raise
                stopped = _describe_stopped_workers(batches)
                if time.monotonic() >= expires:
                    why = f": {stopped}" if stopped else ""
                    raise RuntimeError(f"no batch in {self._loader.deadline_seconds:g} s{why}") from None
                if stopped and stopped != warned:
                    warn_on_stderr(f"{stopped}; the loader waits {self._loader.deadline_seconds:g} s at most")
                    warned = stopped

    def _failure(self, why: str) -> DataError:
        waited_for = f"step {self._feed.ahead[0].step}" if self._feed.ahead else "the first micro-batch"
        return DataError(
            f"the loader failed: {why}",
            where=f"waiting for {waited_for}, with {self._loader.num_workers} workers",
            next_step="set loader.workers = 0 to reproduce it in the training process;"
            " if samples take long to read, raise runtime.deadline_seconds",
        )


class _RequestSampler:
    """A sampler that gives requests to the DataLoader, and keeps the micro-batches of those in flight."""

    def __init__(self, micro_batches: Iterable[MicroBatch]) -> None:
        self._micro_batches = micro_batches
        self.ahead: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[ReadRequest]:
        for micro_batch in self._micro_batches:
            self.ahead.append(micro_batch)
            yield _request(micro_batch)


def _request(micro_batch: MicroBatch) -> ReadRequest:
    return ReadRequest(micro_batch.indices.tolist(), micro_batch.key, (micro_batch.seed, micro_batch.step))


@contextmanager
def _keep_signal_handler() -> Iterator[None]:
    """Undo PyTorch's handler for the death of a child: it raises at any line, in a save or in a step."""
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)


def _worker_death(batches: Iterator[ReadReply]) -> str:
    """Return which worker was killed by which signal; empty if none was."""
    workers = batches._workers if isinstance(batches, _MultiProcessingDataLoaderIter) else []
    wait([worker.sentinel for worker in workers], _REAP_SECONDS)  # its pipe may break before it has ended
    for worker in workers:
        if worker.exitcode is not None and worker.exitcode < 0:
            name = signal.strsignal(-worker.exitcode)
            hint = ": out of shared memory?" if -worker.exitcode == signal.SIGBUS else ""
            return f"DataLoader worker (pid {worker.pid}) is killed by signal: {name}{hint}"
    return ""


def _describe_stopped_workers(batches: Iterator[ReadReply]) -> str:
    """Return which workers a signal has stopped, and can continue; empty if none is."""
    workers = batches._workers if isinstance(batches, _MultiProcessingDataLoaderIter) else []
    stopped = [f"(process {worker.pid})" for worker in workers if worker.pid and is_stopped(worker.pid)]
    if not stopped:
        return ""
    names = (
        f"loader worker {stopped[0]} is" if len(stopped) == 1 else f"loader workers {', '.join(stopped)} are"
    )
    return f"{names} stopped by a signal (SIGSTOP?)"


def _identity(reply: Any) -> Any:
    return reply


def _start_method() -> str | None:
    """Return "fork" on Linux: tasks from a user's file, closures and memory maps need no pickling then."""
    return "fork" if sys.platform == "linux" else None


def _start_worker(worker_index: int) -> None:
    """Initialise a worker: it ignores Ctrl-C, which the parent handles, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name=f"loader-{worker_index}-watch", daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker when its parent was killed, even if the source blocks; PyTorch would not."""
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(1)
