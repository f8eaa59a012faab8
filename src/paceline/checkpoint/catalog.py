"""Which run owns the checkpoints of a folder, and their evaluation losses, even if a file is damaged.

Both stand in small files of the folder, which carry their SHA-256, and in every manifest. Invariant: a small
file is believed only if it is what was written; else the manifests are asked.

Which checkpoints stay: the newest, and the best by evaluation loss. Pure.

The folder of a run's checkpoints: what is in it, which of it is whole, and what may go.

Invariant: nothing is removed but what `retention` does not keep among checkpoints that are whole, and drafts
that a crash left; so the last good one is never removed. One rank, and one process, changes a shelf.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoint.manifest import MANIFEST_FILE, Manifest
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.strict_json import parse, seal
from paceline.errors import CheckpointError

RUN_FILE = "run.json"
LOSSES_FILE = "losses.json"
_SEAL = "sha256"
_MAX_TABLE_BYTES = 64 * 2**20


def encode_sealed_table(values: Mapping[str, Any]) -> bytes:
    """A small table with its SHA-256."""
    return (json.dumps({**values, _SEAL: seal(values)}, sort_keys=True) + "\n").encode()


def read_sealed_table(files: StorageFolder, name: str) -> tuple[dict[str, Any], bool]:
    """A small table, and whether its SHA-256 vouches for it; empty if it is not there or cannot be read."""
    try:
        size = files.size(name)
        found = parse(files.read(name)) if size is not None and size <= _MAX_TABLE_BYTES else {}
    except (OSError, ValueError):
        return {}, False
    if not isinstance(found, dict):
        return {}, False
    written_seal = found.pop(_SEAL, None)
    return found, written_seal is not None and written_seal == seal(found)


def find_run(files: StorageFolder, manifests: Sequence[Manifest]) -> tuple[str, bool]:
    """Of whom the checkpoints are, and whether `run.json` says so.

    Without a file that can be believed it is the run that most of the checkpoints name, if there are any.
    A file of an older version, which has no SHA-256, is believed if a checkpoint agrees or there is none.
    """
    found, sealed = read_sealed_table(files, RUN_FILE)
    said = found.get("run", "")
    named = Counter(one.origin.run for one in manifests)
    if isinstance(said, str) and said and (sealed or said in named or (not named and len(found) == 1)):
        return said, sealed
    newest_first = sorted(manifests, key=lambda one: -one.serial)
    return max((one.origin.run for one in newest_first), key=lambda run: named[run], default=""), False


def find_losses(files: StorageFolder, manifests: Sequence[Manifest], run: str) -> dict[int, float]:
    """Evaluation loss by step: from `losses.json` if it is what was written, and from the manifests."""
    found: dict[int, float] = {}
    for one in sorted(manifests, key=lambda one: one.serial):
        found.update(_parse_losses(one.losses) if one.origin.run == run else {})
    read, sealed = read_sealed_table(files, LOSSES_FILE)
    own = _parse_losses(read) if sealed or not found else {}
    return {**found, **own}


def _parse_losses(values: Mapping[str, Any]) -> dict[int, float]:
    return {
        int(step): float(loss)
        for step, loss in values.items()
        if step.isdecimal() and len(step) < 20 and _is_loss(loss)
    }


def _is_loss(value: Any) -> bool:
    """A number, and none of hundreds of digits, which no float holds."""
    held = type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    return held and not math.isnan(value)


@dataclass(frozen=True)
class CatalogEntry:
    """A whole checkpoint in a folder.

    Args:
        name: of its folder.
        step: steps taken.
        serial: a higher one was saved later.
    """

    name: str
    step: int
    serial: int


def choose_retained(
    whole: Sequence[CatalogEntry], newest: int, best: int, losses: Mapping[int, float]
) -> frozenset[str]:
    """Names that stay.

    Args:
        whole: those that can be loaded; whatever is not among them does not count as kept.
        newest: how many of those saved last; one stays at least.
        best: how many of the lowest loss, of those that were evaluated; of equal ones the later.
        losses: evaluation loss by step.
    """
    by_age = sorted(whole, key=lambda kept: kept.serial)
    return frozenset(kept.name for kept in [*by_age[-max(1, newest) :], *sort_by_loss(whole, losses)[:best]])


def sort_by_loss(whole: Sequence[CatalogEntry], losses: Mapping[int, float]) -> list[CatalogEntry]:
    """Those that were evaluated, the best first; of equal ones the later."""
    scored = [kept for kept in whole if kept.step in losses]
    return sorted(scored, key=lambda kept: (losses[kept.step], -kept.serial))


_PREFIX = "step-"
NEWEST, BEST = "newest", "best"


def checkpoint_name(step: int, copy: int = 0) -> str:
    """The folder name of a step's checkpoint; `copy` counts those that a run saved again at that step."""
    return f"{_PREFIX}{step:08d}" + (f".{copy}" if copy else "")


