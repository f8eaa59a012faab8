"""The catalog of a run's checkpoints: which are in a folder, which are complete, and which can be removed.

The run that owns the folder, and its evaluation losses, stand in small files (`run.json`, `losses.json`) that
carry their SHA-256, and in every manifest. A small file is used only if its SHA-256 is right; otherwise the
manifests are.

Invariant: only two things are ever removed: complete checkpoints that retention does not keep, and drafts
that a crash left. So the last good checkpoint is never removed. A link to a folder elsewhere is read like a
checkpoint, but neither it nor what it leads to is removed. One process of one rank changes a catalog.
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
    """Encode a small table with its SHA-256."""
    return (json.dumps({**values, _SEAL: seal(values)}, sort_keys=True) + "\n").encode()


def read_sealed_table(files: StorageFolder, name: str) -> tuple[dict[str, Any], bool]:
    """Return a small table, and whether its SHA-256 is right; an empty one if it is missing or cannot be
    read.
    """
    try:
        size = files.size(name)
        values = parse(files.read(name)) if size is not None and size <= _MAX_TABLE_BYTES else {}
    except (OSError, ValueError):
        return {}, False
    if not isinstance(values, dict):
        return {}, False
    written_seal = values.pop(_SEAL, None)
    return values, written_seal is not None and written_seal == seal(values)


def find_run(files: StorageFolder, manifests: Sequence[Manifest]) -> tuple[str, bool]:
    """Return the run that owns the checkpoints, and whether `run.json` proves it.

    Without a valid file it is the run that most checkpoints name, if there are any. A file of an older
    version, which has no SHA-256, is used if a checkpoint agrees or there is none.
    """
    values, sealed = read_sealed_table(files, RUN_FILE)
    run_in_file = values.get("run", "")
    num_checkpoints = Counter(manifest.origin.run for manifest in manifests)
    if (
        isinstance(run_in_file, str)
        and run_in_file
        and (sealed or run_in_file in num_checkpoints or (not num_checkpoints and len(values) == 1))
    ):
        return run_in_file, sealed
    # `max` returns the first of several equals, so the newest run wins a tie.
    newest_first = sorted(manifests, key=lambda manifest: -manifest.serial)
    return max(
        (manifest.origin.run for manifest in newest_first), key=lambda run: num_checkpoints[run], default=""
    ), False


def find_losses(files: StorageFolder, manifests: Sequence[Manifest], run: str) -> dict[int, float]:
    """Return the evaluation loss by step, from `losses.json` if it is valid, and from the manifests."""
    losses: dict[int, float] = {}
    for manifest in sorted(manifests, key=lambda manifest: manifest.serial):
        losses.update(_parse_losses(manifest.losses) if manifest.origin.run == run else {})
    values, sealed = read_sealed_table(files, LOSSES_FILE)
    # The file can know more than every manifest: a step is evaluated after its checkpoint was written.
    losses_in_file = _parse_losses(values) if sealed or not losses else {}
    return {**losses, **losses_in_file}


def _parse_losses(values: Mapping[str, Any]) -> dict[int, float]:
    return {
        int(step): float(loss)
        for step, loss in values.items()
        if step.isdecimal() and len(step) < 20 and _is_loss(loss)
    }


def _is_loss(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    is_number = type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    return is_number and not math.isnan(value)


@dataclass(frozen=True)
class CatalogEntry:
    """A complete checkpoint.

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
    """Return the names of the checkpoints to keep; pure.

    Args:
        whole: complete checkpoints; others do not count as kept.
        newest: how many of the last ones to keep; at least one is kept.
        best: how many of those with the lowest evaluation loss to keep; of equal ones the later.
        losses: evaluation loss by step.
    """
    by_age = sorted(whole, key=lambda entry: entry.serial)
    return frozenset(
        entry.name for entry in [*by_age[-max(1, newest) :], *sort_by_loss(whole, losses)[:best]]
    )


