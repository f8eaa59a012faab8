"""When something is due: every so many steps, every so many minutes, the same on every rank.

The checkpoints of a session: where they are, how it saves them, and how it goes on from one.

The saves of one fit: when one is due, and telling the sinks when it is written.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from paceline._version import VERSION
from paceline.checkpoint.catalog import BEST, CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import StoredCheckpoint, open_checkpoint
from paceline.checkpoint.disk.writer_process import WriterProcess, can_use_writer_process
from paceline.checkpoint.manifest import CheckpointOrigin
from paceline.checkpoint.pretrained import VOCABULARY_KEY, require_same_vocabulary
from paceline.checkpoint.publish import FullDiskPatience, RetentionCounts, claim_folder
from paceline.checkpoint.saver import CheckpointSaver, SaveSettings
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.writers import PartWriter, ProcessWriter, ThreadWriter
from paceline.errors import CheckpointError, NumericError
from paceline.job.cluster import process_environment
from paceline.job.launcher_reports import TRAINING_FOR_SERVER
from paceline.observe.sinks import Sink
from paceline.recipe.recipe import Recipe, to_toml
from paceline.recipe.tables import CheckpointRecipe
from paceline.session.early_stopping import EvaluationScores
from paceline.session.reproducibility import fingerprint_differences, numerics_fingerprint
from paceline.session.session import Session, gather_from_all, share_with_all
from paceline.sync.health import RollBackRequest
from paceline.sync.residuals import orphaned_residuals


def interval_passed(every_steps: int, before: int, step: int) -> bool:
    """Whether a round from step `before` to `step` has reached or passed a multiple of the interval."""
    return every_steps > 0 and step // every_steps > before // every_steps


class EveryMinutes:
    """A clock that all ranks read alike: rank 0 looks, and says when to look again.

    Ranks talk at few steps: at about half of what is left, then at half of that.

    Args:
        minutes: the interval; 0: never due, and nobody talks.
        is_first: whether this is the rank whose clock counts.
        total: adds up a number of every rank; collective.
        now: seconds on a clock that never goes back.
    Wire: one all_reduce of 8 bytes at some steps.
    """

    def __init__(
        self,
        minutes: float,
        is_first: bool,
        total: Callable[[float], float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._is_first, self._total, self._now = 60.0 * minutes, is_first, total, now
        self._since, self._steps, self._steps_until_check = now(), 0, 1

    @property
    def asks(self) -> bool:
        """Whether ranks talk about the time at all."""
        return self._seconds > 0

    def due(self, steps: int) -> bool:
        """Whether the interval is over; collective.

        Args:
            steps: taken since the last call.
        """
        self._steps += steps
        self._steps_until_check -= steps
        if not self.asks or self._steps_until_check > 0:
            return False
        answer = int(self._total(self._steps_until_next_check() if self._is_first else 0.0))
        self._steps_until_check = max(1, answer)
        return answer == 0

    def restart(self) -> None:
        """Something has just been done: the next time is an interval from now."""
        self._since, self._steps, self._steps_until_check = self._now(), 0, 1

    def _steps_until_next_check(self) -> float:
        """0 if it is time, else half of the steps that are left at the pace so far."""
        passed = self._now() - self._since
        if passed >= self._seconds:
            return 0.0
        pace = max(passed / max(1, self._steps), 1e-6)
        return float(max(1, int((self._seconds - passed) / pace / 2)))


_PATIENCE_SECONDS = 60.0
"""For so long a save takes only what the training leaves; a crash would lose it."""
_WAIT_PART = "settle"


def checkpoint_files(recipe: Recipe, run_dir: Path) -> StorageFolder:
    """The folder of a run's checkpoints."""
    return StorageFolder(recipe.checkpoint.folder or str(run_dir / "checkpoints"))


