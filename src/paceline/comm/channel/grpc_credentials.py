"""TLS credentials of the two ends of a gRPC channel, and the proof by which each end trusts the other.

Before any call every rank sends the authority that has signed its certificate, with a proof made with the key
of the job, so nobody in between can replace it. Both sides show their certificates, and a client without one
is rejected in the TLS handshake, before a call of it is read.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

import grpc

from paceline.errors import CommunicationError
from paceline.job.handshake import compute_proof, verify_proof
from paceline.job.tls import JobCertificate

UNENCRYPTED = "-"
"""The authority of a rank that does not encrypt."""
_ROLE = b"grpc authority"


def server_credentials(certificate: JobCertificate, trusted: Sequence[bytes]) -> grpc.ServerCredentials:
    """Return server TLS credentials; clients need a certificate that one of the trusted authorities has
    signed.
    """
    return grpc.ssl_server_credentials(
        [(certificate.key, certificate.certificate)], b"".join(trusted), require_client_auth=True
    )


def client_credentials(certificate: JobCertificate, trusted: bytes) -> grpc.ChannelCredentials:
    """Return client TLS credentials that trust only a server whose authority is `trusted`."""
    return grpc.ssl_channel_credentials(trusted, certificate.key, certificate.certificate)


def sign_authority(authority: bytes, rank: int, token: str) -> str:
    """Return the authority of a rank as one word, with a proof that its sender has the key of the job."""
    proof = compute_proof(token, _ROLE, rank, hashlib.sha256(authority).digest(), b"")
    return base64.b64encode(proof + authority).decode()


def verify_authority(
    signed_authority: str, peer_rank: int, rank: int, token: str, named: JobCertificate | None
) -> bytes:
    """Check the authority that a peer has sent, and return it.

    Args:
        rank: this rank, for errors.
        named: the certificate of this rank, if the recipe names one; the peer must have the same.
    Raises:
        CommunicationError: the peer does not encrypt, has another certificate, or has not sent this.
    """
    # Continuing unencrypted would let anyone in between downgrade the connection.
    if signed_authority == UNENCRYPTED:
        raise CommunicationError(
            f"Rank {rank} has another security.tls than rank {peer_rank}: one of them encrypts, the other"
            " does not.",
            next_step="give all nodes of one job the same recipe",
        )
    data = base64.b64decode(signed_authority)
    # A proof has 32 bytes; the authority, as PEM text, is the rest.
    proof, authority = data[:32], data[32:]
    if not verify_proof(proof, token, _ROLE, peer_rank, hashlib.sha256(authority).digest(), b""):
        raise CommunicationError(
            f"rank {peer_rank} has another key than rank {rank}, or the connection is intercepted",
            next_step="give all nodes the same key, and check who can change the traffic between them",
        )
    if named is not None and named.authority != authority:
        raise CommunicationError(
            f"Rank {rank} has another certificate than rank {peer_rank}.",
            next_step="copy the folder of security.certificate to all hosts of the job",
        )
    return authority
