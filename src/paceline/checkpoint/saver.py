"""Saving on one rank: agree who writes what, copy, and go on training while the copy is written.

Invariant: one save at a time is under way, and what it writes is the state at the call of `save`. A failure
in the background is raised by the next call on this rank; it is never lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Overdue
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from paceline.checkpoint.drafts import draft_files
from paceline.checkpoint.manifest import MANIFEST, Origin
from paceline.checkpoint.part import Patience, write_part
from paceline.checkpoint.plan import chunk_of, parse_table, plan_writes, render_table
from paceline.checkpoint.publish import Keep, publish
from paceline.checkpoint.shelf import Shelf, refuse_published
from paceline.checkpoint.staging import Staging
from paceline.checkpoint.tensor_file import Chunk
from paceline.checkpoint.writers import Writer
from paceline.errors import DeadlineError
from paceline.slot import Piece
from paceline.state import TrainState

_POLL_SECONDS = 0.05
_SLACK_SECONDS = 5.0  # the background keeps the deadline itself, and its error says more

Exchange = Callable[[str], Sequence[str]]
"""Gives every rank's text to every rank; collective."""


@dataclass(frozen=True)
class Saving:
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
    """

    rank: int
    background: bool
    steady: bool
    shared: bool
    keep: Keep
    deadline_seconds: float
    patience: Patience
    writer: Writer
    left: Callable[[], Collection[int]] = tuple


class Saver:
    """Saves one state again and again.

    Args:
        state: what is saved; call `settle` before it is updated.
        shelf: where to; claimed on rank 0, only looked at elsewhere.
        origin: what the manifests say of the run.
        saving: see there.
        exchange: see there.
    Attributes:
        blocked_seconds: how long training has waited for saves so far.
    Wire: one exchange of the tables of contents for each save.
    """

    def __init__(
        self, state: TrainState, shelf: Shelf, origin: Origin, saving: Saving, exchange: Exchange
    ) -> None:
        self.shelf = shelf
        self._state, self._origin, self._saving, self._exchange = state, origin, saving, exchange
        self._staging = Staging(saving.writer.allocate)
        self.blocked_seconds = 0.0
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._overdue = DeadlineError(
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
            name, ranks, written = self._agree()
            self._stage(written)
            expires = time.monotonic() + self._saving.deadline_seconds
            self._writing = self._pool.submit(self._job(name, ranks, expires))
        if not self._saving.background:
            self.finish()
        return name

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
                    raise self._overdue from None

    def wait_published(self, name: str) -> None:
        """Wait until a checkpoint that this rank has helped to write can be loaded.

        Raises:
            DeadlineError: it did not appear in time.
        """
        self.finish()
        expires = time.monotonic() + self._saving.deadline_seconds
        while self._saving.rank and self.shelf.files.size(f"{name}/{MANIFEST}") is None:
            if time.monotonic() >= expires:
                raise self._overdue
            time.sleep(_POLL_SECONDS)

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

    def _agree(self) -> tuple[str, list[int], list[tuple[Chunk, Piece]]]:
        """The name of the checkpoint, the ranks that write it, and what this one writes of it."""
        pieces = [box for piece in self._state.pieces() for box in piece.boxes()]
        chunks = [chunk_of(piece) for piece in pieces]
        name = self.shelf.free_name(self._state.step)
        own = {"name": name, "rank": self._saving.rank, "table": render_table(chunks)}
        heard = [json.loads(text) for text in self._exchange(json.dumps(own))]
        plan = plan_writes([parse_table(told["table"]) for told in heard], self._saving.shared)
        ranks = [int(told["rank"]) for told in heard]
        mine = plan[ranks.index(self._saving.rank)]
        written = [(chunk, piece) for chunk, piece in zip(chunks, pieces, strict=True) if chunk in mine]
        return str(heard[0]["name"]), ranks, written

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_seconds += time.perf_counter() - began

    def _stage(self, written: Sequence[tuple[Chunk, Piece]]) -> None:
        tensors = [piece.tensor for _, piece in written]
        drafts = draft_files(self._saving.rank, [chunk for chunk, _ in written])
        self._saving.writer.begin(sum(draft.num_bytes for draft in drafts))
        if not self._saving.background:
            self._staging.borrow(drafts, tensors)
            return
        steady = _changed_by(self._state.optimizer) if self._saving.steady else set()
        self._staging.begin(drafts, tensors, [t.data_ptr() in steady for t in tensors])

    def _job(self, name: str, ranks: Sequence[int], expires: float) -> Callable[[], None]:
        """What the background does; scalars are taken now."""
        step, scalars, saving = self._state.step, self._state.scalars(), self._saving

        def run() -> None:
            self._staging.complete()
            staged, files = self._staging.files, self.shelf.files
            refuse_published(files, name)
            write_part(files, name, saving.rank, staged, scalars, saving.patience, saving.writer)
            self._staging.give_back()
            if saving.rank == 0:
                origin = replace(self._origin, world_size=len(ranks))
                told = (saving.patience, ranks, saving.left)
                publish(self.shelf, name, step, origin, saving.keep, expires, *told)

        return run


def _changed_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Addresses of what only the optimizer's step changes: its parameters and their moments."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [v for p in parameters for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v)]
    return {t.data_ptr() for t in [*parameters, *moments]}
