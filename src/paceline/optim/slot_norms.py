"""Norms, sums and gathers of whole tensors of which each rank updates a part, for optimizers that need them.

A rank of ZeRO or tensor parallelism updates parts of tensors. `slot_norms` returns the norms of the whole
ones; `SlotGroup` also sums factors and gathers matrices. Replicas, stages and context ranks are not in the
group: they hold whole tensors, or the same parts as their peers in other groups.

Invariant: each element is counted once, and the results have equal bits on all ranks of a group, whatever
order the backend adds in: every rank writes values of its own beside zeros, so the all_reduce rounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn

from paceline.comm.net import Net
from paceline.comm.reduction.gradient_norm import row_squares
from paceline.job.mesh import RankGroup
from paceline.state.slot import TensorSlot


@dataclass(frozen=True, eq=False)
class SlotGroup:
    """The ranks that together hold one copy of some tensors, and what this rank updates of them.

    Args:
        slots: the part that this rank updates, by parameter.
        tensors: all tensors that the ranks of the group hold, whole, in an order that is equal on all of
            them.
        counted: names of the tensors whose part this rank counts; other ranks count the same values of the
            others.
        dtypes: of the parameters, by name.
        group: the ranks; None: this rank alone.
        net: of the collectives.
        by_row: add squares by rows, in the order of the tensor, so that the bits of a norm do not depend on
            where it is split along its first dimension.
    """

    slots: Mapping[nn.Parameter, TensorSlot]
    tensors: tuple[TensorSlot, ...]
    counted: frozenset[str]
    dtypes: Mapping[str, torch.dtype]
    group: RankGroup | None = None
    net: Net | None = None
    by_row: bool = False

    @classmethod
    def alone(cls, parameters: Iterable[nn.Parameter]) -> SlotGroup:
        """Return the group of one process, which holds every tensor whole; names are numbers."""
        slots = {p: TensorSlot.whole(str(i), p) for i, p in enumerate(parameters)}
        dtypes = {slot.name: p.dtype for p, slot in slots.items()}
        return cls(slots, tuple(slots.values()), frozenset(dtypes), dtypes)

    def __deepcopy__(self, memo: Any) -> SlotGroup:
        # Ranks and connections are shared, as the parameters are.
        return self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else self.group.size

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, added in the order of the ranks; collective.

        Wire: one all_reduce of S n values for S ranks; none in a group of one.
        """
        if self.group is None or self.net is None or self.group.size == 1:
            return x
        rows = x.new_zeros((self.group.size, *x.shape))
        rows[self.group.rank] = x
        return self.net.all_reduce(rows, self.group).wait().sum(0)

    def gather(
        self, parts: Iterable[tuple[TensorSlot, Tensor]], wanted: Sequence[TensorSlot]
    ) -> dict[str, Tensor]:
        """Return whole tensors by name, on every rank, from the parts that ranks hold; collective.

        Args:
            parts: of this rank; no value is in the parts of two ranks.
            wanted: the whole tensors, equal on all ranks; what no rank holds is zero.
        Wire: one all_reduce of n values for each dtype; none in a group of one.
        """
        by_name = {slot.name: (slot, part) for slot, part in parts}
        device = next((part.device for _, part in by_name.values()), torch.device("cpu"))
        whole: dict[str, Tensor] = {}
        for dtype in sorted({self.dtypes[slot.name] for slot in wanted}, key=str):
            members = [slot for slot in wanted if self.dtypes[slot.name] == dtype]
            sizes = [prod(slot.shape) for slot in members]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for slot, values in zip(members, flat.split(sizes), strict=True):
                whole[slot.name] = values.view(slot.shape)
                if slot.name in by_name:
                    part_slot, part = by_name[slot.name]
                    whole[slot.name][part_slot.index] = part
            if self.group is not None and self.net is not None and self.group.size > 1:
                # Zeros elsewhere: the sum has the bits of the parts. The views follow, as it is in place.
                self.net.all_reduce(flat, self.group).wait()
        return whole


