"""The server of clients that connect over a network: their messages, and which clients are connected.

A client is a peer of a gRPC channel (`comm/channel`), with a number that follows from its name, so a client
that is killed and started again is the same one. Messages of a client, in this order:

- `hello` (its name and version), answered by `recipe`: how it trains, which settings its task gets;
- `join` (how many samples it has; names, dtypes and shapes of its model), answered by `refused` with the
  first difference, or by work;
- `work`: weights and buffers at the start of a round, answered by `update`: numbers of the table of the
  cohort, and the tensors that are added at its position;
- under `federated.secure = "masks"` the messages `masks` in both directions, whose field `stage` says which,
  and an `update` of masked words (`federated/secure_network.py`);
- `end`: the run is complete.

Invariant: no message has a tensor with a batch dimension or anything of a sample. Of two processes with one
name the second is refused while the first is connected. Every wait has a deadline.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from paceline._version import VERSION
from paceline.comm.channel.grpc_channel import GrpcChannel
from paceline.comm.channel.grpc_credentials import server_credentials
from paceline.comm.channel.grpc_protocol import require_grpc
from paceline.comm.channel.grpc_server import GrpcServer
from paceline.comm.channel.message_channel import ChannelMessage
from paceline.comm.channel.reliable_queue import ReliableQueues
from paceline.errors import CommunicationError, DeadlineError, RecipeError, format_count
from paceline.job.cluster import token_from_environment
from paceline.job.handshake import plain_line
from paceline.job.tls import JobCertificate
from paceline.observe.sinks import EventCallback
from paceline.parallel.session_context import SessionContext
from paceline.recipe.federated_recipe import FederatedRecipe
from paceline.recipe.log_recipe import LogRecipe, split_address
from paceline.recipe.private_recipe import PrivateRecipe
from paceline.recipe.recipe import Recipe, to_toml
from paceline.recipe.tables import (
    AverageRecipe,
    CheckpointRecipe,
    DebugRecipe,
    EvaluateRecipe,
    SecurityRecipe,
)
from paceline.task import Task

HELLO, RECIPE, JOIN, REFUSED, WORK, MASKS, UPDATE, END = (
    "hello",
    "recipe",
    "join",
    "refused",
    "work",
    "masks",
    "update",
    "end",
)
MAX_CLIENTS = 256
"""Clients that can be connected at the same time: each takes two threads of the server."""
_NUMBERS = range(1, 1 << 32)
_GRACE_FRACTION = 0.25  # of the deadline, for which a client may be unreachable, as for ranks
_POLL_SECONDS, _CLOSE_SECONDS = 0.05, 5.0
_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


def client_number(name: str) -> int:
    """Return the number of a client on the channel; it follows from the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") or 1


def is_loopback(host: str) -> bool:
    """Return whether a host is this one by its loopback address."""
    return host in _LOOPBACK_HOSTS or host.startswith("127.")


