"""What servers and their workers keep, by the form in which pushes and tickets travel: closed forms. Pure.

How much of it are messages that wait, or come, at a time is a matter of time: these are planned as the most
that may be there. All else is there in every run.

What servers and their workers keep where a codec stands between them; see `traffic.Coded`.

What is kept of every tensor is a closed form of its size: what was lost of it, its payload, what a worker
knows of it. The memory in which tensors are coded is as much as the largest needs: it is found by coding
tensors of these sizes; beyond some size it is a line, as a codec works on rows of values.

What servers keep, and their workers, by the rule of the servers: see `paceline.sync.sync_rule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.comm.channel.message_channel import copied_message_bytes, retained_message_bytes
from paceline.comm.codecs.codec_protocol import Codec
from paceline.comm.codecs.strategy_codec import build_codec
from paceline.comm.reduction.gradient_norm import squares_bytes
from paceline.comm.reduction.summation_tree import covering_nodes
from paceline.data.work import split_evenly
from paceline.parallel.placement import slot_bytes
from paceline.recipe.recipe import num_micro_batches
from paceline.state.slot import TensorSlot
from paceline.sync.server.parameter_transfer import CodedTransfer, compared_bytes, residual_bytes
from paceline.sync.sync_rule import MemoryQuery, RuleMemory


class WireMemory(Protocol):
    """One for each kind of `Traffic` and `PushFormat`."""

    def of_worker(self, asked: MemoryQuery) -> RuleMemory:
        """A worker keeps its ticket until the next has come, and has what it pushes a second time."""

    def of_server(self, asked: MemoryQuery, together: int) -> RuleMemory:
        """Of a server.

        Args:
            together: pushes that make an update; of several a sum is made.
        """


def plan_server_memory(asked: MemoryQuery, together: int, form: WireMemory) -> RuleMemory:
    """What a rank keeps; the first ranks serve.

    Args:
        together: see `WireMemory.of_server`.
    """
    if asked.rank >= asked.recipe.strategy.servers:
        return form.of_worker(asked)
    return form.of_server(asked, together)


class PlainWireMemory:
    """Parts are one sum each, and rows of large matrices are compared: `SparseRowTransfer`, `UnorderedPushes`."""

    def of_worker(self, asked: MemoryQuery) -> RuleMemory:
        """See `WireMemory`; a ticket comes, or what it pushes waits."""
        whole = asked.sizes.computes
        return RuleMemory(messages=whole, running=whole, agreement=whole, updates=False)

    def of_server(self, asked: MemoryQuery, together: int) -> RuleMemory:
        """See `WireMemory`: of each worker a push, or a ticket that it has not taken.

        Gradients lie in the pushes that brought them, but for matrices of which less than half of the rows
        have come.
        """
        sizes, own, compared = asked.sizes, updated_tensor_bytes(asked), _compared_bytes(asked)
        shared = (asked.recipe.strategy.servers - 1) * sizes.updates  # with each of the others, at a pause
        waits = num_workers(asked) * retained_message_bytes(own) + max(copied_message_bytes(own), shared)
        waits += sizes.computes - sizes.updates
        return RuleMemory(
            copies=compared,
            messages=waits + compared // 2,
            at_pushes=sizes.updates if together > 1 else 0,
            pushes=waits + together * compared // 2,
            trains=False,
        )


class TreeWireMemory:
    """Parts are sums of nodes of the tree of additions: `SparseRowTransfer`, `TreeOrderedPushes`.

    Args:
        num_shards: of a step.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards

    def of_worker(self, asked: MemoryQuery) -> RuleMemory:
        """See `WireMemory`: nodes are pushed as they are summed, and what waits is a copy of them."""
        whole, nodes = asked.sizes.computes, max(self._nodes(asked))
        more, waits = (nodes - 1) * whole, nodes * whole
        return RuleMemory(
            messages=waits, running=whole, agreement=whole, at_pushes=more, pushes=waits, updates=False
        )

    def of_server(self, asked: MemoryQuery, together: int) -> RuleMemory:
        """See `WireMemory`: all parts of a step wait, are added where they lie, and the sum is copied.

        The sums of before are there until it is measured, and the last push until the next was read.
        """
        whole, nodes = updated_tensor_bytes(asked), self._nodes(asked)
        largest = max(one.updates.numel for one in asked.held.values() if one.updates is not None)
        pushed = [[size for size in whole for _ in range(n)] for n in nodes]
        waits = sum(retained_message_bytes(one) for one in pushed)
        return RuleMemory(
            copies=_compared_bytes(asked),
            messages=waits + max(sum(one) + copied_message_bytes(one) for one in pushed),
            at_pushes=asked.sizes.updates + squares_bytes(largest),
            pushes=waits,
            trains=False,
        )

    def _nodes(self, asked: MemoryQuery) -> list[int]:
        """How many make up each part; one where it is empty, for a ticket that waits."""
        workers = num_workers(asked)
        parts = (split_evenly(self._num_shards, workers, part) for part in range(workers))
        return [max(1, len(covering_nodes(part))) for part in parts]