def build_saver(session: Session, run_dir: Path, warn: Callable[[str], None]) -> CheckpointSaver:
    """A saver for this rank; collective. What a crash has left half-written is removed."""
    files = checkpoint_files(session.recipe, run_dir)
    options, strategy = session.recipe.checkpoint, session.full_strategy
    patience = FullDiskPatience(options.full_disk_seconds, warn)
    shelf = claim_folder(files, patience) if session.is_first else CheckpointCatalog(files)
    run = share_with_all(session, shelf.run)
    saving = SaveSettings(
        rank=session.cluster.global_rank,
        background=options.mode == "background",
        shared=strategy.rule.shares_state,
        steady=strategy.rule.steady,
        keep=RetentionCounts(options.keep, options.keep_best),
        deadline_seconds=options.deadline_seconds,
        patience=patience,
        writer=_writer(files, options, patience),
        left=partial(_present_ranks, session),
        survives_lost_ranks=lambda: session.launcher_phase == TRAINING_FOR_SERVER,
    )
    saver = CheckpointSaver(
        session.state, shelf, _origin(session, run), saving, partial(gather_from_all, session)
    )
    session.wait_for_save = saver.settle
    session.reinstall_hooks.append(partial(_wait_before_updates, session))
    _wait_before_updates(session)
    return saver


def _writer(files: StorageFolder, options: CheckpointRecipe, patience: FullDiskPatience) -> PartWriter:
    """All threads of a training that waits; else a process beside it, or one thread if there can be none."""
    if options.mode == "blocking":
        return ThreadWriter(torch.get_num_threads())
    if files.local_path("") is None or not can_use_writer_process():
        return ThreadWriter(1)
    seconds = min(_PATIENCE_SECONDS, options.deadline_seconds / 2)
    return ProcessWriter(WriterProcess(process_environment()), seconds, patience.warn)


def _present_ranks(session: Session) -> list[int]:
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
    others = {name: part for name, part in step.parts.items() if name != _WAIT_PART}
    step.parts = {_WAIT_PART: lambda record: session.wait_for_save(), **others}
    if session.average is not None:
        session.average.settle = session.wait_for_save


def _origin(session: Session, run: str) -> CheckpointOrigin:
    return CheckpointOrigin(
        run=run,
        recipe=to_toml(session.recipe.replace(run_dir=None)),  # as the run folder keeps it
        strategy=str(session.full_strategy),
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
        **numerics_fingerprint(),
        **({VOCABULARY_KEY: session.task.vocabulary} if session.task.vocabulary else {}),
    }


ReadState = Callable[[Session, StoredCheckpoint], Callable[[], None]]
"""Reads what this rank wants of a state; nothing changes before the result is called."""


def read_whole_state(session: Session, found: StoredCheckpoint) -> Callable[[], None]:
    """All that a training goes on from."""
    read = session.state.read_from(found, found.scalars)

    def take_over() -> None:
        read()
        _warn_dropped_residuals(session, found)

    return take_over


