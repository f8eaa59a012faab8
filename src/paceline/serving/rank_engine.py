"""An engine over the ranks of a job: rank 0 schedules, and every rank runs its part of each forward.

Each turn, rank 0 broadcasts one small plan: which texts begin and which end. All ranks carry it out on
engines of their own, in lockstep, so nothing else about texts is sent but the tokens that one rank samples.
Replicas share out the texts, tensor ranks hold their heads, stages their layers.

Stages have as many groups of slots as there are stages, and the groups take turns: the first stage begins a
group while the others still run the groups before it. A turn begins the step of one group, and then ends that
of the next group, which began longest ago.

Invariant: a text has the bits that it has in one process with as many slots in a forward. Every wait has the
deadline of the net, and idle ranks get an empty plan every second, so none waits longer than that.
Not done here: replicas that take steps of their own; all wait for the slowest of a turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from paceline.comm.group_collectives import all_gather_bytes
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.membership import members_gone_error
from paceline.job.mesh import RankGroup
from paceline.models.gpt import GPT, GPT_TENSOR_PLAN, gpt_chain
from paceline.parallel.state_hash import state_sha256
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.recipe.tables import BatchRecipe, PrecisionRecipe, RuntimeRecipe
from paceline.serving.engine import Engine, GenerationRequest, Ticket, TokenEvent
from paceline.serving.generation import build_engines
from paceline.serving.kv_cache import SlotSettings
from paceline.serving.load_model import ServedModel
from paceline.serving.sampling import SamplingOptions
from paceline.serving.slot_forward import whole_logits
from paceline.session.build import build_session
from paceline.session.session import Session
from paceline.session.start_rank import connected
from paceline.task import Loss, Task

_PLAN_BYTES = 1024  # of the first broadcast of a plan; long prompts need a second one
_LOST_SECONDS = 2.0  # in which the launcher notices a lost rank


@contextmanager
def engine_on_ranks(
    load: Callable[[], ServedModel],
    strategy: Strategy,
    cluster: Cluster,
    settings: Callable[[ServedModel], SlotSettings],
    *,
    num_threads: Callable[[ServedModel], int],
    max_queued: int,
    on_follow: Callable[[], None],
) -> Iterator[tuple[ServedModel, RankEngine | None]]:
    """Load a model on all ranks, and yield it with the engine on rank 0; collective.

    The other ranks yield no engine, and do so when rank 0 has closed its engine.

    Args:
        load: loads the model; equal on all ranks.
        strategy: how the ranks share the model; without context.
        cluster: of this process, not connected.
        settings: of the forwards; slots are those of each replica, and of each of its groups of stages.
        num_threads: intra-op threads of this process.
        max_queued: most requests that wait for a slot.
        on_follow: called on the other ranks when they begin to follow rank 0.
    Raises:
        CommunicationError: a rank is gone, or does not answer within the deadline.
    """
    recipe = Recipe(
        task="served",
        steps=1,
        strategy=strategy,
        batch=BatchRecipe(size=max(2, cluster.world_size)),
        precision=PrecisionRecipe(compute="fp32"),
        # As in one process, which serves on the CPU.
        runtime=RuntimeRecipe(device="cpu", threads=1),
    )
    with connected(recipe, cluster) as (joined, device):
        seconds = recipe.runtime.setup_deadline_seconds
        joined.enter_phase("loading the model", seconds)
        served = load()
        torch.set_num_threads(num_threads(served))
        weights = state_sha256(served.model.state_dict()) + (
            f" tensor={strategy.tensor}" if strategy.tensor > 1 else ""
        )
        joined.await_ranks("loaded the model", seconds, lambda text: None)
        session = build_session(
            recipe, _task_of(served, cluster.world_size), joined, device, fresh=False, trains=False
        )
        try:
            joined.enter_phase("serving")
            with lead_ranks(
                session, settings(served), weights, max_queued=max_queued, on_follow=on_follow
            ) as engine:
                yield served, engine
        finally:
            session.close()


@contextmanager
def lead_ranks(
    session: Session,
    settings: SlotSettings,
    weights: str = "",
    *,
    max_queued: int = 1024,
    on_follow: Callable[[], None] = lambda: None,
) -> Iterator[RankEngine | None]:
    """Yield the engine of all ranks of a session on rank 0; the others follow it, and then yield None.

    Collective; the model may not change before the end of the block. See `engine_on_ranks`.

    Args:
        weights: hash of the weights, for the fingerprint.
    """
    # Stages are never more than there are groups of slots, so each of them has one to work on.
    engines = build_engines(session, session.mesh.inside, settings, weights, session.strategy.pipeline)
    turns = _Turns(session, engines)
    plans = _PlanChannel(session.mesh.world, session.net, num_ahead=len(engines))
    if session.is_first:
        engine = RankEngine(turns, plans, session.cluster, max_queued=max_queued)
        yield engine
        engine.close()
    else:
        on_follow()
        _follow(turns, plans)
        yield None


def _task_of(served: ServedModel, num_samples: int) -> Task:
    """Return a task of the model; its samples are only for the checks of a session."""
    for p in served.model.parameters():
        p.requires_grad_(p.is_floating_point())
    tokens = [torch.arange(k, k + 5) % served.vocab_size for k in range(max(2, num_samples))]
    plan: dict[str, Any] = {}
    if isinstance(served.model, GPT):
        plan = {"stages": gpt_chain, "tensor": GPT_TENSOR_PLAN}
    elif served.task is not None:
        plan = {"stages": served.task.stages, "tensor": served.task.tensor}
    return Task(model=served.model, data=tokens, loss=_next_token_loss, **plan)


def _next_token_loss(model: Any, tokens_BT: torch.Tensor) -> Loss:
    logits = whole_logits(model(tokens_BT[:, :-1])).flatten(0, 1).float()
    following = tokens_BT[:, 1:].flatten()
    return Loss(torch.nn.functional.cross_entropy(logits, following, reduction="sum"), following.numel())


class PlannedText(NamedTuple):
    """A text that begins in a turn.

    Args:
        request_id: of rank 0.
        replica: that generates it.
        request: the request.
    """

    request_id: int
    replica: int
    request: GenerationRequest


class Plan(NamedTuple):
    """What happens in a turn.

    Args:
        starts: texts that get a slot of the group whose turn it is.
        ends: requests whose slot is free again.
        is_last: all ranks end after this plan.
    """

    starts: Sequence[PlannedText] = ()
    ends: Sequence[int] = ()
    is_last: bool = False

    def encode(self) -> bytes:
        """Return the plan as JSON."""
        starts = [
            (
                text.request_id,
                text.replica,
                {
                    **vars(text.request),
                    "sampling": asdict(text.request.sampling),
                    "stop_tokens": sorted(text.request.stop_tokens),
                },
            )
            for text in self.starts
        ]
        return json.dumps((starts, self.ends, self.is_last)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Plan:
        """Read a plan."""
        starts, ends, is_last = json.loads(data)
        texts = [
            PlannedText(
                request_id,
                replica,
                GenerationRequest(
                    prompt=tuple(fields.pop("prompt")),
                    sampling=SamplingOptions(**fields.pop("sampling")),
                    stop_tokens=frozenset(fields.pop("stop_tokens")),
                    **fields,
                ),
            )
            for request_id, replica, fields in starts
        ]
        return cls(texts, ends, is_last)


class _PlanChannel:
    """The broadcasts of plans from rank 0.

    Args:
        world: all ranks.
        net: of this rank.
        num_ahead: plans that rank 0 may be ahead of the others.
    Wire: 1 KiB a plan; with long prompts a second broadcast.
    """

    def __init__(self, world: RankGroup, net: Net, num_ahead: int) -> None:
        self._world, self._net, self._num_ahead = world, net, num_ahead
        self._sent: list[Handle] = []

    def send(self, plan: Plan) -> None:
        """Send a plan; waits until the others have received earlier ones."""
        data = plan.encode()
        data = len(data).to_bytes(8, "little") + data
        for part in (data[:_PLAN_BYTES].ljust(_PLAN_BYTES), data[_PLAN_BYTES:]):
            if part:
                x = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                self._sent.append(self._net.broadcast(x, self._world))
        self.flush(2 * self._num_ahead)

    def receive(self) -> Plan:
        """Wait for the next plan."""
        head = self._receive_bytes(_PLAN_BYTES)
        num_bytes = 8 + int.from_bytes(head[:8], "little")
        rest = self._receive_bytes(num_bytes - _PLAN_BYTES) if num_bytes > _PLAN_BYTES else b""
        return Plan.decode((head + rest)[8:num_bytes])

    def _receive_bytes(self, count: int) -> bytes:
        x = torch.zeros(count, dtype=torch.uint8)
        received: torch.Tensor = self._net.broadcast(x, self._world).wait()
        return received.numpy().tobytes()

    def flush(self, most: int = 0) -> None:
        """Wait until at most so many broadcasts are under way."""
        while len(self._sent) > most:
            self._sent.pop(0).wait()


class _Turns:
    """The engines of one rank, one for each group of slots, and the texts in them.

    Args:
        session: the ranks.
        engines: by group; equal on the ranks of a replica.
    """

    def __init__(self, session: Session, engines: Sequence[Engine]) -> None:
        self._mesh, self._net = session.mesh, session.net
        self.engines, self.group, self.num_replicas = engines, 0, session.mesh.replica.size
        self._tickets: dict[int, Ticket] = {}
        self._ids: list[dict[int, int]] = [{} for _ in engines]

    def take(self, plan: Plan) -> list[TokenEvent]:
        """Begin the step of the group whose turn it is, and end that of the next group; collective.

        Returns:
            Tokens with the request ids of rank 0: of all replicas on rank 0, elsewhere perhaps of fewer.
        """
        engine, ids = self.engines[self.group], self._ids[self.group]
        for request_id in plan.ends:
            ticket = self._tickets.pop(request_id, None)
            if ticket is not None:
                del ids[ticket.request_id]
                engine.cancel(ticket)
        for text in plan.starts:
            if text.replica == self._mesh.replica.rank:
                ticket = engine.submit(text.request)
                self._tickets[text.request_id], ids[ticket.request_id] = ticket, text.request_id
        engine.begin_step()
        self.group = (self.group + 1) % len(self.engines)
        return self._gather(self._end_step(self.group))

    def finish(self) -> None:
        """End the steps that have begun."""
        for engine in self.engines:
            engine.end_step()

    def _end_step(self, group: int) -> list[TokenEvent]:
        ids = self._ids[group]
        events = [e._replace(request_id=ids[e.request_id]) for e in self.engines[group].end_step()]
        for event in events:
            if event.finish_reason is not None:
                del ids[self._tickets.pop(event.request_id).request_id]
        return events

    def _gather(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events of all replicas, on the first rank of each."""
        if self.num_replicas == 1 or self._mesh.inside.rank:
            return events
        gathered = all_gather_bytes(json.dumps(events).encode(), self._mesh.replica, self._net)
        return [TokenEvent(*fields) for data in gathered for fields in json.loads(data)]


