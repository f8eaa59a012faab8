"""The certificate of a checkpoint: a file beside its manifest that stays with it when it is copied alone.

It says which run, recipe, task and versions the checkpoint is of, and has a checksum of each tensor and the
result of the last `paceline verify RUN` of exactly this recipe and task. It is written with every save, and
again by `paceline verify RUN`; the manifest is never rewritten.

Invariant: a verification is only in the certificate of a checkpoint that has its recipe, task and number of
processes. Not done here: protection against deliberate changes, because a certificate is not signed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter

from paceline._version import VERSION
from paceline.checkpoint.catalog import (
    CheckpointCatalog,
    encode_sealed_table,
    open_manifest,
    read_sealed_table,
)
from paceline.checkpoint.disk.checksum import FileChecksum, recompute_checksum
from paceline.checkpoint.manifest import CheckpointOrigin, Manifest, TensorFileRecord, hash_state
from paceline.checkpoint.safetensors_file import decode_tensors
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.strict_json import Count, StrictModel, parse, validate
from paceline.errors import CheckpointError

CERTIFICATE_FILE = "certificate.json"
_MAX_BYTES = 64 * 2**20

TensorChecksums = Mapping[str, Mapping[str, str]]
"""Checksums by file and by the name that a tensor has in it."""

_Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
_Text = Annotated[str, Field(max_length=10_000)]


class VerificationRecord(StrictModel):
    """The part of a verification that the certificate of a checkpoint keeps."""

    recipe_sha256: _Digest
    task_sha256: _Digest | None
    paceline: _Text
    strategy: _Text
    processes: Count
    steps: Count
    ok: bool
    conclusion: _Text


class CheckpointCertificate(StrictModel):
    """The content of the file; `run` to `versions` are those of the manifest."""

    format: Literal[1] = 1
    run: str
    step: Count
    state_sha256: _Digest
    recipe_sha256: _Digest
    task_sha256: _Digest | None
    strategy: str
    world_size: Count
    versions: dict[str, str]
    tensors: dict[str, dict[str, str]]
    verification: VerificationRecord | None

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return encode_sealed_table(self.model_dump())


_CERTIFICATE = TypeAdapter(CheckpointCertificate)
_VERIFICATION = TypeAdapter(VerificationRecord)


def code_identity(recipe_text: str, task_sha256: str | None) -> dict[str, str | None]:
    """Return what identifies the code of a run: hashes of its recipe and its task, and Paceline's version."""
    return {
        "recipe_sha256": hashlib.sha256(recipe_text.encode()).hexdigest(),
        "task_sha256": task_sha256,
        "paceline": VERSION,
    }


def task_file_sha256(task: str, base_dir: Path) -> str | None:
    """Return the SHA-256 of the file of a task `file.py:function`; None for another task, or without it."""
    file = task.partition(":")[0]
    if not file.endswith(".py"):
        return None
    try:
        return hashlib.sha256((base_dir / file).read_bytes()).hexdigest()
    except OSError:
        return None


def read_verification(path: Path) -> VerificationRecord | None:
    """Return what the certificate of a run folder says; None if there is none, or it names no recipe."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return _verification_of(parse(path.read_bytes()))
    except (OSError, ValueError):
        return None


def _verification_of(values: Any) -> VerificationRecord:
    """Return the part of a certificate of a verification that a checkpoint keeps; ValueError without it."""
    if not isinstance(values, dict):
        raise ValueError("it is no table")
    known = {name: values[name] for name in VerificationRecord.model_fields if name in values}
    return validate(_VERIFICATION, known)


@dataclass(frozen=True)
class Certifier:
    """The writer of the certificates of a run's saves, on rank 0.

    Args:
        verified: the certificate of the run folder; None: there is no run folder.
        task_sha256: of the file of the task when the run started, see `task_file_sha256`.
    """

    verified: Path | None = None
    task_sha256: str | None = None

    def certify(self, manifest: Manifest, tensors: TensorChecksums) -> bytes:
        """Return the bytes of the certificate of a checkpoint."""
        record = None if self.verified is None else read_verification(self.verified)
        return _make_certificate(manifest, tensors, self.task_sha256, record).encode()


def _make_certificate(
    manifest: Manifest, tensors: TensorChecksums, task_sha256: str | None, record: VerificationRecord | None
) -> CheckpointCertificate:
    origin = manifest.origin
    identity = code_identity(origin.recipe, task_sha256)
    is_of_run = (
        record is not None
        and (record.recipe_sha256, record.task_sha256) == (identity["recipe_sha256"], task_sha256)
        and record.processes == origin.world_size
    )
    return CheckpointCertificate(
        **_identity_of(manifest),
        task_sha256=task_sha256,
        tensors={file: dict(checksums) for file, checksums in tensors.items()},
        verification=record if is_of_run else None,
    )


def _identity_of(manifest: Manifest) -> dict[str, Any]:
    """Return the fields of a certificate that follow from the manifest."""
    origin: CheckpointOrigin = manifest.origin
    return {
        "run": origin.run,
        "step": manifest.step,
        "state_sha256": manifest.state_sha256,
        "recipe_sha256": code_identity(origin.recipe, None)["recipe_sha256"],
        "strategy": origin.strategy,
        "world_size": origin.world_size,
        "versions": dict(origin.versions),
    }


def read_certificate(files: StorageFolder, name: str) -> CheckpointCertificate:
    """Return the certificate of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = f"{name}/{CERTIFICATE_FILE}"
    if not files.exists(path):
        raise _certificate_error(files, path, "the checkpoint has no certificate")
    values, is_sealed = read_sealed_table(files, path)
    if not is_sealed:
        raise _certificate_error(files, path, "the certificate is damaged: its SHA-256 does not fit")
    try:
        return validate(_CERTIFICATE, values)
    except ValueError as error:
        raise _certificate_error(files, path, f"the certificate cannot be true: {error}") from error


