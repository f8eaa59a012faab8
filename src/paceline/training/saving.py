"""The checkpoints of a session: where they are, how it saves them, and how it goes on from one."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from paceline import checkpoint
from paceline._version import VERSION
from paceline.checkpoint import (
    VOCABULARY,
    ByProcess,
    ByThreads,
    Files,
    Keep,
    Origin,
    Patience,
    Saver,
    Saving,
    Shelf,
    Stored,
    Writer,
    claim,
    refuse_other_vocabulary,
)
from paceline.cluster import process_environment
from paceline.disk.beside import WriterProcess, can_write_beside
from paceline.errors import CheckpointError
from paceline.phase import SERVED
from paceline.recipe import CheckpointRecipe, Recipe, to_toml
from paceline.sync.residuals import forgotten
from paceline.training.agreed import gather_from_all, share_with_all
from paceline.training.numerics import differences, fingerprint
from paceline.training.session import Session

_PATIENCE_SECONDS = 60.0
"""For so long a save takes only what the training leaves; a crash would lose it."""
_SETTLE = "settle"


def files_of(recipe: Recipe, run_dir: Path) -> Files:
    """The folder of a run's checkpoints."""
    return Files(recipe.checkpoint.folder or str(run_dir / "checkpoints"))


def build_saver(session: Session, run_dir: Path, warn: Callable[[str], None]) -> Saver:
    """A saver for this rank; collective. What a crash has left half-written is removed."""
    files = files_of(session.recipe, run_dir)
    options, strategy = session.recipe.checkpoint, session.whole_strategy
    patience = Patience(options.full_disk_seconds, warn)
    shelf = claim(files, patience) if session.is_first else Shelf(files)
    run = share_with_all(session, shelf.run)
    saving = Saving(
        rank=session.cluster.global_rank,
        background=options.mode == "background",
        shared=strategy.rule.shares_state,
        steady=strategy.rule.steady,
        keep=Keep(options.keep, options.keep_best),
        deadline_seconds=options.deadline_seconds,
        patience=patience,
        writer=_writer(files, options, patience),
        left=partial(_present, session),
        outlives=lambda: session.doing == SERVED,
    )
    saver = Saver(session.state, shelf, _origin(session, run), saving, partial(gather_from_all, session))
    session.settle = saver.settle
    session.puts.append(partial(_wait_before_updates, session))
    _wait_before_updates(session)
    return saver


def _writer(files: Files, options: CheckpointRecipe, patience: Patience) -> Writer:
    """All threads of a training that waits; else a process beside it, or one thread if there can be none."""
    if options.mode == "blocking":
        return ByThreads(torch.get_num_threads())
    if files.local_path("") is None or not can_write_beside():
        return ByThreads(1)
    seconds = min(_PATIENCE_SECONDS, options.deadline_seconds / 2)
    return ByProcess(WriterProcess(process_environment()), seconds, patience.warn)


def _present(session: Session) -> list[int]:
    """The ranks that are not gone, as far as the store of the job knows; empty: there is none."""
    membership = session.cluster.membership
    if membership is None:
        return []
    gone = membership.store.lost()
    return [rank for rank, number in enumerate(membership.members) if number not in gone]


def _wait_before_updates(session: Session) -> None:
    """Nothing that follows a step changes what a save in the background still reads.

    Before all other parts: a step that is left out comes to few of them, and where replicas meet that have
    trained alone parameters move all the same.
    """
    step = session.update_step
    others = {name: part for name, part in step.parts.items() if name != _SETTLE}
    step.parts = {_SETTLE: lambda record: session.settle(), **others}
    if session.average is not None:
        session.average.settle = session.settle


def _origin(session: Session, run: str) -> Origin:
    return Origin(
        run=run,
        recipe=to_toml(session.recipe.replace(run_dir=None)),  # as the run folder keeps it
        strategy=str(session.whole_strategy),
        world_size=session.cluster.world_size,
        versions=_versions(session),
    )


