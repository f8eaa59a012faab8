"""A client of federated rounds: it connects to the server of a job, and trains on its own data.

It builds the session of a job of one process with the recipe that the server sends, so a local step is the
training step of the project. A connection that breaks is repaired by the channel; if the server is gone, the
client connects again until `deadline_seconds` have passed, and does the present work once more.

Invariant: what leaves this process are the messages of `federated/client_server.py`: numbers of samples, of
losses and of steps, and tensors with the shapes of the model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline._version import VERSION
from paceline.comm.channel.grpc_channel import GrpcChannel
from paceline.comm.channel.grpc_client import GrpcClient
from paceline.comm.channel.grpc_credentials import client_credentials
from paceline.comm.channel.grpc_protocol import backoff_seconds
from paceline.comm.channel.message_channel import ChannelMessage
from paceline.comm.channel.reliable_queue import ReliableQueues
from paceline.comm.ledger import ByteLedger
from paceline.comm.reduction.gradients import Gradients
from paceline.data.task_data import prepare_data
from paceline.errors import CommunicationError, DeadlineError, RecipeError, TaskError, format_count
from paceline.federated.client_server import (
    END,
    HELLO,
    JOIN,
    RECIPE,
    REFUSED,
    UPDATE,
    WORK,
    client_number,
    describe_model,
    frozen_tensors,
    is_loopback,
)
from paceline.federated.cohort_table import COHORT_COLUMNS, CohortTable
from paceline.federated.cohorts import ClientSamples, CohortMember, CohortWork
from paceline.federated.rounds import FederatedRounds, find_counters, set_rate
from paceline.job.addresses import format_address
from paceline.job.cluster import Cluster
from paceline.job.tls import JobCertificate
from paceline.parallel.session_context import Components
from paceline.recipe.recipe import Recipe
from paceline.recipe.toml_text import parse_toml
from paceline.session.arguments import TaskLike
from paceline.session.build import build_session
from paceline.session.session import Session
from paceline.session.start_rank import build_task, connected
from paceline.state.slot import TensorSlot
from paceline.task import Task

_GRACE_SECONDS = 60.0
"""Time without an answer of the server after which a new connection is made."""
_NAME_SECONDS = 20.0
"""Time for which another process with the name may still be seen as connected, for example a killed one."""
_POLL_SECONDS = 1.0


class LocalUpdate:
    """The reduction of a client: it keeps what would be added at its position of the tree."""

    by_micro_batch = True

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Forget the update of the last work."""
        self.values = []

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """Accept any position."""

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Keep a tensor of the update."""
        if grad is not None:
            self.values.append(grad)

    def finish(self) -> Gradients:
        """Return nothing, since nothing is summed here."""
        return Gradients({}, (), ())


class ClientTraining(FederatedRounds):
    """The local training of one client; arguments as of `FederatedRounds`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._update = LocalUpdate()
        self.reduction = cast(Any, self._update)

    def train(self, session: Session, name: str, message: ChannelMessage) -> ChannelMessage:
        """Do a work: take the local steps from the weights of the server.

        Args:
            name: of this client.
            message: of kind `work`.
        Returns:
            The message of kind `update`.
        """
        fields, runner, state = message.fields, session.runner, session.state
        device, work = runner.sharded_model.device, cast("CohortWork", session.work)
        buffers = self._load(session, message)
        counters = find_counters(runner.buffers.names, buffers)
        state.step, state.num_updates = int(fields["step"]), int(fields["num_updates"])
        set_rate(session.update_step)
        # From here on the step is the number of the round in this client's order of samples.
        state.step = int(fields["round"])
        member = CohortMember(int(fields["position"]), int(fields["client"]))
        # Numbers of samples are its own, and only the number of the client is that of the server.
        own = work.order.clients.indices[0]
        none = np.empty(0, dtype=np.int64)
        clients = ClientSamples([name] * (member.client + 1), [*[none] * member.client, own])
        work = replace(work, order=replace(work.order, clients=clients))
        table = CohortTable(member.position + 1, runner.metric_names.names or (), len(counters))
        local_step = self._local_update_step(session.update_step)
        self._update.begin()
        with session.feed.open(work.order.micro_batches(state.step, member)) as stream:
            self._run_client(work, member, stream, runner, local_step, table, counters)
        self.begin_client(state.optimizer)
        table.agree(self._net, self._group, device, stops=False)
        answer = {name: fields[name] for name in ("ticket", "step")}
        return ChannelMessage(UPDATE, answer, [table.rows[member.position], *self._update.values])

    @torch.no_grad()
    def _load(self, session: Session, message: ChannelMessage) -> list[Tensor]:
        """Load the weights and buffers of a work into the model; return the buffers.

        Raises:
            CommunicationError: they are not those of the model.
        """
        runner, num_buffers = session.runner, int(message.fields["buffers"])
        model = runner.sharded_model.model
        weights = [*self.server.parameters, *(frozen_tensors(model) if message.fields["frozen"] else [])]
        tensors = [t.to(runner.sharded_model.device) for t in message.tensors]
        own = [*weights, *runner.buffers.values()]
        if [(t.dtype, t.shape) for t in tensors] != [(t.dtype, t.shape) for t in own]:
            raise CommunicationError(
                "the server has sent other tensors than the model has",
                next_step="run the same version of Paceline on the server and on the client",
            )
        torch._foreach_copy_(weights, tensors[: len(weights)])
        self.server.begin()
        buffers = tensors[len(tensors) - num_buffers :]
        runner.buffers.reset(buffers)
        return buffers