def slot_norms(
    values: Sequence[Mapping[TensorSlot, Tensor]], group: SlotGroup
) -> list[dict[TensorSlot, Tensor]]:
    """Return the Euclidean norms of whole tensors, counting each element once; collective over the group.

    Args:
        values: several quantities of each tensor (its values, its update), each by the slot of the part that
            this rank holds; real or complex. A rank without a part of a tensor leaves it out.
    Returns:
        For each quantity the norms by the same slots, float64 []. Parts are not changed.
    Wire: one all_reduce of 8 S n bytes for each quantity, n tensors and S ranks, of all together; by rows 8
        bytes for every row. None in a group of one.
    Exactness: equal bits on all ranks of the group, and by rows under every number of ranks;
        tests/parity/test_layer_norms.py.
    """
    device = next((x.device for quantity in values for x in quantity.values()), torch.device("cpu"))
    first: dict[str, tuple[int, int]] = {}
    num_entries = 0
    for whole in group.tensors:
        count = (whole.shape[0] if whole.shape else 1) if group.by_row else 1
        first[whole.name] = num_entries, count
        num_entries += count
    squares = torch.zeros(len(values), num_entries, dtype=torch.float64, device=device)
    for row, quantity in zip(squares, values, strict=True):
        for slot, x in quantity.items():
            if slot.name in group.counted and x.numel():
                start, _ = first[slot.name]
                if group.by_row:
                    sums = row_squares(x)
                    start += slot.part[0][0] if slot.part else 0
                    row[start : start + len(sums)] = sums
                else:
                    row[start] = _square_norm(x)
    sums = group.sum(squares) if not group.by_row else _sum_rows(squares, group)
    return [
        {slot: _total(row, *first[slot.name]).sqrt() for slot in quantity}
        for row, quantity in zip(sums, values, strict=True)
    ]


def _square_norm(x: Tensor) -> Tensor:
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _sum_rows(squares: Tensor, group: SlotGroup) -> Tensor:
    """Return the squares of all ranks, each of which fills in rows of its own."""
    if group.group is None or group.net is None or group.group.size == 1:
        return squares
    return group.net.all_reduce(squares, group.group).wait()


def _total(row: Tensor, start: int, count: int) -> Tensor:
    return row[start] if count == 1 else row[start : start + count].sum()


class SlotOptimizer(torch.optim.Optimizer):
    """An optimizer that needs norms, sums or gathers of whole tensors, and gets them under every layout.

    A subclass gives `update_tensors`, in which `p` is the part of a tensor that this rank updates: shapes and
    norms of the whole one come from `self.slot_group`, and collectives run on every rank, also on one that
    has no parameter. Without
    a session it is an ordinary optimizer over whole tensors.

    Attributes:
        whole_moments: keys of entries of `self.state[p]` that belong to the whole tensor and are equal on
            all ranks; all other tensors of the shape of a part are split as it is.
        shared_moments: keys of entries of `self.state` that belong to no parameter and are equal on all
            ranks.
        is_ordered: its result does not depend on where tensors are split, to the bit.
        collects_in_backward: it takes more than gradients from the passes of a step; see `begin_backward`.
    """

    whole_moments: ClassVar[frozenset[str]] = frozenset()
    shared_moments: ClassVar[frozenset[str]] = frozenset()
    is_ordered: ClassVar[bool] = False
    collects_in_backward: ClassVar[bool] = False
    _bound: SlotGroup | None = None
    _group_indices: Mapping[str, int] | None = None

    def update_tensors(self) -> None:
        """Update every parameter that has a gradient; called without autograd, collective over the ranks that
        hold its parts.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update_tensors")

    def begin_backward(self, scale: float, losses: Callable[[], Iterable[Any]] | None = None) -> None:
        """Prepare for the backward passes of a step; called before the first of them.

        Args:
            scale: factor of the losses in backward, which are sums over items.
            losses: runs the forwards of this process in the step again, and yields the `Loss` of each with
                its graph; None: the session gives it otherwise, if at all.
        """

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, on all ranks together."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.update_tensors()
        return loss

    def bind(self, group: SlotGroup, names: Mapping[nn.Parameter, str]) -> None:
        """Take the group whose ranks hold the tensors; called once, before parameters become parts.

        Args:
            group: equal on its ranks but for what each of them updates.
            names: of the parameters that ranks of the group hold.
        """
        self._bound = group
        self._group_indices = {
            names[p]: index
            for index, options in enumerate(self.param_groups)
            for p in options["params"]
            if p in names
        }

    @property
    def slot_group(self) -> SlotGroup:
        """The ranks that hold the tensors of this optimizer; this process alone outside of a session."""
        if self._bound is not None:
            return self._bound
        return SlotGroup.alone(p for options in self.param_groups for p in options["params"])

    def owned_tensors(self, group: SlotGroup) -> list[tuple[TensorSlot, int]]:
        """Return all tensors of this optimizer, whole, each with the index of its param group, in an order
        that is equal on all ranks of the group.
        """
        if self._group_indices is not None:
            indices = self._group_indices
        else:
            indices = {group.slots[p].name: i for i, g in enumerate(self.param_groups) for p in g["params"]}
        return [(slot, indices[slot.name]) for slot in group.tensors if slot.name in indices]
