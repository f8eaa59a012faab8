"""Constructors of channels: how the first ranks are connected with all that come after them."""

from __future__ import annotations

import torch

from paceline.addresses import address_towards
from paceline.comm.channel import Channel, SocketChannel
from paceline.comm.channel.grpc_calls import require_grpc
from paceline.comm.channel.hub import accept_all, connect, listen
from paceline.comm.text import share_text
from paceline.handshake import encrypts
from paceline.training.arrange import Setting


def connect_first(setting: Setting, num_ranks: int) -> Channel:
    """Connect every one of the first ranks with all ranks after it, as the strategy says; collective."""
    found: Channel = setting.recipe.strategy.carrier.load()(setting, num_ranks)
    return found


def socket(setting: Setting, num_ranks: int) -> Channel:
    """Plain sockets, or encrypted ones."""
    world, cluster, limit = setting.mesh.world, setting.cluster, setting.net.deadline_seconds
    me, token = world.rank, cluster.token
    secure = encrypts(setting.recipe.security.tls, cluster.num_nodes)
    listener = listen(own_address(setting)) if me < num_ranks else None
    try:
        own = f"{listener.getsockname()[1]} {own_address(setting)}" if listener else ""
        peers = {}
        for server, place in enumerate(places_of(setting, num_ranks, own)[:me]):
            port, _, address = place.partition(" ")
            peers[server] = connect(address, int(port), me, token, limit, tls=secure)
        if listener:
            peers |= accept_all(listener, token, world.ranks[me + 1 :], limit, tls=secure)
    finally:
        if listener:
            listener.close()
    return SocketChannel(peers, setting.net.ledger)


def grpc(setting: Setting, num_ranks: int) -> Channel:
    """Calls of gRPC.

    Raises:
        MissingExtraError: grpcio is not installed.
    """
    require_grpc()
    from paceline.training.grpc_lines import connect_by_calls

    return connect_by_calls(setting, num_ranks)


def places_of(setting: Setting, num_ranks: int, own: str) -> list[str]:
    """Where each of the first ranks can be called, as it says itself; collective."""
    device, world = torch.device("cpu"), setting.mesh.world
    return [share_text(own, world, setting.net, device, first) for first in range(num_ranks)]


def own_address(setting: Setting) -> str:
    """By which the other ranks reach this server."""
    cluster = setting.cluster
    if cluster.node_rank == 0:
        return cluster.address
    return address_towards(cluster.address, cluster.port)
