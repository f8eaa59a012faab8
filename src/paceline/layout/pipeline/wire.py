"""What neighbouring stages send each other: tensors of any shape and dtype, each with its own description.

Invariant: messages between two stages arrive in the order of their tags; an aborted run uses other tags, so
what it left on the way is never taken for something new.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from paceline.comm import Handle, Net
from paceline.mesh import Group

_HEAD = 64  # whole numbers; a description that is longer goes on in a second message
_DTYPES = tuple(sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str))


class StageWire:
    """This rank's two neighbours on the pipeline axis.

    Wire: 512 bytes of description, and the bytes of the tensors.
    """

    def __init__(self, group: Group, net: Net, device: torch.device) -> None:
        self._group, self._net, self._device = group, net, device
        self._under_way: list[Handle] = []
        self._abandoned: list[Handle] = []
        self._attempt = 0

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0) -> None:
        """Start sending; `flush` waits. The tensors must not change until then."""
        words = _describe(tensors, note)
        words += [0] * (_HEAD - len(words))
        parts = [torch.tensor(words[:_HEAD]), torch.tensor(words[_HEAD:])]
        for x in (*(part.to(self._device) for part in parts), *map(_as_bytes, tensors)):
            if x.numel():
                self._under_way.append(self._net.send(x, self._group, to, self._attempt))

    def receive(self, source: int) -> tuple[list[Tensor], float]:
        """Wait for the next message of a neighbour: tensors and a number."""
        words: list[int] = self._take(_HEAD, torch.int64, source).tolist()
        words += self._take(max(0, words[0] - _HEAD), torch.int64, source).tolist()
        num_tensors, note, place = words[1], torch.tensor(words[2]).view(torch.float64), 3
        found = []
        for _ in range(num_tensors):
            dtype, dims = _DTYPES[words[place]], words[place + 1]
            shape = words[place + 2 : place + 2 + dims]
            place += 2 + dims
            data = self._take(prod(shape) * dtype.itemsize, torch.uint8, source)
            found.append(data.view(dtype).view(shape))
        return found, float(note)

    def _take(self, size: int, dtype: torch.dtype, source: int) -> Tensor:
        x = torch.empty(size, dtype=dtype, device=self._device)
        return self._net.receive(x, self._group, source, self._attempt).wait() if size else x

    def flush(self, most: int = 0) -> None:
        """Wait until the neighbours have taken what was sent, all but the last `most` messages' parts."""
        while len(self._under_way) > most:
            self._under_way.pop(0).wait()

    def abort(self) -> None:
        """Forget what is on the way; its memory stays, since the backend may still read it."""
        self._abandoned += self._under_way
        self._under_way = []
        self._attempt += 1


def _describe(tensors: Sequence[Tensor], note: float) -> list[int]:
    """How many numbers follow, how many tensors, the note; then dtype, dimensions and sizes of each."""
    rows = [x for t in tensors for x in (_DTYPES.index(t.dtype), t.dim(), *t.shape)]
    return [
        3 + len(rows),
        len(tensors),
        int(torch.tensor(note, dtype=torch.float64).view(torch.int64)),
        *rows,
    ]


def _as_bytes(x: Tensor) -> Tensor:
    """Gloo carries few types, and bytes carry all."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