def _versions(session: Session) -> dict[str, str]:
    """What the bits of a run depend on beside what was asked for."""
    precision = session.recipe.precision.compute
    return {
        "paceline": VERSION,
        "python": platform.python_version(),
        "precision": precision,
        **fingerprint(),
        **({VOCABULARY: session.task.vocabulary} if session.task.vocabulary else {}),
    }


Take = Callable[[Session, Stored], Callable[[], None]]
"""Reads what this rank wants of a state; nothing changes before the result is called."""


def whole_state(session: Session, found: Stored) -> Callable[[], None]:
    """All that a training goes on from."""
    read = session.state.read_from(found, found.scalars)

    def take_over() -> None:
        read()
        _note_forgotten(session, found)

    return take_over


def restore(
    session: Session,
    files: Files,
    name: str | None = None,
    warn: Callable[[str], None] = lambda text: None,
    *,
    before: str | None = None,
    take: Take = whole_state,
) -> str:
    """Go on from a checkpoint; collective. Every rank reads and checks all of it.

    Args:
        name: which one; "best": by evaluation; None: the newest that is valid.
        warn: is told, on rank 0, which ones cannot be used and why.
        before: only those that were saved before this one.
        take: what is read of it.
    Returns:
        The name of the checkpoint.
    Raises:
        CheckpointError: the named one is damaged or does not fit, or there is no valid one.
    """
    refusal: CheckpointError | None = None
    name = None if name is None else _named(files, name)
    for candidate in [name] if name else _newest_first(session, files, before, warn):
        refusal = _try(session, files, candidate, warn, take)
        if refusal is None:
            return candidate
        if name:
            raise refusal
        warn(f"{refusal.what}; the one before it is used")
    raise CheckpointError(
        "there is no valid checkpoint" + (f": {refusal.what}" if refusal else ""),
        where=files.url,
        next_step="name a run folder with a checkpoint in it, or start the run again",
    )


def _named(files: Files, name: str) -> str:
    """What "best" and "newest" stand for; every rank looks, as nobody writes now."""
    return Shelf.look(files).named(name)


def _newest_first(
    session: Session, files: Files, before: str | None, warn: Callable[[str], None]
) -> list[str]:
    """Rank 0 looks; the others follow."""
    found: list[str] = []
    if session.is_first:
        shelf = Shelf.look(files)
        found = [kept.name for kept in reversed(shelf.whole)]
        found = found[found.index(before) + 1 :] if before in found else found
        for error in shelf.broken.values():
            warn(error.what)
    return [str(name) for name in json.loads(share_with_all(session, json.dumps(found)))]


def _try(
    session: Session, files: Files, name: str, warn: Callable[[str], None], take: Take
) -> CheckpointError | None:
    """Load one if every rank can read it; else why not, on every rank."""
    refusal: CheckpointError | None = None
    other = CheckpointError(f"the checkpoint {name} cannot be read by another rank", where=files.url)
    try:
        found = checkpoint.stored_at(files, name)
        theirs = found.manifest.origin.versions.get(VOCABULARY, "")
        refuse_other_vocabulary(session.task.vocabulary, theirs, name)
    except CheckpointError as error:
        refusal = error
    if session.sum(float(refusal is not None)):
        return refusal or other
    session.make_ready(found.scalars)
    try:
        take_over = take(session, found)
    except CheckpointError as error:
        refusal = error
    if session.sum(float(refusal is not None)):
        return refusal or other
    differing = differences(found.manifest.origin.versions) if session.recipe.reproducible else ""
    if differing:
        warn(f"{name} was computed otherwise ({differing}): from here on the bits may be others")
    take_over()
    return None


def _note_forgotten(session: Session, found: Stored) -> None:
    """What coding had not sent yet is part of the gradients: nobody may lose it unheard."""
    if forgotten(found.shapes, session.state.keepers):
        text = (
            f"{found.name} holds what coding had not sent yet under '{found.manifest.origin.strategy}', and"
            f" nothing sends it under '{session.strategy}': it is dropped; resume with that codec to keep it"
        )
        session.notes.add("warning", {"text": text})
