"""A client of federated rounds: it connects to the server of a job, and trains on its own data.

It builds the session of a job of one process with the recipe that the server sends, so a local step is the
training step of the project. A connection that breaks is repaired by the channel; if the server is gone, the
client connects again until `deadline_seconds` have passed, and does the present work once more.

Invariant: what leaves this process are the messages of `federated/client_server.py`: numbers of samples, of
losses and of steps, and tensors with the shapes of the model; under masks its keys, shares and masked words.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from paceline.errors import (
    CommunicationError,
    DeadlineError,
    NumericError,
    RecipeError,
    TaskError,
    format_count,
)
from paceline.federated.client_codec import ClientCodec
from paceline.federated.client_server import (
    END,
    HELLO,
    JOIN,
    MASKS,
    RECIPE,
    REFUSED,
    UPDATE,
    WORK,
    client_number,
    describe_model,
    frozen_tensors,
    is_loopback,
)
from paceline.federated.cohort_table import RETURNED, ClientRow, CohortTable
from paceline.federated.cohorts import ClientSamples, CohortMember, CohortWork
from paceline.federated.ring_sum import RingWords
from paceline.federated.rounds import FederatedRounds, find_counters, set_rate
from paceline.federated.secure_masks import (
    ClientIdentity,
    ClientKeys,
    MaskClient,
    MaskTerms,
    RoundTerms,
    SecureSumError,
    require_clients,
)
from paceline.federated.secure_network import (
    INPUT,
    KEYS,
    LOST_SECRETS,
    SHARES,
    UNMASK,
    stage_message,
    stage_parts,
)
from paceline.federated.secure_rounds import RingReduction, SecureRounds, hash_model, pack, pack_shares
from paceline.job.addresses import format_address
from paceline.job.cluster import Cluster
from paceline.job.tls import JobCertificate
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import Components
from paceline.privacy.entropy import Entropy
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
    """The local training of one client; arguments as of `FederatedRounds`.

    Attributes:
        row: numbers of its last work, by `COHORT_COLUMNS`; empty: it is left out.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.row: Mapping[str, float] = {}
        self._update = LocalUpdate()
        self.reduction = cast(Any, self._update)
        self._payload: Tensor | None = None
        self._error: Tensor | None = None
        self._pending: tuple[int, Tensor] | None = None
        self._ticket = 0

    def answer(self, session: Session, settings: ClientSettings, message: ChannelMessage) -> ChannelMessage:
        """Return the answer to a message of the server.

        Args:
            message: of kind `work`.
        """
        return self.train(session, settings.name, message)

    def train(self, session: Session, name: str, message: ChannelMessage) -> ChannelMessage:
        """Do a work: take the local steps from the weights of the server.

        Args:
            name: of this client.
            message: of kind `work`.
        Returns:
            The message of kind `update`.
        """
        row = self.take_steps(session, name, message)
        values = self._update.values
        if self._payload is not None:
            values = [self._payload, *values[len(self.server.vectors) :]]
        answer = {name: message.fields[name] for name in ("ticket", "step")}
        return ChannelMessage(UPDATE, answer, [row, *values])

    def take_steps(self, session: Session, name: str, message: ChannelMessage) -> Tensor:
        """Take the local steps of a work; return its row of the table."""
        fields, runner, state = message.fields, session.runner, session.state
        self.row = {}
        self._begin_work(int(fields["ticket"]), int(fields["counted"]))
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
        self.begin_update(member, name, runner, state.step, table)
        with session.feed.open(work.order.micro_batches(state.step, member)) as stream:
            self._run_client(work, member, stream, runner, local_step, table, counters)
        self.begin_client(state.optimizer)
        table.agree(self._net, self._group, device, stops=False)
        return table.rows[member.position]

    def begin_update(
        self, member: CohortMember, name: str, runner: ModelRunner, step: int, table: CohortTable
    ) -> None:
        """Forget the update of the last work."""
        self._update.begin()

    def write_row(
        self, table: CohortTable, position: int, row: ClientRow, moved: Sequence[float], num_bytes: int
    ) -> None:
        """Write the numbers of this client to the table."""
        self.row = row.head
        super().write_row(table, position, row, moved, num_bytes)

    def _begin_work(self, ticket: int, counted: int) -> None:
        """Keep the error of the last update if it was counted, and forget it otherwise.

        Args:
            counted: the ticket of the last work of this client whose update was applied.
        """
        if self._pending is not None and self._pending[0] == counted:
            self._error = self._pending[1]
        self._payload, self._pending, self._ticket = None, None, ticket

    def _encode(self, codec: ClientCodec, client: str, round_number: int, update: list[Tensor]) -> int:
        """Keep the bytes to send, and the error until the server says whether the update was counted."""
        self._payload, error = codec.encode(update, round_number, client, self._error)
        if error is not None:
            self._pending = self._ticket, error
        return len(self._payload)

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


