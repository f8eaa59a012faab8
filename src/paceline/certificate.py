"""The certificate of a job, and the authority that is made for it alone: who has neither is no part of it.

All hosts of a job share one certificate, so it names the job and no host. The key of the authority is never
written and is gone when `make` returns: nobody can make a second certificate that the job would take.
Invariant: the private key is on a disk only where `save` has put it, readable by its owner alone; what `read`
returns fits together and is valid now.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import RecipeError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

HOST_NAME = "paceline-job"
"""The name in the certificate of every job, by which callers ask for it, whatever the address of a host."""
AUTHORITY, CERTIFICATE, KEY = "authority.pem", "certificate.pem", "key.pem"
_EARLY = timedelta(hours=1)  # clocks of hosts differ


@dataclass(frozen=True)
class JobCertificate:
    """Three texts in PEM.

    Args:
        authority: the certificate of the job's own authority; public.
        certificate: what the authority has signed; public.
        key: of the certificate; secret.
    """

    authority: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def make(cls, days: int = 365) -> JobCertificate:
        """A new authority, and the one certificate that it ever signs."""
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        signer, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        root = _builder("the authority of a job of Paceline", "", signer, days, signs=True)
        leaf = _builder(HOST_NAME, "the authority of a job of Paceline", own, days, signs=False)
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        return cls(
            root.sign(signer, hashes.SHA256()).public_bytes(pem),
            leaf.sign(signer, hashes.SHA256()).public_bytes(pem),
            own.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
        )

    def save(self, folder: Path) -> None:
        """Write three files into a folder, which is made; the key is for this user alone.

        Raises:
            RecipeError: there is one already, or it cannot be written.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, text in ((KEY, self.key), (CERTIFICATE, self.certificate), (AUTHORITY, self.authority)):
                mode = 0o600 if name == KEY else 0o644
                with os.fdopen(
                    os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb"
                ) as file:
                    file.write(text)
        except FileExistsError as error:
            raise RecipeError(
                f"{error.filename} is there already, and a job may use it",
                next_step="name another folder, or remove that one",
            ) from error
        except OSError as error:
            raise RecipeError(
                f"cannot write the certificate: {error.strerror}: {error.filename}",
                next_step="name a folder that this user may write",
            ) from error

    @classmethod
    def read(cls, folder: Path) -> JobCertificate:
        """What `save` has written.

        Raises:
            RecipeError: a file is missing or is none of those; others may read the key; or it is not valid
                today.
        """
        try:
            mode = stat.S_IMODE((folder / KEY).stat().st_mode)
            found = cls(*((folder / name).read_bytes() for name in (AUTHORITY, CERTIFICATE, KEY)))
        except OSError as error:
            raise _refused(
                f"there is no certificate: {error.strerror}: {error.filename}",
                f"make one: paceline certificate {folder}",
            ) from error
        if mode & 0o077:
            raise _refused(
                f"other users may read the key {folder / KEY} (mode {mode:04o})", f"chmod 600 {folder / KEY}"
            )
        found._require_fit(folder)
        return found

    def _require_fit(self, folder: Path) -> None:
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        again = f"make another, and give it to all hosts: paceline certificate {folder}"
        try:
            root = x509.load_pem_x509_certificate(self.authority)
            leaf = x509.load_pem_x509_certificate(self.certificate)
            key = load_pem_private_key(self.key, None)
            leaf.verify_directly_issued_by(root)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise _refused(f"the files of {folder} are no certificate of one job", again) from error
        if key.public_key() != leaf.public_key():
            raise _refused(f"the key of {folder} is not that of its certificate", again)
        first, last = leaf.not_valid_before_utc, leaf.not_valid_after_utc
        if not first <= datetime.now(UTC) <= last:
            raise _refused(
                f"the certificate of {folder} is valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}", again
            )


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: int, *, signs: bool
) -> x509.CertificateBuilder:
    from cryptography import x509

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        named(issuer or name), named(name), key.public_key(), x509.random_serial_number()
    )
    builder = builder.not_valid_before(now - _EARLY).not_valid_after(now + timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), True)
    if signs:
        return builder
    return builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)


def _refused(what: str, next_step: str) -> RecipeError:
    return RecipeError(what, where="security.certificate", next_step=next_step)
