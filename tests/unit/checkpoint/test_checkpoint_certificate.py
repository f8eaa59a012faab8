"""The certificate beside a manifest: what it says, and what it finds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.checkpoint.catalog import CheckpointCatalog, open_manifest
from paceline.checkpoint.checkpoint_certificate import (
    CERTIFICATE_FILE,
    Certifier,
    certify_checkpoints,
    code_identity,
    find_mismatches,
    read_certificate,
)
from paceline.checkpoint.disk.checksum import recompute_checksum
from paceline.checkpoint.manifest import MANIFEST_FILE, hash_state
from paceline.checkpoint.safetensors_file import chunk_keys
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import CheckpointError
from tests.unit.checkpoint.states import ORIGIN, flip_bit, make_state, save

VERIFICATION = {
    **code_identity(str(ORIGIN["recipe"]), None),
    "strategy": "replicas=1",
    "processes": 1,
    "steps": 20,
    "ok": True,
    "conclusion": "verified: 20 steps, 14 tensors, all within their bounds",
    "tensors": [],
}
FILE = "rank-00000.safetensors"


@pytest.mark.capability("Z2")
@pytest.mark.parametrize("background", [True, False])
def test_a_tensor_that_has_changed_is_named(background: bool, tmp_path: Path) -> None:
    """Also by somebody who has made the checksums fit again."""
    files, name = StorageFolder(str(tmp_path)), save(tmp_path, make_state(), background=background)
    certificate, mismatches = find_mismatches(files, name)
    assert mismatches == [] and certificate.verification is None
    assert (certificate.step, certificate.run) == (3, open_manifest(files, name).origin.run)
    last = chunk_keys(open_manifest(files, name).files[0].chunks)[-1]
    assert last in certificate.tensors[FILE]
    flip_bit(tmp_path / name / FILE)
    assert find_mismatches(files, name)[1] == [f"'{last}' in {FILE} has changed"]
    manifest = open_manifest(files, name)
    (file,) = manifest.files
    file = replace(file, checksum=recompute_checksum((tmp_path / name / FILE).read_bytes(), file.checksum))
    forged = replace(manifest, files=(file,), state_sha256=hash_state([file], manifest.scalars))
    files.publish(f"{name}/{MANIFEST_FILE}", forged.to_json())
    of_state, of_tensor = find_mismatches(files, name)[1]
    assert "of state_sha256" in of_state and of_tensor == f"'{last}' in {FILE} has changed"


@pytest.mark.capability("Z2")
def test_a_certificate_of_another_run_is_named(tmp_path: Path) -> None:
    mine, other = StorageFolder(str(tmp_path / "mine")), StorageFolder(str(tmp_path / "other"))
    name = save(mine.url, make_state())
    save(other.url, make_state())
    foreign = read_certificate(other, name)
    mine.publish(f"{name}/{CERTIFICATE_FILE}", other.read(f"{name}/{CERTIFICATE_FILE}"))
    owner = CheckpointCatalog.read(mine).run
    text = f"the certificate is of run {foreign.run}, the checkpoint of run {owner}"
    assert find_mismatches(mine, name)[1] == [text]


@pytest.mark.capability("Z2")
def test_a_verification_is_kept_by_the_checkpoints_of_its_recipe_only(tmp_path: Path) -> None:
    files, name = StorageFolder(str(tmp_path)), save(tmp_path, make_state())
    for key, value in (("recipe_sha256", "0" * 64), ("task_sha256", "0" * 64), ("processes", 2)):
        assert certify_checkpoints(files, {**VERIFICATION, key: value}) == []
    assert certify_checkpoints(files, VERIFICATION) == [name]
    kept = find_mismatches(files, name)[0].verification
    assert kept is not None and kept.model_dump().items() <= VERIFICATION.items()
    # The next save takes it from the run folder, as long as it is of this recipe.
    verified = tmp_path / "certificate.json"
    for steps, record in (
        (4, VERIFICATION),
        (5, {**VERIFICATION, "recipe_sha256": "0" * 64}),
        (6, "nonsense"),
    ):
        verified.write_text(json.dumps(record))
        later = save(tmp_path, make_state(steps), newest=9, certifier=Certifier(verified))
        assert (find_mismatches(files, later)[0].verification == kept) == (steps == 4)


@pytest.mark.capability("Z2")
def test_a_damaged_or_missing_certificate_is_an_error_and_written_again(tmp_path: Path) -> None:
    files, name = StorageFolder(str(tmp_path)), save(tmp_path, make_state())
    before = files.read(f"{name}/{CERTIFICATE_FILE}")
    flip_bit(tmp_path / name / CERTIFICATE_FILE, 40)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        find_mismatches(files, name)
    assert "paceline verify RUN" in caught.value.next_step
    (tmp_path / name / CERTIFICATE_FILE).unlink()
    with pytest.raises(CheckpointError, match="has no certificate"):
        find_mismatches(files, name)
    # A wrong result is kept as well: it is of this recipe.
    assert certify_checkpoints(files, {**VERIFICATION, "ok": False}) == [name]
    again, mismatches = find_mismatches(files, name)
    assert mismatches == [] and again.verification is not None and not again.verification.ok
    assert again.tensors == json.loads(before)["tensors"]
