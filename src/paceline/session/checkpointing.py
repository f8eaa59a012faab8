"""Checkpoints of a session: when one is due, how it is saved, and how a session is restored from one.

`CheckpointSchedule` saves during a fit, by steps and by minutes, at the same step on every rank, and
restores an earlier checkpoint if a health check asks to roll back. A save in the background reads the live
state, so the next update waits for it (`_wait_before_updates`). Invariant: a checkpoint is loaded on all
ranks or on none of them.

File formats and atomic publishing are in `paceline.checkpoint`.
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
from paceline.checkpoint.checkpoint_certificate import Certifier, task_file_sha256
from paceline.checkpoint.checkpoint_reader import StoredCheckpoint, open_checkpoint
from paceline.checkpoint.disk.writer_process import WriterProcess, can_use_writer_process
from paceline.checkpoint.manifest import CheckpointOrigin
from paceline.checkpoint.pretrained import VOCABULARY_KEY, require_same_vocabulary
from paceline.checkpoint.publish import FullDiskPatience, RetentionCounts, claim_folder
from paceline.checkpoint.saver import CheckpointSaver, SaveSettings
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.writers import PartWriter, ProcessWriter, ThreadWriter
from paceline.errors import CheckpointError, CommunicationError, NumericError, format_count
from paceline.job.cluster import process_environment
from paceline.job.launcher_reports import TRAINING_ELASTIC, TRAINING_FOR_SERVER
from paceline.observe.sinks import Sink
from paceline.recipe.recipe import Recipe, to_toml
from paceline.recipe.tables import CheckpointRecipe
from paceline.report.run_files import CERTIFICATE
from paceline.session.early_stopping import EvaluationScores
from paceline.session.reproducibility import fingerprint_differences, numerics_fingerprint
from paceline.session.session import Session, gather_from_all, share_with_all
from paceline.sync.health import RollBackRequest
from paceline.sync.residuals import orphaned_residuals


def interval_passed(every_steps: int, before: int, step: int) -> bool:
    """Return whether a round from step `before` to `step` reached a multiple of the interval (0: never)."""
    return every_steps > 0 and step // every_steps > before // every_steps


class EveryMinutes:
    """Timer that is due at the same step on all ranks: rank 0 reads its clock and says when to check again.

    Ranks communicate at few steps: after about half of the remaining time, then after half of the rest.

    Args:
        minutes: the interval; 0: never due, without communication.
        is_first: whether this is the rank whose clock counts.
        total: returns the sum of a number over all ranks; collective.
        now: returns seconds of a monotonic clock.
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
    def is_active(self) -> bool:
        """Return whether there is an interval, for which ranks communicate."""
        return self._seconds > 0

    def due(self, steps: int) -> bool:
        """Return whether the interval is over; collective.

        Args:
            steps: number of steps since the last call.
        """
        self._steps += steps
        self._steps_until_check -= steps
        if not self.is_active or self._steps_until_check > 0:
            return False
        answer = int(self._total(self._steps_until_next_check() if self._is_first else 0.0))
        self._steps_until_check = max(1, answer)
        return answer == 0

    def restart(self) -> None:
        """Start the interval anew, after a save for any reason."""
        self._since, self._steps, self._steps_until_check = self._now(), 0, 1

    def _steps_until_next_check(self) -> float:
        """Return 0 if it is time, else half of the steps that remain at the present pace."""
        passed = self._now() - self._since
        if passed >= self._seconds:
            return 0.0
        pace = max(passed / max(1, self._steps), 1e-6)
        return float(max(1, int((self._seconds - passed) / pace / 2)))


_PATIENCE_SECONDS = 60.0
"""A save runs at idle priority for at most this long, because a crash in the meantime would lose it."""
_WAIT_PART = "settle"


def checkpoint_files(recipe: Recipe, run_dir: Path) -> StorageFolder:
    """Return the folder of a run's checkpoints, local or in object storage."""
    return StorageFolder(recipe.checkpoint.folder or str(run_dir / "checkpoints"))


