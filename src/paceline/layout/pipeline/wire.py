"""What neighbouring stages send each other: tensors of any shape and dtype, each with its own description.

Invariant: messages between two stages arrive in the order of their tags; an aborted run uses other tags, so
what it left on the way is never taken for something new.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm import Handle, Net
from paceline.mesh import Group

_MOST_TENSORS, _MOST_DIMS = 8, 8
_ROW = 2 + _MOST_DIMS  # dtype, number of dimensions, sizes
_HEAD = 2 + _MOST_TENSORS * _ROW  # how many, each, and the note
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
)


class StageWire:
    """This rank's two neighbours on the pipeline axis.

    Wire: 656 bytes of description and the tensors themselves.
    """

    def __init__(self, group: Group, net: Net, device: torch.device) -> None:
        self._group, self._net, self._device = group, net, device
        self._under_way: list[Handle] = []
        self._abandoned: list[Handle] = []
        self._attempt = 0

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0) -> None:
        """Start sending; `flush` waits."""
        head = _describe(tensors, note).to(self._device)
        for x in (head, *(t.detach().contiguous() for t in tensors)):
            self._under_way.append(self._net.send(x, self._group, to, self._attempt))

    def receive(self, source: int) -> tuple[list[Tensor], float]:
        """Wait for the next message of a neighbour: tensors and a number."""
        head = torch.zeros(_HEAD, dtype=torch.int64, device=self._device)
        head = self._net.receive(head, self._group, source, self._attempt).wait().cpu()
        rows, note = head.tolist(), float(head[-1:].view(torch.float64))
        found = []
        for k in range(rows[0]):
            dtype, dims, *sizes = rows[1 + k * _ROW : 1 + (k + 1) * _ROW]
            x = torch.empty(sizes[:dims], dtype=_DTYPES[dtype], device=self._device)
            found.append(self._net.receive(x, self._group, source, self._attempt).wait())
        return found, note

    def flush(self) -> None:
        """Wait until everything that was sent has been taken."""
        for handle in self._under_way:
            handle.wait()
        self._under_way = []

    def abort(self) -> None:
        """Forget what is on the way; its memory stays, since the backend may still read it."""
        self._abandoned += self._under_way
        self._under_way = []
        self._attempt += 1


def _describe(tensors: Sequence[Tensor], note: float) -> Tensor:
    head = torch.zeros(_HEAD, dtype=torch.int64)
    head[0] = len(tensors)
    head[-1:] = torch.tensor([note], dtype=torch.float64).view(torch.int64)
    for k, x in enumerate(tensors):
        row = [_DTYPES.index(x.dtype), x.dim(), *x.shape]
        head[1 + k * _ROW : 1 + k * _ROW + len(row)] = torch.tensor(row)
    return head
