"""What servers and their workers keep where a codec stands between them; see `traffic.Coded`.

What is kept of every tensor is a closed form of its size: what was lost of it, its payload, what a worker
knows of it. The memory in which tensors are coded is as much as the largest needs: it is found by coding
tensors of these sizes; beyond some size it is a line, as a codec works on rows of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm import Codec
from paceline.comm.channel import copied_bytes, kept_bytes
from paceline.slot import Slot
from paceline.sync.beside_servers import num_workers
from paceline.sync.memory import Asked, RuleMemory
from paceline.sync.traffic import Coded, lost_bytes

_FEW, _MORE, _BLOCK = 1 << 18, 1 << 19, 256  # values; what is left of a block changes what is copied
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class InCommon(NamedTuple):
    """Bytes in which all tensors are coded, on either side."""

    worker: int
    server: int


class _Share(NamedTuple):
    """What a server has of the model.

    Args:
        values: bytes of each tensor.
        payloads: of each, coded; the most where that differs.
        lost: of what coding loses, once.
        in_common: see `InCommon`.
    """

    values: Sequence[int]
    payloads: Sequence[int]
    lost: int
    in_common: InCommon


class ThroughCodec:
    """See `Form`: the first ticket of a round, and its end, travel in full, all else is coded.

    Args:
        codec: of both directions.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def of_worker(self, asked: Asked) -> RuleMemory:
        """See `Form`: what was lost is there twice, and gradients once more without their scale.

        It has the parts of two servers at a time. Copies of payloads that wait to be sent come when these are
        gone, and no ticket comes before they are.
        """
        shares = [self._share(asked, server) for server in range(asked.recipe.strategy.servers)]
        full = sum(kept_bytes(one.values) for one in shares)
        unscaled, pushed = [sum(one.values) for one in shares], sum(sum(one.payloads) for one in shares)
        of_two = max(map(sum, pairwise([0, *unscaled])))
        return RuleMemory(
            wire=sum(2 * one.lost + one.in_common.worker for one in shares) + pushed,
            running=full,
            agreement=sum(unscaled) + sum(copied_bytes(one.values) for one in shares),
            at_pushes=of_two,
            pushes=max(0, pushed - of_two),
            updates=False,
        )

    def of_server(self, asked: Asked, together: int) -> RuleMemory:
        """See `Form`: it knows what each worker has, and decodes all pushes of an update before it adds them.

        While it does, workers that it has heard have no ticket.
        """
        strategy, workers, sizes = asked.recipe.strategy, num_workers(asked), asked.sizes
        share = self._share(asked, asked.rank)
        own, push = sum(share.values), kept_bytes(share.payloads)
        waits, pause = max(own, push), (strategy.servers - 2) * own + sizes.computes
        return RuleMemory(
            copies=workers * own,
            wire=share.lost + sum(share.payloads) + share.in_common.server,
            messages=max(workers * waits, pause) + sum(share.payloads) + copied_bytes(share.payloads),
            at_pushes=(together + (together > 1)) * own,
            pushes=together * push + (workers - together) * waits,
            trains=False,
        )

    def _share(self, asked: Asked, server: int) -> _Share:
        parts = [part for one in asked.held.values() if (part := one.parts[server]) is not None]
        item_bytes = [asked.item_bytes[part.name] for part in parts]
        payloads = [self._codec.num_bytes(part.numel) for part in parts]
        return _Share(
            [part.numel * size for part, size in zip(parts, item_bytes, strict=True)],
            payloads,
            sum(lost_bytes(self._codec, part.numel) for part in parts),
            in_common(self._codec, {(p.numel, size) for p, size in zip(parts, item_bytes, strict=True)}),
        )


def in_common(codec: Codec, tensors: set[tuple[int, int]]) -> InCommon:
    """Of memory in which tensors of so many values, of so many bytes each, are coded."""
    largest = max(num_values for num_values, _ in tensors)
    if largest <= _MORE:
        return _in_common(codec, tensors)
    found = [_in_common(codec, {(_cut(n, cap), size) for n, size in tensors}) for cap in (_FEW, _MORE)]
    times = (largest - _cut(largest, _MORE)) / (_MORE - _FEW)
    return InCommon(*(int(more + times * (more - few)) for few, more in zip(*found, strict=True)))


def _cut(num_values: int, most: int) -> int:
    """Values, of which as many are left behind the last block."""
    return min(num_values, most - _BLOCK + num_values % _BLOCK)


def _in_common(codec: Codec, tensors: set[tuple[int, int]]) -> InCommon:
    """After two tickets and a push."""
    shapes = enumerate(sorted(tensors))
    values = {f"{k}": torch.ones(n, dtype=_DTYPES[size]) for k, (n, size) in shapes}
    slots: Mapping[Slot, Tensor] = {Slot.whole(name, x): x for name, x in values.items()}
    worker, server = (Coded(codec, 0, slots) for _ in range(2))
    for version in range(2):
        worker.take(server.ticket(0, [*values.values()], version), [*values.values()], 0, version)
    server.pushed(worker.push(slots, (0, 0)), slots, (0, 0))
    return InCommon(worker.in_common_bytes, server.in_common_bytes)
