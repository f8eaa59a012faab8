"""Saving on one rank: agree on which rank writes which part, copy the state, and write it in the background.

Invariant: one save at a time is in progress, and it writes the state at the call of `save`. An error in the
background is raised by the next call on this rank; it is never lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Overdue
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from paceline.checkpoint.catalog import CheckpointCatalog, require_unpublished
from paceline.checkpoint.checkpoint_certificate import Certifier
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
"""Returns the texts of all ranks; collective. Makes this rank's text again if a rank is lost meanwhile."""


@dataclass(frozen=True)
class SaveSettings:
    """The settings of all saves.

    Args:
        rank: this process's global rank.
        background: train on while a save is written.
        steady: between two rounds only the optimizer changes parameters and moments, so they can be copied
            while the next step computes.
        shared: ranks that hold the same part of the state hold the same values, so any of them can write it.
        keep: how many checkpoints to keep.
        deadline_seconds: for one save.
        patience: with a full disk.
        writer: writes this rank's files.
        certifier: makes the certificates of the checkpoints.
        left: returns the ranks that are not lost, see `publish`.
        survives_lost_ranks: returns whether the job continues without a rank that is lost now; a draft that
            cannot become a checkpoint is dropped then.
    """

    rank: int
    background: bool
    steady: bool
    shared: bool
    keep: RetentionCounts
    deadline_seconds: float
    patience: FullDiskPatience
    writer: PartWriter
    certifier: Certifier = field(default_factory=Certifier)
    left: Callable[[], Collection[int]] = tuple
    survives_lost_ranks: Callable[[], bool] = lambda: False


