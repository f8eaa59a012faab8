"""TLS between two ends that know the key of a job: nobody in between can hear or change what they say.

Who serves makes a certificate at the start, which nobody signs. The key vouches for it instead: inside of the
encrypted connection both sides prove that they know the key and see the same certificate, so one that
somebody in between puts in its place is found. Invariant: a line that is returned has been proved to both.
Source: channel binding to the certificate of the server, RFC 5929, section 4 (tls-server-end-point).
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from paceline.errors import CommunicationError
from paceline.handshake import NONCE_BYTES, PROOF_BYTES, is_proof, nonce, prove

_CALLER, _CALLED = b"tls caller", b"tls called"
_RECORD_BYTES = 1 << 14
_LIFETIME = timedelta(days=3650)  # of a certificate that lives as long as a process; nobody reads it


class SecureLine(ssl.SSLSocket):
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
class Certificate:
    """A certificate and its key, as whoever serves uses them.

    Args:
        context: for the server's side of a connection.
        fingerprint: SHA-256 of the certificate.
    """

    context: ssl.SSLContext
    fingerprint: bytes

    @classmethod
    def make(cls) -> Certificate:
        """A new one; its key is on no disk when this returns."""
        certificate, key = _self_signed()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.sslsocket_class = SecureLine
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


def secure_called(
    connection: socket.socket, certificate: Certificate, token: str, rank: int, seconds: float
) -> SecureLine:
    """The server's side; `connection` is used up.

    Args:
        rank: of who has called.
        seconds: how long either step may wait.
    Raises:
        CommunicationError: the other side has another key, or somebody is in between.
        OSError: it hangs up, or takes too long.
    """
    with ExitStack() as failing:
        line = _wrapped(failing, certificate.context, connection, seconds, server_side=True)
        theirs = _exactly(line, NONCE_BYTES + PROOF_BYTES)
        made, proof = theirs[:NONCE_BYTES], theirs[NONCE_BYTES:]
        if not is_proof(proof, token, _CALLER, rank, made, certificate.fingerprint):
            raise _in_between(f"rank {rank}")
        line.sendall(prove(token, _CALLED, rank, made, certificate.fingerprint))
        failing.pop_all()
    return line


def secure_caller(connection: socket.socket, token: str, rank: int, seconds: float) -> SecureLine:
    """The other side, which is `rank`; arguments and errors as for `secure_called`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the proofs vouch for it
    context.sslsocket_class = SecureLine
    with ExitStack() as failing:
        line = _wrapped(failing, context, connection, seconds, server_side=False)
        seen = hashlib.sha256(line.getpeercert(binary_form=True) or b"").digest()
        made = nonce()
        line.sendall(made + prove(token, _CALLER, rank, made, seen))
        if not is_proof(_exactly(line, PROOF_BYTES), token, _CALLED, rank, made, seen):
            raise _in_between("the server")
        failing.pop_all()
    return line


def _wrapped(
    failing: ExitStack,
    context: ssl.SSLContext,
    connection: socket.socket,
    seconds: float,
    *,
    server_side: bool,
) -> SecureLine:
    failing.callback(connection.close)
    connection.settimeout(seconds)
    line = context.wrap_socket(connection, server_side=server_side)
    failing.callback(line.close)
    assert isinstance(line, SecureLine)
    return line


def _exactly(line: SecureLine, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        data += part
    return data


def _in_between(whom: str) -> CommunicationError:
    return CommunicationError(
        f"{whom} has another certificate, or another key: somebody is in between, or it is another job",
        next_step="give all nodes the same key, and look at who can change the traffic between them",
    )
