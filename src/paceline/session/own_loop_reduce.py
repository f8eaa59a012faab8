"""Values of all replicas as one value, for a user's own loop: a number of samples, a score.

Sums are taken in the order of ranks, of what every rank has heard, so all have the same bits. There is no
mean: that of ranks with other numbers of samples is none of the samples. Add up a sum and a count.

What the ranks of a user's own loop say to each other beside gradients: values, and what is done next.

A rank that has no samples in a step does not run the loop's body, and has to take part in what the others do
there. Nobody knows before a loop runs how many updates it makes in a step, or what it asks of all ranks in
between, so such ranks are told. Nothing is told in a step in which every rank has samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.group_collectives import all_gather_bytes, all_gather_texts
from paceline.errors import TaskError
from paceline.session.session import Session

_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}
)


def require_reduction(how: str) -> None:
    """Raises: TaskError: values cannot come together so."""
    if how not in _REDUCTIONS:
        raise TaskError(
            f"loop.reduce(..., '{how}'): values of replicas come together by {', '.join(_REDUCTIONS)}",
            next_step="for a mean, reduce the sum and the count, and divide",
        )


def reduce_values(values: Sequence[Tensor], how: str) -> Tensor:
    """The values as one, in their type.

    Args:
        values: of the replicas, in their order, of one shape.
        how: "sum", "max" or "min".
    Raises:
        TaskError: shapes differ.
    """
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise TaskError(f"loop.reduce of values of several shapes: {sorted(shapes)}")
    stacked = torch.stack(list(values))
    return _REDUCTIONS[how](stacked).to(stacked.dtype)


def tensor_to_bytes(value: Tensor) -> bytes:
    """A tensor with its type and shape."""
    head = json.dumps([str(value.dtype).removeprefix("torch."), list(value.shape)]).encode()
    own = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return head + b"\n" + bytes(own.numpy().tobytes())


def tensor_from_bytes(data: bytes) -> Tensor:
    """The inverse of `tensor_to_bytes`."""
    head, _, values = data.partition(b"\n")
    kind, shape = json.loads(head)
    flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0).byte()
    return flat.view(getattr(torch, kind)).reshape(shape)


class LoopAction(NamedTuple):
    """What comes next.

    Args:
        what: "update" or "reduce".
        name: of the part that is updated, or of the reduction.
        metrics: names of those of the update's loss.
    """

    what: str
    name: str
    metrics: Sequence[str] = ()


class LoopCoordinator:
    """Of one session. Wire: a ragged all_gather of some bytes for each thing that is told."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def tell(self, told: LoopAction | None) -> None:
        """From a rank with samples: what comes now; None: nothing more in this step."""
        if self._are_any_idle():
            self._exchange(told)

    def receive_update(self) -> LoopAction | None:
        """On a rank without samples: the next update; values that come before it have nothing from here."""
        while (told := self._exchange(None)) is not None and told.what == "reduce":
            self._gather(b"")
        return told

    def reduce(self, value: Tensor | float, how: str, *, tells: bool) -> Tensor:
        """See `OwnLoop.reduce`.

        Args:
            tells: ranks without samples do not know of it.
        """
        require_reduction(how)
        own = torch.as_tensor(value).detach()
        if tells:
            self.tell(LoopAction("reduce", how))
        values = [tensor_from_bytes(data) for data in self._gather(tensor_to_bytes(own)) if data]
        return reduce_values(values, how).to(own.device)

    def _gather(self, data: bytes) -> list[bytes]:
        return all_gather_bytes(data, self._session.mesh.world, self._session.net)

    def _exchange(self, mine: LoopAction | None) -> LoopAction | None:
        texts = all_gather_texts(json.dumps(mine), self._session.mesh.world, self._session.net)
        return next((LoopAction(*told) for told in map(json.loads, texts) if told is not None), None)

    def _are_any_idle(self) -> bool:
        work, step, replicas = self._session.work, self._session.state.step, self._session.mesh.data.size
        if work.num_samples(step) >= work.shards:
            return False
        return not all(work.part(rank, replicas).num_micro_batches(step) for rank in range(replicas))
