"""A message and its answer between two ranks, over each channel, in the clear and encrypted; see `server`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import distributed

from benchmarks.report import Table
from paceline.comm.channel import ChannelMessage, MessageChannel, SocketChannel
from paceline.comm.channel.grpc_channel import GrpcChannel
from paceline.comm.channel.grpc_client import GrpcClient
from paceline.comm.channel.grpc_credentials import client_credentials, server_credentials
from paceline.comm.channel.grpc_server import GrpcServer
from paceline.comm.channel.reliable_queue import ReliableQueues
from paceline.comm.channel.socket_channel import accept_ranks, connect_to_hub, listen_on_free_port
from paceline.comm.ledger import ByteLedger
from paceline.job.cluster import Cluster
from paceline.job.tls import JobCertificate
from paceline.testing import run_ranks

SIZES = {"4 KB": 4_000, "1 MB": 1_000_000, "10 MB": 10_000_000, "100 MB": 100_000_000}
_SECONDS = 60.0  # of every wait
_CERTIFICATE = JobCertificate.make()

Meet = Callable[[Cluster, bool, JobCertificate], MessageChannel]


def _told(cluster: Cluster, port: int) -> int:
    """The port of rank 0."""
    told = torch.tensor([port])
    distributed.broadcast(told, 0)
    return int(told)


def _by_socket(cluster: Cluster, tls: bool, certificate: JobCertificate) -> MessageChannel:
    if cluster.global_rank:
        port = _told(cluster, 0)
        return SocketChannel(
            {0: connect_to_hub(cluster.address, port, 1, "key", _SECONDS, tls=tls)}, ByteLedger()
        )
    with listen_on_free_port(cluster.address) as listener:
        _told(cluster, listener.getsockname()[1])
        return SocketChannel(accept_ranks(listener, "key", [1], _SECONDS, tls=tls), ByteLedger())


def _by_grpc(cluster: Cluster, tls: bool, certificate: JobCertificate) -> MessageChannel:
    room = ReliableQueues(_SECONDS)
    if cluster.global_rank:
        shown = client_credentials(certificate.authority, certificate) if tls else None
        caller = GrpcClient(room, cluster.address, _told(cluster, 0), 1, "key", credentials=shown)
        caller.connect(_SECONDS)
        return GrpcChannel(room, [caller], ByteLedger())
    hub = GrpcServer(
        room,
        cluster.address,
        [1],
        "key",
        server_credentials(certificate, require_client_certificate=True) if tls else None,
    )
    _told(cluster, hub.port)
    hub.wait_for_all(_SECONDS)
    return GrpcChannel(room, [hub], ByteLedger())


WAYS: Mapping[str, tuple[Meet, bool]] = {
    "socket": (_by_socket, False),
    "grpc": (_by_grpc, False),
    "socket, TLS": (_by_socket, True),
    "grpc, TLS": (_by_grpc, True),
}


def trips(
    way: str, sizes: Sequence[int], repeats: int, certificate: JobCertificate, cluster: Cluster
) -> list[float]:
    """Medians, by size, of what a message takes to rank 1 and back; rank 0 measures."""
    torch.set_num_threads(1)
    meet, tls = WAYS[way]
    channel = meet(cluster, tls, certificate)
    found = []
    for size in sizes:
        values, seconds = torch.ones(size // 4), list[float]()
        while len(seconds) < repeats + 1:  # the first warms up
            began = time.perf_counter()
            if cluster.global_rank == 0:
                channel.send(1, ChannelMessage("there", {}, [values]), _SECONDS)
                channel.receive(_SECONDS)
            else:
                channel.send(0, ChannelMessage("back", {}, channel.receive(_SECONDS).tensors), _SECONDS)
                channel.flush(_SECONDS)
            seconds.append(time.perf_counter() - began)
        found.append(statistics.median(seconds[1:]))
    distributed.barrier()  # who has the last answer leaves no earlier than who has given it
    channel.close()
    return found


def measure_trips(*, quick: bool) -> tuple[Table, dict[str, list[float]]]:
    """All ways, one after another."""
    names = [*SIZES][: 2 if quick else None]
    repeats = 3 if quick else 15
    sizes = [SIZES[name] for name in names]
    data = {
        way: run_ranks(partial(trips, way, sizes, repeats, _CERTIFICATE), 2, deadline=200.0)[0]
        for way in WAYS
    }
    rows = [
        (
            name,
            *(f"{1e3 * data[way][row]:.2f}" for way in WAYS),
            f"{data['grpc'][row] / data['socket'][row]:.2f}",
        )
        for row, name in enumerate(names)
    ]
    columns = ("there and back", *(f"{way}: ms" for way in WAYS), "grpc / socket")
    title = f"A message to another process and back, median of {repeats}"
    remark = "gRPC keeps a message until the other side has said that it has it, and numbers it."
    return Table(title, columns, rows, (remark,)), data
