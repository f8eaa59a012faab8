"""TLS between processes of a job, either bound to the key of the job or with a certificate of the job.

Connections to the store use an ephemeral certificate that is not signed. Instead, inside of the encrypted
connection, both sides prove that they know the key of the job and see the same certificate, so a certificate
that somebody in between substitutes is detected. Connections over gRPC use a certificate that all hosts of a
job share and that the job's own authority has signed. The authority's key is never written and is dropped
when `make` returns, so nobody can create a second certificate that the job would accept.

Invariants: a connection that is returned has been authenticated to both sides. The private key is on disk
only where `save` has written it, readable by its owner alone; what `read` returns fits together and is valid
now.
Source: channel binding to the server's certificate, RFC 5929, section 4 (tls-server-end-point).
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
from paceline.job.handshake import (
    NONCE_BYTES,
    PROOF_BYTES,
    compute_proof,
    make_nonce,
    receive_exactly,
    verify_proof,
)

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_CALLER, _CALLED = b"tls caller", b"tls called"
_RECORD_BYTES = 1 << 14
_LIFETIME = timedelta(days=3650)  # of an ephemeral certificate; no side checks it


class EncryptedSocket(ssl.SSLSocket):
    """An encrypted socket that raises `BlockingIOError` when it would block, as plain sockets do."""

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
        """Send at most one TLS record; returns the number of bytes sent."""
        # after a send that would block, OpenSSL insists on being called with the same bytes
        try:
            return super().send(memoryview(data)[:_RECORD_BYTES], flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


@dataclass(frozen=True)
class EphemeralCertificate:
    """A self-signed certificate of a server, which exists only in its memory.

    Args:
        context: for the server's side of a connection.
        fingerprint: SHA-256 of the certificate.
    """

    context: ssl.SSLContext
    fingerprint: bytes

    @classmethod
    def make(cls) -> EphemeralCertificate:
        """Create a certificate; its key is not on disk when this returns."""
        certificate, key = _self_signed()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.sslsocket_class = EncryptedSocket
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # mode 0700; ssl reads only files
            path = Path(folder) / "pem"
            path.write_bytes(key + certificate)
            context.load_cert_chain(path)
        der = ssl.PEM_cert_to_DER_cert(certificate.decode())
        return cls(context, hashlib.sha256(der).digest())


def _self_signed() -> tuple[bytes, bytes]:
    """Return a certificate and its key, in PEM."""
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
    """Encrypt the server's side of a connection, which is replaced by the returned socket.

    Args:
        rank: rank of the client.
        seconds: how long each step can take.
    Raises:
        CommunicationError: the client has another key, or another process is in between.
        OSError: the client hangs up or takes too long.
    """
    with ExitStack() as failing:
        encrypted = _wrap_socket(failing, certificate.context, connection, seconds, server_side=True)
        message = receive_exactly(encrypted, NONCE_BYTES + PROOF_BYTES)
        nonce, proof = message[:NONCE_BYTES], message[NONCE_BYTES:]
        if not verify_proof(proof, token, _CALLER, rank, nonce, certificate.fingerprint):
            raise _interception_error(f"rank {rank}")
        encrypted.sendall(compute_proof(token, _CALLED, rank, nonce, certificate.fingerprint))
        failing.pop_all()
    return encrypted


def encrypt_client_side(connection: socket.socket, token: str, rank: int, seconds: float) -> EncryptedSocket:
    """Encrypt the client's side of a connection; arguments and errors as for `encrypt_server_side`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the proofs below replace the check
    context.sslsocket_class = EncryptedSocket
    with ExitStack() as failing:
        encrypted = _wrap_socket(failing, context, connection, seconds, server_side=False)
        fingerprint = hashlib.sha256(encrypted.getpeercert(binary_form=True) or b"").digest()
        nonce = make_nonce()
        encrypted.sendall(nonce + compute_proof(token, _CALLER, rank, nonce, fingerprint))
        proof = receive_exactly(encrypted, PROOF_BYTES)
        if not verify_proof(proof, token, _CALLED, rank, nonce, fingerprint):
            raise _interception_error("the server")
        failing.pop_all()
    return encrypted


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
    encrypted = context.wrap_socket(connection, server_side=server_side)
    failing.callback(encrypted.close)
    assert isinstance(encrypted, EncryptedSocket)
    return encrypted


