"""Federated rounds whose server receives only a sum: in a ring, with masks that cancel or without.

The rule is that of `FederatedRounds`, and what a client returns is one vector of words: its weighted update,
the weighted changes of its buffers, its weight, and its counts and sums of losses and metrics. After the sum
the table of the cohort has the numbers of all clients together in one row, so nothing downstream can read
those of one client. Each rank plays the clients at its positions with keys of their own; the messages that a
server forwards are gathered, so every rank computes what the server does.

Invariant: with or without masks, and on any number of ranks, the sum has the same bits.
Released besides the sum: the names of a cohort, which of them returned an update, and the number of bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from torch import Tensor

from paceline.comm.group_collectives import all_gather_bytes
from paceline.comm.net import Net
from paceline.comm.reduction.gradients import Gradients
from paceline.comm.tally import StepTally
from paceline.data.work import BatchStream
from paceline.errors import StrategyError
from paceline.federated.cohort_table import RETURNED, ClientRow, CohortTable
from paceline.federated.cohorts import ClientOrder, CohortWork
from paceline.federated.ring_sum import MAX_CLIENTS_OF_A_SUM, Ring, RingLayout, RingWords
from paceline.federated.rounds import FederatedRounds, find_counters
from paceline.federated.secure_masks import (
    KEYS_BYTES,
    SEALED_BYTES,
    MaskClient,
    MaskServer,
    MaskTerms,
    RoundTerms,
    add_mask,
    derive,
)
from paceline.federated.shamir import SHARE_BYTES
from paceline.job.mesh import RankGroup
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.privacy.entropy import Entropy
from paceline.privacy.private_sum import PrivateSum
from paceline.recipe.federated_recipe import FederatedRecipe
from paceline.state.slot import TensorSlot
from paceline.state.train_state import TrainState
from paceline.sync.update import UpdateStep

KEYS, SHARES, INPUT, UNMASK = 1, 2, 3, 4
"""The messages of a client, for `RingReduction.lost_at`."""
_HEAD = struct.Struct("<HI")


class MaskExchange(Protocol):
    """What a sum needs of the protocol of `secure_masks`; arguments as in `SimulatedMasks`."""

    def begin(
        self,
        number: int,
        model: bytes,
        names: Mapping[int, str],
        own: Collection[int],
        lost_at: Callable[[int], int],
    ) -> None:
        """Exchange keys and shares at the start of a round; collective."""

    def mask(self, position: int, words: RingWords) -> None:
        """Mask the words of a client in place."""

    def unmask(self, arrived: Collection[int], total: RingWords) -> list[int]:
        """Remove the masks that are left in the sum; return the survivors; collective."""
        ...


class SimulatedMasks:
    """The protocol of `secure_masks` among clients that the ranks of a job play.

    Args:
        terms: of the run.
        secret: from which the identities of clients follow, equal on all ranks; in memory only.
        entropy: of the clients' secrets.
        group, net: of the ranks.
    Wire: four all_gathers of what clients send to the server besides their input.
    """

    def __init__(self, terms: MaskTerms, secret: bytes, entropy: Entropy, group: RankGroup, net: Net) -> None:
        self._terms, self._secret, self._entropy, self._group, self._net = terms, secret, entropy, group, net
        self._clients: dict[int, MaskClient] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}
        self._lost_at: Callable[[int], int] = lambda position: 0

    def begin(
        self,
        number: int,
        model: bytes,
        names: Mapping[int, str],
        own: Collection[int],
        lost_at: Callable[[int], int],
    ) -> None:
        """Exchange keys and shares at the start of a round; collective.

        Args:
            number: of the round.
            model: hash of the weights.
            names: of the clients with samples, by position.
            own: positions of this rank.
            lost_at: the message before which a client is lost; 0: it is not.
        """
        self._round, self._lost_at = RoundTerms(self._terms, number, model, names), lost_at
        self.server, known = MaskServer(self._round), {name: self._identity(name) for name in names.values()}
        public = {name: key.public_key() for name, key in known.items()}
        self._clients = {
            p: self.build_client(p, known[names[p]], public) for p in own if p in names and lost_at(p) != KEYS
        }
        sent = {p: client.advertise().to_bytes() for p, client in self._clients.items()}
        keys = self.server.forward_keys(self._gather(sent))
        shares = {p: pack(client.share(keys)) for p, client in self._clients.items() if lost_at(p) != SHARES}
        received = {p: unpack(data) for p, data in self._gather(shares).items()}
        self._sealed = self.server.forward_shares(received)

    def build_client(
        self, position: int, identity: Ed25519PrivateKey, public: Mapping[str, Ed25519PublicKey]
    ) -> MaskClient:
        """Return a client of this round, with fresh secrets."""
        purpose = "client", self._round.number, self._round.names[position]
        return MaskClient(self._round, position, identity, public, self._entropy.of(*purpose))

    def _identity(self, name: str) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(derive(self._secret, b"identity" + name.encode()))

    def mask(self, position: int, words: RingWords) -> None:
        """Mask the words of a client in place."""
        self._clients[position].mask(self._sealed[position], words)

    def unmask(self, arrived: Collection[int], total: RingWords) -> list[int]:
        """Remove this rank's part of the masks that are left in the sum; return the survivors; collective."""
        present = self._gather(dict.fromkeys(arrived, b""))
        survivors, lost = self.server.requests([*present])
        answers = {
            p: pack_shares(c.reveal(survivors, lost))
            for p, c in self._clients.items()
            if p in survivors and self._lost_at(p) != UNMASK
        }
        revealed = {p: unpack_shares(data) for p, data in self._gather(answers).items()}
        masks = self.server.masks_left(survivors, lost, revealed)
        for index, mask in enumerate(masks):
            if index % self._group.size == self._group.rank:
                add_mask(total, mask.key, mask.sign)
        return survivors

    def _gather(self, own: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the messages of all ranks, by position; collective."""
        packed = pack(own)
        parts = all_gather_bytes(packed, self._group, self._net) if self._group.size > 1 else [packed]
        merged = {p: data for part in parts for p, data in unpack(part).items()}
        return dict(sorted(merged.items()))


class RingReduction:
    """The reduction of the words of clients, in place of one of floating-point values.

    Args:
        ring: of the values.
        tensors: by slot, in the dtype of the sums.
        group, net: of the ranks that share the positions.
        masks: of the clients; None: the words are added as they are.
    Attributes:
        total: the words of the clients of this rank.
        after_sum: is given the words of the whole sum once, equal on every rank, before they are decoded; it
            may change them in place, equally on every rank. Noise is added here.
        lost_at: the message before which a client is lost, by round and name; for tests and simulations.
        survivors: positions whose input is in the last sum.
        numbers: the summed counts and sums of losses.
    Wire: one all_reduce of the words, and what the masks need.
    """

    by_micro_batch = True

    def __init__(
        self,
        ring: Ring,
        tensors: Mapping[TensorSlot, Tensor],
        group: RankGroup,
        net: Net,
        masks: MaskExchange | None,
    ) -> None:
        self.ring, self.masks = ring, masks
        self._tensors, self._group, self._net = tensors, group, net
        self.after_sum: Callable[[RingLayout, RingWords], None] = lambda layout, words: None
        self.lost_at: Callable[[int, str], int] = lambda number, name: 0
        self.survivors: list[int] = []
        self.numbers: list[float] = []
        self.layout = RingLayout(ring, tensors, 0)
        self.total = self.layout.zeros()
        self._names: Mapping[int, str] = {}
        self._open: tuple[int, float] | None = None
        self._values: dict[TensorSlot, Tensor] = {}
        self._client_numbers: Sequence[float] = ()
        self._arrived: set[int] = set()
        self._round = 0

    def open_round(
        self, number: int, names: Mapping[int, str], own: Collection[int], model: bytes, num_numbers: int
    ) -> None:
        """Begin a round before `begin`; collective.

        Args:
            number: of the round.
            names: of the members that have samples, by position.
            own: the positions of this rank.
            model: hash of the weights.
            num_numbers: counts and sums of each client.
        """
        self._round, self._names = number, names
        self.layout = RingLayout(self.ring, self._tensors, num_numbers)
        if self.masks is not None and names:
            self.masks.begin(number, model, names, own, lambda p: self.lost_at(number, names[p]))

    @property
    def num_clients(self) -> int:
        """Return the clients of the round that have samples."""
        return len(self._names)

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Begin with a sum of zeros."""
        self.total, self._arrived = self.layout.zeros(), set()
        self._open, self._values = None, {}

    def begin_client(self, position: int, weight: float) -> None:
        """Begin the words of a client, after those of the one before."""
        self._end_client()
        self._open, self._values, self._client_numbers = (position, weight), {}, ()

    def set_numbers(self, numbers: Sequence[float]) -> None:
        """Set the counts and sums of the present client."""
        self._client_numbers = numbers

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """Do nothing: `begin_client` does, which knows the weight."""

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Keep the values of a slot of the present client."""
        if grad is not None:
            self._values[slot] = grad

    def _end_client(self) -> None:
        """Encode the present client, mask it, and add it to the sum of this rank."""
        if self._open is None:
            return
        (position, weight), self._open = self._open, None
        name = self._names[position]
        if self.lost_at(self._round, name) in (KEYS, SHARES, INPUT):
            return
        words = self.layout.encode(self._values, self._client_numbers, client=name, weight=weight)
        if self.masks is not None:
            self.masks.mask(position, words)
        self.receive(position, words)

    def receive(self, position: int, words: RingWords) -> None:
        """Add what the server receives of a client."""
        self.total.add(words)
        self._arrived.add(position)

    def close(self) -> None:
        """End the last client."""
        self._end_client()

    def finish(self) -> Gradients:
        """Return the sums; collective."""
        total = self.total
        if self.masks is not None and self._names:
            self.survivors = self.masks.unmask(self._arrived, total)
        else:
            self.survivors = self._agree(self._arrived)
        if self._group.size > 1:
            self._all_reduce(total)
        self.after_sum(self.layout, total)
        tensors, self.numbers = self.layout.decode(total)
        return Gradients(tensors, [*tensors.values()], ())

    def _all_reduce(self, total: RingWords) -> None:
        device = next(iter(self._tensors.values())).device
        for words in (total.values, total.numbers):
            # Signed words wrap in the same way, and backends have no unsigned ones.
            signed = torch.from_numpy(words.view(words.dtype.str.replace("u", "i")))
            signed.copy_(self._net.all_reduce(signed.to(device, copy=True), self._group).wait())

    def _agree(self, positions: Collection[int]) -> list[int]:
        if self._group.size == 1:
            return sorted(positions)
        own = pack(dict.fromkeys(positions, b""))
        return sorted(p for part in all_gather_bytes(own, self._group, self._net) for p in unpack(part))

    def commit(self, used: Collection[str] | None = None) -> None:
        """Do nothing: no state is kept between rounds."""

    def abort(self) -> None:
        """Drop the round."""
        self._open, self._values = None, {}

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """Return none: nothing is encoded with an error that is kept."""
        return ()

    def set_residuals(self, residuals: Mapping[tuple[str, str], Tensor]) -> None:
        """Do nothing: there are none."""

    def rescale(self, factor: float) -> None:
        """Do nothing: there are no errors."""


class SecureRounds(FederatedRounds):
    """The rule of federated rounds that receive a sum in a ring; arguments as of `FederatedRounds`.

    Wire: the words of a client are `RingLayout.num_bytes`; with masks it sends `protocol_bytes` more.
    """

    reduction: RingReduction

    def keep_clients(self, state: TrainState, work: CohortWork) -> None:
        check_ring(self.settings, work.order, 0.0 if self._private is None else self._private.largest_noise)
        super().keep_clients(state, work)

    def _run_round(
        self, work: CohortWork, stream: BatchStream, runner: ModelRunner, local_step: UpdateStep
    ) -> tuple[StepTally, float | None]:
        step, buffers = local_step.state.step, runner.buffers.values()
        counters = find_counters(runner.buffers.names, buffers)
        table = CohortTable(1, runner.metric_names.names or (), len(counters))
        names, own = self.open_cohort(work, runner, local_step.state)
        if self._private is not None:
            self.reduction.after_sum = partial(self._add_noise_to_words, self._private, step)
        model = hash_model(self.server.parameters, runner)
        self.reduction.open_round(step, names, own, model, table.num_summed)
        return super()._run_round(work, stream, runner, local_step)

    def open_cohort(
        self, work: CohortWork, runner: ModelRunner, state: TrainState
    ) -> tuple[dict[int, str], list[int]]:
        """Return the names of clients of a round with samples, by position, and this rank's positions."""
        cohort = [m for m in work.order.cohort(state.step) if work.order.num_local_steps(m.client)]
        names = {m.position: work.order.clients.names[m.client] for m in cohort}
        return names, [m.position for m in work.members(state.step)]

    def add_noise(
        self, private: PrivateSum, sums: Mapping[TensorSlot, Tensor | None], step: int
    ) -> Mapping[TensorSlot, Tensor | None]:
        """Return the sums, whose words have noise already."""
        return sums

    def _add_noise_to_words(
        self, private: PrivateSum, step: int, layout: RingLayout, words: RingWords
    ) -> None:
        """Add noise to the summed words of updates, with wraparound."""
        count = sum(v.numel() * (1 + v.is_complex()) for v in self.server.vectors.values())
        noise = private.open_release(step)(0, count, layout.ring.fraction_bits)
        words.values[:count] += noise.view(np.uint64).astype(words.values.dtype, copy=False)

    def buffer_change(self, runner: ModelRunner, before: list[Tensor], weight: float) -> Tensor:
        """Return the weighted changes without those of counters, which are in the numbers of the client."""
        change, start = super().buffer_change(runner, before, weight), 0
        counters = find_counters(runner.buffers.names, before)
        for index, buffer in enumerate(before):
            size = buffer.numel() * (1 + buffer.is_complex())
            if index in counters:
                change[start : start + size] = 0.0
            start += size
        return change

    def open_leaf(self, position: int, weight: float) -> None:
        """Begin the words of a client."""
        self.reduction.begin_client(position, weight)

    def write_row(
        self, table: CohortTable, position: int, row: ClientRow, moved: Sequence[float], num_bytes: int
    ) -> None:
        """Add the numbers of a client to its words, and write to the table only that it has returned."""
        self.reduction.set_numbers(table.summed_numbers(row, moved))
        sent = self.reduction.layout.num_bytes
        sent += protocol_bytes(self.settings, self.reduction.num_clients)
        table.write(position, {"status": RETURNED, "bytes": float(sent)}, {}, ())

    def _apply(
        self,
        table: CohortTable,
        sums: Mapping[TensorSlot, Tensor | None],
        runner: ModelRunner,
        buffers: list[Tensor],
        counters: Sequence[int],
        state: TrainState,
    ) -> float | None:
        """Write the summed numbers to the table, and apply the mean update."""
        table.set_sums(self.reduction.survivors, self.reduction.numbers)
        return super()._apply(table, sums, runner, buffers, counters, state)


def build_ring_reduction(context: SessionContext, tensors: Mapping[TensorSlot, Tensor]) -> RingReduction:
    """Build the sum of a recipe with `federated.secure`; collective."""
    settings, group, net = context.recipe.federated, context.mesh.data, context.net
    ring, masks = Ring(settings.ring, settings.fraction_bits, settings.largest), None
    entropy = Entropy(context.recipe.debug.entropy_seed)
    is_simulated = context.components.federated is None and not settings.is_networked
    if settings.secure == "masks" and is_simulated:
        mine = entropy.of("run").bytes(48)
        shared = all_gather_bytes(mine, group, net)[0] if group.size > 1 else mine
        terms = MaskTerms(shared[:16], settings.threshold, settings.neighbours)
        masks = SimulatedMasks(terms, shared[16:], entropy, group, net)
    return RingReduction(ring, tensors, group, net, masks)


def check_ring(settings: FederatedRecipe, order: ClientOrder, largest_noise: float = 0.0) -> None:
    """Check before the first round that no sum of a cohort can overflow.

    Args:
        largest_noise: largest magnitude of the noise that is added to a value of it.
    Raises:
        RecipeError: one could.
        StrategyError: a cohort may have more clients than the sums of counts hold.
    """
    size = settings.num_positions
    if size > MAX_CLIENTS_OF_A_SUM:
        raise StrategyError(
            f"a cohort may have {size} clients, and a sum in a ring {MAX_CLIENTS_OF_A_SUM} at most",
            where="federated.cohort",
            next_step='set a smaller cohort, or federated.secure = "none"',
        )
    weights = [len(indices) if settings.weights == "samples" else 1 for indices in order.clients.indices]
    Ring(settings.ring, settings.fraction_bits, settings.largest).check(
        sum(sorted(weights)[-size:]), largest_noise
    )


def protocol_bytes(settings: FederatedRecipe, num_clients: int) -> int:
    """Return the bytes that a client sends besides its words if nobody is lost: those of the masks.

    They depend on the number of clients, or of neighbours, and on nothing else.
    """
    if settings.secure != "masks":
        return 0
    degree = num_clients - 1
    if settings.neighbours:
        degree = min(degree, settings.neighbours)
    return KEYS_BYTES + degree * (_HEAD.size + SEALED_BYTES) + (degree + 1) * (_HEAD.size + SHARE_BYTES)


def hash_model(parameters: Sequence[Tensor], runner: ModelRunner) -> bytes:
    """Return the hash of the model with which a round begins: trained parameters, others, and buffers."""
    frozen = [p.detach() for p in runner.sharded_model.model.parameters() if not p.requires_grad]
    return hash_tensors([*parameters, *frozen, *runner.buffers.values()])


def hash_tensors(tensors: Sequence[Tensor]) -> bytes:
    """Return the SHA-256 of the bytes of tensors: what clients sign as the model of a round."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def pack(messages: Mapping[int, bytes]) -> bytes:
    """Return messages by position as bytes."""
    return b"".join(_HEAD.pack(position, len(data)) + data for position, data in messages.items())


def pack_shares(shares: Mapping[int, int]) -> bytes:
    """Return shares by position as bytes."""
    return pack({owner: share.to_bytes(SHARE_BYTES, "little") for owner, share in shares.items()})


def unpack_shares(data: bytes) -> dict[int, int]:
    """Return what `pack_shares` has packed."""
    return {owner: int.from_bytes(share, "little") for owner, share in unpack(data).items()}


def unpack(data: bytes) -> dict[int, bytes]:
    """Return what `pack` has packed."""
    messages, start = dict[int, bytes](), 0
    while start < len(data):
        position, size = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        messages[position] = data[start : start + size]
        start += size
    return messages
