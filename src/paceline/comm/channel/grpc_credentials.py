"""TLS credentials of the two ends of a gRPC channel, and the proof by which a client trusts the server's
authority.

Before any call a server sends the authority that has signed its certificate, with a proof made with the key
of the job, so nobody in between can replace it. If the recipe names a certificate, clients show it too, and a
client without one is rejected before a byte is read.
"""

from __future__ import annotations

import base64
import hashlib

import grpc

from paceline.errors import CommunicationError
from paceline.job.handshake import compute_proof, verify_proof
from paceline.job.tls import JobCertificate

UNENCRYPTED = "-"
"""The authority of a server that does not encrypt."""
_ROLE = b"grpc authority"


def server_credentials(
    certificate: JobCertificate, *, require_client_certificate: bool
) -> grpc.ServerCredentials:
    """Return server TLS credentials; with `require_client_certificate`, clients need one of the same
    authority.
    """
    authority = certificate.authority if require_client_certificate else None
    return grpc.ssl_server_credentials(
        [(certificate.key, certificate.certificate)], authority, require_client_certificate
    )


def client_credentials(authority: bytes, certificate: JobCertificate | None) -> grpc.ChannelCredentials:
    """Return client TLS credentials that trust only this authority; `certificate` is the client's own, if
    it has one.
    """
    if certificate is None:
        return grpc.ssl_channel_credentials(authority)
    return grpc.ssl_channel_credentials(authority, certificate.key, certificate.certificate)


def sign_authority(authority: bytes, rank: int, token: str) -> str:
    """Return the authority of a server as one word, with a proof that its sender has the key of the job."""
    proof = compute_proof(token, _ROLE, rank, hashlib.sha256(authority).digest(), b"")
    return base64.b64encode(proof + authority).decode()


def verify_authority(
    signed_authority: str, hub_rank: int, rank: int, token: str, certificate: JobCertificate | None
) -> bytes:
    """Check the authority that a server has sent, and return it.

    Args:
        certificate: the certificate of this rank, if the recipe names one.
    Raises:
        CommunicationError: the server does not encrypt, has another certificate, or has not sent this.
    """
    # Continuing unencrypted would let anyone in between downgrade the connection.
    if signed_authority == UNENCRYPTED:
        raise CommunicationError(
            f"Rank {rank} has another security.tls than rank {hub_rank}: one of them encrypts, the other does"
            " not.",
            next_step="give all nodes of one job the same recipe",
        )
    data = base64.b64decode(signed_authority)
    # A proof has 32 bytes; the authority, as PEM text, is the rest.
    proof, authority = data[:32], data[32:]
    if not verify_proof(proof, token, _ROLE, hub_rank, hashlib.sha256(authority).digest(), b""):
        raise CommunicationError(
            f"rank {hub_rank} has another key than rank {rank}, or the connection is intercepted",
            next_step="give all nodes the same key, and check who can change the traffic between them",
        )
    if certificate is not None and certificate.authority != authority:
        raise CommunicationError(
            f"Rank {rank} has another certificate than rank {hub_rank}.",
            next_step="copy the folder of security.certificate to all hosts of the job",
        )
    return authority