def num_workers(asked: MemoryQuery) -> int:
    """All ranks that do not serve."""
    return asked.recipe.strategy.replicas or 1


def updated_tensor_bytes(asked: MemoryQuery) -> Sequence[int]:
    """Bytes of each tensor that the rank updates."""
    own = (one.updates for one in asked.held.values())
    return [slot_bytes(slot, asked.item_bytes) for slot in own if slot is not None]


def _compared_bytes(asked: MemoryQuery) -> int:
    own = [one.updates for one in asked.held.values() if one.updates is not None]
    return compared_bytes(own, asked.item_bytes)


_SMALL_NUM_VALUES, _LARGE_NUM_VALUES, _BLOCK = (
    1 << 18,
    1 << 19,
    256,
)  # values; what is left of a block changes what is copied
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class CodingWorkspaceBytes(NamedTuple):
    """Bytes in which all tensors are coded, on either side."""

    worker: int
    server: int


class _ServerShardBytes(NamedTuple):
    """What a server has of the model.

    Args:
        values: bytes of each tensor.
        payloads: of each, coded; the most where that differs.
        lost: of what coding loses, once.
        in_common: see `CodingWorkspaceBytes`.
    """

    values: Sequence[int]
    payloads: Sequence[int]
    lost: int
    in_common: CodingWorkspaceBytes


