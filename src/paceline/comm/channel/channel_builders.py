"""Constructors of channels: how the first ranks are connected with all that come after them."""

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
    """Connect every one of the first ranks with all ranks after it, as the strategy says; collective."""
    found: MessageChannel = context.recipe.strategy.channel_spec.load()(context, num_ranks)
    return found


def build_socket_channel(context: SessionContext, num_ranks: int) -> MessageChannel:
    """Plain sockets, or encrypted ones."""
    world, cluster, limit = context.mesh.world, context.cluster, context.net.deadline_seconds
    me, token = world.rank, cluster.token
    secure = needs_encryption(context.recipe.security.tls, cluster.num_nodes)
    listener = listen_on_free_port(local_address(context)) if me < num_ranks else None
    try:
        own = f"{listener.getsockname()[1]} {local_address(context)}" if listener else ""
        peers = {}
        for server, place in enumerate(share_addresses(context, num_ranks, own)[:me]):
            port, _, address = place.partition(" ")
            peers[server] = connect_to_hub(address, int(port), me, token, limit, tls=secure)
        if listener:
            peers |= accept_ranks(listener, token, world.ranks[me + 1 :], limit, tls=secure)
    finally:
        if listener:
            listener.close()
    return SocketChannel(peers, context.net.ledger)


def build_grpc_channel(context: SessionContext, num_ranks: int) -> MessageChannel:
    """Calls of gRPC.

    Raises:
        MissingExtraError: grpcio is not installed.
    """
    require_grpc()
    from paceline.comm.channel.grpc_connect import connect_over_grpc

    return connect_over_grpc(context, num_ranks)


def share_addresses(context: SessionContext, num_ranks: int, own: str) -> list[str]:
    """Where each of the first ranks can be called, as it says itself; collective."""
    device, world = torch.device("cpu"), context.mesh.world
    return [broadcast_text(own, world, context.net, device, first) for first in range(num_ranks)]


def local_address(context: SessionContext) -> str:
    """By which the other ranks reach this server."""
    cluster = context.cluster
    if cluster.node_rank == 0:
        return cluster.address
    return address_towards(cluster.address, cluster.port)