def build_saver(session: Session, run_dir: Path, warn: Callable[[str], None]) -> CheckpointSaver:
    """Build the saver of this rank and remove incomplete checkpoints of a crashed run; collective."""
    files = checkpoint_files(session.recipe, run_dir)
    options, strategy = session.recipe.checkpoint, session.full_strategy
    patience = FullDiskPatience(options.full_disk_seconds, warn)
    catalog = claim_folder(files, patience) if session.is_first else CheckpointCatalog(files)
    run = share_with_all(session, catalog.run)
    settings = SaveSettings(
        rank=session.cluster.global_rank,
        background=options.mode == "background",
        shared=strategy.sync_spec.shares_state,
        steady=strategy.sync_spec.steady,
        keep=RetentionCounts(options.keep, options.keep_best),
        deadline_seconds=options.deadline_seconds,
        patience=patience,
        writer=_writer(files, options, patience),
        certifier=Certifier(run_dir / CERTIFICATE, task_file_sha256(session.recipe.task, Path.cwd())),
        left=partial(_present_ranks, session),
        survives_lost_ranks=lambda: session.launcher_phase in (TRAINING_FOR_SERVER, TRAINING_ELASTIC),
    )
    saver = CheckpointSaver(
        session.state, catalog, _origin(session, run), settings, partial(gather_from_all, session)
    )
    session.wait_for_save = saver.settle
    session.reinstall_hooks.append(partial(_wait_before_updates, session))
    _wait_before_updates(session)
    return saver


def _writer(files: StorageFolder, options: CheckpointRecipe, patience: FullDiskPatience) -> PartWriter:
    """Return the writer: all threads if training waits, else a process or, without one, a thread."""
    if options.mode == "blocking":
        return ThreadWriter(torch.get_num_threads())
    if files.local_path("") is None or not can_use_writer_process():
        return ThreadWriter(1)
    seconds = min(_PATIENCE_SECONDS, options.deadline_seconds / 2)
    return ProcessWriter(WriterProcess(process_environment()), seconds, patience.warn)


def _present_ranks(session: Session) -> list[int]:
    """Return the ranks that the job's store does not know as lost; empty if the job has no store."""
    membership = session.cluster.membership
    if membership is None:
        return []
    gone = membership.store.lost()
    return [rank for rank, number in enumerate(membership.members) if number not in gone]


def _wait_before_updates(session: Session) -> None:
    """Make updates wait until a background save no longer reads the state.

    It is the first part of the update step, since a skipped step runs only some of the parts, and since
    parameters change before the update where replicas average that have trained alone.
    """
    step = session.update_step
    other_parts = {name: part for name, part in step.parts.items() if name != _WAIT_PART}
    step.parts = {_WAIT_PART: lambda record: session.wait_for_save(), **other_parts}
    # The average is also updated outside of the update step, after rounds.
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
    """Return versions and settings of this machine on which the bits of a run depend."""
    precision = session.recipe.precision.compute
    return {
        "paceline": VERSION,
        "python": platform.python_version(),
        "precision": precision,
        **numerics_fingerprint(),
        **({VOCABULARY_KEY: session.task.vocabulary} if session.task.vocabulary else {}),
    }


ReadState = Callable[[Session, StoredCheckpoint], Callable[[], None]]
"""Function that reads what this rank needs; it returns a function that then changes the session."""


def read_whole_state(session: Session, stored: StoredCheckpoint) -> Callable[[], None]:
    """Read the whole state of a training run; see `ReadState`."""
    load = session.state.read_from(stored, stored.scalars)

    def load_state() -> None:
        load()
        _warn_dropped_residuals(session, stored)

    return load_state


