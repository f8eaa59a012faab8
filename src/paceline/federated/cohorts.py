"""The clients of a run, the cohort of each round, and the local steps of a client, as work of a rank.

A round is one step of the run. Its cohort has positions, and position c is leaf c of the tree of additions;
a rank has a contiguous block of them. Under "poisson" there is a position for each client, of which most stay
empty. Clients keep no state: client k in round r takes the steps r S, ..., (r + 1) S - 1 of an order of its
own samples, where S is the number of its local steps, whether or not it took part in the rounds before. With
one client that is the order of plain training.

Invariant: who takes part, and what each client trains on, are functions of (seed, data, recipe, round). With
noise (`[private]`) who takes part is secret and follows from no seed, where epsilon counts on that.
Source: McMahan et al. 2017, arXiv:1602.05629, Algorithm 1.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paceline.data.sample_order import KeyedOrder, SampleIndices, permute
from paceline.data.task_data import CollatedSamples
from paceline.data.work import MicroBatch, MicroBatchWork, split_evenly
from paceline.errors import DataError, TaskError, format_count
from paceline.federated.data_partition import partition
from paceline.privacy.noise import PrivateDraws
from paceline.recipe.federated_recipe import CohortSize, FederatedRecipe
from paceline.recipe.recipe import Recipe
from paceline.state.keys import key
from paceline.task import LossFunction, Task

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext

_MAX_TABLE_ROWS = 50
_NUM_DRAWN, _MAX_COHORTS = 512, 64


@dataclass(frozen=True, eq=False)
class ClientSamples:
    """The clients of a run with their samples.

    Args:
        names: of the clients.
        indices: of the samples of each, int64.
        labels: of all samples; None if the data does not show them.
        num_redraws: how often the draw of the partition was repeated.
        held_out: indices of the samples of each client that it never trains on; empty: there are none.
    """

    names: Sequence[str]
    indices: Sequence[SampleIndices]
    labels: NDArray[Any] | None = None
    num_redraws: int = 0
    held_out: Sequence[SampleIndices] = ()

    def __len__(self) -> int:
        return len(self.names)

    def sha256(self) -> str:
        """Return a hash of names and indices: a resumed run must divide the data in the same way."""
        digest = hashlib.sha256("\n".join(self.names).encode())
        for indices in self.indices:
            digest.update(len(indices).to_bytes(8, "little") + indices.tobytes())
        return digest.hexdigest()

    def holding_out(self, share: float, seed: int) -> ClientSamples:
        """Return the same clients, of which each keeps a share of its samples from training.

        Which samples follows from the seed, and a client trains on one sample or more if it has any.
        """
        if not share:
            return self
        trained, held_out = list[SampleIndices](), list[SampleIndices]()
        for client, indices in enumerate(self.indices):
            size = len(indices)
            num_held_out = max(0, min(size - 1, round(share * size)))
            draws = np.random.Generator(np.random.Philox(key=key(seed, "client held out", client)))
            is_held_out = np.zeros(size, dtype=bool)
            is_held_out[draws.permutation(size)[:num_held_out]] = True
            trained.append(indices[~is_held_out])
            held_out.append(indices[is_held_out])
        return replace(self, indices=trained, held_out=held_out)

    def record(self, how: str) -> dict[str, Any]:
        """Return the event `partition`: sizes, and of the first clients the samples of each label."""
        sizes = [len(indices) for indices in self.indices]
        values: list[str] = []
        table: list[list[int]] = []
        if self.labels is not None:
            labels, numbers = np.unique(self.labels, return_inverse=True)
            values = [str(label) for label in labels[:_MAX_TABLE_ROWS]]
            for indices in self.indices[:_MAX_TABLE_ROWS]:
                counts = np.bincount(numbers[indices], minlength=len(labels))
                table.append([int(count) for count in counts[:_MAX_TABLE_ROWS]])
        return {
            "how": how,
            "clients": len(self),
            "samples": sum(sizes),
            "held_out": sum(map(len, self.held_out)),
            "smallest": min(sizes),
            "largest": max(sizes),
            "redraws": self.num_redraws,
            "names": list(self.names[:_MAX_TABLE_ROWS]),
            "sizes": sizes[:_MAX_TABLE_ROWS],
            "labels": values,
            "table": table,
        }


def build_clients(recipe: Recipe, task: Task) -> ClientSamples:
    """Divide the data of a task among clients, as the recipe says.

    Raises:
        DataError: the data cannot be divided so; the error says what can.
    """
    settings, redraws = recipe.federated, list[int]()
    if settings.partition_rule.word == "natural":
        return _natural_clients(task, int(settings.clients))
    needs_labels = settings.partition_rule.word in ("labels", "dirichlet")
    labels = read_labels(task.data, required=needs_labels)
    column = labels if labels is not None else np.zeros(len(task.data), dtype=np.int64)
    num_clients = int(settings.clients)
    parts = partition(column, settings.partition, num_clients, recipe.seed, on_redraw=redraws.append)
    names = [f"client-{number}" for number in range(len(parts))]
    return ClientSamples(names, parts, labels, len(redraws))


def _natural_clients(task: Task, expected: int) -> ClientSamples:
    if not task.clients:
        raise DataError(
            'federated.partition is "natural", and the task names no clients',
            where="federated.partition",
            next_step="return Task(clients={name: data, ...}) from the task, or choose another partition",
        )
    if len(task.clients) != expected:
        raise DataError(
            f"the task has {format_count(len(task.clients), 'client')}, and federated.clients = {expected}",
            where="federated.clients",
            next_step=f"set federated.clients = {len(task.clients)}",
        )
    ends = np.cumsum([len(source) for source in task.clients.values()])
    indices = np.split(np.arange(ends[-1], dtype=np.int64), ends[:-1])
    return ClientSamples(list(task.clients), indices, read_labels(task.data, required=False))


def read_labels(data: Any, *, required: bool) -> NDArray[Any] | None:
    """Return the label of each sample: the last column of a data set, its `targets`, or a sample's last item.

    Args:
        data: map-style.
        required: read the samples one by one if nothing else has the labels.
    Raises:
        DataError: labels are required, and samples have none.
    """
    match data:
        case CollatedSamples():
            return read_labels(data.samples, required=required)
        case Subset():
            labels = read_labels(data.dataset, required=required)
            return None if labels is None else labels[np.asarray(data.indices)]
        case ConcatDataset():
            parts = [read_labels(part, required=required) for part in data.datasets]
            known = [part for part in parts if part is not None]
            return np.concatenate(known) if len(known) == len(parts) else None
    column = getattr(data, "tensors", (getattr(data, "targets", None),))[-1]
    if column is not None:
        labels = np.asarray(column)
        if labels.ndim == 1 and len(labels) == len(data) and labels.dtype.kind in "iubUS":
            return labels
    if not required:
        return None
    labels = np.array([_label_of(data[index]) for index in range(len(data))])
    if labels.dtype.kind not in "iubUS" or labels.ndim != 1:
        raise DataError(
            "this partition needs a label for each sample, and the last item of a sample is no integer or"
            " text",
            where="federated.partition",
            next_step='give the data set an attribute `targets`, or set federated.partition to "iid"',
        )
    return labels


def _label_of(sample: Any) -> Any:
    last = sample[-1] if isinstance(sample, tuple | list) else None
    return last.item() if isinstance(last, Tensor) and last.numel() == 1 else last


def draw_by_chance(
    size: CohortSize, num_clients: int, seed: int, round_number: int, draws: PrivateDraws | None
) -> SampleIndices:
    """Return the clients of a round, sorted: each by itself, or with secret draws also a number of them."""
    if draws is None:
        by_seed = np.random.Generator(np.random.Philox(key=key(seed, "poisson", round_number)))
        return np.flatnonzero(by_seed.random(num_clients) < size.rate)
    if size.rate:
        return draws.poisson(num_clients, size.rate, "cohort", round_number)
    return draws.subset(num_clients, min(size.number, num_clients), "cohort", round_number)


class CohortMember(NamedTuple):
    """A client at its position of a cohort."""

    position: int
    client: int


@dataclass(frozen=True, eq=False)
class ClientOrder:
    """Cohorts of rounds, and the samples on which each client trains.

    Args:
        clients: all clients.
        settings: the table `[federated]`.
        num_passes: E, the passes of a client over its samples in a round.
        seed: of the run.
        shuffle: each pass of a client has a new keyed order.
        draws: of cohorts that nobody can compute again, for noise that counts on it; None: they follow from
            the seed.
    """

    clients: ClientSamples
    settings: FederatedRecipe
    num_passes: int
    seed: int
    shuffle: bool = True
    draws: PrivateDraws | None = None
    _orders: dict[int, KeyedOrder] = field(default_factory=dict, init=False, repr=False)
    _cohorts: dict[int, tuple[CohortMember, ...]] = field(default_factory=dict, init=False, repr=False)
    _present: dict[int, tuple[int, list[SampleIndices]]] = field(default_factory=dict, init=False, repr=False)

    def cohort(self, round_number: int) -> tuple[CohortMember, ...]:
        """Return the members of a round, by position and by client."""
        members = self._cohorts.get(round_number)
        if members is None:
            if len(self._cohorts) > _MAX_COHORTS:
                self._cohorts.clear()
            self._cohorts.update(self._draw_cohorts(round_number))
            members = self._cohorts[round_number]
        return members

    def _draw_cohorts(self, first: int) -> Iterator[tuple[int, tuple[CohortMember, ...]]]:
        """Yield the cohorts of a round and of those that follow it, as many as take the time of one."""
        size, num_clients = self.settings.cohort_size, len(self.clients)
        if self.draws is not None or size.rate:
            chosen = draw_by_chance(size, num_clients, self.seed, first, self.draws).tolist()
            yield first, tuple(map(CohortMember, chosen if size.rate else range(len(chosen)), chosen))
            return
        rounds = range(first, first + max(1, _NUM_DRAWN // size.number))
        keys = [key(self.seed, "cohort", number) for number in rounds]
        drawn = permute(num_clients, keys, np.arange(size.number, dtype=np.int64))
        # Sorted, so that the order in which clients are drawn has no influence on any bit.
        for number, clients in zip(rounds, np.sort(drawn, axis=1).tolist(), strict=True):
            yield number, tuple(CohortMember(position, client) for position, client in enumerate(clients))

    def num_local_steps(self, client: int) -> int:
        """Return the number of steps of a client in a round; 0 if it has no samples."""
        size = len(self.clients.indices[client])
        if not size:
            return 0
        return self.settings.local_steps or self.num_passes * self._order(size).steps_per_epoch

    def batch_sizes(self, round_number: int, client: int) -> list[int]:
        """Return the number of samples of each local step of a client in a round."""
        num_steps = self.num_local_steps(client)
        if not num_steps:
            return []
        order, first = self._order(len(self.clients.indices[client])), round_number * num_steps
        return [order.batch_size(step) for step in range(first, first + num_steps)]

    def num_samples(self, client: int, round_number: int = 0) -> int:
        """Return the number of samples that a client reads in a round."""
        if not self.settings.local_steps:
            return self.num_passes * len(self.clients.indices[client])
        # The last batch of a pass can be smaller, and local steps can end anywhere in a pass.
        return sum(self.batch_sizes(round_number, client))

    def micro_batches(self, round_number: int, member: CohortMember) -> tuple[MicroBatch, ...]:
        """Return the batches of the local steps of a client in a round, one for each step."""
        indices, num_steps = self.clients.indices[member.client], self.num_local_steps(member.client)
        if not num_steps:
            return ()
        first = round_number * num_steps
        return tuple(
            MicroBatch(
                step,
                member.position,
                indices[positions],
                key(self.seed, "unit", step, member.client),
                seed=self.seed,
            )
            for step, positions in enumerate(self._positions(len(indices), first, num_steps), first)
        )

    def batched_steps(
        self, round_number: int, members: Sequence[CohortMember]
    ) -> list[dict[int, MicroBatch]]:
        """Return the local steps of several clients in the order in which they run as one computation.

        A batched step has batches of equal size, of clients that are in the same pass over their samples;
        the largest come first.

        Returns:
            For each batched step the batches by index of the member.
        """
        queues = [deque(self.micro_batches(round_number, member)) for member in members]
        steps = list[dict[int, MicroBatch]]()
        while any(queues):
            # The pass that is behind, so that clients of equal size never drift apart.
            ranks = {
                index: (self._pass_of(queue[0], members[index].client, round_number), -len(queue[0].indices))
                for index, queue in enumerate(queues)
                if queue
            }
            first = min(ranks.values())
            steps.append({index: queues[index].popleft() for index, rank in ranks.items() if rank == first})
        return steps

    def _pass_of(self, batch: MicroBatch, client: int, round_number: int) -> int:
        """Return the pass over the samples of a client, counted from that in which the round begins."""
        order = self._order(len(self.clients.indices[client]))
        return order.epoch_of(batch.step) - order.epoch_of(round_number * self.num_local_steps(client))

    def _positions(self, size: int, first: int, num_steps: int) -> list[SampleIndices]:
        """Return the positions of the samples of some local steps; of a size kept for the round."""
        start, positions = self._present.get(size, (-1, []))
        if start != first:
            order = self._order(size)
            positions = [order.batch(step) for step in range(first, first + num_steps)]
            self._present[size] = first, positions
        return positions

    def _order(self, size: int) -> KeyedOrder:
        # Clients of one size share an order of positions, which are other samples for each of them.
        if size not in self._orders:
            batch = size if self.settings.full else min(size, self.settings.batch)
            self._orders[size] = KeyedOrder(size, batch, self.seed, shuffle=self.shuffle)
        return self._orders[size]


@dataclass(frozen=True, eq=False)
class CohortWork:
    """The work of one rank: the local steps of the clients at its positions, one client after another.

    Args:
        order: of all clients.
        rank, num_ranks: this rank, and how many share the positions of a round.
        loss: of the task; for clients that run as one batched computation.
        joins_batches: the batches of a batched step are read as one, since rows of tensors lie next to each
            other in it.
    """

    order: ClientOrder
    rank: int = 0
    num_ranks: int = 1
    loss: LossFunction | None = None
    joins_batches: bool = False
    _batched: dict[int, list[list[dict[int, MicroBatch]]]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def shards(self) -> int:
        return self.order.settings.num_positions

    @property
    def steps_per_epoch(self) -> int:
        """Return the rounds in which clients read as many samples as there are."""
        size, sizes = self.order.settings.cohort_size, [len(i) for i in self.order.clients.indices]
        share = size.rate or size.number / len(sizes)
        expected = share * sum(map(self.order.num_samples, range(len(sizes))))
        return max(1, round(sum(sizes) / expected))

    def num_samples(self, step: int) -> int:
        return max(1, sum(self.order.num_samples(m.client, step) for m in self.order.cohort(step)))

    def members(self, step: int) -> list[CohortMember]:
        """Return the members of a round at this rank's positions."""
        settings = self.order.settings
        block = settings.block(split_evenly(settings.num_groups, self.num_ranks, self.rank))
        return [member for member in self.order.cohort(step) if member.position in block]

    def groups(self, step: int) -> list[list[CohortMember]]:
        """Return the members at this rank's positions whose local steps are one batched computation.

        A group is a block of positions, so who is in it does not depend on the number of ranks.
        """
        groups = groupby(self.members(step), lambda member: member.position // self.order.settings.vectorize)
        return [list(members) for _, members in groups]

    def num_micro_batches(self, step: int) -> int:
        return sum(self.order.num_local_steps(member.client) for member in self.members(step))

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        if self.order.settings.vectorize:
            batched = [self.order.batched_steps(step, members) for members in self.groups(step)]
            self._batched[step] = batched
            return tuple(
                batch for steps in batched for rows in steps for batch in self._read_batches([*rows.values()])
            )
        return tuple(
            batch for member in self.members(step) for batch in self.order.micro_batches(step, member)
        )

    def batched_steps(self, step: int) -> list[list[dict[int, MicroBatch]]]:
        """Return the batched steps of each group of a round, whose batches were requested before."""
        return self._batched.pop(step, None) or [
            self.order.batched_steps(step, members) for members in self.groups(step)
        ]

    def _read_batches(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the batches of a batched step as they are read."""
        if not self.joins_batches:
            return batches
        return [replace(batches[0], indices=np.concatenate([batch.indices for batch in batches]))]

    def part(self, number: int, of: int) -> CohortWork:
        return replace(self, rank=number, num_ranks=of)


def build_order_of_clients(recipe: Recipe, task: Task) -> ClientOrder:
    """Return the order of a recipe; equal on every rank.

    Raises:
        DataError: the data cannot be divided among the clients.
        TaskError: the task orders its samples itself.
    """
    if task.order is not None:
        raise TaskError(
            "the task orders its samples itself (a sampler or a stream), and federated clients have orders of"
            " their own",
            next_step="give the task map-style data without a sampler",
        )
    num_passes = recipe.strategy.sync_word.argument
    clients = build_clients(recipe, task).holding_out(recipe.federated.held_out, recipe.seed)
    return ClientOrder(clients, recipe.federated, num_passes, recipe.seed, recipe.batch.shuffle)


def build_cohort_work(context: SessionContext, task: Task) -> MicroBatchWork:
    """Build the work of this rank, and note how the data was divided; for `SyncSpec.work`."""
    if context.recipe.federated.is_networked:
        # It needs gRPC, which simulated clients do not.
        from paceline.federated.network_rounds import build_network_work

        return build_network_work(context, task)
    order, data = build_order_of_clients(context.recipe, task), context.mesh.data
    private = context.rule_inputs.private
    if private is not None and private.hides_units:
        order = replace(order, draws=private.draws)
    context.note("partition", order.clients.record(context.recipe.federated.partition))
    if order.clients.num_redraws:
        context.warn(
            f"partition {context.recipe.federated.partition}:"
            f" {format_count(order.clients.num_redraws, 'draw')} left a client without samples, so the next"
            " key was used"
        )
    joins = task.collate is None and _has_rows(task.data)
    return CohortWork(order, data.rank, data.size, task.loss, joins)


def _has_rows(data: Any) -> bool:
    """Return whether the samples are rows of tensors, which the default collate function stacks."""
    match data:
        case Subset():
            return _has_rows(data.dataset)
        case ConcatDataset():
            return all(map(_has_rows, data.datasets))
    return type(data) is TensorDataset
