"""Secure sums of clients that connect over a network: the server's side, and what both sides say.

The four messages of `secure_masks` are messages of `client_server`: `work` is answered by `masks` with the
keys of a client; the server forwards them, then the shares, and a client that has both trains and returns an
`update` of masked words; last, the survivors are asked for shares. `MaskServer` and `MaskClient` are those of
simulated clients, and only who carries their messages is another.

A client that does not answer in time is lost at that message, as in a simulation. One that is connected again
gets the work once more while keys are collected, and is lost later on: its secrets are in memory alone.

Invariants: every wait has a deadline; a message counts for the ticket of its work alone; the server holds the
words of a client only under its masks. A client that finds keys, shares or requests that it must not accept
says so and ends, and that ends the run.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.data.work import BatchStream
from paceline.errors import StrategyError
from paceline.federated.client_server import MASKS, UPDATE, ClientServer
from paceline.federated.cohort_table import (
    INVALID,
    LATE,
    NO_SAMPLES,
    NOT_FINITE,
    RETURNED,
    CohortTable,
    status_of,
)
from paceline.federated.cohorts import CohortMember, CohortWork
from paceline.federated.network_rounds import NetworkRounds, NetworkWork
from paceline.federated.ring_sum import RingWords
from paceline.federated.secure_masks import (
    ClientKeys,
    MaskServer,
    MaskTerms,
    RoundTerms,
    SecureSumError,
    add_mask,
    require_clients,
)
from paceline.federated.secure_rounds import SecureRounds, pack, unpack, unpack_shares
from paceline.job.handshake import plain_line
from paceline.parallel.model_runner import ModelRunner
from paceline.privacy.entropy import Entropy
from paceline.state.train_state import TrainState
from paceline.sync.update import UpdateStep

KEYS, SHARES, INPUT, UNMASK, LOST_SECRETS = "keys", "shares", "input", "unmask", "lost"
"""Stages, in the field `stage` of messages; the last: a client has the secrets of a round no more."""
_POLL_SECONDS = 0.25


def stage_message(ticket: int, stage: str, data: bytes = b"", **fields: Any) -> ChannelMessage:
    """Return a message of a stage: `update` for the input, which ends a work, and `masks` for the others."""
    kind = UPDATE if stage == INPUT else MASKS
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return ChannelMessage(kind, {"ticket": ticket, "stage": stage, **fields}, [body])


def message_bytes(message: ChannelMessage) -> bytes | None:
    """Return the bytes of a message of a stage; None: it has none."""
    if len(message.tensors) != 1 or message.tensors[0].dtype != torch.uint8 or message.tensors[0].dim() != 1:
        return None
    return message.tensors[0].numpy().tobytes()


def stage_parts(message: ChannelMessage) -> dict[int, bytes] | None:
    """Return the parts of a message of a stage by position; None: they cannot be read."""
    data = message_bytes(message)
    try:
        return None if data is None else unpack(data)
    except struct.error:
        return None


class RoundMember(NamedTuple):
    """A client of a round.

    Args:
        name: of the client.
        ticket: of its work.
    """

    name: str
    ticket: int


class NetworkMasks:
    """The protocol of `secure_masks` among clients of a network, for the sum of their server.

    Args:
        terms: of the run.
    Attributes:
        connection: the clients; set by the rule.
        seconds: that each of the four messages may take.
        send_work: gives a client its work, and returns the ticket.
        inputs: by position the message with masked words.
    """

    def __init__(self, terms: MaskTerms) -> None:
        self.terms = terms
        self.connection: ClientServer
        self.seconds = 0.0
        self.send_work: Callable[[int, str], int]
        self.server: MaskServer
        self.inputs: dict[int, ChannelMessage] = {}
        self._members: dict[int, RoundMember] = {}
        self._step = 0

    def begin(
        self,
        number: int,
        model: bytes,
        names: Mapping[int, str],
        own: Collection[int],
        lost_at: Callable[[int], int],
    ) -> None:
        """Exchange keys and shares, and collect the masked words.

        Raises:
            SecureSumError: there are too few clients; one has found that it is deceived.
        """
        require_clients(number, len(names))
        self._step, self.inputs = number, {}
        self.server = MaskServer(RoundTerms(self.terms, number, model, names))
        self._members = {position: RoundMember(name, 0) for position, name in names.items()}
        for position in names:
            self._give_work(position)
        keys = {p: data for p, m in self._collect(KEYS, names).items() if (data := message_bytes(m))}
        readable = {p: data for p, data in keys.items() if _is_readable(data)}
        require_clients(number, len(readable))
        forwarded = self.server.forward_keys(readable)
        self._forget(names.keys() - forwarded.keys())
        packed = pack({p: key.to_bytes() for p, key in forwarded.items()})
        self._send(dict.fromkeys(forwarded, packed), KEYS)
        shares = {p: parts for p, m in self._collect(SHARES, forwarded).items() if (parts := stage_parts(m))}
        self._forget(forwarded.keys() - shares.keys())
        sealed = self.server.forward_shares(shares)
        self._send({p: pack(parts) for p, parts in sealed.items()}, SHARES)
        self.inputs = self._collect(INPUT, sealed)

    def mask(self, position: int, words: RingWords) -> None:
        """Do nothing: a client masks its words itself."""

    def unmask(self, arrived: Collection[int], total: RingWords) -> list[int]:
        """Remove the masks that are left in the sum; return the survivors.

        Raises:
            SecureSumError: there are too few clients; one has found that it is deceived.
        """
        survivors, lost = self.server.requests(arrived)
        self._send(dict.fromkeys(survivors, b""), UNMASK, survivors=survivors, lost=lost)
        answers = {p: stage_parts(m) for p, m in self._collect(UNMASK, survivors).items()}
        revealed = {p: unpack_shares(pack(parts)) for p, parts in answers.items() if parts}
        for mask in self.server.masks_left(survivors, lost, revealed):
            add_mask(total, mask.key, mask.sign)
        return survivors

    # -- messages

    def _give_work(self, position: int) -> None:
        """Send the work of a round to a client that is connected."""
        name = self._members[position].name
        client = self.connection.clients.get(name)
        if client is not None and client.is_joined:
            self._members[position] = RoundMember(name, self.send_work(position, name))

    def _send(self, parts: Mapping[int, bytes], stage: str, **fields: Any) -> None:
        for position, data in parts.items():
            name, ticket = self._members[position]
            message = stage_message(ticket, stage, data, **fields)
            self.connection.send(self.connection.clients[name], message)

    def _forget(self, positions: Collection[int]) -> None:
        """Let clients that are lost before they train get the work of the next round."""
        for position in positions:
            name, ticket = self._members[position]
            client = self.connection.clients.get(name)
            if client is not None and client.ticket == ticket:
                client.ticket = None

    def _collect(self, stage: str, positions: Collection[int]) -> dict[int, ChannelMessage]:
        """Return the messages of a stage by position; who does not answer in time is lost.

        Raises:
            SecureSumError: a client has ended the round.
        """
        places = {self._members[position].name: position for position in positions}
        waiting, received = {*positions}, dict[int, ChannelMessage]()
        expires = time.monotonic() + self.seconds
        while waiting and (left := expires - time.monotonic()) > 0.0:
            event = self.connection.next_event(min(left, _POLL_SECONDS))
            if event is None:
                if stage != KEYS:  # while keys are collected, a client can still come back
                    waiting = {p for p in waiting if self._is_connected(p)}
                continue
            position = places.get(event.client.name)
            if position is None:
                continue
            message = event.message
            if message is None:
                if stage == KEYS:
                    received.pop(position, None)
                    waiting.add(position)
                    self._give_work(position)
                else:
                    waiting.discard(position)
                continue
            if message.fields.get("ticket") != self._members[position].ticket:
                continue
            if "error" in message.fields:
                raise _error_of(event.client.name, self._step, message)
            if message.fields.get("stage") == LOST_SECRETS:
                waiting.discard(position)
                self._forget([position])
            elif message.fields.get("stage") == stage and position in waiting:
                received[position] = message
                waiting.discard(position)
        return dict(sorted(received.items()))

    def _is_connected(self, position: int) -> bool:
        client = self.connection.clients.get(self._members[position].name)
        return client is not None and client.is_joined


class SecureNetworkRounds(SecureRounds, NetworkRounds):
    """The rule of rounds whose clients connect over a network and mask what they return; arguments as of
    `FederatedRounds`.

    Wire: for each member of a cohort the weights and buffers, and back `RingLayout.num_bytes` of words and
        what the masks need.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        settings = self.settings
        terms = MaskTerms(Entropy().bytes(16), settings.threshold, settings.neighbours)
        self._masks, self._left_out = NetworkMasks(terms), dict[str, float]()
        self.reduction.masks = self._masks

    def keep_clients(self, state: TrainState, work: CohortWork) -> None:
        NetworkRounds.keep_clients(self, state, work)

    def open_cohort(
        self, work: CohortWork, runner: ModelRunner, state: TrainState
    ) -> tuple[dict[int, str], list[int]]:
        """Draw the clients of a round, and return the names of those that can take part, by position."""
        network = cast("NetworkWork", work)
        self.draw_members(network, state.step)
        if self._private is not None and self._private.hides_units:
            raise StrategyError(
                "clients of a network know who else takes part in a round with masks, and epsilon counts on"
                " nobody knowing that",
                where="federated.secure",
                next_step='set federated.secure = "none", or let all clients take part in each round',
            )
        self.server.begin()  # the weights that are sent
        self._left_out = self._find_left_out(network, state.step)
        members = {m.position: m for m, name in self._members if name not in self._left_out}
        names = {m.position: name for m, name in self._members if m.position in members}
        sizes = {c.name: c.num_samples for c in network.server.clients.values()}
        noise = 0.0 if self._private is None else self._private.largest_noise
        weights = [self.client_weight(sizes.get(name, 0)) for name in names.values()]
        if names:
            self.reduction.ring.check(max(1.0, sum(weights)), noise)

        def send_work(position: int, name: str) -> int:
            client = network.server.clients[name]
            self._send_work(network, client, members[position], runner, state, round_number=state.step)
            return self._num_tickets

        self.work_fields = {"run": self._masks.terms.run.hex(), "names": [*names.items()]}
        self._masks.connection, self._masks.send_work = network.server, send_work
        self._masks.seconds = self.settings.deadline_seconds or network.deadline_seconds
        return names, []

    def _find_left_out(self, network: NetworkWork, step: int) -> dict[str, float]:
        """Return the members that get no work, with the status of each."""
        late = {} if self.replay is None else self.replay.left_out(step)
        left_out = {name: status_of(late[name]) for _, name in self._members if name in late}
        for _, name in self._members:
            client = network.server.clients.get(name)
            if client is None or name in left_out:
                continue
            if client.is_joined and not client.num_samples:
                left_out[name] = NO_SAMPLES
            elif client.is_joined and client.ticket is not None:
                left_out[name] = LATE  # still busy with an earlier round
        return left_out

    def run_cohort(
        self,
        work: CohortWork,
        stream: BatchStream,
        runner: ModelRunner,
        local_step: UpdateStep,
        table: CohortTable,
        counters: Sequence[int],
        undo: Callable[[], None],
    ) -> None:
        """Add the masked words that have arrived."""
        undo()  # changes of buffers count from the start of the round
        network = cast("NetworkWork", work)
        inputs = {} if not self.reduction.num_clients else self._masks.inputs
        for member, name in self._members:
            message = inputs.get(member.position)
            if name in self._left_out:
                status = self._left_out[name]
            elif message is None:
                status = self._no_answer(network, name)
            else:
                status = self._receive(member, message)
            table.write(member.position, {"status": status}, {}, ())

    def _receive(self, member: CohortMember, message: ChannelMessage) -> float:
        """Add the masked words of a client to the sum; return its status."""
        status = message.fields.get("status")
        if status != RETURNED:
            return status if status in (NO_SAMPLES, NOT_FINITE) else INVALID
        data, layout = message_bytes(message), self.reduction.layout
        if data is None or len(data) != layout.num_bytes:
            return INVALID
        self.reduction.receive(member.position, layout.from_bytes(data))
        return RETURNED


def _is_readable(data: bytes) -> bool:
    try:
        ClientKeys.read(data)
    except SecureSumError:
        return False
    return True


def _error_of(name: str, step: int, message: ChannelMessage) -> SecureSumError:
    """Return the error with which a client has ended a round."""
    what, next_step = (plain_line(str(message.fields.get(word, ""))) for word in ("error", "next_step"))
    return SecureSumError(f"client {name} has ended round {step}: {what}", next_step=next_step)
