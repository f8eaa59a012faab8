"""Federated rounds of clients that connect over a network: the server trains nothing itself.

A round sends weights and buffers to its cohort, and adds what comes back at the leaf of each client's
position, so its bits are those of simulated clients with the same data. Which clients return in time is not a
function of the seed: the event `cohort` has it, and `debug.replay_arrivals` repeats it.

`BufferedRounds` does not wait for a cohort. Clients always have work, and a round ends when the buffer has
enough updates. One that began t rounds ago is multiplied by 1 / sqrt(1 + t), and the sum divided by the
weights without that factor, so late updates move the weights less; one older than `federated.age` is dropped
and counted. The event `buffer` has their order.

Invariants: names get numbers once, sorted at the start of the run and then by arrival, and a checkpoint keeps
them; an update is added at most once; every wait has a deadline.
Source: Bonawitz et al. 2019, arXiv:1902.01046 (rounds with a deadline); Nguyen et al. 2022,
arXiv:2106.06581, Algorithm 1 (the buffer).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.data.sample_order import KeyedPermutation
from paceline.data.work import BatchStream, MicroBatch, TrainingFeed
from paceline.errors import CheckpointError, CommunicationError, DeadlineError, StrategyError, TaskError
from paceline.federated.client_codec import ClientCodec
from paceline.federated.client_server import (
    WORK,
    ClientEvent,
    ClientServer,
    NetworkClient,
    describe_clients,
    frozen_tensors,
)
from paceline.federated.cohort_table import (
    COHORT_COLUMNS,
    INVALID,
    LATE,
    LEFT_OUT_REASONS,
    LOST,
    NO_SAMPLES,
    NOT_FINITE,
    RETURNED,
    CohortTable,
    status_of,
)
from paceline.federated.cohorts import CohortMember, CohortWork, draw_by_chance
from paceline.federated.rounds import FederatedRounds
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.privacy.noise import PrivateDraws
from paceline.recipe.federated_recipe import FederatedRecipe
from paceline.state.keys import key
from paceline.state.train_state import TrainState
from paceline.sync.server.server_policies import WorkLedger
from paceline.sync.update import UpdateStep
from paceline.task import Task

_CLIENTS_KEY = "federated.clients"


class ClientRoster:
    """The names of all clients that have taken part, by number, and how much work each was given.

    Attributes:
        names: by number.
        works: for a buffer: how many works each client has begun.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.works: dict[str, int] = {}

    def add(self, names: Sequence[str]) -> None:
        """Give numbers to new names, in the order of the names."""
        self.names += sorted({*names} - {*self.names})

    def state_dict(self) -> Mapping[str, Any]:
        """Return the names and counts."""
        return {"names": list(self.names), "works": [self.works.get(name, 0) for name in self.names]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            CheckpointError: the saved run had simulated clients.
        """
        if "names" not in state_dict:
            raise CheckpointError(
                "the checkpoint has no clients of a network", next_step="resume with the recipe of the run"
            )
        self.names = [str(name) for name in state_dict["names"]]
        self.works = dict(zip(self.names, map(int, state_dict["works"]), strict=True))


@dataclass(eq=False)
class NetworkWork:
    """The work of the server, which has no samples of its own: who takes part in a round.

    Args:
        settings: the table `[federated]`.
        server: of the clients.
        seed: of the run.
        deadline_seconds: that any wait may take.
        draws: of cohorts that nobody can compute again; None: they follow from the seed.
    Attributes:
        roster: names by number.
        gone: names that could not be reached in the last round to which they were drawn.
    """

    settings: FederatedRecipe
    server: ClientServer
    seed: int
    deadline_seconds: float
    roster: ClientRoster = field(default_factory=ClientRoster)
    draws: PrivateDraws | None = None
    gone: set[str] = field(default_factory=set)
    num_round_samples: int = 1

    # Nobody knows the samples of clients that have not connected yet, so there are no passes.
    steps_per_epoch = 0

    @property
    def shards(self) -> int:
        return self.settings.num_positions

    def num_samples(self, step: int) -> int:
        """Return the samples of the last round."""
        return max(1, self.num_round_samples)

    def num_micro_batches(self, step: int) -> int:
        return 0

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        return ()

    def part(self, number: int, of: int) -> NetworkWork:
        return self

    def draw(self, step: int) -> tuple[CohortMember, ...]:
        """Return the members of a round, drawn from all clients but those that are gone."""
        names = self.roster.names
        clients = [number for number, name in enumerate(names) if name not in self.gone]
        size = self.settings.cohort_size
        if self.draws is not None and size.rate:
            clients = [*range(len(names))]  # being away is a selection, and is accounted as if present
        if self.draws is not None or size.rate:
            drawn = draw_by_chance(size, len(clients), self.seed, step, self.draws)
        else:
            permutation = KeyedPermutation(len(clients), key(self.seed, "cohort", step))
            drawn = np.sort(permutation[np.arange(min(size.number, len(clients)), dtype=np.int64)])
        if len(drawn) > self.shards:
            raise StrategyError(
                f"a round has drawn {len(drawn)} clients, and can have {self.shards}",
                where="federated.cohort",
                next_step="set a smaller probability",
            )
        return tuple(CohortMember(position, clients[index]) for position, index in enumerate(drawn))

    def update_roster(self) -> None:
        """Give numbers to clients that have joined, and forget that they were gone."""
        joined = [client.name for client in self.server.joined]
        self.roster.add(joined)
        self.gone -= {*joined}


def build_network_work(context: SessionContext, task: Task) -> NetworkWork:
    """Start the server of the clients, and wait until enough of them have joined.

    Raises:
        StrategyError: the job has several processes.
        TaskError: the task has a keeper.
        DeadlineError: too few clients have joined within `runtime.setup_deadline_seconds`.
    """
    recipe = context.recipe
    if context.cluster.world_size > 1:
        raise StrategyError(
            f"clients of a network train themselves, and one process serves them; there are"
            f" {context.cluster.world_size}",
            where='federated.clients = "network"',
            next_step="start the job with -n 1",
        )
    if task.keeper is not None:
        raise TaskError(
            "what a keeper keeps of simulated clients would have to lie with clients of a network",
            where="Task(keeper=...)",
            next_step="leave it out, or simulate the clients",
        )
    with ExitStack() as on_error:
        server = ClientServer.start(context, task)
        on_error.callback(server.close)
        server.wait_for(recipe.federated.at_least, recipe.runtime.setup_deadline_seconds)
        on_error.pop_all()
    joined = server.joined
    context.note("partition", describe_clients(joined))
    private = context.rule_inputs.private
    draws = None if private is None else private.draws
    return NetworkWork(recipe.federated, server, recipe.seed, recipe.runtime.deadline_seconds, draws=draws)


class ClientUpdate(NamedTuple):
    """What a client has returned.

    Args:
        status: of the table.
        head: numbers of `COHORT_COLUMNS`.
        metrics, counters: the other numbers of its row.
        values: the tensors that are added at its position.
        name: of the client.
        ticket: of its work.
    """

    status: float
    head: Mapping[str, float]
    metrics: Mapping[str, float]
    counters: Sequence[float]
    values: Sequence[Tensor]
    name: str
    ticket: int


class NetworkRounds(FederatedRounds):
    """The rule of federated rounds of clients of a network; arguments as of `FederatedRounds`.

    Wire: for each member of a cohort the weights and buffers, and back an update in float64, or the bytes of
        the codec.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._members: Sequence[tuple[CohortMember, str]] = ()
        self.work_fields: Mapping[str, Any] = {}
        self._num_tickets = 0
        self._counted: dict[str, int] = {}

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        server = cast("NetworkWork", feed.work).server
        try:
            yield from super().rounds(feed, runner, update_step)
        except GeneratorExit:
            # A run that was stopped is resumed, and its clients wait for that.
            if not self._stop_requested():
                server.end()
            raise
        server.end()

    def keep_clients(self, state: TrainState, work: CohortWork) -> None:
        state.keep(_CLIENTS_KEY, cast("NetworkWork", work).roster)

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
        """Send the weights to the cohort, and add what comes back in time."""
        undo()  # changes of buffers count from the start of the round
        network = cast("NetworkWork", work)
        self.draw_members(network, local_step.state.step)
        returned = self._collect(network, runner, local_step.state)
        for member, name in self._members:
            update = returned.get(name)
            status = update if isinstance(update, float) else self._no_answer(network, name)
            if isinstance(update, ClientUpdate):
                self._add(member.position, update, table)
            else:
                table.write(member.position, {"status": status}, {}, ())

    def draw_members(self, network: NetworkWork, step: int) -> None:
        """Wait until enough clients are connected, and draw those of a round."""
        self._phases.begin("communication")
        network.server.wait_for(self.settings.at_least, network.deadline_seconds)
        network.update_roster()
        self._members = [(m, network.roster.names[m.client]) for m in network.draw(step)]
        if self._private is not None and not self.settings.cohort_size.rate:
            self._private.set_cohort(len(self._members), len(network.roster.names) - len(network.gone))

    def _no_answer(self, network: NetworkWork, name: str) -> float:
        client = network.server.clients.get(name)
        if client is not None and client.is_joined:
            return LATE
        network.gone.add(name)
        return LOST

    def _collect(
        self, network: NetworkWork, runner: ModelRunner, state: TrainState
    ) -> dict[str, ClientUpdate | float]:
        """Return by name what the members of the round have returned, or why they are left out."""
        server, step = network.server, state.step
        returned: dict[str, ClientUpdate | float] = {}
        if self.replay is not None:
            late = self.replay.left_out(step)
            returned |= {name: status_of(late[name]) for _, name in self._members if name in late}
        waiting = {name: member for member, name in self._members if name not in returned}
        for name in [*waiting]:
            client = server.clients.get(name)
            if client is None or not client.is_joined:
                continue  # it can come back before the deadline
            if client.ticket is not None and self.replay is None:
                returned[name] = LATE  # still busy with an earlier round
                del waiting[name]
            else:
                self._send_work(network, client, waiting[name], runner, state, round_number=step)
        seconds = network.deadline_seconds if self.replay else self.settings.deadline_seconds
        expires = time.monotonic() + (seconds or network.deadline_seconds)
        while waiting and (event := server.next_event(expires - time.monotonic())) is not None:
            member = waiting.get(event.client.name)
            if member is None:
                continue
            if event.message is None:
                self._send_work(network, event.client, member, runner, state, round_number=step)
            elif event.message.fields.get("step") == step:
                returned[event.client.name] = self._read(event.message, runner, event.client.name, step)
                del waiting[event.client.name]
        self._require_enough(network, len(self._members) - len(waiting), [*waiting])
        return returned

    def _require_enough(self, network: NetworkWork, num_answers: int, missing: Sequence[str]) -> None:
        """Raise an error if a round that waits for all has got fewer answers than `at_least`."""
        waits_for_all = not self.settings.deadline_seconds or self.replay is not None
        if waits_for_all and missing and num_answers < min(self.settings.at_least, len(self._members)):
            raise DeadlineError(
                f"no update came within {network.deadline_seconds:g} s from {', '.join(missing)}",
                where="sync=federated",
                next_step="look at what these clients print; raise runtime.deadline_seconds if a round takes"
                " longer, or set federated.deadline_seconds to go on without late clients",
            )

    def _send_work(
        self,
        network: NetworkWork,
        client: NetworkClient,
        member: CohortMember,
        runner: ModelRunner,
        state: TrainState,
        *,
        round_number: int,
    ) -> None:
        """Send a client the weights, and which of its local steps to take.

        Args:
            round_number: of its own order of samples.
        """
        model = runner.sharded_model.model
        self._num_tickets += 1
        frozen = [] if client.has_frozen else frozen_tensors(model)
        buffers = runner.buffers.values()
        fields = {
            "ticket": self._num_tickets,
            "step": state.step,
            "num_updates": state.num_updates,
            "round": round_number,
            "position": member.position,
            "client": member.client,
            # The last ticket of this client whose update was applied: it keeps the error of no other.
            "counted": self._counted.get(client.name, 0),
            "frozen": len(frozen),
            "buffers": len(buffers),
            **self.work_fields,
        }
        client.ticket, client.has_frozen = self._num_tickets, True
        tensors = [*self.server.start, *frozen, *buffers]
        network.server.send(client, ChannelMessage(WORK, fields, tensors))

    def _read(
        self, message: ChannelMessage, runner: ModelRunner, name: str, round_number: int
    ) -> ClientUpdate | float:
        """Return what an update says; a status if it is left out.

        Args:
            round_number: of the client's order of samples.
        """
        names = runner.metric_names.names or ()
        first = len(COHORT_COLUMNS)
        row, *values = message.tensors or [torch.zeros(0)]
        if row.dtype != torch.float64 or row.dim() != 1 or len(row) < first + len(names):
            return INVALID
        numbers: list[float] = row.tolist()
        head = dict(zip(COHORT_COLUMNS, numbers, strict=False))
        if head["status"] != RETURNED:
            return NO_SAMPLES if head["status"] == NO_SAMPLES else NOT_FINITE
        if self._codec is not None:
            decoded = self._decode(self._codec, values, name, round_number, head["weight"])
            if decoded is None:
                return INVALID
            values = decoded
        if [(t.dtype, t.shape) for t in values] != [(t.dtype, t.shape) for t in self.slots.values()]:
            return INVALID
        norms = [float(norm) for norm in torch._foreach_norm(values)] if values else []
        if not (all(map(math.isfinite, numbers)) and math.isfinite(math.fsum(norms))):
            return NOT_FINITE
        metrics = dict(zip(names, numbers[first:], strict=False))
        counters, ticket = numbers[first + len(names) :], int(message.fields.get("ticket", 0))
        return ClientUpdate(RETURNED, head, metrics, counters, values, name, ticket)

    def _decode(
        self, codec: ClientCodec, values: Sequence[Tensor], name: str, round_number: int, weight: float
    ) -> list[Tensor] | None:
        """Return the tensors that are added, from the bytes of an update and what follows; None: not those of
        the model.
        """
        vectors = [torch.empty_like(vector) for vector in self.server.vectors.values()]
        payload, *others = values or [torch.zeros(0)]
        if not codec.fits(payload, sum(v.numel() * (1 + v.is_complex()) for v in vectors)):
            return None
        try:
            codec.decode(payload.to(vectors[0].device), vectors, round_number, name)
        except CommunicationError:
            return None
        torch._foreach_mul_(vectors, weight)
        return [*vectors, *others]

    def _add(self, position: int, update: ClientUpdate, table: CohortTable, factor: float = 1.0) -> None:
        """Add an update at a position of the tree, multiplied by a factor."""
        self.reduction.micro_batch(range(position, position + 1), False)
        for (slot, like), value in zip(self.slots.items(), update.values, strict=True):
            # A copy: the sum is taken in place, and a message is a view of the bytes that have arrived.
            self.reduction.ready(slot, value.to(like.device, copy=True).mul_(factor))
        self._counted[update.name] = update.ticket
        table.write(position, update.head, update.metrics, update.counters)

    def _report(self, work: CohortWork, table: CohortTable, step: int) -> None:
        """Note the cohort of a round, who was left out and why, and the bytes of each client."""
        network, statuses = cast("NetworkWork", work), table.column("status")
        taken = network.server.take_bytes()
        if self._private is not None and self._private.hides_units:
            return  # epsilon counts on nobody knowing who took part
        network.num_round_samples = int(
            math.fsum(table.returned()[:, COHORT_COLUMNS.index("samples")].tolist())
        )
        left_out = {
            name: LEFT_OUT_REASONS[statuses[m.position]]
            for m, name in self._members
            if statuses[m.position] != RETURNED
        }
        record = {
            "step": step,
            "clients": [name for _, name in self._members],
            "left_out": left_out | self._dropped_reasons(),
            "samples": network.num_round_samples,
            "down_bytes": sum(down for down, _ in taken.values()),
            "up_bytes": sum(up for _, up in taken.values()),
            "bytes": taken,
        }
        self._note("cohort", record)

    def _dropped_reasons(self) -> dict[str, str]:
        """Return why updates were dropped that no position waited for, by name."""
        return {}


class BegunWork(NamedTuple):
    """A work that a client has begun.

    Args:
        number: of its works, from 0.
        step: the round whose weights it began with.
    """

    number: int
    step: int


class BufferedRounds(NetworkRounds):
    """The rule in which a round applies the first updates that arrive, of whatever age up to a bound.

    Attributes:
        ledger: updates that have arrived, were applied and dropped.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ledger = WorkLedger()
        self._begun: dict[str, BegunWork] = {}
        self._arrived: dict[tuple[str, int], tuple[BegunWork, ClientUpdate]] = {}
        self._refused: dict[str, str] = {}
        self._dropped: list[tuple[str, int, int]] = []

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
        """Add updates as they arrive until the buffer is full."""
        undo()  # changes of buffers count from the start of the round
        network, state = cast("NetworkWork", work), local_step.state
        network.server.wait_for(self.settings.at_least, network.deadline_seconds)
        self._phases.begin("communication")
        self._dropped = list[tuple[str, int, int]]()
        applied = list[tuple[str, BegunWork, ClientUpdate]]()
        for name, begun, update in self._fill(network, runner, state):
            position, age = len(applied), state.step - begun.step
            if age > self.settings.age:
                self._dropped.append((name, begun.number, age))
                self.ledger.dropped += 1
                continue
            self._add(position, update, table, factor=1.0 / math.sqrt(1.0 + age))
            self.ledger.applied += 1
            self.ledger.staleness[age] += 1
            applied.append((name, begun, update))
            if len(applied) == self.settings.buffer:
                break
        numbers = {name: number for number, name in enumerate(network.roster.names)}
        self._members = [(CohortMember(i, numbers[name]), name) for i, (name, *_) in enumerate(applied)]
        record = {
            "step": state.step,
            "clients": [name for name, *_ in applied],
            "works": [begun.number for _, begun, _ in applied],
            "ages": [state.step - begun.step for _, begun, _ in applied],
            "dropped": [list(row) for row in self._dropped],
        }
        self._note("buffer", record)
        self._note("work", {"step": state.step, **self.ledger.record()})

    def _fill(
        self, network: NetworkWork, runner: ModelRunner, state: TrainState
    ) -> Iterator[tuple[str, BegunWork, ClientUpdate]]:
        """Yield updates in the order in which they are applied, and give work to clients that are idle."""
        wanted = None if self.replay is None else self.replay.taken(state.step)
        while True:
            self._give_work(network, runner, state)
            first = self._next_update(wanted)
            if first is not None:
                yield first[0], *self._arrived.pop(first)
                continue
            event = network.server.next_event(network.deadline_seconds)
            if event is None:
                names = ", ".join(client.name for client in network.server.joined) or "none"
                raise DeadlineError(
                    f"no update came within {network.deadline_seconds:g} s; connected clients: {names}",
                    where="sync=federated",
                    next_step="look at what the clients print, or raise runtime.deadline_seconds",
                )
            self._take(event, runner, network)

    def _next_update(self, wanted: list[tuple[str, int]] | None) -> tuple[str, int] | None:
        """Return the update to apply or drop next, in a replay the one that the run had; None: wait."""
        if wanted is None:
            return next(iter(self._arrived), None)
        return wanted.pop(0) if wanted and wanted[0] in self._arrived else None

    def _take(self, event: ClientEvent, runner: ModelRunner, network: NetworkWork) -> None:
        """Keep an update until it is applied; one of a client that has not returned a finite one is named."""
        begun = self._begun.pop(event.client.name, None)
        if event.message is None or begun is None:
            return
        update = self._read(event.message, runner, event.client.name, begun.number)
        if isinstance(update, float):
            self._refused[event.client.name] = LEFT_OUT_REASONS[update]
            return
        self.ledger.taken += 1
        self._arrived[event.client.name, begun.number] = begun, update

    def _give_work(self, network: NetworkWork, runner: ModelRunner, state: TrainState) -> None:
        """Send work to idle clients, at most to as many at a time as a cohort has."""
        network.update_roster()
        numbers = {name: number for number, name in enumerate(network.roster.names)}
        num_busy = sum(client.ticket is not None for client in network.server.joined)
        for client in network.server.joined:
            if client.ticket is not None or not client.num_samples:
                continue
            number: int | None = network.roster.works.get(client.name, 0)
            if self.replay is not None:
                number = self.replay.next_work(client.name, number or 0, state.step)
            elif num_busy >= self.settings.cohort_size.number:
                continue
            if number is None:
                continue
            network.roster.works[client.name] = number + 1
            self._begun[client.name] = BegunWork(number, state.step)
            member = CohortMember(0, numbers[client.name])
            self._send_work(network, client, member, runner, state, round_number=number)
            num_busy += 1

    def _dropped_reasons(self) -> dict[str, str]:
        refused, self._refused = self._refused, {}
        return refused | {name: f"its update was {age} rounds old" for name, _, age in self._dropped}
