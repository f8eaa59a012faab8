"""Flat buffers with a row for each rank that gets a part: in it lie that rank's parts of some tensors.

Invariant: a part lies in its row in the order in which it lies in the memory of its parameter, so that a
kernel that walks parameter, gradient and moments side by side meets the same element in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from paceline.comm.codecs.low_rank import Matrix
from paceline.slot import Slot

Parts = Mapping[Slot, Sequence[Slot | None]]
"""By slot, the part of it that each rank gets; None: nothing."""
_LEAST_IN_TURN, _TURNS = 2**20, 32
Zeros = Callable[[int, Tensor], Tensor]
"""Makes a buffer of so many values, like a tensor."""


class PartBuffer:
    """Some tensors, cut into one row for each rank.

    Args:
        slots: which, in the order in which they lie here.
        tensors: of these slots.
        parts: what each row holds of them.
        zeros: makes the memory.
        multiple: the width of a row is a multiple of it.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        tensors: Mapping[Slot, Tensor],
        parts: Parts,
        zeros: Zeros,
        multiple: int = 1,
    ) -> None:
        self.slots = slots
        self._held = {slot: parts[slot] for slot in slots}
        num_rows = len(parts[slots[0]])
        sizes = [sum(part.numel for s in slots if (part := parts[s][row])) for row in range(num_rows)]
        width = multiple * -(-max(1, *sizes) // multiple)
        self.has_gaps = min(sizes) < width
        self.flat = zeros(num_rows * width, nothing_like(tensors[slots[0]]))
        self.rows = self.flat.view(num_rows, width)
        self._places = [self._layout(row, tensors) for row in range(num_rows)]
        self._views = [self.views(self.rows[row], row) for row in range(num_rows)]
        self._index = {s: [part.inside(s) if part else () for part in parts[s]] for s in slots}

    def over(self, flat: Tensor, row: int | None = None) -> PartBuffer:
        """The same places in other memory: of all rows [num_rows * width], or of one [width] and no other."""
        other = copy(self)
        other.flat = flat
        if row is None:
            other.rows = flat.view(self.rows.shape)
            other._views = [self.views(values, r) for r, values in enumerate(other.rows)]
        else:
            other.rows = flat.view(1, -1)
            other._views = [self.views(flat, row) if r == row else {} for r in range(len(self.rows))]
        return other

    def _layout(self, row: int, tensors: Mapping[Slot, Tensor]) -> dict[Slot, tuple[int, tuple[int, ...]]]:
        """By part, where it begins in the row, and its strides."""
        found: dict[Slot, tuple[int, tuple[int, ...]]] = {}
        start = 0
        for slot in self.slots:
            part, x = self._held[slot][row], tensors[slot]
            if part is not None:
                shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                found[part] = (start, strides_like(shape[part.inside(slot)]))
                start += part.numel
        return found

    def views(self, flat: Tensor, row: int) -> dict[Slot, Tensor]:
        """The parts of one row [width], in their shapes and strides."""
        offset = flat.storage_offset()
        return {
            part: flat.as_strided(part.sizes, strides, offset + start)
            for part, (start, strides) in self._places[row].items()
        }

    def own(self, flat: Tensor, row: int) -> dict[Slot, Tensor]:
        """As `views`, made once for a row of this very buffer."""
        mine = self.rows[row]
        return self._views[row] if flat.data_ptr() == mine.data_ptr() else self.views(flat, row)

    def places(self, names: Collection[str]) -> Tensor:
        """Where tensors of these names lie, bool [num_rows, width]."""
        found = torch.zeros(self.rows.shape, dtype=torch.bool, device=self.flat.device)
        for row in range(len(found)):
            for part, view in self.views(found[row], row).items():
                view.fill_(part.name in names)
        return found

    def matrices(self, row: int | None) -> list[Matrix]:
        """Where parts that are matrices lie in one row, or (None) in all, in order: by memory, from outside.

        A tensor of more than two dimensions is the matrix of its outermost dimension and all others.
        """
        if row is None:
            width = self.rows.shape[1]
            each = [(r * width, m) for r in range(len(self.rows)) for m in self.matrices(r)]
            return [m._replace(start=offset + m.start) for offset, m in each]
        found = []
        for part, (start, strides) in self._places[row].items():
            if len(part.sizes) > 1 and part.numel:
                outermost = max(range(len(strides)), key=lambda d: (strides[d], -d))
                num_rows = part.sizes[outermost]
                found.append(Matrix(start, num_rows, part.numel // num_rows))
        return found

    def write(self, slot: Slot, value: Tensor | None) -> None:
        """Cut one tensor into the rows that are here; None counts as zeros."""
        for row, part in enumerate(self._held[slot]):
            view = None if part is None else self._views[row].get(part)
            if view is None:
                continue
            if value is None:
                view.zero_()
            else:
                view.copy_(value[self._index[slot][row]] if part is not slot else value)

    def write_row(self, row: int, tensors: Mapping[Slot, Tensor], into: Tensor | None = None) -> None:
        """Fill in one row from the parts themselves, or from what they are parts of.

        Args:
            into: [width], in place of the row of this buffer.
        """
        views = self._views[row] if into is None else self.views(into, row)
        with torch.no_grad():
            for slot in self.slots:
                part = self._held[slot][row]
                if part is not None:
                    value = tensors[part] if part in tensors else tensors[slot][part.inside(slot)]
                    views[part].copy_(value)

    def read_row(self, row: int, flat: Tensor, tensors: Mapping[Slot, Tensor]) -> None:
        """Put the parts of one row, which lie in `flat` [width], in their places in the tensors."""
        views = self.views(flat, row)
        for slot in self.slots:
            part = self._held[slot][row]
            if part is not None:
                tensors[slot].data[self._index[slot][row]].copy_(views[part])

    def read(self, slot: Slot, out: Tensor) -> Tensor:
        """Put one tensor together again, in place, as far as its rows are here."""
        for row, part in enumerate(self._held[slot]):
            view = None if part is None else self._views[row].get(part)
            if view is not None:
                out[self._index[slot][row]].copy_(view)
        return out


def share_in_turn(num_bytes: int, most_bytes: int) -> int:
    """Bytes of tensors that go through a buffer at a time, where it is to be small beside all of them.

    At most a thirty-second of all, but a mebibyte at least: its latency is small beside its transfer.

    Args:
        num_bytes: of all.
        most_bytes: what was asked for, at most.
    """
    return min(most_bytes, max(_LEAST_IN_TURN, num_bytes // _TURNS))


def bytes_in_turn(tensors: Iterable[Tensor], most_bytes: int) -> int:
    """`share_in_turn` of these tensors, which may have no memory now."""
    return share_in_turn(sum(x.numel() * x.element_size() for x in tensors), most_bytes)


def nothing_like(x: Tensor) -> Tensor:
    """A tensor without values, of the dtype and on the device of another, which may have no memory now."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


def strides_like(x: Tensor) -> tuple[int, ...]:
    """Strides of a dense tensor whose values lie in the order of those of `x`."""
    return tuple(torch.empty_like(x, device="meta").stride())


def plan_buckets(tensors: Mapping[Slot, Tensor], bucket_bytes: int) -> list[list[Slot]]:
    """Slots by bucket, the last one first (the order in which backward reaches them); pure.

    A bucket holds one dtype on one device, at least one tensor, and is closed when it has reached
    `bucket_bytes`.
    """
    found: list[list[Slot]] = []
    filled, last = 0, None
    for slot, tensor in reversed([*tensors.items()]):
        alike = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        if not alike or filled >= bucket_bytes:
            found.append([])
            filled = 0
        found[-1].append(slot)
        filled, last = filled + tensor.numel() * tensor.element_size(), tensor
    return found