def sort_by_loss(whole: Sequence[CatalogEntry], losses: Mapping[int, float]) -> list[CatalogEntry]:
    """Return the evaluated checkpoints, the best first; of equal ones the later first."""
    scored = [entry for entry in whole if entry.step in losses]
    return sorted(scored, key=lambda entry: (losses[entry.step], -entry.serial))


_PREFIX = "step-"
NEWEST, BEST = "newest", "best"


def checkpoint_name(step: int, copy: int = 0) -> str:
    """Return the folder name of a step's checkpoint; `copy` counts repeated saves of a step."""
    return f"{_PREFIX}{step:08d}" + (f".{copy}" if copy else "")


def open_manifest(files: StorageFolder, name: str) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there with their full length.

    Raises:
        CheckpointError: it is half-written, cut short or not Paceline's; names it.
    """
    try:
        manifest = Manifest.from_json(files.read(f"{name}/{MANIFEST_FILE}"))
    except FileNotFoundError:
        reason = "it has no manifest.json, so it is half-written or not a Paceline checkpoint"
        raise unusable_checkpoint_error(files, name, reason) from None
    except (ValueError, OSError) as error:
        raise unusable_checkpoint_error(files, name, str(error)) from error
    for file in manifest.files:
        try:
            size = files.size(f"{name}/{file.name}")
        except OSError as error:
            raise unusable_checkpoint_error(files, name, f"{file.name}: {error}") from error
        if size != file.num_bytes:
            problem = "is missing" if size is None else f"has {size} bytes, {file.num_bytes} were written"
            raise unusable_checkpoint_error(files, name, f"{file.name} {problem}")
    return manifest


def has_published(files: StorageFolder) -> bool:
    """Return whether a folder holds a manifest, complete or damaged."""
    names = [name for name in files.names() if name.startswith(_PREFIX)]
    return any(files.exists(f"{name}/{MANIFEST_FILE}") for name in names)


def require_unpublished(files: StorageFolder, name: str) -> None:
    """Check that no checkpoint has this name, because a published one is never written again.

    Raises:
        CheckpointError: there is a checkpoint of this name.
    """
    if files.exists(f"{name}/{MANIFEST_FILE}"):
        raise CheckpointError(
            f"the checkpoint {name} is there already: another job saves into this folder",
            where=files.place(name),
            next_step="end one of the two jobs; the checkpoints that are there stay as they are",
        )


def unusable_checkpoint_error(files: StorageFolder, name: str, reason: str) -> CheckpointError:
    """Return the error for a checkpoint that must not be loaded."""
    return CheckpointError(
        f"the checkpoint {name} cannot be used: {reason}",
        where=files.place(name),
        next_step="name another one inside the run's checkpoints, or the run: it uses the newest valid one",
    )


@dataclass(frozen=True)
class CheckpointCatalog:
    """The contents of a folder of checkpoints.

    Args:
        files: the folder.
        run: the run that owns it; empty in a folder that no run has used.
        whole: checkpoints that can be loaded as far as manifests and file lengths show, oldest first.
        broken: the reason for each of the others, by name.
        losses: evaluation loss by step.
        is_run_file_valid: `run.json` is valid and names the run.
    """

    files: StorageFolder
    run: str = ""
    whole: list[CatalogEntry] = field(default_factory=list)
    broken: dict[str, CheckpointError] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    is_run_file_valid: bool = False

    @classmethod
    def read(cls, files: StorageFolder) -> CheckpointCatalog:
        """Read a folder; changes nothing."""
        manifests_by_name: dict[str, Manifest] = {}
        broken: dict[str, CheckpointError] = {}
        for name in files.names():
            if name.startswith(_PREFIX):
                try:
                    manifests_by_name[name] = open_manifest(files, name)
                except CheckpointError as error:
                    broken[name] = error
        manifests = [*manifests_by_name.values()]
        run, is_run_file_valid = find_run(files, manifests)
        catalog = cls(files, run, [], broken, find_losses(files, manifests, run), is_run_file_valid)
        for name, manifest in sorted(manifests_by_name.items(), key=lambda item: item[1].serial):
            catalog._add(name, manifest)
        return catalog

    def _add(self, name: str, manifest: Manifest) -> None:
        if manifest.origin.run == self.run:
            self.whole.append(CatalogEntry(name, manifest.step, manifest.serial))
        else:
            self.broken[name] = unusable_checkpoint_error(
                self.files, name, "it is foreign: another run wrote it"
            )

    def claim(self) -> CheckpointCatalog:
        """Make the folder this run's, and remove drafts that a crash left."""
        run = self.run or secrets.token_hex(8)
        if not self.is_run_file_valid:
            self.files.publish(RUN_FILE, encode_sealed_table({"run": run}))
        for name in [*self.broken]:
            # Only drafts: a damaged checkpoint keeps its files, in case they can be repaired.
            if self.files.is_folder(name) and not self.files.exists(f"{name}/{MANIFEST_FILE}"):
                self.files.remove(name)
                del self.broken[name]
        return CheckpointCatalog(
            self.files, run, self.whole, self.broken, self.losses, is_run_file_valid=True
        )

    @property
    def next_serial(self) -> int:
        """Return the serial of the next checkpoint."""
        return max((entry.serial for entry in self.whole), default=0) + 1

    def unused_name(self, step: int) -> str:
        """Return a name for a checkpoint of this step that is not used: nothing is ever overwritten."""
        used_names = {entry.name for entry in self.whole} | self.broken.keys() | {*self.files.names()}
        copy = 0
        while checkpoint_name(step, copy) in used_names:
            copy += 1
        return checkpoint_name(step, copy)

    def newest_at_step(self, step: int) -> str | None:
        """Return the name of the newest checkpoint if it is of this step, else None."""
        return self.whole[-1].name if self.whole and self.whole[-1].step == step else None

    def resolve_name(self, name: str) -> str:
        """Return a name as it is; replace "newest" and "best" (by evaluation) by a checkpoint that can be
        loaded.

        Raises:
            CheckpointError: there is no checkpoint, or none was evaluated.
        """
        if name not in (NEWEST, BEST):
            return name
        scored = (
            self.whole if name == NEWEST else [entry for entry in self.whole if entry.step in self.losses]
        )
        if not scored:
            raise CheckpointError(
                "no checkpoint of the run was evaluated" if self.whole else "there is no valid checkpoint",
                where=self.files.url,
                next_step="set evaluate.every_steps and checkpoint.keep_best, or name a checkpoint",
            )
        return scored[-1].name if name == NEWEST else sort_by_loss(scored, self.losses)[0].name

    def publish(self, name: str, manifest: Manifest) -> None:
        """Write the manifest, which makes a draft a checkpoint: phase two of publishing.

        Raises:
            CheckpointError: another job has published a checkpoint of this name.
        """
        # Checked right before the write: another job can have published since the draft began.
        require_unpublished(self.files, name)
        self.files.publish(f"{name}/{MANIFEST_FILE}", manifest.to_json())
        self.whole.append(CatalogEntry(name, manifest.step, manifest.serial))

    def record_loss(self, step: int, loss: float) -> None:
        """Record the evaluation loss of a step."""
        self.losses[step] = loss
        self.files.publish(
            LOSSES_FILE, encode_sealed_table({str(step): loss for step, loss in self.losses.items()})
        )

    def remove_expired(self, newest: int, best: int) -> None:
        """Remove the checkpoints that retention does not keep."""
        self._drop_damaged()
        retained = choose_retained(self.whole, newest, best, self.losses)
        for entry in [entry for entry in self.whole if entry.name not in retained]:
            if not self.files.is_folder(entry.name):
                continue  # a link: what it leads to is not this run's
            # The manifest first: a crash in between leaves a draft and no half checkpoint.
            self.files.remove(f"{entry.name}/{MANIFEST_FILE}")
            self.files.remove(entry.name)
            self.whole.remove(entry)

    def _drop_damaged(self) -> None:
        """Drop checkpoints that were damaged since from the list; their files stay."""
        for entry in [*self.whole]:
            try:
                open_manifest(self.files, entry.name)
            except CheckpointError as error:
                self.whole.remove(entry)
                self.broken[entry.name] = error