@dataclass(frozen=True)
class ClientSettings:
    """What a client needs to connect and to train.

    Args:
        host, port: of the server.
        name: of this client; the server knows it again by it.
        token: the key of the job; it is never sent.
        task: the task with this client's data: "file.py" with a function `build`, "file.py:function", or as
            in `paceline.train`. Of `Task(clients=...)` it is the data under the name.
        base_dir: folder to which the file is relative.
        options: of the task, in addition to those of the server's recipe or in place of them.
        certificate: of the job; None: messages are not encrypted.
        allows_plain: messages may be sent without encryption to another host.
        deadline_seconds: time for which the server may be gone, or send nothing.
    """

    host: str
    port: int
    name: str
    token: str
    task: str | TaskLike
    base_dir: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    certificate: JobCertificate | None = None
    allows_plain: bool = False
    deadline_seconds: float = 3600.0


class FederatedClient:
    """A client until the run of its server is complete.

    Args:
        settings: where to connect, and what to train on.
        log: receives a line about what happens.
    Attributes:
        num_works: works whose updates were sent.
    """

    def __init__(self, settings: ClientSettings, log: Callable[[str], None]) -> None:
        self._settings, self._log = settings, log
        self._recipe_text, self._session = "", cast("Session | None", None)
        self._opened = ExitStack()
        self.num_works = 0

    def run(self) -> None:
        """Train until the server says that the run is complete.

        Raises:
            CommunicationError: the server cannot be reached, has another key, or refuses this client.
            RecipeError: messages would leave this host without encryption.
        """
        settings = self._settings
        if settings.certificate is None and not (settings.allows_plain or is_loopback(settings.host)):
            raise RecipeError(
                f"updates would be sent to {settings.host} without encryption",
                next_step="copy the folder of the server's certificate here: --certificate FOLDER; or say"
                " --plain on a network that you trust",
            )
        self._reached_at, failures, rng = time.monotonic(), 0, random.Random()
        with self._opened:
            while True:
                try:
                    with self._connection() as channel:
                        if self._serve(channel):
                            return
                        failures = 0
                except CommunicationError as error:
                    if self._is_final(error):
                        raise
                    self._log(f"the connection is lost, and made again: {error.what}")
                    time.sleep(backoff_seconds(failures, rng))
                    failures += 1

    def _is_final(self, error: CommunicationError) -> bool:
        """Return whether it is of no use to connect again."""
        is_late = time.monotonic() - self._reached_at > self._settings.deadline_seconds
        return is_late or isinstance(error, RefusedError | DeadlineError) or error.peer is None

    @contextmanager
    def _connection(self) -> Iterator[GrpcChannel]:
        """Return a context manager with a connection to the server.

        Raises:
            CommunicationError: it cannot be reached in time, or another process has this name.
        """
        settings, queues = self._settings, ReliableQueues(_GRACE_SECONDS)
        certificate, began = settings.certificate, time.monotonic()
        credentials = client_credentials(certificate, certificate.authority) if certificate else None
        while True:
            client = GrpcClient(
                queues,
                settings.host,
                settings.port,
                client_number(settings.name),
                settings.token,
                credentials=credentials,
                name=f"client {settings.name}",
            )
            try:
                client.connect(settings.deadline_seconds)
                break
            except CommunicationError as error:
                if not _is_name_taken(error):
                    error.peer = (
                        None  # another key, or no answer until the deadline: another try is of no use
                    )
                    raise
                if time.monotonic() - began > _NAME_SECONDS:
                    raise RefusedError(
                        f"another client with the name {settings.name} is connected to the server",
                        next_step="give each client a name of its own",
                    ) from error
                time.sleep(_POLL_SECONDS / 4)
        channel = GrpcChannel(queues, [client], ByteLedger())
        try:
            yield channel
        finally:
            channel.close()

    def _serve(self, channel: GrpcChannel) -> bool:
        """Do the works of the server; return whether the run is complete."""
        settings = self._settings
        self._send(channel, ChannelMessage(HELLO, {"name": settings.name, "version": VERSION}))
        while True:
            message = self._newest(channel)
            if message.kind == END:
                return True
            if message.kind == REFUSED:
                raise RefusedError(
                    f"the server refuses client {settings.name}: {message.fields.get('reason')}",
                    next_step="build the model as the task of the server does",
                )
            if message.kind == RECIPE:
                self._join(channel, self._build(str(message.fields["recipe"])))
            elif message.kind == WORK and self._session is not None:
                self._do(channel, self._session, message)

    def _join(self, channel: GrpcChannel, session: Session) -> None:
        """Tell the server what it must know before the first work."""
        settings, num_samples = self._settings, len(session.task.data)
        model = describe_model(session.runner.sharded_model.model)
        self._send(channel, ChannelMessage(JOIN, {"samples": num_samples, "model": model}))
        place = format_address(settings.host, settings.port)
        self._log(f"{settings.name} has joined {place} with {format_count(num_samples, 'sample')}")

    def _do(self, channel: GrpcChannel, session: Session, message: ChannelMessage) -> None:
        rule = cast("ClientTraining", session.rule)
        update = rule.train(session, self._settings.name, message)
        self._send(channel, update)
        self.num_works += 1
        row = dict(zip(COHORT_COLUMNS, update.tensors[0].tolist(), strict=False))
        loss = row["total"] / row["count"] if row["count"] else float("nan")
        steps = format_count(int(row["steps"]), "step")
        self._log(f"round {message.fields['step']}: {steps}, loss {loss:.5g}")

    def _build(self, text: str) -> Session:
        """Build the session of a recipe, or return that which is built."""
        if self._session is not None and text == self._recipe_text:
            return self._session
        self._opened.close()
        recipe = Recipe.read(parse_toml(text), lambda paths: "the recipe of the server")
        cluster, device = self._opened.enter_context(connected(recipe, Cluster.single()))
        task = self._own_task(recipe)
        components = Components(federated=ClientTraining)
        self._session = build_session(recipe, task, cluster, device, components=components, warn=self._log)
        self._opened.callback(self._session.close)
        self._recipe_text = text
        return self._session

    def _own_task(self, recipe: Recipe) -> Task:
        """Return the task with the data of this client alone."""
        source, name = self._settings.task, self._settings.name
        recipe = recipe.replace(options={**recipe.options, **self._settings.options})
        if isinstance(source, str):
            is_file = source.endswith(".py")
            recipe, source = recipe.replace(task=f"{source}:build" if is_file else source), cast(Any, None)
        task = prepare_data(
            build_task(recipe, cast("TaskLike | None", source), self._settings.base_dir), recipe
        )
        if task.clients and name not in task.clients:
            known = ", ".join(list(task.clients)[:10])
            raise TaskError(
                f"the task has data of the clients {known}, and none of {name}",
                next_step="name one of them, or return Task(data=...) with the data of this client",
            )
        data = task.clients.get(name, task.data)
        return replace(task, data=data, clients={name: data}, held_out=None)

    # -- messages

    def _send(self, channel: GrpcChannel, message: ChannelMessage) -> None:
        channel.send(0, message, self._settings.deadline_seconds)

    def _newest(self, channel: GrpcChannel) -> ChannelMessage:
        """Return the next message; of several works that wait only the last, since the others are late."""
        expires = time.monotonic() + self._settings.deadline_seconds
        message: ChannelMessage | None = None
        while message is None:
            message = _receive(channel, _POLL_SECONDS)
            if message is None and time.monotonic() > expires:
                raise DeadlineError(
                    f"the server has sent nothing for {self._settings.deadline_seconds:g} s",
                    next_step="look at the server, or raise --deadline",
                )
        self._reached_at = time.monotonic()
        while message.kind == WORK and (newer := _receive(channel, 0.0)) is not None:
            message = newer
        return message


class RefusedError(CommunicationError):
    """The server refuses a client: its name is taken, or its model is another one."""


def _receive(channel: GrpcChannel, seconds: float) -> ChannelMessage | None:
    try:
        return channel.receive(seconds)
    except DeadlineError as error:
        if error.peer is not None:
            raise
        return None


def _is_name_taken(error: CommunicationError) -> bool:
    code = getattr(error.__cause__, "code", None)
    return callable(code) and getattr(code(), "name", "") == "ALREADY_EXISTS"
