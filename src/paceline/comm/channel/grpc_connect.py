"""Connecting ranks over gRPC: of two ranks the earlier is the server and the later the client.

Calls are encrypted with the certificate of the recipe, which both sides show; otherwise with one that each
server makes now and signs with the key of the job, as on sockets.
"""

from __future__ import annotations

from contextlib import ExitStack
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
from paceline.job.handshake import needs_encryption
from paceline.job.tls import JobCertificate

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext

_RECONNECT_FRACTION = 0.25
"""Fraction of the deadline for which a link may be gone before the rank behind it is lost."""


def connect_over_grpc(context: SessionContext, num_ranks: int) -> MessageChannel:
    """Connect every one of the first ranks with all ranks after it; collective."""
    limit, rank = context.net.deadline_seconds, context.mesh.world.rank
    queues, certificate = ReliableQueues(_RECONNECT_FRACTION * limit), _named_certificate(context)
    ends: list[ChannelEnd] = []
    server, local = None, ""
    with ExitStack() as failing:
        if rank < num_ranks:
            server, local = _start_server(context, queues, certificate)
            ends.append(server)
            # If a later rank cannot be reached, no thread or port may stay behind.
            failing.callback(server.close)
        for server_rank, address in enumerate(share_addresses(context, num_ranks, local)[:rank]):
            client = _make_client(context, queues, certificate, server_rank, address)
            ends.append(client)
            failing.callback(client.close)
            client.connect(limit)
        if server:
            server.wait_for_all(limit)
        failing.pop_all()
    return GrpcChannel(queues, ends, context.net.ledger)


def _start_server(
    context: SessionContext, queues: ReliableQueues, certificate: JobCertificate | None
) -> tuple[GrpcServer, str]:
    """Start a server for all later ranks, and return it with what they have to know of it."""
    world, token, address = context.mesh.world, context.cluster.token, local_address(context)
    shown = certificate or (JobCertificate.make() if _is_encrypted(context) else None)
    credentials = (
        server_credentials(shown, require_client_certificate=certificate is not None) if shown else None
    )
    server = GrpcServer(queues, address, world.ranks[world.rank + 1 :], token, credentials)
    authority = sign_authority(shown.authority, world.rank, token) if shown else UNENCRYPTED
    return server, f"{server.port} {address} {authority}"


def _make_client(
    context: SessionContext,
    queues: ReliableQueues,
    certificate: JobCertificate | None,
    server_rank: int,
    answer: str,
) -> GrpcClient:
    rank, token = context.mesh.world.rank, context.cluster.token
    port, address, signed_authority = answer.split(" ")
    authority = (
        verify_authority(signed_authority, server_rank, rank, token, certificate)
        if _is_encrypted(context)
        else None
    )
    credentials = client_credentials(authority, certificate) if authority else None
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
