"""Reading with loader processes: samples a second against torch's DataLoader, and how long steps wait.

The decode-bound set is the source text of Python's standard library in compressed parts of 128 KiB (bz2): to
read a sample is to unpack it and to count its bytes. All sides read the same samples in the same order; what
the tables call a loss is the spread of a batch, which shows it.
"""

from __future__ import annotations

import bz2
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.allocator import keep_freed_memory
from benchmarks.measure import Series, Side, take_turns
from benchmarks.report import Options, Report, Table, comparison_table, present, rate_table, series_data
from benchmarks.subjects import Subject, byte_gpt
from paceline.data import KeyedOrder, LockstepWork, SampleLoader
from paceline.data.text_corpus import STDLIB, corpus_files
from paceline.job.cluster import Cluster
from paceline.recipe import LoaderRecipe
from paceline.session import Session, build_session

_PART_BYTES = 1 << 17
_BATCH, _PREFETCH = 16, 2
_WORKERS = (0, 1, 2)
_CPU = torch.device("cpu")


class Packed(Dataset[Tensor]):
    """Compressed parts of text; a sample is how often each byte is in a part, float32 [256]."""

    def __init__(self, num_parts: int) -> None:
        text = b"".join(path.read_bytes() for path in corpus_files(STDLIB))
        starts = range(0, min(len(text) - _PART_BYTES, num_parts * _PART_BYTES), _PART_BYTES)
        self._parts = [bz2.compress(text[start : start + _PART_BYTES]) for start in starts]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Tensor:
        counts = np.bincount(np.frombuffer(self.unpack(index), np.uint8), minlength=256)
        return torch.from_numpy(counts.astype(np.float32))

    def unpack(self, index: int) -> bytes:
        """The text of a part."""
        return bz2.decompress(self._parts[index % len(self._parts)])


@dataclass(frozen=True)
class Costly(Dataset[Any]):
    """The samples of another source, each after some unpacking."""

    source: Any
    packed: Packed
    times: int

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        for k in range(self.times):
            self.packed.unpack(index + k)
        return self.source[index]


def work_of(data: Sequence[Any]) -> LockstepWork:
    """Batches in a keyed order, for one reader."""
    return LockstepWork(KeyedOrder(len(data), _BATCH, 1), 1, 1, 0, 1)


def paceline_batches(data: Packed, workers: int) -> Iterator[Tensor]:
    """Through Paceline's loader."""
    loader = SampleLoader(data, None, LoaderRecipe(workers=workers, prefetch=_PREFETCH), _CPU)
    work = work_of(data)
    with loader.open(
        micro_batch for step in range(10**9) for micro_batch in work.micro_batches(step)
    ) as stream:
        for loaded in stream:
            yield loaded.batch


class _Batches:
    """The same batches as a sampler of indices."""

    def __init__(self, data: Packed) -> None:
        self._work = work_of(data)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(10**9):
            yield self._work.micro_batches(step)[0].indices.tolist()


def torch_batches(data: Packed, workers: int) -> Iterator[Tensor]:
    """Through torch's DataLoader."""
    prefetch = _PREFETCH if workers else None
    yield from DataLoader(data, batch_sampler=_Batches(data), num_workers=workers, prefetch_factor=prefetch)


def reading_side(name: str, batches: Iterator[Tensor], workers: int) -> Side:
    """A step is a batch; before each block, what was read ahead meanwhile is used up."""

    def drain() -> None:
        for _ in range(workers * _PREFETCH):
            next(batches)

    return Side(name, lambda: float(next(batches).std()), drain)


def read(quick: bool) -> list[Series]:
    """Both loaders with every number of workers, by turns."""
    data = Packed(8 if quick else 128)
    kinds = {"Paceline": paceline_batches, "DataLoader": torch_batches}
    sides = [
        reading_side(f"{name} {workers}", batches(data, workers), workers)
        for workers in _WORKERS
        for name, batches in kinds.items()
    ]
    return take_turns(sides, repeats=3 if quick else 11, steps=2 if quick else 12, warmup=5)


@dataclass
class Waiting:
    """A session whose steps note the share of their time that went into waiting for data."""

    name: str
    session: Session
    shares: list[float] = field(default_factory=list)

    def side(self) -> Side:
        """One of those that take turns."""
        rounds = self.session.rounds()

        def step() -> float:
            stats = next(rounds)
            self.shares.append(stats.phases["data"] / stats.seconds)
            return float(stats.loss)

        return Side(self.name, step)


def train(subject: Subject, quick: bool) -> tuple[list[Series], list[Waiting]]:
    """One job with every number of workers, by turns."""
    torch.set_num_threads(1)
    sessions = []
    for workers in _WORKERS:
        found = subject.changed(loader=LoaderRecipe(workers=workers, prefetch=_PREFETCH))
        session = build_session(found.recipe, found.fresh(), Cluster.single(), _CPU)
        sessions.append(Waiting(f"{workers} workers", session))
    sides = [waiting.side() for waiting in sessions]
    return take_turns(sides, repeats=3 if quick else 11, steps=2 if quick else 4, warmup=2), sessions


def share_table(title: str, found: Sequence[Series], sessions: Sequence[Waiting]) -> Table:
    """Median share of a step that waits, and the largest."""
    rows = []
    for series, waiting in zip(found, sessions, strict=True):
        share = statistics.median(waiting.shares)
        verdict = "met" if share < 0.05 else "missed"
        milliseconds = f"{series.median_seconds * 1e3:.1f}"
        rows.append((series.name, milliseconds, f"{share:.2%}", f"{max(waiting.shares):.2%}", verdict))
    columns = ("side", "median step ms", "median share", "largest", "under 5 %")
    return Table(f"{title}: share of a step that waits for data", columns, rows)


def measure(options: Options) -> Report:
    """Throughput, then waiting."""
    keep_freed_memory()
    read_series = read(options.quick)
    cores = len(os.sched_getaffinity(0))
    tables = [
        rate_table(
            f"Decode-bound: batches of {_BATCH} parts of 128 KiB, with 0, 1 and 2 workers",
            read_series,
            _BATCH,
            "samples",
        )
    ]
    for workers in _WORKERS:
        pair = [series for series in read_series if series.name.endswith(f" {workers}")]
        tables.append(comparison_table(f"the same, {workers} workers, {cores} cores", pair, pair[1].name))
    data: dict[str, Any] = {"reading": series_data(read_series)}
    gpt = byte_gpt(quick=options.quick, precision=options.precision)
    costly = replace(gpt, task=replace(gpt.task, data=Costly(gpt.task.data, Packed(16), 1)))
    for title, subject in {"byte-gpt, 1 thread": gpt, "byte-gpt with costly samples": costly}.items():
        series, sessions = train(subject, options.quick)
        tables.append(share_table(title, series, sessions))
        data[title] = {"series": series_data(series), "shares": [w.shares for w in sessions]}
    return Report("Reading with loader processes.", tables, data)


if __name__ == "__main__":
    present(measure, __doc__ or "")