def open_manifest(files: StorageFolder, name: str) -> Manifest:
    """The manifest of one checkpoint, if all of its files are there in their full length.

    Raises:
        CheckpointError: it is half-written, cut short or not Paceline's; says which, with its name.
    """
    try:
        manifest = Manifest.from_json(files.read(f"{name}/{MANIFEST_FILE}"))
    except FileNotFoundError:
        reason = "it has no manifest.json: half-written, or not a checkpoint of Paceline"
        raise unusable_checkpoint_error(files, name, reason) from None
    except (ValueError, OSError) as error:
        raise unusable_checkpoint_error(files, name, str(error)) from error
    for file in manifest.files:
        try:
            size = files.size(f"{name}/{file.name}")
        except OSError as error:
            raise unusable_checkpoint_error(files, name, f"{file.name}: {error}") from error
        if size != file.num_bytes:
            found = "is missing" if size is None else f"has {size} bytes, {file.num_bytes} were written"
            raise unusable_checkpoint_error(files, name, f"{file.name} {found}")
    return manifest


def has_published(files: StorageFolder) -> bool:
    """Whether a folder holds a manifest, whole or damaged."""
    names = [name for name in files.names() if name.startswith(_PREFIX)]
    return any(files.size(f"{name}/{MANIFEST_FILE}") is not None for name in names)


def require_unpublished(files: StorageFolder, name: str) -> None:
    """What is published is never written again.

    Raises:
        CheckpointError: there is a checkpoint of this name.
    """
    if files.size(f"{name}/{MANIFEST_FILE}") is not None:
        raise CheckpointError(
            f"the checkpoint {name} is there already: another job saves into this folder",
            where=files.place(name),
            next_step="end one of the two jobs; the checkpoints that are there stay as they are",
        )


def unusable_checkpoint_error(files: StorageFolder, name: str, reason: str) -> CheckpointError:
    """A checkpoint must not be loaded."""
    return CheckpointError(
        f"the checkpoint {name} cannot be used: {reason}",
        where=files.place(name),
        next_step="name another one inside the run's checkpoints, or the run: it uses the newest valid one",
    )


@dataclass(frozen=True)
class CheckpointCatalog:
    """What a folder holds.

    Args:
        run: of whom the checkpoints are; empty in a folder that no run has used.
        whole: those that can be loaded as far as lengths and manifests tell, oldest first.
        broken: why the others cannot, by name.
        losses: evaluation loss by step.
        vouched: `run.json` is whole, and names the run.
    """

    files: StorageFolder
    run: str = ""
    whole: list[CatalogEntry] = field(default_factory=list)
    broken: dict[str, CheckpointError] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    vouched: bool = False

    @classmethod
    def look(cls, files: StorageFolder) -> CheckpointCatalog:
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
            self.whole.append(CatalogEntry(name, manifest.step, manifest.serial))
        else:
            self.broken[name] = unusable_checkpoint_error(
                self.files, name, "it is foreign: another run wrote it"
            )

    def claim(self) -> CheckpointCatalog:
        """Make the folder this run's, and remove what a crash has left half-written."""
        run = self.run or secrets.token_hex(8)
        if not self.vouched:
            self.files.publish(RUN_FILE, encode_sealed_table({"run": run}))
        for name in [*self.broken]:
            if self.files.size(f"{name}/{MANIFEST_FILE}") is None:
                self.files.remove(name)
                del self.broken[name]
        return CheckpointCatalog(self.files, run, self.whole, self.broken, self.losses, vouched=True)

    @property
    def next_serial(self) -> int:
        """Of the checkpoint that is saved next."""
        return max((kept.serial for kept in self.whole), default=0) + 1

    def unused_name(self, step: int) -> str:
        """A name for a checkpoint of this step that is not taken: nothing is ever overwritten."""
        taken = {kept.name for kept in self.whole} | self.broken.keys() | {*self.files.names()}
        copy = 0
        while checkpoint_name(step, copy) in taken:
            copy += 1
        return checkpoint_name(step, copy)

    def newest_at_step(self, step: int) -> str | None:
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
        return scored[-1].name if name == NEWEST else sort_by_loss(scored, self.losses)[0].name

    def publish(self, name: str, manifest: Manifest) -> None:
        """Phase two: from here on it is a checkpoint.

        Raises:
            CheckpointError: another job has published one of this name.
        """
        require_unpublished(self.files, name)
        self.files.publish(f"{name}/{MANIFEST_FILE}", manifest.to_json())
        self.whole.append(CatalogEntry(name, manifest.step, manifest.serial))

    def score(self, step: int, loss: float) -> None:
        """Remember the evaluation loss of a step."""
        self.losses[step] = loss
        self.files.publish(
            LOSSES_FILE, encode_sealed_table({str(step): loss for step, loss in self.losses.items()})
        )

    def tidy(self, newest: int, best: int) -> None:
        """Remove what need not be kept."""
        self._drop_damaged()
        kept = choose_retained(self.whole, newest, best, self.losses)
        for one in [one for one in self.whole if one.name not in kept]:
            self.files.remove(
                f"{one.name}/{MANIFEST_FILE}"
            )  # first: a crash here must leave no half checkpoint
            self.files.remove(one.name)
            self.whole.remove(one)

    def _drop_damaged(self) -> None:
        """What has been damaged since no longer counts; it is left where it is."""
        for one in [*self.whole]:
            try:
                open_manifest(self.files, one.name)
            except CheckpointError as error:
                self.whole.remove(one)
                self.broken[one.name] = error