class CheckpointSaver:
    """The saver of one state, for one save after another.

    Args:
        state: the state; call `settle` before it is updated.
        catalog: of the folder; claimed on rank 0, only read on others.
        origin: of the run, for the manifests.
        saving: settings.
        exchange: exchanges a text between the ranks.
    Attributes:
        blocked_seconds: how long training has waited for saves.
        dropped: names of drafts that were dropped, as far as this rank knows.
    Wire: one exchange of the tables of chunks per save.
    """

    def __init__(
        self,
        state: TrainState,
        catalog: CheckpointCatalog,
        origin: CheckpointOrigin,
        saving: SaveSettings,
        exchange: ExchangeTexts,
    ) -> None:
        self.catalog = catalog
        self._state, self._origin, self._saving, self._exchange = state, origin, saving, exchange
        self._staging = StagingBuffer(saving.writer.allocate)
        self.blocked_seconds, self.dropped = 0.0, set[str]()
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._name = ""  # of the draft in progress
        self._deadline_error = DeadlineError(
            f"a checkpoint was not written within {saving.deadline_seconds:g} s",
            where=catalog.files.url,
            next_step="raise checkpoint.deadline_seconds, or look at the disk",
        )

    def save(self) -> str:
        """Start to save the state as it is, and return the name of the checkpoint; collective.

        Raises:
            CheckpointError: this save, or the one before it, failed on this rank.
        """
        # One save at a time: the staging buffer still belongs to the one before.
        self.finish()
        with self._blocking():
            self._name, writers, written = self._agree()
            self.dropped.discard(self._name)  # the name of a dropped draft can be used again
            self._stage(written)
            expires = time.monotonic() + self._saving.deadline_seconds
            self._writing = self._pool.submit(self._job(self._name, writers, expires))
        if not self._saving.background:
            self.finish()
        return self._name

    @property
    def busy(self) -> bool:
        """Return whether a save is being written on this rank."""
        return self._writing is not None and not self._writing.done()

    def settle(self) -> None:
        """Copy what is left, so that the state can change; call this before an update."""
        if not self._staging.settled:
            with self._blocking():
                self._staging.settle()

    def finish(self) -> None:
        """Wait until the save in progress, if any, is written; on rank 0 until it is published.

        Raises:
            CheckpointError, DeadlineError: it failed.
        """
        # Cleared first, so that an error is raised once, and not by every later call.
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
        """Remove a draft that cannot become a checkpoint; earlier checkpoints stay."""
        self.dropped.add(self._name)
        self.catalog.files.remove(self._name)
        self._saving.patience.warn(f"{error.what}; it is dropped, and earlier checkpoints stay")

    def wait_published(self, name: str) -> bool:
        """Wait until a checkpoint that this rank has helped to write can be loaded.

        Returns:
            False if its draft was dropped, on all ranks.
        Raises:
            DeadlineError: it did not appear in time.
        """
        self.finish()
        expires, files = time.monotonic() + self._saving.deadline_seconds, self.catalog.files
        while self._saving.rank and files.size(f"{name}/{MANIFEST_FILE}") is None:
            if files.size(f"{name}/{report_name(self._saving.rank)}") is None:
                return False
            if time.monotonic() >= expires:
                raise self._deadline_error
            time.sleep(_POLL_SECONDS)
        return name not in self.dropped

    def score(self, step: int, loss: float) -> None:
        """Report the evaluation loss of a step; on rank 0 retention uses it from the next save on."""
        if self._saving.rank == 0:
            try:
                self.catalog.record_loss(step, loss)
            except OSError as error:  # the next manifest also holds it
                self._saving.patience.warn(f"the evaluation loss cannot be written: {error}")

    def tidy(self) -> None:
        """Remove checkpoints that retention does not keep, on rank 0."""
        self.finish()
        if self._saving.rank == 0:
            try:
                self.catalog.remove_expired(self._saving.keep.newest, self._saving.keep.best)
            except OSError as error:
                self._saving.patience.warn(f"old checkpoints cannot be removed: {error}")

    def close(self) -> None:
        """End the background thread; a write in progress continues, so call `finish` before."""
        writing, busy = self._writing, self.busy
        if writing is not None and busy:
            self._saving.writer.hurry()
            writing.add_done_callback(lambda _: self._saving.writer.close())
        else:
            self._saving.writer.close()
        self._pool.shutdown(wait=not busy, cancel_futures=True)

    def _agree(self) -> tuple[str, dict[int, bool], list[tuple[TensorChunk, TensorPiece]]]:
        """Agree on a plan; collective.

        Returns:
            The name of the checkpoint, by rank whether it writes anything, and what this rank writes.
        """
        name, pieces_by_chunk = (
            self.catalog.unused_name(self._state.step),
            list[tuple[TensorChunk, TensorPiece]](),
        )

        def make_table() -> str:
            pieces = [box for piece in self._state.pieces() for box in piece.boxes()]
            # In place, because the exchange calls this function again if a rank is lost meanwhile.
            pieces_by_chunk[:] = [(chunk_of_piece(piece), piece) for piece in pieces]
            table = render_table(chunk for chunk, _ in pieces_by_chunk)
            return json.dumps({"name": name, "rank": self._saving.rank, "table": table})

        replies = [json.loads(text) for text in self._exchange(make_table)]
        plan = plan_writes([parse_table(reply["table"]) for reply in replies], self._saving.shared)
        by_rank = {int(reply["rank"]): chunks for reply, chunks in zip(replies, plan, strict=True)}
        own_chunks = by_rank[self._saving.rank]
        written = [(chunk, piece) for chunk, piece in pieces_by_chunk if chunk in own_chunks]
        return str(replies[0]["name"]), {rank: bool(chunks) for rank, chunks in by_rank.items()}, written

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
            self._staging.use_tensor_memory(drafts, tensors)
            return
        steady = optimizer_addresses(self._state.optimizer) if self._saving.steady else set()
        self._staging.begin(drafts, tensors, [t.data_ptr() in steady for t in tensors])

    def _job(self, name: str, writers: Mapping[int, bool], expires: float) -> Callable[[], None]:
        """Return the function that the background runs; scalars are read now."""
        step, scalars, saving = self._state.step, self._state.scalars(), self._saving

        def run() -> None:
            self._staging.complete()
            staged, files = self._staging.files, self.catalog.files
            require_unpublished(files, name)
            write_part(files, name, saving.rank, staged, scalars, saving.patience, saving.writer)
            self._staging.release()
            if saving.rank == 0:
                origin = replace(self._origin, world_size=len(writers))
                idle = {rank for rank, writes in writers.items() if not writes}
                ranks = (saving.patience, [*writers], saving.left, idle)
                publish(self.catalog, name, step, origin, saving.keep, expires, *ranks, saving.certifier)

        return run
