"""Constructors of channels, which connect the first ranks with all ranks after them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.comm.channel.grpc_protocol import require_grpc
from paceline.comm.channel.message_channel import MessageChannel
from paceline.comm.channel.socket_channel import (
    SocketChannel,
    accept_ranks,
    connect_to_hub,
    listen_on_free_port,
)
from paceline.comm.group_collectives import broadcast_text
from paceline.job.addresses import address_towards
from paceline.job.handshake import needs_encryption

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext


def connect_first_ranks(context: SessionContext, num_ranks: int) -> MessageChannel:
    """Connect each of the first `num_ranks` ranks with all ranks that follow it; collective.

    The strategy chooses the channel.
    """
    channel: MessageChannel = context.recipe.strategy.channel_spec.load()(context, num_ranks)
    return channel


def build_socket_channel(context: SessionContext, num_ranks: int) -> MessageChannel:
    """Connect over sockets, encrypted if the recipe or the number of nodes requires it."""
    world, cluster, limit = context.mesh.world, context.cluster, context.net.deadline_seconds
    rank, token = world.rank, cluster.token
    secure = needs_encryption(context.recipe.security.tls, cluster.num_nodes)
    listener = listen_on_free_port(local_address(context)) if rank < num_ranks else None
    try:
        local = f"{listener.getsockname()[1]} {local_address(context)}" if listener else ""
        peers = {}
        # Later ranks call earlier ones, so a pair of servers has one connection, too.
        for server, answer in enumerate(share_addresses(context, num_ranks, local)[:rank]):
            port, _, address = answer.partition(" ")
            peers[server] = connect_to_hub(address, int(port), rank, token, limit, tls=secure)
        if listener:
            peers |= accept_ranks(listener, token, world.ranks[rank + 1 :], limit, tls=secure)
    finally:
        if listener:
            listener.close()
    return SocketChannel(peers, context.net.ledger)


def build_grpc_channel(context: SessionContext, num_ranks: int) -> MessageChannel:
    """Connect over gRPC.

    Raises:
        MissingExtraError: grpcio is not installed.
    """
    require_grpc()
    # gRPC is optional and slow to import: only jobs that use it load it.
    from paceline.comm.channel.grpc_connect import connect_over_grpc

    return connect_over_grpc(context, num_ranks)


def share_addresses(context: SessionContext, num_ranks: int, local: str) -> list[str]:
    """Broadcast the address of each of the first ranks from that rank, and return all; collective."""
    device, world = torch.device("cpu"), context.mesh.world
    return [broadcast_text(local, world, context.net, device, first) for first in range(num_ranks)]


def local_address(context: SessionContext) -> str:
    """Return the address by which the other ranks reach this server."""
    cluster = context.cluster
    if cluster.node_rank == 0:
        return cluster.address
    return address_towards(cluster.address, cluster.port)
