"""How ranks are connected by gRPC: of two the earlier is called, the later calls.

What they say is encrypted by the certificate of the recipe, which both sides show; else by one that each rank
that is called makes now, and for which the key of the job vouches, as on sockets.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from paceline.certificate import JobCertificate
from paceline.comm.channel import Channel
from paceline.comm.channel.grpc_caller import Caller
from paceline.comm.channel.grpc_channel import End, GrpcChannel
from paceline.comm.channel.grpc_hub import Hub
from paceline.comm.channel.grpc_identity import PLAIN, authority_of, calling, serving, vouch
from paceline.comm.channel.mailroom import Mailroom
from paceline.handshake import encrypts
from paceline.training.arrange import Setting
from paceline.training.channels import own_address, places_of

_GRACE = 0.25
"""Of the deadline: how long a link may be gone before the rank behind it is lost."""


def connect_by_calls(setting: Setting, num_ranks: int) -> Channel:
    """Connect every one of the first ranks with all ranks after it; collective."""
    limit, me = setting.net.deadline_seconds, setting.mesh.world.rank
    room, own = Mailroom(_GRACE * limit), _named_certificate(setting)
    ends: list[End] = []
    hub, place = None, ""
    with ExitStack() as failing:
        if me < num_ranks:
            hub, place = _serve(setting, room, own)
            ends.append(hub)
            failing.callback(hub.close)
        for server, where in enumerate(places_of(setting, num_ranks, place)[:me]):
            caller = _caller(setting, room, own, server, where)
            ends.append(caller)
            failing.callback(caller.close)
            caller.connect(limit)
        if hub:
            hub.wait_for_all(limit)
        failing.pop_all()
    return GrpcChannel(room, ends, setting.net.ledger)


def _serve(setting: Setting, room: Mailroom, own: JobCertificate | None) -> tuple[Hub, str]:
    """A hub for all later ranks, and what they have to know of it."""
    world, token, address = setting.mesh.world, setting.cluster.token, own_address(setting)
    shown = own or (JobCertificate.make() if _encrypts(setting) else None)
    credentials = serving(shown, asks_callers=own is not None) if shown else None
    hub = Hub(room, address, world.ranks[world.rank + 1 :], token, credentials)
    said = vouch(shown.authority, world.rank, token) if shown else PLAIN
    return hub, f"{hub.port} {address} {said}"


def _caller(setting: Setting, room: Mailroom, own: JobCertificate | None, server: int, place: str) -> Caller:
    me, token = setting.mesh.world.rank, setting.cluster.token
    port, address, said = place.split(" ")
    believed = authority_of(said, server, me, token, own) if _encrypts(setting) else None
    credentials = calling(believed, own) if believed else None
    return Caller(room, address, int(port), me, token, hub_rank=server, credentials=credentials)


def _encrypts(setting: Setting) -> bool:
    """Whether calls are encrypted: between nodes, and where the recipe says so or names a certificate."""
    security = setting.recipe.security
    asked = security.certificate is not None and security.tls == "auto"
    return asked or encrypts(security.tls, setting.cluster.num_nodes)


def _named_certificate(setting: Setting) -> JobCertificate | None:
    folder = setting.recipe.security.certificate
    return JobCertificate.read(Path(folder)) if folder is not None and _encrypts(setting) else None
