"""How ranks are connected by gRPC: of two the earlier is called, the later calls.

What they say is encrypted by the certificate of the recipe, which both sides show; else by one that each rank
that is called makes now, and for which the key of the job vouches, as on sockets.
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
"""Of the deadline: how long a link may be gone before the rank behind it is lost."""


def connect_over_grpc(context: SessionContext, num_ranks: int) -> MessageChannel:
    """Connect every one of the first ranks with all ranks after it; collective."""
    limit, me = context.net.deadline_seconds, context.mesh.world.rank
    room, own = ReliableQueues(_RECONNECT_FRACTION * limit), _named_certificate(context)
    ends: list[ChannelEnd] = []
    hub, place = None, ""
    with ExitStack() as failing:
        if me < num_ranks:
            hub, place = _start_server(context, room, own)
            ends.append(hub)
            failing.callback(hub.close)
        for server, where in enumerate(share_addresses(context, num_ranks, place)[:me]):
            caller = _make_client(context, room, own, server, where)
            ends.append(caller)
            failing.callback(caller.close)
            caller.connect(limit)
        if hub:
            hub.wait_for_all(limit)
        failing.pop_all()
    return GrpcChannel(room, ends, context.net.ledger)


def _start_server(
    context: SessionContext, room: ReliableQueues, own: JobCertificate | None
) -> tuple[GrpcServer, str]:
    """A hub for all later ranks, and what they have to know of it."""
    world, token, address = context.mesh.world, context.cluster.token, local_address(context)
    shown = own or (JobCertificate.make() if _is_encrypted(context) else None)
    credentials = server_credentials(shown, require_client_certificate=own is not None) if shown else None
    hub = GrpcServer(room, address, world.ranks[world.rank + 1 :], token, credentials)
    said = sign_authority(shown.authority, world.rank, token) if shown else UNENCRYPTED
    return hub, f"{hub.port} {address} {said}"


def _make_client(
    context: SessionContext, room: ReliableQueues, own: JobCertificate | None, server: int, place: str
) -> GrpcClient:
    me, token = context.mesh.world.rank, context.cluster.token
    port, address, said = place.split(" ")
    believed = verify_authority(said, server, me, token, own) if _is_encrypted(context) else None
    credentials = client_credentials(believed, own) if believed else None
    return GrpcClient(room, address, int(port), me, token, hub_rank=server, credentials=credentials)


def _is_encrypted(context: SessionContext) -> bool:
    """Whether calls are encrypted: between nodes, and where the recipe says so or names a certificate."""
    security = context.recipe.security
    asked = security.certificate is not None and security.tls == "auto"
    return asked or needs_encryption(security.tls, context.cluster.num_nodes)


def _named_certificate(context: SessionContext) -> JobCertificate | None:
    folder = context.recipe.security.certificate
    return JobCertificate.read(Path(folder)) if folder is not None and _is_encrypted(context) else None
