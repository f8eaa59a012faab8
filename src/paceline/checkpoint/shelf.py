"""The folder of a run's checkpoints: what is in it, which of it is whole, and what may go.

Invariant: nothing is removed but what `retention` does not keep among checkpoints that are whole, and drafts
that a crash left; so the last good one is never removed. One rank, and one process, changes a shelf.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from paceline.checkpoint.files import Files
from paceline.checkpoint.identity import LOSSES, RUN, encode_table, find_losses, find_run
from paceline.checkpoint.manifest import MANIFEST, Manifest
from paceline.checkpoint.retention import Kept, by_loss, choose_kept
from paceline.errors import CheckpointError

_PREFIX = "step-"
NEWEST, BEST = "newest", "best"


def name_of(step: int, copy: int = 0) -> str:
    """The folder name of a step's checkpoint; `copy` counts those that a run saved again at that step."""
    return f"{_PREFIX}{step:08d}" + (f".{copy}" if copy else "")


def open_manifest(files: Files, name: str) -> Manifest:
    """The manifest of one checkpoint, if all of its files are there in their full length.

    Raises:
        CheckpointError: it is half-written, cut short or not Paceline's; says which, with its name.
    """
    try:
        manifest = Manifest.from_json(files.read(f"{name}/{MANIFEST}"))
    except FileNotFoundError:
        reason = "it has no manifest.json: half-written, or not a checkpoint of Paceline"
        raise unusable(files, name, reason) from None
    except (ValueError, OSError) as error:
        raise unusable(files, name, str(error)) from error
    for file in manifest.files:
        try:
            size = files.size(f"{name}/{file.name}")
        except OSError as error:
            raise unusable(files, name, f"{file.name}: {error}") from error
        if size != file.num_bytes:
            found = "is missing" if size is None else f"has {size} bytes, {file.num_bytes} were written"
            raise unusable(files, name, f"{file.name} {found}")
    return manifest


def has_published(files: Files) -> bool:
    """Whether a folder holds a manifest, whole or damaged."""
    names = [name for name in files.names() if name.startswith(_PREFIX)]
    return any(files.size(f"{name}/{MANIFEST}") is not None for name in names)


def refuse_published(files: Files, name: str) -> None:
    """What is published is never written again.

    Raises:
        CheckpointError: there is a checkpoint of this name.
    """
    if files.size(f"{name}/{MANIFEST}") is not None:
        raise CheckpointError(
            f"the checkpoint {name} is there already: another job saves into this folder",
            where=files.place(name),
            next_step="end one of the two jobs; the checkpoints that are there stay as they are",
        )


def unusable(files: Files, name: str, reason: str) -> CheckpointError:
    """A checkpoint must not be loaded."""
    return CheckpointError(
        f"the checkpoint {name} cannot be used: {reason}",
        where=files.place(name),
        next_step="name another one inside the run's checkpoints, or the run: it uses the newest valid one",
    )


@dataclass(frozen=True)
class Shelf:
    """What a folder holds.

    Args:
        run: of whom the checkpoints are; empty in a folder that no run has used.
        whole: those that can be loaded as far as lengths and manifests tell, oldest first.
        broken: why the others cannot, by name.
        losses: evaluation loss by step.
        vouched: `run.json` is whole, and names the run.
    """

    files: Files
    run: str = ""
    whole: list[Kept] = field(default_factory=list)
    broken: dict[str, CheckpointError] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    vouched: bool = False

    @classmethod
    def look(cls, files: Files) -> Shelf:
        """Read the folder; changes nothing."""
        found: dict[str, Manifest] = {}
        broken: dict[str, CheckpointError] = {}
        for name in files.names():
            if name.startswith(_PREFIX):
                try:
                    found[name] = open_manifest(files, name)
                except CheckpointError as error:
                    broken[name] = error
        manifests = [*found.values()]
        run, vouched = find_run(files, manifests)
        shelf = cls(files, run, [], broken, find_losses(files, manifests, run), vouched)
        for name, manifest in sorted(found.items(), key=lambda item: item[1].serial):
            shelf._add(name, manifest)
        return shelf

    def _add(self, name: str, manifest: Manifest) -> None:
        if manifest.origin.run == self.run:
            self.whole.append(Kept(name, manifest.step, manifest.serial))
        else:
            self.broken[name] = unusable(self.files, name, "it is foreign: another run wrote it")

    def claim(self) -> Shelf:
        """Make the folder this run's, and remove what a crash has left half-written."""
        run = self.run or secrets.token_hex(8)
        if not self.vouched:
            self.files.publish(RUN, encode_table({"run": run}))
        for name in [*self.broken]:
            if self.files.size(f"{name}/{MANIFEST}") is None:
                self.files.remove(name)
                del self.broken[name]
        return Shelf(self.files, run, self.whole, self.broken, self.losses, vouched=True)

    @property
    def next_serial(self) -> int:
        """Of the checkpoint that is saved next."""
        return max((kept.serial for kept in self.whole), default=0) + 1

    def free_name(self, step: int) -> str:
        """A name for a checkpoint of this step that is not taken: nothing is ever overwritten."""
        taken = {kept.name for kept in self.whole} | self.broken.keys() | {*self.files.names()}
        copy = 0
        while name_of(step, copy) in taken:
            copy += 1
        return name_of(step, copy)

    def newest_at(self, step: int) -> str | None:
        """The newest checkpoint, if it is of this step."""
        return self.whole[-1].name if self.whole and self.whole[-1].step == step else None

    def named(self, name: str) -> str:
        """A name as it is; "newest" and "best" (by evaluation) stand for one that can be loaded.

        Raises:
            CheckpointError: none was evaluated, or there is none.
        """
        if name not in (NEWEST, BEST):
            return name
        scored = self.whole if name == NEWEST else [kept for kept in self.whole if kept.step in self.losses]
        if not scored:
            raise CheckpointError(
                "no checkpoint of the run was evaluated" if self.whole else "there is no valid checkpoint",
                where=self.files.url,
                next_step="set evaluate.every_steps and checkpoint.keep_best, or name a checkpoint",
            )
        return scored[-1].name if name == NEWEST else by_loss(scored, self.losses)[0].name

    def publish(self, name: str, manifest: Manifest) -> None:
        """Phase two: from here on it is a checkpoint.

        Raises:
            CheckpointError: another job has published one of this name.
        """
        refuse_published(self.files, name)
        self.files.publish(f"{name}/{MANIFEST}", manifest.to_json())
        self.whole.append(Kept(name, manifest.step, manifest.serial))

    def score(self, step: int, loss: float) -> None:
        """Remember the evaluation loss of a step."""
        self.losses[step] = loss
        self.files.publish(LOSSES, encode_table({str(step): loss for step, loss in self.losses.items()}))

    def tidy(self, newest: int, best: int) -> None:
        """Remove what need not be kept."""
        self._recheck()
        kept = choose_kept(self.whole, newest, best, self.losses)
        for one in [one for one in self.whole if one.name not in kept]:
            self.files.remove(f"{one.name}/{MANIFEST}")  # first: a crash here must leave no half checkpoint
            self.files.remove(one.name)
            self.whole.remove(one)

    def _recheck(self) -> None:
        """What has been damaged since no longer counts; it is left where it is."""
        for one in [*self.whole]:
            try:
                open_manifest(self.files, one.name)
            except CheckpointError as error:
                self.whole.remove(one)
                self.broken[one.name] = error