def _certificate_error(files: StorageFolder, path: str, what: str) -> CheckpointError:
    return CheckpointError(
        what, where=files.place(path), next_step="`paceline verify RUN` writes it again, for all checkpoints"
    )


def find_mismatches(files: StorageFolder, name: str) -> tuple[CheckpointCertificate, list[str]]:
    """Compare the certificate of a checkpoint with its manifest and with every tensor, one file at a time.

    Returns:
        The certificate, and a sentence for each difference; tensors are named.
    Raises:
        CheckpointError: a file is missing or cut short, or there is no valid certificate.
    """
    manifest, certificate = open_manifest(files, name), read_certificate(files, name)
    found = [
        f"the certificate is of {key} {getattr(certificate, key)}, the checkpoint of {key} {value}"
        for key, value in _identity_of(manifest).items()
        if getattr(certificate, key) != value
    ]
    if hash_state(manifest.files, manifest.scalars) != manifest.state_sha256:
        found.append("the values in manifest.json that are not tensors have changed")
    for file in manifest.files:
        found += _compare_file(files, name, file, certificate.tensors.get(file.name, {}))
    return certificate, found


def _compare_file(
    files: StorageFolder, name: str, file: TensorFileRecord, certified: Mapping[str, str]
) -> list[str]:
    data = _read_file(files, name, file)
    try:
        present = hash_tensors(data)
    except ValueError as error:
        return [f"{file.name} is damaged: {error}"]
    found = [
        f"'{key}' in {file.name} has changed" if key in present else f"'{key}' in {file.name} is missing"
        for key, checksum in certified.items()
        if present.get(key) != checksum
    ]
    found += [f"'{key}' in {file.name} is not in the certificate" for key in present if key not in certified]
    if not found and recompute_checksum(data, file.checksum) != file.checksum:
        found.append(f"{file.name} is damaged outside of its tensors")
    return found


def _read_file(files: StorageFolder, name: str, file: TensorFileRecord) -> bytearray:
    try:
        return bytearray(files.read(f"{name}/{file.name}"))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file.name}: {error}", where=files.place(name), next_step="check its permissions"
        ) from error


def hash_tensors(data: bytearray) -> dict[str, str]:
    """Return the checksum of each tensor of a safetensors file, by its name in the file.

    Raises:
        ValueError: this is no safetensors file.
    """
    checksums: dict[str, str] = {}
    for key, tensor in decode_tensors(data).items():
        checksum = FileChecksum()
        checksum.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        checksums[key] = checksum.text()
    return checksums


def certify_checkpoints(files: StorageFolder, values: Mapping[str, Any]) -> list[str]:
    """Write the result of a verification into the certificates of a run's checkpoints.

    A checkpoint of another recipe, task or number of processes keeps its certificate. One without a valid
    certificate, as older versions wrote it, gets one from its files.

    Args:
        files: the folder of the checkpoints.
        values: the certificate of the verification, with `code_identity`.
    Returns:
        The names of the checkpoints that have it now.
    Raises:
        CheckpointError: a file cannot be read.
        OSError: a certificate cannot be written.
    """
    record, names = _verification_of(values), []
    for entry in CheckpointCatalog.read(files).whole:
        if not files.is_folder(entry.name):
            continue  # a link: what it leads to is not this run's
        manifest = open_manifest(files, entry.name)
        old: CheckpointCertificate | None
        try:
            old = read_certificate(files, entry.name)
            tensors, task_sha256 = old.tensors, old.task_sha256
        except CheckpointError:
            # Which file of a task made such a checkpoint is not known.
            old, tensors, task_sha256 = None, _checked_tensors(files, entry.name, manifest), None
        new = _make_certificate(manifest, tensors, task_sha256, record)
        if new.verification is not None:
            names.append(entry.name)
        if new.verification is not None or old is None:
            files.publish(f"{entry.name}/{CERTIFICATE_FILE}", new.encode())
    return names


def _checked_tensors(files: StorageFolder, name: str, manifest: Manifest) -> dict[str, dict[str, str]]:
    """Return the checksums of all tensors of a checkpoint whose files have the checksums of its manifest."""
    tensors: dict[str, dict[str, str]] = {}
    for file in manifest.files:
        data = _read_file(files, name, file)
        if recompute_checksum(data, file.checksum) != file.checksum:
            raise CheckpointError(
                f"{file.name} is damaged: its checksum is not that of the manifest",
                where=files.place(name),
                next_step="remove this checkpoint; the run uses the newest valid one",
            )
        tensors[file.name] = hash_tensors(data)
    return tensors