def _follow(turns: _Turns, plans: _PlanChannel) -> None:
    """Carry out the plans of rank 0 until the last one."""
    while not (plan := plans.receive()).is_last:
        turns.take(plan)
    turns.finish()


@dataclass(frozen=True)
class _Place:
    """Where a text runs: its replica and the group of its slot."""

    replica: int
    group: int


class RankEngine(Engine):
    """The engine of rank 0, whose steps all ranks take part in; used as an `Engine`.

    Args:
        turns: the engines of this rank.
        plans: the way to the other ranks.
        cluster: names ranks that are lost.
        max_queued: most requests that wait for a slot.
    """

    heartbeat_seconds: ClassVar[float | None] = 1.0

    def __init__(self, turns: _Turns, plans: _PlanChannel, cluster: Cluster, *, max_queued: int) -> None:
        super().__init__(turns.engines[0].forward, max_queued=max_queued)
        self._turns, self._plans, self._cluster = turns, plans, cluster
        self._loads = {
            _Place(replica, group): 0
            for group in range(len(turns.engines))
            for replica in range(turns.num_replicas)
        }
        self._places: dict[int, _Place] = {}
        self._tickets: dict[int, Ticket] = {}
        self._cancelled: set[int] = set()

    @property
    def num_slots(self) -> int:
        return self.forward.num_slots * len(self._loads)

    @property
    def num_running(self) -> int:
        return len(self._places)

    def cancel(self, ticket: Ticket) -> None:
        """End a request; its slot is free after the next step of its group."""
        if ticket.finish_reason is None:
            ticket.finish_reason = "cancelled"
            if ticket.slot is None:
                self._queue.remove(ticket)
            else:
                self._cancelled.add(ticket.request_id)

    def step(self) -> list[TokenEvent]:
        """Take one turn on all ranks.

        Returns:
            Tokens of the group whose step has ended; tokens of ended texts are left out.
        Raises:
            CommunicationError: a rank is gone, or does not answer within the deadline; names it if the
                launcher has noticed.
        """
        group = self._turns.group
        ends = [k for k in self._cancelled if k not in self._places or self._places[k].group == group]
        self._cancelled.difference_update(ends)
        for request_id in ends:
            self._forget(request_id)
        plan = Plan(self._start_texts(group), ends)
        try:
            self._plans.send(plan)
            return [event for event in self._turns.take(plan) if self._append_event(event)]
        except CommunicationError as error:
            raise self._name_lost_ranks(error) from error

    def close(self) -> None:
        """End the other ranks; every step that has begun ends first."""
        self._plans.send(Plan(is_last=True))
        self._turns.finish()
        self._plans.flush()

    def _start_texts(self, group: int) -> list[PlannedText]:
        """Give slots to texts in the order of submission, on the places with the fewest texts."""
        starts = []
        while self._queue:
            place = min(self._loads, key=lambda place: self._loads[place])
            # The place with the fewest texts may be in a group whose turn comes later.
            if place.group != group or self._loads[place] == self.forward.num_slots:
                break
            ticket = self._queue.popleft()
            ticket.slot = group  # its own slot is known to its replica
            self._loads[place] += 1
            self._places[ticket.request_id], self._tickets[ticket.request_id] = place, ticket
            starts.append(PlannedText(ticket.request_id, place.replica, ticket.request))
        return starts

    def _append_event(self, event: TokenEvent) -> bool:
        """Append a token to its text; return False if the text has been cancelled."""
        ticket = self._tickets.get(event.request_id)
        is_open = ticket is not None and ticket.finish_reason is None
        if ticket is not None and is_open:
            ticket.text += [event.token] if event.token >= 0 else []
            ticket.finish_reason = event.finish_reason
        if event.finish_reason is not None:
            self._forget(event.request_id)
        return is_open

    def _forget(self, request_id: int) -> None:
        place = self._places.pop(request_id, None)
        ticket = self._tickets.pop(request_id, None)
        if place is not None:
            self._loads[place] -= 1
        if ticket is not None:
            ticket.slot = None

    def _name_lost_ranks(self, error: CommunicationError) -> CommunicationError:
        """Return an error that names the ranks that are gone, if the launcher notices any in time."""
        expires = time.monotonic() + _LOST_SECONDS
        while time.monotonic() < expires:
            members = self._cluster.connected
            if lost := members.store.lost():
                return members_gone_error(members.members, sorted(lost), "while it served texts")
            time.sleep(0.05)
        return error
