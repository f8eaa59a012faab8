"""Flat buffers with a row for each rank that gets a part: in it lie that rank's parts of some tensors.

Invariant: a part lies in its row in the order in which it lies in the memory of its parameter, so that a
kernel that walks parameter, gradient and moments side by side meets the same element in all of them.

Memory that buckets take in turn, so that a steady step allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from paceline.comm.codecs.low_rank import MatrixSpan
from paceline.comm.collectives.collective_protocol import ReceiveBuffer
from paceline.comm.workspace import Workspace
from paceline.state.slot import TensorSlot

PartsBySlot = Mapping[TensorSlot, Sequence[TensorSlot | None]]
"""By slot, the part of it that each rank gets; None: nothing."""
_MIN_BUCKET_BYTES, _MIN_BUCKETS = 2**20, 32
AllocateZeros = Callable[[int, Tensor], Tensor]
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
        slots: Sequence[TensorSlot],
        tensors: Mapping[TensorSlot, Tensor],
        parts: PartsBySlot,
        zeros: AllocateZeros,
        multiple: int = 1,
    ) -> None:
        self.slots = slots
        self._held = {slot: parts[slot] for slot in slots}
        num_rows = len(parts[slots[0]])
        sizes = [sum(part.numel for s in slots if (part := parts[s][row])) for row in range(num_rows)]
        width = multiple * -(-max(1, *sizes) // multiple)
        self.has_gaps = min(sizes) < width
        self.flat = zeros(num_rows * width, empty_on_device_of(tensors[slots[0]]))
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

    def _layout(
        self, row: int, tensors: Mapping[TensorSlot, Tensor]
    ) -> dict[TensorSlot, tuple[int, tuple[int, ...]]]:
        """By part, where it begins in the row, and its strides."""
        found: dict[TensorSlot, tuple[int, tuple[int, ...]]] = {}
        start = 0
        for slot in self.slots:
            part, x = self._held[slot][row], tensors[slot]
            if part is not None:
                shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                found[part] = (start, dense_strides(shape[part.inside(slot)]))
                start += part.numel
        return found

    def views(self, flat: Tensor, row: int) -> dict[TensorSlot, Tensor]:
        """The parts of one row [width], in their shapes and strides."""
        offset = flat.storage_offset()
        return {
            part: flat.as_strided(part.sizes, strides, offset + start)
            for part, (start, strides) in self._places[row].items()
        }

    def own(self, flat: Tensor, row: int) -> dict[TensorSlot, Tensor]:
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

    def matrices(self, row: int | None) -> list[MatrixSpan]:
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
                found.append(MatrixSpan(start, num_rows, part.numel // num_rows))
        return found

    def write(self, slot: TensorSlot, value: Tensor | None) -> None:
        """Cut one tensor into the rows that are here; None counts as zeros."""
        for row, part in enumerate(self._held[slot]):
            view = None if part is None else self._views[row].get(part)
            if view is None:
                continue
            if value is None:
                view.zero_()
            else:
                view.copy_(value[self._index[slot][row]] if part is not slot else value)

    def write_row(self, row: int, tensors: Mapping[TensorSlot, Tensor], into: Tensor | None = None) -> None:
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

    def read_row(self, row: int, flat: Tensor, tensors: Mapping[TensorSlot, Tensor]) -> None:
        """Put the parts of one row, which lie in `flat` [width], in their places in the tensors."""
        views = self.views(flat, row)
        for slot in self.slots:
            part = self._held[slot][row]
            if part is not None:
                tensors[slot].data[self._index[slot][row]].copy_(views[part])

    def read(self, slot: TensorSlot, out: Tensor) -> Tensor:
        """Put one tensor together again, in place, as far as its rows are here."""
        for row, part in enumerate(self._held[slot]):
            view = None if part is None else self._views[row].get(part)
            if view is not None:
                out[self._index[slot][row]].copy_(view)
        return out


def limit_bucket_bytes(num_bytes: int, most_bytes: int) -> int:
    """Bytes of tensors that go through a buffer at a time, where it is to be small beside all of them.

    At most a thirty-second of all, but a mebibyte at least: its latency is small beside its transfer.

    Args:
        num_bytes: of all.
        most_bytes: what was asked for, at most.
    """
    return min(most_bytes, max(_MIN_BUCKET_BYTES, num_bytes // _MIN_BUCKETS))


def bucket_bytes_of(tensors: Iterable[Tensor], most_bytes: int) -> int:
    """`limit_bucket_bytes` of these tensors, which may have no memory now."""
    return limit_bucket_bytes(sum(x.numel() * x.element_size() for x in tensors), most_bytes)


def empty_on_device_of(x: Tensor) -> Tensor:
    """A tensor without values, of the dtype and on the device of another, which may have no memory now."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of a dense tensor whose values lie in the order of those of `x`."""
    return tuple(torch.empty_like(x, device="meta").stride())