def _interception_error(peer: str) -> CommunicationError:
    return CommunicationError(
        f"{peer} has a different certificate or key: it is in another job, or the connection is intercepted",
        next_step="use the same key on all nodes, and check who can change the traffic between them",
    )


CERTIFICATE_HOST_NAME = "paceline-job"
"""The host name in the certificate of every job, which clients check instead of the real host name."""
AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "authority.pem", "certificate.pem", "key.pem"
_CLOCK_SKEW = timedelta(hours=1)  # the clocks of hosts differ


@dataclass(frozen=True)
class JobCertificate:
    """The certificate of a job, as three texts in PEM.

    Args:
        authority: certificate of the job's own authority; public.
        certificate: certificate of the job, signed by the authority; public.
        key: private key of the certificate; secret.
    """

    authority: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def make(cls, days: int = 365) -> JobCertificate:
        """Create an authority and the only certificate that it ever signs, valid for `days`."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        signer, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        root = _certificate_builder("the authority of a job of Paceline", "", signer, days, signs=True)
        leaf = _certificate_builder(
            CERTIFICATE_HOST_NAME, "the authority of a job of Paceline", key, days, signs=False
        )
        # All authorities have one name: the key tells a server that trusts several which one has signed.
        root = root.add_extension(x509.SubjectKeyIdentifier.from_public_key(signer.public_key()), False)
        leaf = leaf.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False
        )
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        return cls(
            root.sign(signer, hashes.SHA256()).public_bytes(pem),
            leaf.sign(signer, hashes.SHA256()).public_bytes(pem),
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
        )

    def save(self, folder: Path) -> None:
        """Write three files to a folder, which is created; only this user can read the key.

        Raises:
            RecipeError: one of the files exists already, or cannot be written.
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
                f"{error.filename} exists already, and a job may use it",
                next_step="name another folder, or remove that one",
            ) from error
        except OSError as error:
            raise RecipeError(
                f"cannot write the certificate: {error.strerror}: {error.filename}",
                next_step="choose a folder that this user can write to",
            ) from error

    @classmethod
    def read(cls, folder: Path) -> JobCertificate:
        """Read what `save` has written.

        Raises:
            RecipeError: a file is missing or invalid, other users can read the key, or the certificate is not
                valid today.
        """
        try:
            mode = stat.S_IMODE((folder / KEY_FILE).stat().st_mode)
            certificate = cls(
                *((folder / name).read_bytes() for name in (AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE))
            )
        except OSError as error:
            raise _certificate_error(
                f"cannot read the certificate: {error.strerror}: {error.filename}",
                f"create one: paceline certificate {folder}",
            ) from error
        if mode & 0o077:
            raise _certificate_error(
                f"other users can read the key {folder / KEY_FILE} (mode {mode:04o})",
                f"chmod 600 {folder / KEY_FILE}",
            )
        certificate._check_validity(folder)
        return certificate

    def _check_validity(self, folder: Path) -> None:
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        again = f"create another one and copy it to all hosts: paceline certificate {folder}"
        try:
            root = x509.load_pem_x509_certificate(self.authority)
            leaf = x509.load_pem_x509_certificate(self.certificate)
            key = load_pem_private_key(self.key, None)
            leaf.verify_directly_issued_by(root)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise _certificate_error(
                f"the files in {folder} are not the certificate of one job", again
            ) from error
        if key.public_key() != leaf.public_key():
            raise _certificate_error(f"the key in {folder} does not belong to its certificate", again)
        first, last = leaf.not_valid_before_utc, leaf.not_valid_after_utc
        if not first <= datetime.now(UTC) <= last:
            raise _certificate_error(
                f"the certificate in {folder} is valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}", again
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
