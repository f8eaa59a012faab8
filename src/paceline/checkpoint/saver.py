"""Saving on one rank: agree who writes what, copy, and go on training while the copy is written.

Invariant: one save at a time is under way, and what it writes is the state at the call of `save`. A failure
in the background is raised by the next call on this rank; it is never lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Overdue
from contextlib import contextmanager
from dataclasses import dataclass, replace

from paceline.checkpoint.catalog import CheckpointCatalog, require_unpublished
from paceline.checkpoint.manifest import MANIFEST_FILE, CheckpointOrigin
from paceline.checkpoint.publish import (
    FullDiskPatience,
    PartLostError,
    RetentionCounts,
    publish,
    report_name,
    write_part,
)
from paceline.checkpoint.safetensors_file import TensorChunk
from paceline.checkpoint.staging import StagingBuffer, optimizer_addresses
from paceline.checkpoint.write_plan import chunk_of_piece, draft_files, parse_table, plan_writes, render_table
from paceline.checkpoint.writers import PartWriter
from paceline.errors import DeadlineError
from paceline.state.slot import TensorPiece
from paceline.state.train_state import TrainState

_POLL_SECONDS = 0.05
_SLACK_SECONDS = 5.0  # the background keeps the deadline itself, and its error says more

ExchangeTexts = Callable[[Callable[[], str]], Sequence[str]]
"""Gives a text of every rank, which is made once more where a rank is lost on the way, to all; collective."""


@dataclass(frozen=True)
class SaveSettings:
    """How to save.

    Args:
        rank: this process's, in the world.
        background: whether training goes on while a save is written.
        steady: between two rounds the rule changes parameters and moments only by steps of the optimizer, so
            that they can be copied while the next step computes.
        shared: ranks that hold the same part of the state hold the same values, so any of them may write it.
        keep: what stays.
        deadline_seconds: for one save.
        patience: with a full disk.
        writer: who writes this rank's part.
        left: see `publish`.
        survives_lost_ranks: whether the job goes on without a rank that is lost now; then a draft that cannot become a
            checkpoint is dropped.
    """

    rank: int
    background: bool
    steady: bool
    shared: bool
    keep: RetentionCounts
    deadline_seconds: float
    patience: FullDiskPatience
    writer: PartWriter
    left: Callable[[], Collection[int]] = tuple
    survives_lost_ranks: Callable[[], bool] = lambda: False


class CheckpointSaver:
    """Saves one state again and again.

    Args:
        state: what is saved; call `settle` before it is updated.
        shelf: where to; claimed on rank 0, only looked at elsewhere.
        origin: what the manifests say of the run.
        saving: see there.
        exchange: see there.
    Attributes:
        blocked_seconds: how long training has waited for saves so far.
        dropped: the names of drafts of which nothing could be made, as far as this rank knows.
    Wire: one exchange of the tables of contents for each save.
    """

    def __init__(
        self,
        state: TrainState,
        shelf: CheckpointCatalog,
        origin: CheckpointOrigin,
        saving: SaveSettings,
        exchange: ExchangeTexts,
    ) -> None:
        self.shelf = shelf
        self._state, self._origin, self._saving, self._exchange = state, origin, saving, exchange
        self._staging = StagingBuffer(saving.writer.allocate)
        self.blocked_seconds, self.dropped = 0.0, set[str]()
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._name = ""  # of the draft under way
        self._deadline_error = DeadlineError(
            f"a checkpoint was not written within {saving.deadline_seconds:g} s",
            where=shelf.files.url,
            next_step="raise checkpoint.deadline_seconds, or look at the disk",
        )

    def save(self) -> str:
        """Begin to save the state as it is; collective. Returns the name of the checkpoint.

        Raises:
            CheckpointError: this save, or the one before it, failed on this rank.
        """
        self.finish()
        with self._blocking():
            self._name, writers, written = self._agree()
            self.dropped.discard(self._name)  # a name of which nothing is left may come again
            self._stage(written)
            expires = time.monotonic() + self._saving.deadline_seconds
            self._writing = self._pool.submit(self._job(self._name, writers, expires))
        if not self._saving.background:
            self.finish()
        return self._name

    @property
    def busy(self) -> bool:
        """Whether a save is still being written on this rank."""
        return self._writing is not None and not self._writing.done()

    def settle(self) -> None:
        """Return when the state may change; whoever updates it calls this before."""
        if not self._staging.settled:
            with self._blocking():
                self._staging.settle()

    def finish(self) -> None:
        """Wait until the save under way, if there is one, is written; on rank 0: until it is published.

        Raises:
            CheckpointError, DeadlineError: it failed.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._blocking():
                self._staging.settle()
                self._saving.writer.hurry()
                try:
                    writing.result(self._saving.deadline_seconds + _SLACK_SECONDS)
                except Overdue:
                    raise self._deadline_error from None
                except PartLostError as error:
                    if not self._saving.survives_lost_ranks():
                        raise
                    self._drop(error)

    def _drop(self, error: PartLostError) -> None:
        """Leave nothing of a draft that cannot become a checkpoint; those of before stay."""
        self.dropped.add(self._name)
        self.shelf.files.remove(self._name)
        self._saving.patience.warn(f"{error.what}: it is left out, and those before it stay")

    def wait_published(self, name: str) -> bool:
        """Wait until a checkpoint that this rank has helped to write can be loaded.

        Returns:
            False if its draft was dropped, on all ranks.
        Raises:
            DeadlineError: it did not appear in time.
        """
        self.finish()
        expires, files = time.monotonic() + self._saving.deadline_seconds, self.shelf.files
        while self._saving.rank and files.size(f"{name}/{MANIFEST_FILE}") is None:
            if files.size(f"{name}/{report_name(self._saving.rank)}") is None:
                return False
            if time.monotonic() >= expires:
                raise self._deadline_error
            time.sleep(_POLL_SECONDS)
        return name not in self.dropped

    def score(self, step: int, loss: float) -> None:
        """Tell the evaluation loss of a step; rank 0 remembers it for what is kept from the next save on."""
        if self._saving.rank == 0:
            try:
                self.shelf.score(step, loss)
            except OSError as error:  # the next manifest holds it too
                self._saving.patience.warn(f"the evaluation loss cannot be written: {error}")

    def tidy(self) -> None:
        """Remove on rank 0 what need not be kept, with the losses that are known now."""
        self.finish()
        if self._saving.rank == 0:
            try:
                self.shelf.tidy(self._saving.keep.newest, self._saving.keep.best)
            except OSError as error:
                self._saving.patience.warn(f"old checkpoints cannot be removed: {error}")

    def close(self) -> None:
        """A write that is under way goes on, and the process ends after it: call `finish` before."""
        writing, busy = self._writing, self.busy
        if writing is not None and busy:
            self._saving.writer.hurry()
            writing.add_done_callback(lambda _: self._saving.writer.close())
        else:
            self._saving.writer.close()
        self._pool.shutdown(wait=not busy, cancel_futures=True)

    def _agree(self) -> tuple[str, dict[int, bool], list[tuple[TensorChunk, TensorPiece]]]:
        """The name of the checkpoint, by rank whether it has something to write, and what this one writes."""
        name, found = self.shelf.unused_name(self._state.step), list[tuple[TensorChunk, TensorPiece]]()

        def own() -> str:
            pieces = [box for piece in self._state.pieces() for box in piece.boxes()]
            found[:] = [(chunk_of_piece(piece), piece) for piece in pieces]
            table = render_table(chunk for chunk, _ in found)
            return json.dumps({"name": name, "rank": self._saving.rank, "table": table})

        heard = [json.loads(text) for text in self._exchange(own)]
        plan = plan_writes([parse_table(told["table"]) for told in heard], self._saving.shared)
        by_rank = {int(told["rank"]): part for told, part in zip(heard, plan, strict=True)}
        mine = by_rank[self._saving.rank]
        written = [(chunk, piece) for chunk, piece in found if chunk in mine]
        return str(heard[0]["name"]), {rank: bool(part) for rank, part in by_rank.items()}, written

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_seconds += time.perf_counter() - began

    def _stage(self, written: Sequence[tuple[TensorChunk, TensorPiece]]) -> None:
        tensors = [piece.tensor for _, piece in written]
        drafts = draft_files(self._saving.rank, [chunk for chunk, _ in written])
        self._saving.writer.begin(sum(draft.num_bytes for draft in drafts))
        if not self._saving.background:
            self._staging.borrow(drafts, tensors)
            return
        steady = optimizer_addresses(self._state.optimizer) if self._saving.steady else set()
        self._staging.begin(drafts, tensors, [t.data_ptr() in steady for t in tensors])

    def _job(self, name: str, writers: Mapping[int, bool], expires: float) -> Callable[[], None]:
        """What the background does; scalars are taken now."""
        step, scalars, saving = self._state.step, self._state.scalars(), self._saving

        def run() -> None:
            self._staging.complete()
            staged, files = self._staging.files, self.shelf.files
            require_unpublished(files, name)
            write_part(files, name, saving.rank, staged, scalars, saving.patience, saving.writer)
            self._staging.give_back()
            if saving.rank == 0:
                origin = replace(self._origin, world_size=len(writers))
                idle = {rank for rank, writes in writers.items() if not writes}
                told = (saving.patience, [*writers], saving.left, idle)
                publish(self.shelf, name, step, origin, saving.keep, expires, *told)

        return run
