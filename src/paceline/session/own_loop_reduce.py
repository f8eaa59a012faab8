"""Communication between the ranks of a user's own loop besides gradients: reduced values, next actions.

Values (a number of samples, a score) are gathered on every rank and reduced there in the order of ranks,
so all ranks have the same bits. There is no mean, because ranks have different numbers of samples: reduce
a sum and a count.

A rank without samples in a step does not run the body of the loop, but it must take part in its
collectives. How many updates and reductions a step has is unknown before the body runs, so ranks with
samples announce each of them (`LoopAction`). In a step in which every rank has samples nothing is
announced.
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
    """Raise a TaskError unless `how` is "sum", "max" or "min"."""
    if how not in _REDUCTIONS:
        raise TaskError(
            f"loop.reduce(..., '{how}'): expected one of {', '.join(_REDUCTIONS)}",
            next_step="for a mean, reduce the sum and the count, and divide them",
        )


def reduce_values(values: Sequence[Tensor], how: str) -> Tensor:
    """Reduce values to one of their dtype.

    Args:
        values: one of each replica, in the order of ranks, of one shape.
        how: "sum", "max" or "min".
    Raises:
        TaskError: shapes differ.
    """
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise TaskError(f"loop.reduce needs values of one shape, found {sorted(shapes)}")
    stacked = torch.stack(list(values))
    return _REDUCTIONS[how](stacked).to(stacked.dtype)


def tensor_to_bytes(value: Tensor) -> bytes:
    """Serialize a tensor with its dtype and shape."""
    head = json.dumps([str(value.dtype).removeprefix("torch."), list(value.shape)]).encode()
    # As bytes, because numpy has no bfloat16.
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return head + b"\n" + bytes(data.numpy().tobytes())


def tensor_from_bytes(data: bytes) -> Tensor:
    """Return the tensor that `tensor_to_bytes` has serialized."""
    head, _, values = data.partition(b"\n")
    dtype, shape = json.loads(head)
    flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0).byte()
    return flat.view(getattr(torch, dtype)).reshape(shape)


class LoopAction(NamedTuple):
    """Next collective action of a loop, as ranks with samples announce it.

    Args:
        what: "update" or "reduce".
        name: of the part of the model that is updated, or of the reduction.
        metrics: names of the metrics of the update's loss.
    """

    what: str
    name: str
    metrics: Sequence[str] = ()


class LoopCoordinator:
    """Coordinator of the ranks of one session's loop.

    Wire: a ragged all_gather of some bytes for each announced action.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def announce(self, action: LoopAction | None) -> None:
        """Announce the next action to ranks without samples, if there are any; collective.

        Args:
            action: None: the step has no further action.
        """
        if self._are_any_idle():
            self._exchange(action)

    def receive_update(self) -> LoopAction | None:
        """Return the next update on a rank without samples, after reductions before it; collective."""
        while (action := self._exchange(None)) is not None and action.what == "reduce":
            self._gather(b"")  # this rank has no value, and an empty text stands for none
        return action

    def reduce(self, value: Tensor | float, how: str, *, announces: bool) -> Tensor:
        """Reduce a value over all replicas; collective.

        Args:
            value, how: see `OwnLoop.reduce`.
            announces: inside the body of the loop, which ranks without samples do not run.
        """
        require_reduction(how)
        local = torch.as_tensor(value).detach()
        if announces:
            self.announce(LoopAction("reduce", how))
        values = [tensor_from_bytes(data) for data in self._gather(tensor_to_bytes(local)) if data]
        return reduce_values(values, how).to(local.device)

    def _gather(self, data: bytes) -> list[bytes]:
        return all_gather_bytes(data, self._session.mesh.world, self._session.net)

    def _exchange(self, action: LoopAction | None) -> LoopAction | None:
        texts = all_gather_texts(json.dumps(action), self._session.mesh.world, self._session.net)
        return next((LoopAction(*fields) for fields in map(json.loads, texts) if fields is not None), None)

    def _are_any_idle(self) -> bool:
        # All ranks know the shares of all others, so this needs no communication.
        work, step, replicas = self._session.work, self._session.state.step, self._session.mesh.data.size
        if work.num_samples(step) >= work.shards:
            return False
        return not all(work.part(rank, replicas).num_micro_batches(step) for rank in range(replicas))