def plan_buckets(tensors: Mapping[TensorSlot, Tensor], bucket_bytes: int) -> list[list[TensorSlot]]:
    """Slots by bucket, the last one first (the order in which backward reaches them); pure.

    A bucket holds one dtype on one device, at least one tensor, and is closed when it has reached
    `bucket_bytes`.
    """
    found: list[list[TensorSlot]] = []
    filled, last = 0, None
    for slot, tensor in reversed([*tensors.items()]):
        alike = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        if not alike or filled >= bucket_bytes:
            found.append([])
            filled = 0
        found[-1].append(slot)
        filled, last = filled + tensor.numel() * tensor.element_size(), tensor
    return found


MAX_IN_FLIGHT = 2
"""Scatters, and gathers after an update, at a time."""


def transfer_buffer_name(number: int, name: str = "") -> str:
    """The name of memory that gradients leave through, and after an update parameters come through."""
    return f"{name}moving.{number}"


def scatter_buffer_prefix(number: int) -> str:
    """In front of the names of its memory: what the first leaves is that in which parameters come."""
    return f"{number}/" if number else ""


class BlockPool:
    """Pieces of memory: a few stay, each as large as the largest bucket of its dtype.

    Whoever finds none free gets one of the size it asks for, which goes when it is given back.

    Args:
        sizes: values of the largest bucket, by dtype.
        device: where the memory lies.
        num_kept: how many of a dtype stay.
        workspace: from which these are, as `transfer_buffer_name` names them; others may use them between two steps.
        name: tells them from those of others that are used meanwhile.
    """

    def __init__(
        self,
        sizes: Mapping[torch.dtype, int],
        device: torch.device,
        num_kept: int,
        workspace: Workspace,
        name: str,
    ) -> None:
        self._sizes, self._device, self._num_kept = sizes, device, num_kept
        self._workspace, self._name = workspace, name
        self.memory: dict[int, Tensor] = {}
        self._kept: dict[int, torch.dtype] = {}
        self._free: list[int] = []
        self._next = 0

    @property
    def temporary_bytes(self) -> int:
        """Of those that somebody has, and that do not stay."""
        return sum(x.nbytes for number, x in self.memory.items() if number not in self._kept)

    @property
    def kept(self) -> list[Tensor]:
        """Those that stay."""
        return [self.memory[number] for number in self._kept]

    def take(self, dtype: torch.dtype, num_values: int) -> int:
        """The number of a block that nobody has; its values are whatever was left in it."""
        for number in self._free:
            if self._kept[number] == dtype:
                self._free.remove(number)
                return number
        number, self._next = self._next, self._next + 1
        place = [*self._kept.values()].count(dtype)
        if place < self._num_kept:
            self._kept[number], size = dtype, (self._sizes[dtype],)
            self.memory[number] = self._workspace.take(
                transfer_buffer_name(place, self._name), size, dtype, self._device
            )
        else:
            self.memory[number] = torch.empty(num_values, dtype=dtype, device=self._device)
        return number

    def arriving(self, rows: Tensor, turn: int) -> ReceiveBuffer:
        """Memory for what other ranks send of rows [P, n]; where blocks stay, one of each turn is in use."""
        num_others, width = len(rows) - 1, rows.shape[1]
        if not self._num_kept:
            return lambda: rows.new_empty(num_others, width)
        name, room = f"{self._name}arriving.{turn}", self._sizes[rows.dtype] // len(rows) * num_others
        size, where = (num_others, width), self._device
        return lambda: self._workspace.take(name, size, rows.dtype, where, room=room)

    def release(self, number: int) -> bool:
        """It may be taken again, if it stays; whether it does."""
        if number in self._kept:
            self._free.append(number)
            return True
        del self.memory[number]
        return False

    def release_all(self) -> None:
        """Nobody has any."""
        self.memory = {number: self.memory[number] for number in self._kept}
        self._free = [*self._kept]
