"""Federated rounds: the sync rule in which a client is a virtual shard of a round.

A rank runs the clients at its positions one after another on its one model: it loads the weights from the
start of the round, takes the local steps with a fresh optimizer through the training step, and adds
`n_k (w_k - w)` to the tree of additions, at the leaf of the position. After one sum per round all ranks have
the sum of the cohort; it is divided by the weights of the clients that returned an update, and the server
optimizer applies it. With SGD of rate 1 that is FedAvg.

Updates are differenced, weighted and added in float64, so one client alone gives exactly its own weights.
Floating-point buffers move by the weighted mean of their changes (ADR 2); a counter, an integer buffer of one
value such as `num_batches_tracked`, by its largest change.

Invariant: after a round all ranks hold the same bits, whatever their number; what is kept of a client
is in `client_keeper`, and nothing elsewhere. A client without samples, or whose loss or update is not finite,
is left out and named.

Sources: McMahan et al. 2017, arXiv:1602.05629, Algorithm 1 (FedAvg); Hsu et al. 2019, arXiv:1909.06335
(FedAvgM); Reddi et al. 2021, arXiv:2003.00295 (FedAdam, FedYogi, FedAdagrad); Li et al. 2020,
arXiv:1812.06127 (FedProx).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reduction.gradients import GradientReduction, Gradients
from paceline.comm.tally import StepTally
from paceline.data.work import BatchStream, MicroBatch, MicroBatchWork, TrainingFeed
from paceline.errors import CheckpointError, NumericError
from paceline.federated.client_codec import ClientCodec
from paceline.federated.client_keeper import KeeperRounds, KeptVectors
from paceline.federated.cohort_table import (
    COHORT_COLUMNS,
    LEFT_OUT_REASONS,
    NO_SAMPLES,
    NOT_FINITE,
    RETURNED,
    ClientRow,
    CohortReplay,
    CohortTable,
    LocalSums,
    status_of,
)
from paceline.federated.cohorts import CohortMember, CohortWork
from paceline.federated.server_step import ServerStep, norm_of
from paceline.federated.vectorized_clients import VectorizedClients
from paceline.job.mesh import RankGroup
from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import PhaseTimer, StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.recipe.recipe import Recipe
from paceline.state.slot import TensorSlot
from paceline.state.train_state import TrainState
from paceline.sync.every_step import EveryStep
from paceline.sync.sync_rule import step_stats
from paceline.sync.update import PendingUpdate, UpdatePart, UpdateResult, UpdateStep, insert_part_before

_BUFFER_SLOT_NAME = "#buffers"
_PARTITION_KEY = "federated.partition"


@dataclass(frozen=True)
class LocalStepWork:
    """The work of one local step: a single micro-batch, which the stream of the round reads.

    Args:
        size: samples of the step.
    """

    size: int

    shards = 1
    steps_per_epoch = 0

    def num_samples(self, step: int) -> int:
        return self.size

    def num_micro_batches(self, step: int) -> int:
        return 1

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        """Return none: the caller of the training step opens the stream."""
        return ()

    def part(self, number: int, of: int) -> MicroBatchWork:
        return self


class PartitionHash:
    """The hash of the partition, as state of the run: a resumed run must divide the data in the same way."""

    def __init__(self, sha256: str) -> None:
        self._sha256 = sha256

    def state_dict(self) -> Mapping[str, Any]:
        """Return the hash."""
        return {"sha256": self._sha256}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Compare the hash with that of the saved run.

        Raises:
            CheckpointError: the clients have other samples now.
        """
        if state_dict.get("sha256", self._sha256) != self._sha256:
            raise CheckpointError(
                "the data is divided among the clients in another way than when the checkpoint was saved",
                next_step="resume with the data, the seed and the NumPy of the run, or start a new one",
            )