class MaskedTraining(ClientTraining, SecureRounds):
    """The local training of a client that masks what it returns; arguments as of `FederatedRounds`.

    A message of the server is answered by that of the next stage: `work` by keys, keys by shares, shares by
    the masked words, and the request for shares by those.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reduction = cast("RingReduction", args[2])
        self.reduction.masks = self
        self._work: ChannelMessage | None = None
        self._client: MaskClient | None = None
        self._names: Mapping[int, str] = {}
        self._sealed: Mapping[int, bytes] = {}
        self._model = b""

    def answer(self, session: Session, settings: ClientSettings, message: ChannelMessage) -> ChannelMessage:
        """Return the message of the next stage.

        Raises:
            SecureSumError: the server, or another client, has deviated from the protocol.
            NumericError: a value of the update does not fit.
        """
        identity, ticket = settings.identity, int(message.fields.get("ticket", 0))
        assert identity is not None
        if message.kind == WORK:
            self._work, self._client = message, self._begin_round(session, settings.name, identity, message)
            return stage_message(ticket, KEYS, self._client.advertise().to_bytes())
        work, client = self._work, self._client
        if work is None or client is None or work.fields["ticket"] != ticket:
            return stage_message(ticket, LOST_SECRETS)
        stage, parts = message.fields.get("stage"), stage_parts(message) or {}
        if stage == KEYS:
            shares = client.share({p: ClientKeys.read(data) for p, data in sorted(parts.items())})
            return stage_message(ticket, SHARES, pack(shares))
        if stage == SHARES:
            self._sealed = parts
            return self._train_masked(session, settings.name, work)
        survivors, lost = (map(int, message.fields.get(word, ())) for word in ("survivors", "lost"))
        return stage_message(ticket, UNMASK, pack_shares(client.reveal([*survivors], [*lost])))

    def _begin_round(
        self, session: Session, name: str, identity: ClientIdentity, message: ChannelMessage
    ) -> MaskClient:
        """Return this client of a round, whose keys are fresh and bound to the model that it has received."""
        fields, settings = message.fields, self.settings
        self._load(session, message)
        self._model = hash_model(self.server.parameters, session.runner)
        self._names = {int(position): str(other) for position, other in fields["names"]}
        terms = MaskTerms(bytes.fromhex(fields["run"]), settings.threshold, settings.neighbours)
        round_terms = RoundTerms(terms, int(fields["step"]), self._model, self._names)
        position = int(fields["position"])
        require_clients(round_terms.number, len({*self._names.values()}))
        if self._names.get(position) != name or len({*self._names.values()}) != len(self._names):
            raise SecureSumError(
                f"the list of the clients of round {round_terms.number} does not have {name} in its place",
                next_step="do not trust this server: look at who has changed it",
            )
        return MaskClient(round_terms, position, identity.key, identity.known, Entropy(), identity.ledger)

    def _train_masked(self, session: Session, name: str, work: ChannelMessage) -> ChannelMessage:
        """Take the local steps, and return the masked words."""
        row = self.take_steps(session, name, work)
        self.reduction.close()
        status, ticket = float(row[0]), int(work.fields["ticket"])
        words = self.reduction.total.to_bytes() if status == RETURNED else b""
        return stage_message(ticket, INPUT, words, status=status, step=work.fields["step"])

    def begin_update(
        self, member: CohortMember, name: str, runner: ModelRunner, step: int, table: CohortTable
    ) -> None:
        """Begin the words of a round."""
        own = [member.position]
        self.reduction.open_round(step, self._names, own, self._model, table.num_summed)
        self.reduction.begin()

    def begin(self, *args: Any, **options: Any) -> None:
        """Do nothing: keys and shares are exchanged already."""

    def mask(self, position: int, words: RingWords) -> None:
        """Mask the words of this client in place."""
        assert self._client is not None
        self._client.mask(self._sealed, words)

    def unmask(self, arrived: Collection[int], total: RingWords) -> list[int]:
        """Return none: the server computes the sum."""
        return []


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
        identity: the private key of this client and the public keys of all; None: it takes part in no round
            with masks.
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
    identity: ClientIdentity | None = None


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
            elif message.kind in (WORK, MASKS) and self._session is not None:
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
        try:
            answer = rule.answer(session, self._settings, message)
        except (SecureSumError, NumericError) as error:
            # The server ends the run with this reason; a client with other trouble is lost.
            said = {"ticket": message.fields.get("ticket"), "error": error.what}
            self._send(channel, ChannelMessage(MASKS, {**said, "next_step": error.next_step}))
            raise
        self._send(channel, answer)
        if answer.kind != UPDATE:
            return
        self.num_works += 1
        row = rule.row
        loss = row["total"] / row["count"] if row.get("count") else float("nan")
        steps = format_count(int(row.get("steps", 0)), "step")
        self._log(f"round {answer.fields['step']}: {steps}, loss {loss:.5g}")

    def _build(self, text: str) -> Session:
        """Build the session of a recipe, or return that which is built."""
        if self._session is not None and text == self._recipe_text:
            return self._session
        self._opened.close()
        recipe = Recipe.read(parse_toml(text), lambda paths: "the recipe of the server")
        cluster, device = self._opened.enter_context(connected(recipe, Cluster.single()))
        task = self._own_task(recipe)
        components = Components(federated=self._choose_training(recipe))
        self._session = build_session(recipe, task, cluster, device, components=components, warn=self._log)
        self._opened.callback(self._session.close)
        self._recipe_text = text
        return self._session

    def _choose_training(self, recipe: Recipe) -> type[ClientTraining]:
        """Return the rule of this client.

        Raises:
            RecipeError: there should be masks, and this client has no keys for them; or the reverse.
        """
        is_masked, has_keys = recipe.federated.secure == "masks", self._settings.identity is not None
        if is_masked and not has_keys:
            raise RecipeError(
                "the run adds updates under masks, and without the public keys of the others the server could"
                " take the place of all of them",
                where='federated.secure = "masks"',
                next_step="make keys with `paceline certificate FOLDER --client NAME`, give every client the"
                " file of all public keys beforehand, and pass --identity FOLDER/NAME.key --keys FILE",
            )
        if has_keys and not is_masked:
            raise RecipeError(
                "this client has keys for a secure sum, and the run would receive its updates as they are",
                where='federated.secure = "none"',
                next_step="leave out --identity and --keys if the server may see each update",
            )
        return MaskedTraining if is_masked else ClientTraining

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
