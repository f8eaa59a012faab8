"""The certificate of a job: three files that fit together, a key that nobody else may read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from paceline.cli.certificate_command import certificate as command
from paceline.errors import RecipeError
from paceline.job import tls
from paceline.job.tls import AUTHORITY_FILE, CERTIFICATE_FILE, CERTIFICATE_HOST_NAME, KEY_FILE, JobCertificate

pytestmark = pytest.mark.capability("G12")
MADE, OTHER = JobCertificate.make(), JobCertificate.make()


def test_the_command_writes_what_a_job_reads_and_writes_over_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "job"
    command(folder, days=30)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {KEY_FILE: 0o600, CERTIFICATE_FILE: 0o644, AUTHORITY_FILE: 0o644}
    found = JobCertificate.read(folder)
    with pytest.raises(RecipeError, match=r"key.pem exists already"):
        command(folder)
    assert JobCertificate.read(folder) == found


def test_the_authority_signs_one_certificate_and_its_key_is_nowhere() -> None:
    root, leaf = (x509.load_pem_x509_certificate(text) for text in (MADE.authority, MADE.certificate))
    leaf.verify_directly_issued_by(root)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [CERTIFICATE_HOST_NAME]
    signs = {
        one: one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca for one in (root, leaf)
    }
    assert signs == {root: True, leaf: False}
    assert root.public_key() != leaf.public_key()


def others_may_read_the_key(folder: Path) -> None:
    (folder / KEY_FILE).chmod(0o640)


def the_key_is_missing(folder: Path) -> None:
    (folder / KEY_FILE).unlink()


def it_is_no_certificate(folder: Path) -> None:
    (folder / CERTIFICATE_FILE).write_text("none")


def another_authority(folder: Path) -> None:
    (folder / AUTHORITY_FILE).write_bytes(OTHER.authority)


def another_key(folder: Path) -> None:
    (folder / KEY_FILE).write_bytes(OTHER.key)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (others_may_read_the_key, r"other users can read the key .*key.pem \(mode 0640\)"),
        (the_key_is_missing, "cannot read the certificate: No such file"),
        (it_is_no_certificate, "are not the certificate of one job"),
        (another_authority, "are not the certificate of one job"),
        (another_key, "does not belong to its certificate"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], what: str
) -> None:
    MADE.save(tmp_path)
    assert JobCertificate.read(tmp_path) == MADE
    damage(tmp_path)
    with pytest.raises(RecipeError, match=what) as caught:
        JobCertificate.read(tmp_path)
    assert caught.value.where == "security.certificate" and caught.value.next_step


def test_one_that_is_over_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(tls.datetime):
        @classmethod
        def now(cls, tz: object = None) -> tls.datetime:
            return super().now(tls.UTC) + tls.timedelta(days=366)

    MADE.save(tmp_path)
    monkeypatch.setattr(tls, "datetime", Later)
    with pytest.raises(RecipeError, match="is valid from 2"):
        JobCertificate.read(tmp_path)