class FederatedRounds:
    """The rule of federated rounds.

    Args:
        step: the training step of this rank alone.
        server: the server optimizer.
        reduction: sums updates over positions, and the changes of buffers under a slot of their own.
        recipe: of the run.
        group: the ranks that share the positions.
        net, phases: as in `EveryStep`.
        note: receives the event `cohort` of each round.
        stop_requested: returns whether this rank was asked to stop.
        vectorized: makes the batched computation of several clients from the loss of the task.
        keeper: what the task keeps of each client.
        codec: of what a client returns; None: it returns values as they are.
        errors: the quantisation errors of the codec by client; None: none are kept.
    Wire: one sum of the parameters in float64 (`TreeNodeOwners.calls`) and one all_reduce of the cohort table
        per round, whatever the number of clients.
    """

    def __init__(
        self,
        step: EveryStep,
        server: ServerStep,
        reduction: GradientReduction,
        recipe: Recipe,
        *,
        group: RankGroup,
        net: Net,
        phases: PhaseTimer,
        note: EventCallback,
        stop_requested: Callable[[], bool] = lambda: False,
        vectorized: Callable[..., VectorizedClients] | None = None,
        keeper: KeeperRounds | None = None,
        codec: ClientCodec | None = None,
        errors: KeptVectors | None = None,
    ) -> None:
        self._keeper, self._codec, self._errors = keeper, codec, errors
        self._old_errors: Mapping[str, Tensor] = {}
        self._new_errors: dict[str, Tensor] = {}
        self.inner, self.server, self.reduction = step, server, reduction
        self.settings, self._health = recipe.federated, recipe.health
        self._group, self._net, self._phases = group, net, phases
        self._note, self._stop_requested = note, stop_requested
        self._is_finite, self._num_skipped = True, 0
        self._undo: Callable[[], None] | None = None
        self.slots: Mapping[TensorSlot, Tensor] = {}
        self.replay: CohortReplay | None = None
        self._vectorized: VectorizedClients | None = None
        self._build_vectorized = vectorized

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        state, work = update_step.state, cast("CohortWork", feed.work)
        self.keep_clients(state, work)
        local_step = self._local_update_step(update_step)
        if self._build_vectorized is not None and work.loss is not None:
            self._vectorized = self._build_vectorized(work.loss, joins_batches=work.joins_batches)
        with feed.from_step(state.step) as stream:
            while state.step < feed.num_steps:
                self._phases.take()
                rate = set_rate(update_step)
                tally, norm = self._run_round(work, stream, runner, local_step)
                update = UpdateResult(math.nan if norm is None else norm, rate, applied=norm is not None)
                state.step += 1
                steps = range(state.step - 1, state.step)
                yield step_stats(steps, work, state, tally, update, self._phases, self._net)

    def keep_clients(self, state: TrainState, work: CohortWork) -> None:
        """Register what a resumed run must know of the clients as state."""
        state.keep(_PARTITION_KEY, PartitionHash(work.order.clients.sha256()))

    def abort(self) -> None:
        self.inner.abort()
        self.reduction.abort()
        if self._undo is not None:
            self._undo()

    # -- one round

    def _run_round(
        self, work: CohortWork, stream: BatchStream, runner: ModelRunner, local_step: UpdateStep
    ) -> tuple[StepTally, float | None]:
        """Run a round; return its sums, and the norm of the mean update or None if there was none."""
        state, buffers = local_step.state, runner.buffers.values()
        num_updates = state.num_updates
        self._net.step = state.step
        self.server.begin()
        self.reduction.begin()

        def undo() -> None:
            """Return to the start of the round, from the middle of a client's training."""
            self.server.load_start()
            runner.buffers.reset(buffers)
            state.num_updates = num_updates

        self._undo = undo
        counters = find_counters(runner.buffers.names, buffers)
        table = CohortTable(work.shards, runner.metric_names.names or (), len(counters))
        names = list[str]()
        if self._keeper is not None or self._errors is not None:
            names = [work.order.clients.names[member.client] for member in work.order.cohort(state.step)]
        if self._keeper is not None:
            self._keeper.begin_round(names)
        if self._errors is not None:
            self._old_errors, self._new_errors = self._errors.fetch(names), {}
        self.run_cohort(work, stream, runner, local_step, table, counters, undo)
        self.begin_client(state.optimizer)  # no moment of the last client may reach a checkpoint
        self._phases.begin("communication")
        self.reduction.close()
        table.agree(self._net, self._group, runner.sharded_model.device, stops=self._stop_requested())
        sums = self.reduction.finish().tensors
        self._phases.begin("optimizer")
        norm = self._apply(table, sums, runner, buffers, counters, state)
        if self._keeper is not None:
            self._keeper.end_round(names, sums.get(self._keeper.slot))
        if self._errors is not None:
            self._errors.keep(names, self._new_errors)
        state.num_updates = num_updates + (norm is not None)
        self._report(work, table, state.step)
        self._undo = None
        return table.tally(), norm

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
        """Add the updates of the clients at this rank's positions to the tree.

        Args:
            undo: returns to the start of the round.
        """
        step = local_step.state.step
        if self.settings.vectorize:
            for members, steps in zip(work.groups(step), work.batched_steps(step), strict=True):
                self._run_group(work, step, members, steps, stream, table)
            return
        late = {} if self.replay is None else self.replay.left_out(step)
        for member in work.members(step):
            if reason := late.get(work.order.clients.names[member.client]):
                table.write(member.position, {"status": status_of(reason)}, {}, ())
                # The stream holds its batches nevertheless.
                for _ in work.order.batch_sizes(step, member.client):
                    next(stream)
                continue
            self._run_client(work, member, stream, runner, local_step, table, counters)
            # The weights of this client must not be those from which the next one starts.
            undo()

    def _apply(
        self,
        table: CohortTable,
        sums: Mapping[TensorSlot, Tensor | None],
        runner: ModelRunner,
        buffers: list[Tensor],
        counters: Sequence[int],
        state: TrainState,
    ) -> float | None:
        """Apply the mean update; return its norm, or None if no client returned one."""
        divisor = self.divisor(table)
        if not divisor:
            if NOT_FINITE in table.column("status"):
                self._handle_no_update(state.step)
            return None
        self._num_skipped = 0
        norm = self.server.apply(sums, divisor)
        changes = {slot.name: total for slot, total in sums.items()}.get(_BUFFER_SLOT_NAME)
        if changes is not None:
            runner.buffers.end_step(changes, divisor, of_rounds=True)
            self._advance_counters(table, runner, buffers, counters)
        return norm

    def divisor(self, table: CohortTable) -> float:
        """Return the sum of the weights of the clients that returned an update; 0: none did."""
        return math.fsum(table.returned()[:, COHORT_COLUMNS.index("weight")].tolist())

    def client_weight(self, num_samples: int) -> float:
        """Return the weight of a client in the mean."""
        return {"samples": float(num_samples), "equal": 1.0}[self.settings.weights]

    def begin_client(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer fresh."""
        optimizer.state.clear()

    def _advance_counters(
        self, table: CohortTable, runner: ModelRunner, buffers: list[Tensor], counters: Sequence[int]
    ) -> None:
        """Advance counters by the largest change of a client; a mean would count batches that no one ran."""
        module_buffers = dict(runner.sharded_model.model.named_buffers())
        for column, index in enumerate(counters):
            changes = table.returned()[:, column - len(counters)]
            largest = float(changes[changes.abs().argmax()])
            with torch.no_grad():
                module_buffers[runner.buffers.names[index]].copy_(buffers[index] + int(largest))

    def _handle_no_update(self, step: int) -> None:
        """React to a round in which no update is finite, as `health.non_finite` says."""
        error = NumericError(
            f"no client of round {step} returned an update: the losses or updates of all are not finite",
            where="sync=federated",
            next_step="lower optimizer.lr or outer.lr, or set optimizer.clip_norm or federated.clip_norm",
        )
        if self._health.non_finite == "stop" or self._num_skipped >= self._health.max_skips:
            raise error
        self._num_skipped += 1
        self._note("skip", {"step": step, "reason": error.what})

    # -- one client

    def _run_client(
        self,
        work: CohortWork,
        member: CohortMember,
        stream: BatchStream,
        runner: ModelRunner,
        local_step: UpdateStep,
        table: CohortTable,
        counters: Sequence[int],
    ) -> None:
        """Train a client, and add its update to the tree and its numbers to the table."""
        state, num_samples = local_step.state, len(work.order.clients.indices[member.client])
        sizes = work.order.batch_sizes(state.step, member.client)
        if not sizes:
            table.write(member.position, {"status": NO_SAMPLES}, {}, ())
            return
        buffers, num_updates = runner.buffers.values(), state.num_updates
        self.begin_client(state.optimizer)
        sums, self._is_finite = LocalSums.empty(), True
        name = work.order.clients.names[member.client]
        if self._keeper is not None:
            self._keeper.begin_client(name)
        for number, size in enumerate(sizes):
            state.num_updates = num_updates  # local steps are no updates of the run
            tally, _ = self.inner.step(LocalStepWork(size), stream, runner, local_step)
            sums.add(tally.total, tally.count, tally.metrics)
            if not (self._is_finite and math.isfinite(tally.total)):
                # The stream holds the other batches of this client before those of the next one.
                for _ in sizes[number + 1 :]:
                    next(stream)
                self._is_finite = False
                break
        update = self.server.client_update()
        whole = [vector.clone() for vector in update] if self._keeper is not None else []
        moved = _moved(runner, buffers, counters)
        weight = self._add_update(member, (name, state.step), num_samples, update, sums, table, moved)
        if buffers and weight is not None:
            change = runner.buffers.weighted_change_since(buffers, weight)
            self.reduction.ready(buffer_slot(change), change)
        if self._keeper is not None and weight is not None:
            by_name = {slot.name: value for slot, value in self.server.by_parameter(whole).items()}
            rate = float(state.optimizer.param_groups[0]["lr"])
            steps, clients = len(sums.totals), len(work.order.clients)
            added = self._keeper.end_client(name, by_name, steps, rate, clients)
            if added.numel():
                self.reduction.ready(self._keeper.slot, added)

    def _add_update(
        self,
        member: CohortMember,
        source: tuple[str, int],
        num_samples: int,
        update: list[Tensor],
        sums: LocalSums,
        table: CohortTable,
        moved: Sequence[float] = (),
    ) -> float | None:
        """Add the update of a client to the tree, and its numbers to the table.

        Args:
            source: the name of the client, and its round.
            update: one vector for each of the server's; changed.
            moved: by how much its counters have advanced.
        Returns:
            The weight of the client; None if it is left out.
        """
        norm = norm_of(update)
        if not (self._is_finite and math.isfinite(norm)):
            table.write(member.position, {"status": NOT_FINITE, "samples": num_samples}, {}, ())
            return None
        weight, clip = self.client_weight(num_samples), self.settings.clip_norm
        if clip:
            # By parameter, so that the factor does not depend on how parameters share vectors.
            parts = [*self.server.by_parameter(update).values()]
            norm = math.hypot(*(float(n) for n in torch._foreach_norm(parts)), 0.0)
        factor, num_bytes = clip / norm if 0.0 < clip < norm else 1.0, self._client_bytes
        if self._codec is not None:
            torch._foreach_mul_(update, factor)
            factor, num_bytes = 1.0, self._encode(self._codec, *source, update)
        torch._foreach_mul_(update, weight * factor)
        self.open_leaf(member.position, weight)
        for slot, value in zip(self.server.vectors, update, strict=True):
            self.reduction.ready(slot, value)
        self.write_row(table, member.position, sums.row(weight, num_samples), moved, num_bytes)
        return weight

    def open_leaf(self, position: int, weight: float) -> None:
        """Begin what a client adds to the sums."""
        self.reduction.micro_batch(range(position, position + 1), False)

    def write_row(
        self, table: CohortTable, position: int, row: ClientRow, moved: Sequence[float], num_bytes: int
    ) -> None:
        """Write the numbers of a client to the table.

        Args:
            num_bytes: of its update, as it sends it.
        """
        table.write(position, {"status": RETURNED, **row.head, "bytes": float(num_bytes)}, row.metrics, moved)

    def _encode(self, codec: ClientCodec, client: str, round_number: int, update: list[Tensor]) -> int:
        """Replace an update by what the server decodes of it; return the bytes that are sent."""
        payload, error = codec.encode(update, round_number, client, self._old_errors.get(client))
        if error is not None:
            self._new_errors[client] = error
        return len(payload)

    @property
    def _client_bytes(self) -> int:
        """Return the bytes of the trained parameters."""
        return sum(p.numel() * p.element_size() for p in self.server.parameters)

    def _run_group(
        self,
        work: CohortWork,
        round_number: int,
        members: Sequence[CohortMember],
        steps: Sequence[Mapping[int, MicroBatch]],
        stream: BatchStream,
        table: CohortTable,
    ) -> None:
        """Train the clients of a group as one computation, and add their updates."""
        assert self._vectorized is not None
        sizes = [len(work.order.clients.indices[member.client]) for member in members]
        trained, sums = self._vectorized.train(len(members), steps, stream)
        updates = self.server.client_updates(trained)
        for index, (member, num_samples) in enumerate(zip(members, sizes, strict=True)):
            if not num_samples:
                table.write(member.position, {"status": NO_SAMPLES}, {}, ())
                continue
            self._is_finite = all(map(math.isfinite, sums[index].totals))
            update = [values[index] for values in updates]
            source = work.order.clients.names[member.client], round_number
            self._add_update(member, source, num_samples, update, sums[index], table)

    def _local_update_step(self, update_step: UpdateStep) -> UpdateStep:
        """Return the update step of a client: with the proximal term, and without the guard of a global step.

        Trouble of one client leaves it out and does not end the run.
        """
        # The rate is that of the round in all of its local steps, and is set before the first of them.
        parts = {name: part for name, part in update_step.parts.items() if name not in ("watch", "rate")}
        if self.settings.proximal:
            parts = insert_part_before(parts, "norm", "proximal", self._proximal_part())
        if self._keeper is not None:
            parts = insert_part_before(parts, "norm", "correction", self._correct)
        parts["finite"] = self._leave_out
        return UpdateStep(update_step.state, update_step.updates, parts)

    def _correct(self, record: PendingUpdate) -> None:
        """Add the correction of the client to its gradient: a part of the update step."""
        assert self._keeper is not None
        for slot, grad in record.grads.tensors.items():
            correction = self._keeper.correction.get(slot.name)
            if correction is not None and grad is not None:
                grad.add_(correction.to(grad.dtype), alpha=record.divisor)
        norms = torch._foreach_norm([*record.grads.flats]) if record.grads.norms else ()
        record.grads = replace(record.grads, norms=norms)

    def _leave_out(self, record: PendingUpdate) -> None:
        """End a step whose gradient is not finite: a part of the update step."""
        if not math.isfinite(record.norm):
            self._is_finite = False
            record.update = UpdateResult(record.norm, record.lr, applied=False)

    def _proximal_part(self) -> UpdatePart:
        """Return the part that adds mu (w - w_start) to the gradient, for FedProx."""
        start = dict(zip(self.server.wide, self.server.start, strict=True))

        def part(record: PendingUpdate) -> None:
            for slot, p in record.updates.items():
                grad = record.grads.tensors.get(slot)
                if grad is not None:
                    # The update step divides later, so the term is multiplied by the divisor first.
                    grad.add_(p.detach() - start[slot], alpha=self.settings.proximal * record.divisor)
            norms = torch._foreach_norm([*record.grads.flats]) if record.grads.norms else ()
            record.grads = replace(record.grads, norms=norms)

        return part

    def _report(self, work: CohortWork, table: CohortTable, step: int) -> None:
        """Note the cohort of a round, who was left out and why, and the bytes that clients would send."""
        cohort, names = work.order.cohort(step), work.order.clients.names
        statuses = table.column("status")
        left_out = {
            names[m.client]: LEFT_OUT_REASONS[statuses[m.position]]
            for m in cohort
            if statuses[m.position] != RETURNED
        }
        record = {
            "step": step,
            "clients": [names[m.client] for m in cohort],
            "left_out": left_out,
            "samples": int(math.fsum(table.returned()[:, COHORT_COLUMNS.index("samples")].tolist())),
            "down_bytes": self._client_bytes * len(cohort),
            "up_bytes": int(math.fsum(table.returned()[:, COHORT_COLUMNS.index("bytes")].tolist())),
            "bytes": {},
        }
        self._note("cohort", record)


def set_rate(step: UpdateStep) -> float:
    """Set the rates of the round, on a rank without a client as well; return that of the first group."""
    record = PendingUpdate(step.state, {}, Gradients({}, (), ()), _EMPTY_TALLY)
    step.parts["rate"](record)
    return record.lr


_EMPTY_TALLY = StepTally(0.0, 0.0, 0.0, {}, 0.0, (), torch.zeros(0, dtype=torch.float64))


def buffer_slot(values: Tensor) -> TensorSlot:
    return TensorSlot.whole(_BUFFER_SLOT_NAME, values)


def find_counters(names: Sequence[str], buffers: Sequence[Tensor]) -> list[int]:
    """Return the indices of the counters: integer buffers of one value."""
    return [
        index
        for index, b in enumerate(buffers)
        if b.numel() == 1 and not (b.is_floating_point() or b.is_complex() or b.is_meta)
    ]


def _moved(runner: ModelRunner, before: Sequence[Tensor], counters: Sequence[int]) -> list[float]:
    now = runner.buffers.values() if counters else ()
    return [float(now[index] - before[index]) for index in counters]
