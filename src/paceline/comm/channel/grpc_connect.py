"""Connecting ranks over gRPC: of two ranks the earlier is the server and the later the client.

Calls are encrypted with the certificate of the recipe, or with one that each rank makes now; the key of the
job vouches for it, as on sockets. Both sides show theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.comm.channel.channel_builders import local_address, share_addresses
from paceline.comm.channel.grpc_channel import ChannelEnd, GrpcChannel
from paceline.comm.channel.grpc_client import GrpcClient
from paceline.comm.channel.grpc_credentials import (
    UNENCRYPTED,
    client_credentials,
    server_credentials,
    sign_authority,
    verify_authority,
)
from paceline.comm.channel.grpc_server import GrpcServer
from paceline.comm.channel.message_channel import MessageChannel
from paceline.comm.channel.reliable_queue import ReliableQueues
from paceline.comm.group_collectives import all_gather_texts
from paceline.job.handshake import needs_encryption
from paceline.job.tls import JobCertificate

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext

_RECONNECT_FRACTION = 0.25
"""Fraction of the deadline for which a link may be gone before the rank behind it is lost."""


def connect_over_grpc(context: SessionContext, num_ranks: int) -> MessageChannel:
    """Connect every one of the first ranks with all ranks after it; collective."""
    limit, rank = context.net.deadline_seconds, context.mesh.world.rank
    queues, trust = ReliableQueues(_RECONNECT_FRACTION * limit), _exchange_authorities(context)
    ends: list[ChannelEnd] = []
    server, local = None, ""
    with ExitStack() as failing:
        if rank < num_ranks:
            server = _start_server(context, queues, trust)
            local = f"{server.port} {local_address(context)}"
            ends.append(server)
            # If a later rank cannot be reached, no thread or port may stay behind.
            failing.callback(server.close)
        for server_rank, address in enumerate(share_addresses(context, num_ranks, local)[:rank]):
            client = _make_client(context, queues, trust, server_rank, address)
            ends.append(client)
            failing.callback(client.close)
            client.connect(limit)
        if server:
            server.wait_for_all(limit)
        failing.pop_all()
    return GrpcChannel(queues, ends, context.net.ledger)


@dataclass(frozen=True)
class _RankTrust:
    """The certificate of this rank, and the authorities that have signed those of all ranks, by rank."""

    certificate: JobCertificate
    authorities: Sequence[bytes]


def _exchange_authorities(context: SessionContext) -> _RankTrust | None:
    """Send the authority of this rank's certificate to all ranks, and check theirs; collective.

    Returns:
        None if calls are not encrypted.
    """
    world, token, named = context.mesh.world, context.cluster.token, _named_certificate(context)
    certificate = named or (JobCertificate.make() if _is_encrypted(context) else None)
    local = sign_authority(certificate.authority, world.rank, token) if certificate else UNENCRYPTED
    signed = all_gather_texts(local, world, context.net)
    if certificate is None:
        return None
    # The rank's own is known; checking it too would only tell that it has its own key.
    authorities = [
        certificate.authority
        if peer == world.rank
        else verify_authority(signed[peer], peer, world.rank, token, named)
        for peer in range(world.size)
    ]
    return _RankTrust(certificate, authorities)


def _start_server(context: SessionContext, queues: ReliableQueues, trust: _RankTrust | None) -> GrpcServer:
    """Start a server for all later ranks."""
    world, first = context.mesh.world, context.mesh.world.rank + 1
    credentials = server_credentials(trust.certificate, trust.authorities[first:]) if trust else None
    return GrpcServer(queues, local_address(context), world.ranks[first:], context.cluster.token, credentials)


def _make_client(
    context: SessionContext, queues: ReliableQueues, trust: _RankTrust | None, server_rank: int, answer: str
) -> GrpcClient:
    rank, token = context.mesh.world.rank, context.cluster.token
    port, _, address = answer.partition(" ")
    credentials = client_credentials(trust.certificate, trust.authorities[server_rank]) if trust else None
    return GrpcClient(queues, address, int(port), rank, token, hub_rank=server_rank, credentials=credentials)


def _is_encrypted(context: SessionContext) -> bool:
    """Return whether calls are encrypted: between nodes, and if the recipe requires it or names a
    certificate.
    """
    security = context.recipe.security
    names_certificate = security.certificate is not None and security.tls == "auto"
    return names_certificate or needs_encryption(security.tls, context.cluster.num_nodes)


def _named_certificate(context: SessionContext) -> JobCertificate | None:
    folder = context.recipe.security.certificate
    return JobCertificate.read(Path(folder)) if folder is not None and _is_encrypted(context) else None