def describe_model(model: nn.Module) -> list[list[Any]]:
    """Return name, dtype, shape and whether it is trained of every parameter and buffer, as JSON values."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return [
        [name, str(t.dtype).removeprefix("torch."), list(t.shape), name in trained]
        for name, t in model.state_dict().items()
    ]


def find_model_difference(server: Sequence[Any], client: Sequence[Any]) -> str:
    """Return the first difference between two results of `describe_model`, in words; empty: they are equal.

    Both lists come from JSON, so a client decides only what its own part says.
    """
    theirs = {str(row[0]): row for row in client if isinstance(row, list) and len(row) == 4}
    for name, dtype, shape, trained in server:
        if name not in theirs:
            return f"it has no tensor {name}"
        _, other_dtype, other_shape, other_trained = theirs.pop(name)
        if other_shape != shape:
            return f"{name} has shape {other_shape}, and on the server {shape}"
        if other_dtype != dtype:
            return f"{name} is {other_dtype}, and on the server {dtype}"
        if other_trained != trained:
            return f"{name} is {'' if other_trained else 'not '}trained, and on the server it is not so"
    return f"it has a tensor {next(iter(theirs))}, which the server does not have" if theirs else ""


def frozen_tensors(model: nn.Module) -> list[Tensor]:
    """Return the parameters that are not trained."""
    return [p.detach() for p in model.parameters() if not p.requires_grad]


def num_message_bytes(message: ChannelMessage) -> int:
    """Return the bytes of a message on the channel."""
    head, bodies = message.encode()
    return len(head) + sum(len(body) for body in bodies)


def recipe_of_client(recipe: Recipe) -> Recipe:
    """Return the recipe with which a client trains: that of the run, with one client, which is itself.

    Where the server keeps its run, evaluates and listens is no matter of a client.
    """
    federated = recipe.federated.model_dump() | {
        name: FederatedRecipe.model_fields[name].default
        for name in ("at_least", "listen", "deadline_seconds", "buffer", "age")
    }
    strategy = recipe.strategy.replace(channel="socket", replicas=1)
    if recipe.private.is_on:
        # A client clips, and the server adds the noise.
        federated["clip_norm"] = recipe.private.clip_norm
    return recipe.replace(
        strategy=strategy,
        private=PrivateRecipe(),
        federated=FederatedRecipe(**federated | {"clients": 1, "cohort": 1, "partition": "natural"}),
        task="client",
        run_dir=None,
        init_from=None,
        hash_every=0,
        on_divergence=Recipe.model_fields["on_divergence"].default,
        average=AverageRecipe(),
        runtime=recipe.runtime.replace(device="auto"),
        evaluate=EvaluateRecipe(),
        checkpoint=CheckpointRecipe(),
        debug=DebugRecipe(),
        log=LogRecipe(),
        security=SecurityRecipe(),
    )


@dataclass
class NetworkClient:
    """A client that has said hello at least once.

    Args:
        name: of the client.
        number: on the channel.
        num_samples: that it has.
        is_joined: it is connected, and its model fits.
        ticket: of the work that it has not returned; None: it is idle.
        has_frozen: it has received the parameters that are not trained.
        down_bytes, up_bytes: sent to it and received from it since the last `take_bytes`.
    """

    name: str
    number: int
    num_samples: int = 0
    is_joined: bool = False
    ticket: int | None = None
    has_frozen: bool = False
    down_bytes: int = 0
    up_bytes: int = 0


def describe_clients(joined: Sequence[NetworkClient]) -> dict[str, Any]:
    """Return the event `partition` of clients with their own data."""
    sizes = [client.num_samples for client in joined]
    return {
        "how": "network",
        "clients": len(joined),
        "samples": sum(sizes),
        "smallest": min(sizes),
        "largest": max(sizes),
        "redraws": 0,
        "names": [client.name for client in joined][:50],
        "sizes": sizes[:50],
        "labels": [],
        "table": [],
    }


class ClientEvent(NamedTuple):
    """Event of a client: it has joined, or has returned an update.

    Args:
        message: of kind `update` or `masks`; None: it has joined.
    """

    client: NetworkClient
    message: ChannelMessage | None = None


class ClientServer:
    """The server of all clients of a run.

    Args:
        server, queues: of the channel.
        channel: over both.
        recipe: of the run.
        model: of the server, as `describe_model` returns it.
        warn: receives sentences for the user.
        note: receives the event `wire` of each message, if the recipe asks for it.
    Attributes:
        clients: by name, in the order in which they have said hello.
    """

    def __init__(
        self,
        server: GrpcServer,
        queues: ReliableQueues,
        channel: GrpcChannel,
        recipe: Recipe,
        model: Sequence[Any],
        *,
        warn: Callable[[str], None],
        note: EventCallback,
    ) -> None:
        self._server, self._queues, self._channel, self._model = server, queues, channel, model
        self._recipe_text, self._deadline_seconds = (
            to_toml(recipe_of_client(recipe)),
            recipe.runtime.deadline_seconds,
        )
        self._warn, self._note, self._logs_wire = warn, note, recipe.log.wire
        self._has_masks = recipe.federated.secure == "masks"
        self.clients: dict[str, NetworkClient] = {}
        self._by_number: dict[int, NetworkClient] = {}

    @classmethod
    def start(cls, context: SessionContext, task: Task) -> ClientServer:
        """Listen for clients at the address of the recipe.

        Raises:
            MissingExtraError: grpcio is not installed.
            RecipeError: others could read the traffic, and there is neither a certificate nor a permission.
            CommunicationError: it cannot listen there.
        """
        require_grpc()
        recipe = context.recipe
        host, port = split_address(recipe.federated.listen)
        certificate = _certificate(recipe, host)
        trusted = server_credentials(certificate, [certificate.authority]) if certificate else None
        queues = ReliableQueues(_GRACE_FRACTION * recipe.runtime.deadline_seconds)
        server = GrpcServer(
            queues,
            host,
            _NUMBERS,
            _job_key(context),
            trusted,
            port=port,
            max_peers=MAX_CLIENTS,
            returning=True,
        )
        channel = GrpcChannel(queues, [server], context.net.ledger)
        server_of_clients = cls(
            server, queues, channel, recipe, describe_model(task.model), warn=context.warn, note=context.note
        )
        context.close_callbacks.append(server_of_clients.close)
        context.warn(f"clients connect at {host}:{server.port}, with `paceline client {host}:{server.port}`")
        return server_of_clients

    @property
    def port(self) -> int:
        """Return the port at which clients connect."""
        return self._server.port

    @property
    def joined(self) -> list[NetworkClient]:
        """Return the clients that can get work, by name."""
        return sorted((c for c in self.clients.values() if c.is_joined), key=lambda client: client.name)

    def wait_for(self, at_least: int, seconds: float) -> None:
        """Wait until so many clients have joined.

        Raises:
            DeadlineError: fewer did in time; names them.
        """
        expires = time.monotonic() + seconds
        while len(self.joined) < at_least:
            if self.next_event(expires - time.monotonic()) is None:
                names = ", ".join(client.name for client in self.joined) or "none"
                raise DeadlineError(
                    f"{format_count(at_least, 'client')} should be connected, and after {seconds:g} s there"
                    f" are {len(self.joined)}: {names}",
                    where="federated.at_least",
                    next_step=f"start clients: paceline client HOST:{self.port} --task FILE.py --name NAME"
                    " --token-file KEY; or raise the deadline",
                )

    def next_event(self, seconds: float) -> ClientEvent | None:
        """Return the next client that has joined or returned an update; None: there is none in time."""
        expires = time.monotonic() + seconds
        while (left := expires - time.monotonic()) > 0.0:
            message = self._receive(left)
            event = None if message is None else self._handle(message)
            if event is not None:
                return event
        return None

    def send(self, client: NetworkClient, message: ChannelMessage) -> None:
        """Send a message to a client; nothing happens if it is gone."""
        self._log("sent", client, message)
        try:
            self._channel.send(client.number, message, self._deadline_seconds)
        except CommunicationError:
            client.is_joined = False

    def take_bytes(self) -> dict[str, list[int]]:
        """Return the bytes sent to and received from each client since the last call, without zeros."""
        taken = {
            c.name: [c.down_bytes, c.up_bytes] for c in self.clients.values() if c.down_bytes + c.up_bytes
        }
        for client in self.clients.values():
            client.down_bytes = client.up_bytes = 0
        return taken

    def end(self) -> None:
        """Tell all clients that the run is complete."""
        for client in self.joined:
            self.send(client, ChannelMessage(END))
        self._queues.wait_for_delivery(_CLOSE_SECONDS)

    def close(self) -> None:
        """Close all connections; clients that were not told the end connect again to the next server."""
        self._channel.close()

    # -- messages

    def _receive(self, seconds: float) -> ChannelMessage | None:
        if not self._queues.ranks:
            time.sleep(min(seconds, _POLL_SECONDS))  # the queues have no peer whose message could end a wait
            return None
        try:
            return self._queues.receive(seconds)
        except CommunicationError as error:
            lost = self._by_number.get(-1 if error.peer is None else error.peer)
            if lost is not None:
                lost.is_joined, lost.ticket = False, None
            return None

    def _handle(self, message: ChannelMessage) -> ClientEvent | None:
        if message.kind == HELLO:
            self._greet(message)
            return None
        client = self._by_number.get(message.sender)
        if client is None:
            return None
        self._log("received", client, message)
        if message.kind == JOIN:
            return self._join(client, message.fields)
        if message.kind == MASKS and client.is_joined and self._has_masks:
            return ClientEvent(client, message)
        if message.kind != UPDATE or not client.is_joined:
            return None
        if client.ticket is None or message.fields.get("ticket") != client.ticket:
            return None
        client.ticket = None
        return ClientEvent(client, message)

    def _greet(self, message: ChannelMessage) -> None:
        """Answer the hello of a client with the recipe."""
        name, version = (message.fields.get(word) for word in ("name", "version"))
        known = self._by_number.get(message.sender)
        client = known or NetworkClient(plain_line(str(name)), message.sender)
        self._log("received", client, message)
        if not isinstance(name, str) or client_number(name) != message.sender or name != client.name:
            refusal = f'the name "{plain_line(str(name))}" does not fit: choose another one'
        elif version != VERSION:
            refusal = f"it runs Paceline {plain_line(str(version))}, and the server {VERSION}"
        else:
            client.is_joined, client.ticket, client.has_frozen = False, None, False
            self.clients[name] = self._by_number[message.sender] = client
            self.send(client, ChannelMessage(RECIPE, {"recipe": self._recipe_text}))
            return
        self.send(client, ChannelMessage(REFUSED, {"reason": refusal}))

    def _join(self, client: NetworkClient, fields: Mapping[str, Any]) -> ClientEvent | None:
        samples, model = fields.get("samples"), fields.get("model")
        difference = find_model_difference(self._model, model if isinstance(model, list) else [])
        if type(samples) is not int or samples < 0:
            difference = "it does not say how many samples it has"
        if difference:
            self._warn(f"client {client.name} was refused: {plain_line(difference)}")
            self.send(client, ChannelMessage(REFUSED, {"reason": f"its model is another one: {difference}"}))
            return None
        client.num_samples, client.is_joined = int(samples or 0), True
        return ClientEvent(client)

    def _log(self, direction: str, client: NetworkClient, message: ChannelMessage) -> None:
        size = num_message_bytes(message)
        if direction == "sent":
            client.down_bytes += size
        else:
            client.up_bytes += size
        if self._logs_wire:
            tensors = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in message.tensors]
            record = {"direction": direction, "client": client.name, "kind": message.kind}
            self._note("wire", {**record, "fields": dict(message.fields), "tensors": tensors, "bytes": size})


def _job_key(context: SessionContext) -> str:
    """Return the key of the job; a process that no launcher has started reads it from PACELINE_TOKEN.

    Raises:
        RecipeError: there is none.
    """
    token = context.cluster.token or token_from_environment()
    if not token:
        raise RecipeError(
            "clients of a network need a key: without it, anyone who reaches the server could join",
            where='federated.clients = "network"',
            next_step="pass the same --token-file or PACELINE_TOKEN to the job and to every client",
        )
    return token


def _certificate(recipe: Recipe, host: str) -> JobCertificate | None:
    """Return the certificate of the run; None: messages are not encrypted.

    Raises:
        RecipeError: it is needed and missing, or cannot be read.
    """
    security = recipe.security
    if security.certificate is not None:
        return JobCertificate.read(Path(security.certificate))
    if security.tls == "on" or not (security.tls == "off" or is_loopback(host)):
        raise RecipeError(
            f"clients would send their updates to {host} without encryption",
            where="security.certificate",
            next_step="create one with `paceline certificate FOLDER`, copy the folder to every client, and"
            ' set security.certificate = "FOLDER"; or set security.tls = "off" on a network that you trust',
        )
    return None
