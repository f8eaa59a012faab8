"""How the ends of a gRPC channel are encrypted, and how a caller learns whom to believe.

A hub says, before anybody calls it, which authority has signed its certificate, and the key of the job
vouches for that; so nobody in between can put another one in its place. Where the recipe names a certificate,
callers show it too, and whoever has none is turned away before a word is read.
"""

from __future__ import annotations

import base64
import hashlib

import grpc

from paceline.errors import CommunicationError
from paceline.job.handshake import compute_proof, verify_proof
from paceline.job.tls import JobCertificate

UNENCRYPTED = "-"
"""What a hub says of its authority that does not encrypt."""
_ROLE = b"grpc authority"


def server_credentials(own: JobCertificate, *, require_client_certificate: bool) -> grpc.ServerCredentials:
    """Of a hub; `require_client_certificate`: who has no certificate of the same authority cannot call."""
    authority = own.authority if require_client_certificate else None
    return grpc.ssl_server_credentials([(own.key, own.certificate)], authority, require_client_certificate)


def client_credentials(authority: bytes, own: JobCertificate | None) -> grpc.ChannelCredentials:
    """Of a caller, which believes this authority alone; `own`: what it shows."""
    if own is None:
        return grpc.ssl_channel_credentials(authority)
    return grpc.ssl_channel_credentials(authority, own.key, own.certificate)


def sign_authority(authority: bytes, rank: int, token: str) -> str:
    """The authority of a hub, as one word, with the proof that a holder of the key has said it."""
    proof = compute_proof(token, _ROLE, rank, hashlib.sha256(authority).digest(), b"")
    return base64.b64encode(proof + authority).decode()


def verify_authority(said: str, hub_rank: int, rank: int, token: str, own: JobCertificate | None) -> bytes:
    """What a hub has said of its authority.

    Args:
        own: the certificate of this rank, if the recipe names one.
    Raises:
        CommunicationError: it does not encrypt, has another certificate, or it was not the hub that said it.
    """
    if said == UNENCRYPTED:
        raise CommunicationError(
            f"Rank {rank} has another security.tls than rank {hub_rank}: one of both encrypts, and one does"
            " not.",
            next_step="give all nodes of one job the same recipe",
        )
    data = base64.b64decode(said)
    proof, authority = data[:32], data[32:]
    if not verify_proof(proof, token, _ROLE, hub_rank, hashlib.sha256(authority).digest(), b""):
        raise CommunicationError(
            f"rank {hub_rank} has another key than rank {rank}, or somebody is in between",
            next_step="give all nodes the same key, and look at who can change the traffic between them",
        )
    if own is not None and own.authority != authority:
        raise CommunicationError(
            f"Rank {rank} has another certificate than rank {hub_rank}.",
            next_step="copy the folder of security.certificate to all hosts of the job",
        )
    return authority