def restore_checkpoint(
    session: Session,
    files: StorageFolder,
    name: str | None = None,
    warn: Callable[[str], None] = lambda text: None,
    *,
    before: str | None = None,
    take: ReadState = read_whole_state,
) -> str:
    """Load a checkpoint into the session; collective. Every rank reads and verifies all that it needs.

    Args:
        name: of the checkpoint; "best": that of the best evaluation; None: the newest valid one.
        warn: receives, on rank 0, which checkpoints cannot be used and why.
        before: consider only checkpoints that were saved before this one.
        take: reads the wanted part of the state.
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
        warn(f"warning: {refusal.what}. Trying the checkpoint before it.")
    raise CheckpointError(
        "there is no valid checkpoint" + (f": {refusal.what}" if refusal else ""),
        where=files.url,
        next_step="name a run folder that has a checkpoint, or start the run again",
    )


def _resolve_name(files: StorageFolder, name: str) -> str:
    """Return the checkpoint name that "best" or "newest" stands for; every rank reads the folder itself."""
    return CheckpointCatalog.read(files).resolve_name(name)


def _newest_first(
    session: Session, files: StorageFolder, before: str | None, warn: Callable[[str], None]
) -> list[str]:
    """Return the names of complete checkpoints as rank 0 lists them; collective."""
    names: list[str] = []
    if session.is_first:
        catalog = CheckpointCatalog.read(files)
        names = [complete.name for complete in reversed(catalog.whole)]
        names = names[names.index(before) + 1 :] if before in names else names
        for error in catalog.broken.values():
            warn(f"warning: {error.what}")
    return [str(name) for name in json.loads(share_with_all(session, json.dumps(names)))]


def _try_restore(
    session: Session, files: StorageFolder, name: str, warn: Callable[[str], None], take: ReadState
) -> CheckpointError | None:
    """Load a checkpoint if every rank can read it; else return the reason, on every rank; collective."""
    refusal: CheckpointError | None = None
    other = CheckpointError(f"the checkpoint {name} cannot be read by another rank", where=files.url)
    try:
        stored = open_checkpoint(files, name)
        saved_vocabulary = stored.manifest.origin.versions.get(VOCABULARY_KEY, "")
        require_same_vocabulary(session.task.vocabulary, saved_vocabulary, name)
    except CheckpointError as error:
        refusal = error
    if session.sum(float(refusal is not None)):
        return refusal or other
    session.prepare_restore(stored.scalars)
    try:
        load_state = take(session, stored)
    except CheckpointError as error:
        refusal = error
    if session.sum(float(refusal is not None)):
        return refusal or other
    # Only now, when all ranks have read their part, does the state change: never half on some of them.
    versions = stored.manifest.origin.versions
    differing = fingerprint_differences(versions) if session.recipe.reproducible else ""
    if differing:
        warn(f"warning: {name} was computed differently ({differing}), so the bits may differ from here on.")
    load_state()
    return None


def _warn_dropped_residuals(session: Session, stored: StoredCheckpoint) -> None:
    """Warn if quantisation errors of the checkpoint, which belong to its gradients, are not sent any more."""
    if orphaned_residuals(stored.shapes, session.state.extra_states):
        text = (
            f"{stored.name} has unsent quantisation errors of '{stored.manifest.origin.strategy}', which are"
            f" dropped under '{session.strategy}'. Resume with that codec to keep them."
        )
        session.events.add("warning", {"text": text})


@contextmanager
def open_checkpoint_schedule(
    session: Session, run_dir: Path | None, sinks: Sequence[Sink]
) -> Iterator[CheckpointSchedule]:
    """Return a context manager around the checkpoints of a fit; collective.

    Args:
        run_dir: the folder of the run; None: nothing is saved.
        sinks: receive the events `checkpoint`, `roll-back` and `warning`.
    """

    def warn(text: str) -> None:
        for sink in sinks:
            sink.event("warning", {"text": text})

    saver = None if run_dir is None else build_saver(session, run_dir, warn)
    schedule = CheckpointSchedule(session, saver, sinks, warn)
    try:
        schedule.best = EvaluationScores(session.recipe.evaluate, schedule.scores())
        schedule.begin()
        yield schedule
    except CommunicationError:
        # The session may continue on the remaining ranks and change the state that is being saved.
        if session.is_elastic:
            schedule.report_complete()
        raise
    finally:
        if saver is not None:
            saver.close()


class CheckpointSchedule:
    """Schedule of the saves of one fit.

    Args:
        saver: None: nothing is saved.
        sinks: receive the event `checkpoint` when a checkpoint is complete.
        warn: receives which checkpoints cannot be used.
    Attributes:
        best: the evaluations so far, by which the run may end early.
        saved_at: step of the last save of this fit; -1 before it.
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
        self.saved_at = -1
        self._roll_backs = 0
        self._rolled_back_to: str | None = None
        self._unreported: tuple[int, str] | None = None
        minutes = session.recipe.checkpoint.every_minutes if saver is not None else 0.0
        self._clock = EveryMinutes(minutes, session.is_first, session.sum)

    def at_interval(self, before: int, *, is_best: bool = False) -> bool:
        """Save if a round from step `before` to the present one has made it due; collective.

        Args:
            is_best: the state has just been evaluated, and no earlier one was better; equal on every rank.
        Returns:
            Whether the ranks may have communicated.
        """
        if self._saver is None:
            return False
        if not self._saver.busy:
            self.report_complete()
        step = self._session.state.step
        # Every round, even if a save is due anyway: it counts the steps, on all ranks alike.
        by_time = self._clock.due(step - before)
        options = self._session.recipe.checkpoint
        as_best = is_best and options.keep_best > 0
        is_due = by_time or as_best or interval_passed(options.every_steps, before, step)
        if is_due:
            self._save(self._saver)
        return is_due or self._clock.is_active

    def begin(self) -> None:
        """Save the first state of the fit if the run may have to roll back to it; collective."""
        if (
            self._saver is not None
            and self._session.recipe.health.rolls_back
            and self._present_checkpoint() is None
        ):
            self._save(self._saver)

    def roll_back(self, request: RollBackRequest) -> None:
        """Load the newest valid checkpoint and skip the steps from it to the failed one; collective.

        If nothing was saved since the last roll-back, that checkpoint leads to the same error, so the one
        before it is loaded.

        Raises:
            NumericError: the run has rolled back too often, or there is no checkpoint left.
        """
        saver, session = self._saver_for_roll_back(request), self._session
        self._roll_backs += 1
        if self._name is not None:
            # The newest checkpoint may still be on its way to the disk.
            saver.wait_published(self._name)
        self.report_complete()
        session.abort()
        wrong = session.state.step
        try:
            name = restore_checkpoint(
                session, saver.catalog.files, None, self._warn, before=self._rolled_back_to
            )
        except CheckpointError as error:
            raise _no_roll_back_error(
                request, f"{error.what}: there is no earlier checkpoint to roll back to"
            ) from error
        self._rolled_back_to = name
        first, session.state.step = session.state.step, wrong + 1
        record = {"step": wrong, "checkpoint": name, "left_out": [first, wrong], "reason": request.what}
        for sink in self._sinks:
            sink.event("roll-back", record)

    def _saver_for_roll_back(self, request: RollBackRequest) -> CheckpointSaver:
        """Return the saver; raise a NumericError if there is none or the run may not roll back again."""
        most = self._session.recipe.health.max_roll_backs
        if self._saver is None:
            raise _no_roll_back_error(request, "without a run folder there is no checkpoint to roll back to")
        if self._roll_backs == most:
            raise _no_roll_back_error(
                request,
                f"the run has rolled back {format_count(most, 'time')}, the limit of health.max_roll_backs",
            )
        return self._saver

    def score(self, score: float) -> None:
        """Record the score of the evaluation at the present step; lower is better."""
        if self._saver is not None:
            self._saver.score(self._session.state.step, score)

    def scores(self) -> dict[int, float]:
        """Return the saved scores up to the present step, by step; collective."""
        session, saver = self._session, self._saver
        if saver is None or session.state.step == 0:
            return {}
        local = json.dumps(saver.catalog.losses if session.is_first else {})
        saved = json.loads(share_with_all(session, local))
        scores = {int(step): float(score) for step, score in saved.items()}
        return {step: score for step, score in scores.items() if step <= session.state.step}

    def lacks_score(self, step: int) -> bool:
        """Return whether a saved run has no evaluation at a step; equal on all ranks."""
        return self._saver is not None and not self.best.has(step)

    def begin_final_save(self) -> None:
        """Begin to save the last state of the fit, unless it has a checkpoint already; collective."""
        if self._saver is None:
            return
        step = self._session.state.step
        if step == self._first:
            self._name = self._present_checkpoint()
        if self._name is None or step not in (self._first, self.saved_at):
            self._save(self._saver)

    def finish(self) -> str | None:
        """Wait until the last checkpoint is complete and return its place; collective if a rank was lost."""
        if self._saver is None or self._name is None:
            return None
        # A save that lost a rank is incomplete, so the remaining ranks save again.
        while not self._saver.wait_published(self._name):
            self._save(self._saver)
        self.report_complete()
        self._saver.tidy()
        return self._saver.catalog.files.place(self._name)

    def best_checkpoint_path(self) -> str | None:
        """Return the place of the checkpoint of the best evaluation, if such are kept; collective."""
        session, saver = self._session, self._saver
        if saver is None or not session.recipe.checkpoint.keep_best:
            return None
        catalog, name = saver.catalog, ""
        if session.is_first and any(complete.step in catalog.losses for complete in catalog.whole):
            name = catalog.resolve_name(BEST)
        name = share_with_all(session, name)
        return catalog.files.place(name) if name else None

    def _present_checkpoint(self) -> str | None:
        """Return the newest checkpoint if it is of the present step, else None; collective."""
        session, saver = self._session, self._saver
        name = None
        if saver is not None and session.is_first:
            name = saver.catalog.newest_at_step(session.state.step)
        return share_with_all(session, name or "") or None

    def _save(self, saver: CheckpointSaver) -> None:
        saver.finish()
        self.report_complete()
        self._rolled_back_to = None
        with self._session.net.activity.during("checkpoint"):
            self._name, self.saved_at = saver.save(), self._session.state.step
        self._unreported = (self._session.state.step, self._name)
        self._clock.restart()

    def report_complete(self) -> None:
        """Wait until the save that is in progress, if any, is written, and send its event."""
        if self._saver is None or self._unreported is None:
            return
        self._saver.finish()
        (step, name), self._unreported = self._unreported, None
        if name in self._saver.dropped:
            return
        path = self._saver.catalog.files.place(name)
        for sink in self._sinks:
            sink.event("checkpoint", {"step": step, "path": path})


def _no_roll_back_error(request: RollBackRequest, why: str) -> NumericError:
    """Return the error of the failed health check, with the reason why the run cannot roll back."""
    return NumericError(f"{request.what}; {why}", where=request.where, next_step=request.next_step)
