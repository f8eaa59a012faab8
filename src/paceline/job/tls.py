"""TLS between two ends that know the key of a job: nobody in between can hear or change what they say.

Who serves makes a certificate at the start, which nobody signs. The key vouches for it instead: inside of the
encrypted connection both sides prove that they know the key and see the same certificate, so one that
somebody in between puts in its place is found. Invariant: a line that is returned has been proved to both.
Source: channel binding to the certificate of the server, RFC 5929, section 4 (tls-server-end-point).

The certificate of a job, and the authority that is made for it alone: who has neither is no part of it.

All hosts of a job share one certificate, so it names the job and no host. The key of the authority is never
written and is gone when `make` returns: nobody can make a second certificate that the job would take.
Invariant: the private key is on a disk only where `save` has put it, readable by its owner alone; what `read`
returns fits together and is valid now.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import stat
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CommunicationError, RecipeError
from paceline.job.handshake import NONCE_BYTES, PROOF_BYTES, compute_proof, make_nonce, verify_proof

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_CALLER, _CALLED = b"tls caller", b"tls called"
_RECORD_BYTES = 1 << 14
_LIFETIME = timedelta(days=3650)  # of a certificate that lives as long as a process; nobody reads it


class EncryptedSocket(ssl.SSLSocket):
    """A socket that encrypts. Where it would have to wait it raises `BlockingIOError`, as others do."""

    def recv(self, *arguments: Any, **options: Any) -> bytes:
        try:
            return super().recv(*arguments, **options)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv_into(self, *arguments: Any, **options: Any) -> int:
        try:
            return super().recv_into(*arguments, **options) or 0
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: Any, flags: int = 0) -> int:
        """Send one record at most: the library insists on the same bytes after it had to wait."""
        try:
            return super().send(memoryview(data)[:_RECORD_BYTES], flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


@dataclass(frozen=True)
class EphemeralCertificate:
    """A certificate and its key, as whoever serves uses them.

    Args:
        context: for the server's side of a connection.
        fingerprint: SHA-256 of the certificate.
    """

    context: ssl.SSLContext
    fingerprint: bytes

    @classmethod
    def make(cls) -> EphemeralCertificate:
        """A new one; its key is on no disk when this returns."""
        certificate, key = _self_signed()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.sslsocket_class = EncryptedSocket
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # nobody else may look into it
            path = Path(folder) / "pem"
            path.write_bytes(key + certificate)
            context.load_cert_chain(path)
        der = ssl.PEM_cert_to_DER_cert(certificate.decode())
        return cls(context, hashlib.sha256(der).digest())


def _self_signed() -> tuple[bytes, bytes]:
    """Certificate and key, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a job of Paceline")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + _LIFETIME)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return (
        builder.sign(key, hashes.SHA256()).public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
    )


def encrypt_server_side(
    connection: socket.socket, certificate: EphemeralCertificate, token: str, rank: int, seconds: float
) -> EncryptedSocket:
    """The server's side; `connection` is used up.

    Args:
        rank: of who has called.
        seconds: how long either step may wait.
    Raises:
        CommunicationError: the other side has another key, or somebody is in between.
        OSError: it hangs up, or takes too long.
    """
    with ExitStack() as failing:
        line = _wrap_socket(failing, certificate.context, connection, seconds, server_side=True)
        theirs = _receive_exactly(line, NONCE_BYTES + PROOF_BYTES)
        made, proof = theirs[:NONCE_BYTES], theirs[NONCE_BYTES:]
        if not verify_proof(proof, token, _CALLER, rank, made, certificate.fingerprint):
            raise _interception_error(f"rank {rank}")
        line.sendall(compute_proof(token, _CALLED, rank, made, certificate.fingerprint))
        failing.pop_all()
    return line


def encrypt_client_side(connection: socket.socket, token: str, rank: int, seconds: float) -> EncryptedSocket:
    """The other side, which is `rank`; arguments and errors as for `encrypt_server_side`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the proofs vouch for it
    context.sslsocket_class = EncryptedSocket
    with ExitStack() as failing:
        line = _wrap_socket(failing, context, connection, seconds, server_side=False)
        seen = hashlib.sha256(line.getpeercert(binary_form=True) or b"").digest()
        made = make_nonce()
        line.sendall(made + compute_proof(token, _CALLER, rank, made, seen))
        if not verify_proof(_receive_exactly(line, PROOF_BYTES), token, _CALLED, rank, made, seen):
            raise _interception_error("the server")
        failing.pop_all()
    return line


def _wrap_socket(
    failing: ExitStack,
    context: ssl.SSLContext,
    connection: socket.socket,
    seconds: float,
    *,
    server_side: bool,
) -> EncryptedSocket:
    failing.callback(connection.close)
    connection.settimeout(seconds)
    line = context.wrap_socket(connection, server_side=server_side)
    failing.callback(line.close)
    assert isinstance(line, EncryptedSocket)
    return line


def _receive_exactly(line: EncryptedSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        data += part
    return data


def _interception_error(whom: str) -> CommunicationError:
    return CommunicationError(
        f"{whom} has another certificate, or another key: somebody is in between, or it is another job",
        next_step="give all nodes the same key, and look at who can change the traffic between them",
    )


CERTIFICATE_HOST_NAME = "paceline-job"
"""The name in the certificate of every job, by which callers ask for it, whatever the address of a host."""
AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "authority.pem", "certificate.pem", "key.pem"
_CLOCK_SKEW = timedelta(hours=1)  # clocks of hosts differ


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
        root = _certificate_builder("the authority of a job of Paceline", "", signer, days, signs=True)
        leaf = _certificate_builder(
            CERTIFICATE_HOST_NAME, "the authority of a job of Paceline", own, days, signs=False
        )
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
            for name, text in (
                (KEY_FILE, self.key),
                (CERTIFICATE_FILE, self.certificate),
                (AUTHORITY_FILE, self.authority),
            ):
                mode = 0o600 if name == KEY_FILE else 0o644
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
            mode = stat.S_IMODE((folder / KEY_FILE).stat().st_mode)
            found = cls(
                *((folder / name).read_bytes() for name in (AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE))
            )
        except OSError as error:
            raise _certificate_error(
                f"there is no certificate: {error.strerror}: {error.filename}",
                f"make one: paceline certificate {folder}",
            ) from error
        if mode & 0o077:
            raise _certificate_error(
                f"other users may read the key {folder / KEY_FILE} (mode {mode:04o})",
                f"chmod 600 {folder / KEY_FILE}",
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
            raise _certificate_error(f"the files of {folder} are no certificate of one job", again) from error
        if key.public_key() != leaf.public_key():
            raise _certificate_error(f"the key of {folder} is not that of its certificate", again)
        first, last = leaf.not_valid_before_utc, leaf.not_valid_after_utc
        if not first <= datetime.now(UTC) <= last:
            raise _certificate_error(
                f"the certificate of {folder} is valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}", again
            )


def _certificate_builder(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: int, *, signs: bool
) -> x509.CertificateBuilder:
    from cryptography import x509

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        named(issuer or name), named(name), key.public_key(), x509.random_serial_number()
    )
    builder = builder.not_valid_before(now - _CLOCK_SKEW).not_valid_after(now + timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), True)
    if signs:
        return builder
    return builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)


def _certificate_error(what: str, next_step: str) -> RecipeError:
    return RecipeError(what, where="security.certificate", next_step=next_step)