def restore_checkpoint(
    session: Session,
    files: StorageFolder,
    name: str | None = None,
    warn: Callable[[str], None] = lambda text: None,
    *,
    before: str | None = None,
    take: ReadState = read_whole_state,
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
    name = None if name is None else _resolve_name(files, name)
    for candidate in [name] if name else _newest_first(session, files, before, warn):
        refusal = _try_restore(session, files, candidate, warn, take)
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


def _resolve_name(files: StorageFolder, name: str) -> str:
    """What "best" and "newest" stand for; every rank looks, as nobody writes now."""
    return CheckpointCatalog.look(files).named(name)


def _newest_first(
    session: Session, files: StorageFolder, before: str | None, warn: Callable[[str], None]
) -> list[str]:
    """Rank 0 looks; the others follow."""
    found: list[str] = []
    if session.is_first:
        shelf = CheckpointCatalog.look(files)
        found = [kept.name for kept in reversed(shelf.whole)]
        found = found[found.index(before) + 1 :] if before in found else found
        for error in shelf.broken.values():
            warn(error.what)
    return [str(name) for name in json.loads(share_with_all(session, json.dumps(found)))]


def _try_restore(
    session: Session, files: StorageFolder, name: str, warn: Callable[[str], None], take: ReadState
) -> CheckpointError | None:
    """Load one if every rank can read it; else why not, on every rank."""
    refusal: CheckpointError | None = None
    other = CheckpointError(f"the checkpoint {name} cannot be read by another rank", where=files.url)
    try:
        found = open_checkpoint(files, name)
        theirs = found.manifest.origin.versions.get(VOCABULARY_KEY, "")
        require_same_vocabulary(session.task.vocabulary, theirs, name)
    except CheckpointError as error:
        refusal = error
    if session.sum(float(refusal is not None)):
        return refusal or other
    session.prepare_restore(found.scalars)
    try:
        take_over = take(session, found)
    except CheckpointError as error:
        refusal = error
    if session.sum(float(refusal is not None)):
        return refusal or other
    differing = fingerprint_differences(found.manifest.origin.versions) if session.recipe.reproducible else ""
    if differing:
        warn(f"{name} was computed otherwise ({differing}): from here on the bits may be others")
    take_over()
    return None


def _warn_dropped_residuals(session: Session, found: StoredCheckpoint) -> None:
    """What coding had not sent yet is part of the gradients: nobody may lose it unheard."""
    if orphaned_residuals(found.shapes, session.state.extra_states):
        text = (
            f"{found.name} holds what coding had not sent yet under '{found.manifest.origin.strategy}', and"
            f" nothing sends it under '{session.strategy}': it is dropped; resume with that codec to keep it"
        )
        session.events.add("warning", {"text": text})


@contextmanager
def open_checkpoint_schedule(
    session: Session, run_dir: Path | None, sinks: Sequence[Sink]
) -> Iterator[CheckpointSchedule]:
    """The saves of a fit; collective. Without a run folder nothing is saved."""

    def warn(text: str) -> None:
        for sink in sinks:
            sink.event("warning", {"text": text})

    saver = None if run_dir is None else build_saver(session, run_dir, warn)
    try:
        saves = CheckpointSchedule(session, saver, sinks, warn)
        saves.best = EvaluationScores(session.recipe.evaluate, saves.scores())
        saves.begin()
        yield saves
    finally:
        if saver is not None:
            saver.close()


class CheckpointSchedule:
    """Saves a session when it is time.

    Args:
        saver: None: it is never time.
        sinks: are told of every checkpoint when it is there.
        warn: is told what cannot be used.
    Attributes:
        best: the evaluations so far, by which the run may end early.
    """

    def __init__(
        self,
        session: Session,
        saver: CheckpointSaver | None,
        sinks: Sequence[Sink],
        warn: Callable[[str], None],
    ) -> None:
        self._session, self._saver, self._sinks, self._warn = session, saver, sinks, warn
        self.best = EvaluationScores(session.recipe.evaluate, {})
        self._first = session.state.step
        self._name: str | None = None
        self._saved_at = -1
        self._roll_backs = 0
        self._rolled_back_to: str | None = None
        self._untold: tuple[int, str] | None = None
        minutes = session.recipe.checkpoint.every_minutes if saver is not None else 0.0
        self._clock = EveryMinutes(minutes, session.is_first, session.sum)

    def at_interval(self, before: int, *, is_best: bool = False) -> bool:
        """Save if a round from step `before` to now has made it due; collective.

        Args:
            is_best: the state has just been evaluated, and none was better; the same on every rank.
        Returns:
            Whether ranks may have talked about it.
        """
        if self._saver is None:
            return False
        if not self._saver.busy:
            self._tell()
        step = self._session.state.step
        by_time = self._clock.due(step - before)
        options = self._session.recipe.checkpoint
        as_best = is_best and options.keep_best > 0
        is_due = by_time or as_best or interval_passed(options.every_steps, before, step)
        if is_due:
            self._save(self._saver)
        return is_due or self._clock.asks

    def begin(self) -> None:
        """Save where the fit begins, if the run may have to go back there; collective."""
        if self._saver is not None and self._session.recipe.health.rolls_back and self._here() is None:
            self._save(self._saver)

    def roll_back(self, ask: RollBackRequest) -> None:
        """Load the newest valid checkpoint, and leave out the steps from there to the one that went wrong.

        If nothing was saved since the last time, that one is no good, and the one before it is loaded.
        Collective.

        Raises:
            NumericError: it went back too often, or there is nothing to go back to.
        """
        saver, session = self._saver_for_roll_back(ask), self._session
        self._roll_backs += 1
        if self._name is not None:
            saver.wait_published(self._name)
        self._tell()
        session.abort()
        wrong = session.state.step
        try:
            name = restore_checkpoint(
                session, saver.shelf.files, None, self._warn, before=self._rolled_back_to
            )
        except CheckpointError as error:
            raise _no_roll_back_error(
                ask, f"{error.what}: there is no checkpoint left to go back to"
            ) from error
        self._rolled_back_to = name
        first, session.state.step = session.state.step, wrong + 1
        told = {"step": wrong, "checkpoint": name, "left_out": [first, wrong], "reason": ask.what}
        for sink in self._sinks:
            sink.event("roll-back", told)

    def _saver_for_roll_back(self, ask: RollBackRequest) -> CheckpointSaver:
        """The saver, if there is one and the run may go back once more."""
        most = self._session.recipe.health.max_roll_backs
        if self._saver is None:
            raise _no_roll_back_error(ask, "there is no checkpoint to go back to, as there is no run folder")
        if self._roll_backs == most:
            raise _no_roll_back_error(
                ask, f"the run has gone back {most} times, and health.max_roll_backs allows no more"
            )
        return self._saver

    def score(self, score: float) -> None:
        """Of the evaluation at the present step; lower is better."""
        if self._saver is not None:
            self._saver.score(self._session.state.step, score)

    def scores(self) -> dict[int, float]:
        """The scores up to the present step, by step; collective."""
        session, saver = self._session, self._saver
        if saver is None or session.state.step == 0:
            return {}
        mine = json.dumps(saver.shelf.losses if session.is_first else {})
        found = {int(step): float(score) for step, score in json.loads(share_with_all(session, mine)).items()}
        return {step: score for step, score in found.items() if step <= session.state.step}

    def begin_final_save(self) -> None:
        """Begin to save the end of the fit, if that is not where a checkpoint is already; collective."""
        if self._saver is None:
            return
        step = self._session.state.step
        if step == self._first:
            self._name = self._here()
        if self._name is None or step not in (self._first, self._saved_at):
            self._save(self._saver)

    def finish(self) -> str | None:
        """Wait until the last one can be loaded, and say where it is; collective where a rank was lost."""
        if self._saver is None or self._name is None:
            return None
        while not self._saver.wait_published(self._name):
            self._save(self._saver)
        self._tell()
        self._saver.tidy()
        return self._saver.shelf.files.place(self._name)

    def best_checkpoint_path(self) -> str | None:
        """Where the checkpoint of the best evaluation is, if such are kept; collective."""
        session, saver = self._session, self._saver
        if saver is None or not session.recipe.checkpoint.keep_best:
            return None
        shelf, name = saver.shelf, ""
        if session.is_first and any(kept.step in shelf.losses for kept in shelf.whole):
            name = shelf.named(BEST)
        name = share_with_all(session, name)
        return shelf.files.place(name) if name else None

    def _here(self) -> str | None:
        """The newest checkpoint, if it is of the present step; collective."""
        session, saver = self._session, self._saver
        found = (
            saver.shelf.newest_at_step(session.state.step) if saver is not None and session.is_first else None
        )
        return share_with_all(session, found or "") or None

    def _save(self, saver: CheckpointSaver) -> None:
        saver.finish()
        self._tell()
        self._rolled_back_to = None
        self._name, self._saved_at = saver.save(), self._session.state.step
        self._untold = (self._session.state.step, self._name)
        self._clock.restart()

    def _tell(self) -> None:
        """Tell of the save that was under way, now that it is written."""
        if self._saver is None or self._untold is None:
            return
        self._saver.finish()
        (step, name), self._untold = self._untold, None
        if name in self._saver.dropped:
            return
        path = self._saver.shelf.files.place(name)
        for sink in self._sinks:
            sink.event("checkpoint", {"step": step, "path": path})


def _no_roll_back_error(ask: RollBackRequest, why: str) -> NumericError:
    """The trouble that asked to go back, and why that cannot be."""
    return NumericError(f"{ask.what}; {why}", where=ask.where, next_step=ask.next_step)