class CodedWireMemory:
    """See `WireMemory`: the first ticket of a round, and its end, travel in full, all else is coded.

    Args:
        codec: of both directions.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def of_worker(self, asked: MemoryQuery) -> RuleMemory:
        """See `WireMemory`: what was lost is there twice, and gradients once more without their scale.

        It has the parts of two servers at a time. Copies of payloads that wait to be sent come when these are
        gone, and no ticket comes before they are.
        """
        shares = [self._share(asked, server) for server in range(asked.recipe.strategy.servers)]
        full = sum(retained_message_bytes(one.values) for one in shares)
        unscaled, pushed = [sum(one.values) for one in shares], sum(sum(one.payloads) for one in shares)
        of_two = max(map(sum, pairwise([0, *unscaled])))
        return RuleMemory(
            wire=sum(2 * one.lost + one.in_common.worker for one in shares) + pushed,
            running=full,
            agreement=sum(unscaled) + sum(copied_message_bytes(one.values) for one in shares),
            at_pushes=of_two,
            pushes=max(0, pushed - of_two),
            updates=False,
        )

    def of_server(self, asked: MemoryQuery, together: int) -> RuleMemory:
        """See `WireMemory`: it knows what each worker has, and decodes all pushes of an update before it adds them.

        While it does, workers that it has heard have no ticket.
        """
        strategy, workers, sizes = asked.recipe.strategy, num_workers(asked), asked.sizes
        share = self._share(asked, asked.rank)
        own, push = sum(share.values), retained_message_bytes(share.payloads)
        waits, pause = max(own, push), (strategy.servers - 2) * own + sizes.computes
        return RuleMemory(
            copies=workers * own,
            wire=share.lost + sum(share.payloads) + share.in_common.server,
            messages=max(workers * waits, pause) + sum(share.payloads) + copied_message_bytes(share.payloads),
            at_pushes=(together + (together > 1)) * own,
            pushes=together * push + (workers - together) * waits,
            trains=False,
        )

    def _share(self, asked: MemoryQuery, server: int) -> _ServerShardBytes:
        parts = [part for one in asked.held.values() if (part := one.parts[server]) is not None]
        item_bytes = [asked.item_bytes[part.name] for part in parts]
        payloads = [self._codec.num_bytes(part.numel) for part in parts]
        return _ServerShardBytes(
            [part.numel * size for part, size in zip(parts, item_bytes, strict=True)],
            payloads,
            sum(residual_bytes(self._codec, part.numel) for part in parts),
            coding_workspace_bytes(
                self._codec, {(p.numel, size) for p, size in zip(parts, item_bytes, strict=True)}
            ),
        )


def coding_workspace_bytes(codec: Codec, tensors: set[tuple[int, int]]) -> CodingWorkspaceBytes:
    """Of memory in which tensors of so many values, of so many bytes each, are coded."""
    largest = max(num_values for num_values, _ in tensors)
    if largest <= _LARGE_NUM_VALUES:
        return _measure_workspace_bytes(codec, tensors)
    found = [
        _measure_workspace_bytes(codec, {(_cap_values(n, cap), size) for n, size in tensors})
        for cap in (_SMALL_NUM_VALUES, _LARGE_NUM_VALUES)
    ]
    times = (largest - _cap_values(largest, _LARGE_NUM_VALUES)) / (_LARGE_NUM_VALUES - _SMALL_NUM_VALUES)
    return CodingWorkspaceBytes(*(int(more + times * (more - few)) for few, more in zip(*found, strict=True)))


def _cap_values(num_values: int, most: int) -> int:
    """Values, of which as many are left behind the last block."""
    return min(num_values, most - _BLOCK + num_values % _BLOCK)


def _measure_workspace_bytes(codec: Codec, tensors: set[tuple[int, int]]) -> CodingWorkspaceBytes:
    """After two tickets and a push."""
    shapes = enumerate(sorted(tensors))
    values = {f"{k}": torch.ones(n, dtype=_DTYPES[size]) for k, (n, size) in shapes}
    slots: Mapping[TensorSlot, Tensor] = {TensorSlot.whole(name, x): x for name, x in values.items()}
    worker, server = (CodedTransfer(codec, 0, slots) for _ in range(2))
    for version in range(2):
        worker.take(server.ticket(0, [*values.values()], version), [*values.values()], 0, version)
    server.pushed(worker.push(slots, (0, 0)), slots, (0, 0))
    return CodingWorkspaceBytes(worker.workspace_bytes, server.workspace_bytes)


def sync_server_memory(asked: MemoryQuery) -> RuleMemory:
    """An update of all pushes of a step."""
    return server_rule_memory(asked, together=num_workers(asked))


def async_server_memory(asked: MemoryQuery) -> RuleMemory:
    """An update of every push."""
    return server_rule_memory(asked, together=1)


def bounded_staleness_memory(asked: MemoryQuery) -> RuleMemory:
    """An update of every push; without a step between workers of all of them."""
    return server_rule_memory(asked, together=1 if _rule_number(asked) else num_workers(asked))


def backup_workers_memory(asked: MemoryQuery) -> RuleMemory:
    """An update of the first pushes of a step."""
    return server_rule_memory(asked, together=num_workers(asked) - int(_rule_number(asked)))


def server_rule_memory(asked: MemoryQuery, together: int) -> RuleMemory:
    """What a rank keeps under a rule of servers; also for rules of other packages.

    Args:
        together: pushes that make an update.
    """
    return plan_server_memory(asked, together, _transfer_form(asked))


def _transfer_form(asked: MemoryQuery) -> WireMemory:
    """As `paceline.sync.server.server_builders` chooses traffic and pushes."""
    if asked.recipe.is_ordered:
        return TreeWireMemory(num_micro_batches(asked.recipe, asked.processes))
    codec = build_codec(asked.recipe.strategy)
    return PlainWireMemory() if codec is None else CodedWireMemory(codec)


def _rule_number(asked: MemoryQuery) -> float:
    return float(asked.recipe.strategy.sync.partition(":")[2])
