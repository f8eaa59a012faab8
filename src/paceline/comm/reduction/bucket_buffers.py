"""Flat buffers with a row for each rank, and memory that buckets use in turn.

A row holds a rank's parts of some tensors. Invariant: a part lies in its row in the order in which it lies in
the memory of its parameter, so that a kernel that reads parameter, gradient and moments side by side meets
the same element in all of them. A `BlockPool` lends the same few pieces of memory again and again, so a
steady step allocates nothing.
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
"""The part of each slot that each rank gets, by slot; None: nothing."""
_MIN_BUCKET_BYTES, _MIN_BUCKETS = 2**20, 32
AllocateZeros = Callable[[int, Tensor], Tensor]
"""A function from a number of values and a tensor to a buffer with the dtype and device of that."""


class PartBuffer:
    """A flat buffer of some tensors, cut into one row for each rank.

    Args:
        slots: slots in the order in which they lie here.
        tensors: tensors of these slots.
        parts: the part of each slot in each row.
        zeros: allocates the memory.
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
        # Rows of ranks with smaller parts end in padding, which is no part's value.
        self.has_gaps = min(sizes) < width
        self.flat = zeros(num_rows * width, empty_on_device_of(tensors[slots[0]]))
        self.rows = self.flat.view(num_rows, width)
        self._layouts = [self._layout(row, tensors) for row in range(num_rows)]
        self._views = [self.views(self.rows[row], row) for row in range(num_rows)]
        # Computed once: slicing by part would cost more than copying small tensors.
        self._index = {s: [part.inside(s) if part else () for part in parts[s]] for s in slots}

    def over(self, flat: Tensor, row: int | None = None) -> PartBuffer:
        """Return the same layout in other memory: of all rows [num_rows * width], or of one [width] and no
        other.
        """
        # The layout is shared; only the memory and its views are new.
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
        """Return the offset in the row and the strides of each part."""
        layout: dict[TensorSlot, tuple[int, tuple[int, ...]]] = {}
        start = 0
        for slot in self.slots:
            part, x = self._held[slot][row], tensors[slot]
            if part is not None:
                shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                layout[part] = (start, dense_strides(shape[part.inside(slot)]))
                start += part.numel
        return layout

    def views(self, flat: Tensor, row: int) -> dict[TensorSlot, Tensor]:
        """Return the parts of one row [width], in their shapes and strides."""
        offset = flat.storage_offset()
        return {
            # With the strides of the parameter, an optimizer kernel walks gradient and parameter in the same
            # order.
            part: flat.as_strided(part.sizes, strides, offset + start)
            for part, (start, strides) in self._layouts[row].items()
        }

    def own(self, flat: Tensor, row: int) -> dict[TensorSlot, Tensor]:
        """Return the same as `views`, from a cache if `flat` is a row of this very buffer."""
        row_values = self.rows[row]
        # Views are made once: making them in every step would cost more than small sums.
        return self._views[row] if flat.data_ptr() == row_values.data_ptr() else self.views(flat, row)

    def places(self, names: Collection[str]) -> Tensor:
        """Return the positions of tensors with these names, bool [num_rows, width]."""
        mask = torch.zeros(self.rows.shape, dtype=torch.bool, device=self.flat.device)
        for row in range(len(mask)):
            for part, view in self.views(mask[row], row).items():
                view.fill_(part.name in names)
        return mask

    def matrices(self, row: int | None) -> list[MatrixSpan]:
        """Return the positions of parts that are matrices in one row, or (None) in all, in order.

        A tensor of more than two dimensions is the matrix of its outermost dimension in memory and all
        others.
        """
        if row is None:
            width = self.rows.shape[1]
            row_spans = [(r * width, m) for r in range(len(self.rows)) for m in self.matrices(r)]
            return [m._replace(start=offset + m.start) for offset, m in row_spans]
        spans = []
        for part, (start, strides) in self._layouts[row].items():
            if len(part.sizes) > 1 and part.numel:
                # Ties (dimensions of size one) go to the first dimension.
                outermost = max(range(len(strides)), key=lambda d: (strides[d], -d))
                num_rows = part.sizes[outermost]
                spans.append(MatrixSpan(start, num_rows, part.numel // num_rows))
        return spans

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
        """Fill in one row from the parts themselves, or from the tensors that they are parts of.

        Args:
            into: [width], memory other than the row of this buffer.
        """
        views = self._views[row] if into is None else self.views(into, row)
        with torch.no_grad():
            for slot in self.slots:
                part = self._held[slot][row]
                if part is not None:
                    value = tensors[part] if part in tensors else tensors[slot][part.inside(slot)]
                    views[part].copy_(value)

    def read_row(self, row: int, flat: Tensor, tensors: Mapping[TensorSlot, Tensor]) -> None:
        """Copy the parts of one row, which lie in `flat` [width], to their positions in the tensors."""
        views = self.views(flat, row)
        for slot in self.slots:
            part = self._held[slot][row]
            if part is not None:
                tensors[slot].data[self._index[slot][row]].copy_(views[part])

    def read(self, slot: TensorSlot, out: Tensor) -> Tensor:
        """Copy the rows that are here to their positions in one tensor, in place."""
        for row, part in enumerate(self._held[slot]):
            view = None if part is None else self._views[row].get(part)
            if view is not None:
                out[self._index[slot][row]].copy_(view)
        return out


def limit_bucket_bytes(num_bytes: int, most_bytes: int) -> int:
    """Return the bytes of a bucket that is to be small beside all tensors.

    At most a thirty-second of all, but a mebibyte at least: its latency is small beside its transfer.

    Args:
        num_bytes: bytes of all tensors.
        most_bytes: the requested size, at most.
    """
    return min(most_bytes, max(_MIN_BUCKET_BYTES, num_bytes // _MIN_BUCKETS))


def bucket_bytes_of(tensors: Iterable[Tensor], most_bytes: int) -> int:
    """Return `limit_bucket_bytes` of these tensors, which may have no memory now."""
    return limit_bucket_bytes(sum(x.numel() * x.element_size() for x in tensors), most_bytes)


def empty_on_device_of(x: Tensor) -> Tensor:
    """Return an empty tensor of the dtype and on the device of another, which may have no memory now."""
    return torch.empty(0, dtype=x.dtype, device=x.device)


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """Return strides of a dense tensor whose values lie in the order of those of `x`."""
    return tuple(torch.empty_like(x, device="meta").stride())


def plan_buckets(tensors: Mapping[TensorSlot, Tensor], bucket_bytes: int) -> list[list[TensorSlot]]:
    """Return slots by bucket, the last one first (the order in which backward reaches them); pure.

    A bucket holds one dtype on one device, at least one tensor, and is closed when it has reached
    `bucket_bytes`.
    """
    buckets: list[list[TensorSlot]] = []
    filled, previous = 0, None
    # Backward completes the gradients of the last layers first.
    for slot, tensor in reversed([*tensors.items()]):
        is_same_kind = previous is not None and (previous.dtype, previous.device) == (
            tensor.dtype,
            tensor.device,
        )
        if not is_same_kind or filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(slot)
        filled, previous = filled + tensor.numel() * tensor.element_size(), tensor
    return buckets


MAX_IN_FLIGHT = 2
"""Number of scatters, or of gathers after an update, that are in flight at a time."""


def transfer_buffer_name(number: int, name: str = "") -> str:
    """Return the name of memory for gradients that leave, and for parameters that arrive after an update."""
    return f"{name}moving.{number}"


def scatter_buffer_prefix(number: int) -> str:
    """Return the prefix of a reduction's memory; the first has none and shares its memory with arriving
    parameters.
    """
    return f"{number}/" if number else ""


class BlockPool:
    """A pool of pieces of memory: a few stay, each as large as the largest bucket of its dtype.

    If none is free, a piece of the requested size is allocated, and freed when it is released.

    Args:
        sizes: values of the largest bucket, by dtype.
        device: device of the memory.
        num_kept: number of pieces of a dtype that stay.
        workspace: source of the memory that stays, named by `transfer_buffer_name`; others may use it between
            steps.
        name: prefix that tells it from memory that others use at the same time.
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
        self._kept_dtypes: dict[int, torch.dtype] = {}
        self._free: list[int] = []
        self._next = 0

    @property
    def temporary_bytes(self) -> int:
        """Bytes of the blocks in use that will be freed, not kept for reuse."""
        return sum(x.nbytes for number, x in self.memory.items() if number not in self._kept_dtypes)

    @property
    def kept(self) -> list[Tensor]:
        """Blocks that are kept for reuse."""
        return [self.memory[number] for number in self._kept_dtypes]

    def take(self, dtype: torch.dtype, num_values: int) -> int:
        """Return the number of a free block; its values are undefined."""
        for number in self._free:
            if self._kept_dtypes[number] == dtype:
                self._free.remove(number)
                return number
        number, self._next = self._next, self._next + 1
        index = [*self._kept_dtypes.values()].count(dtype)
        if index < self._num_kept:
            self._kept_dtypes[number], size = dtype, (self._sizes[dtype],)
            self.memory[number] = self._workspace.take(
                transfer_buffer_name(index, self._name), size, dtype, self._device
            )
        else:
            self.memory[number] = torch.empty(num_values, dtype=dtype, device=self._device)
        return number

    def arriving(self, rows: Tensor, turn: int) -> ReceiveBuffer:
        """Return a function that allocates memory for received rows of `rows` [P, n]; one buffer for each
        turn, if blocks are kept for reuse.
        """
        num_others, width = len(rows) - 1, rows.shape[1]
        if not self._num_kept:
            return lambda: rows.new_empty(num_others, width)
        name, room = f"{self._name}arriving.{turn}", self._sizes[rows.dtype] // len(rows) * num_others
        size, where = (num_others, width), self._device
        return lambda: self._workspace.take(name, size, rows.dtype, where, room=room)

    def release(self, number: int) -> bool:
        """Release a block, and return whether it is kept for reuse."""
        if number in self._kept_dtypes:
            self._free.append(number)
            return True
        # Blocks beyond those that stay are freed, so a burst does not raise the memory for good.
        del self.memory[number]
        return False

    def release_all(self) -> None:
        """Release all blocks."""
        self.memory = {number: self.memory[number] for number in self._kept_dtypes}
        self._free = [*self._kept_dtypes]
