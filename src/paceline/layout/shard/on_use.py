"""ZeRO 3: a rank keeps its parts; whole tensors exist while a block computes with them.

Before a block's forward its parameters are gathered, after it their memory is given back; before its backward they
are gathered again, and given back when the last of their gradients is there. What lies in no block is
gathered for a whole `run`. A gathered parameter has the bits of the whole one.

The parameters of the modules keep their shape; only their memory comes and goes, so that autograd finds in backward
what it saved in forward.
Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.3; Zhao et al. 2023, PyTorch FSDP,
arXiv:2304.11277, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import Collective
from paceline.comm.reduction import PartBuffer
from paceline.comm.reduction.part_buffer import Parts, plan_buckets
from paceline.slot import Slot


class GatherOnUse:
    """The comings and goings of one rank's parameters.

    Args:
        computes: whole-shaped parameters; their memory is given back here.
        updates: this rank's parts.
        parts: of every rank of the shard group.
        blocks: modules that are gathered by themselves.
        collective: over the shard group; exact.
    Wire: for every unit two gathers of (S-1)/S n bytes; one in evaluation.
    """

    def __init__(
        self,
        computes: Mapping[Slot, nn.Parameter],
        updates: Mapping[Slot, nn.Parameter],
        parts: Parts,
        blocks: Iterable[nn.Module],
        collective: Collective,
    ) -> None:
        self._blocks: list[_Block] = []
        left = dict(computes)
        for number, block in enumerate(blocks):
            inside = set(block.parameters())
            own = {slot: p for slot, p in left.items() if p in inside}
            if own:
                left = {slot: p for slot, p in left.items() if slot not in own}
                self._blocks.append(_Block(own, updates, parts, collective, f"block {number}"))
                self._blocks[-1].follow(block)
        self._rest = _Block(left, updates, parts, collective, "rest") if left else None
        for one in self._all():
            one.release()

    def begin(self) -> None:
        """A run begins; collective."""
        if self._rest is not None:
            self._rest.gather()

    def end(self) -> None:
        """A run is over, well or badly: give everything back."""
        for one in self._all():
            one.release()

    def _all(self) -> list[_Block]:
        return [*self._blocks, *([self._rest] if self._rest is not None else [])]


class _Block:
    """Parameters that come and go together."""

    def __init__(
        self,
        tensors: Mapping[Slot, nn.Parameter],
        updates: Mapping[Slot, nn.Parameter],
        parts: Parts,
        collective: Collective,
        name: str,
    ) -> None:
        self._tensors, self._updates, self._parts = tensors, updates, parts
        self._collective, self._name = collective, name
        self._own: Sequence[Sequence[Slot]] = plan_buckets(tensors, 2**62)
        self._is_here = True
        self._waited_for: set[Slot] = set()
        for p in tensors.values():
            p.data = p.detach().clone()  # memory of its own, that can be given back

    def follow(self, block: nn.Module) -> None:
        """Gather and release as the block computes."""
        block.register_forward_pre_hook(lambda *_: self.gather())
        block.register_forward_hook(lambda *_: self.release())
        block.register_full_backward_pre_hook(lambda *_: self._before_backward())
        for slot, p in self._tensors.items():
            p.register_post_accumulate_grad_hook(partial(self._has_gradient, slot))

    def gather(self) -> None:
        """Bring everything here; collective."""
        if self._is_here:
            return
        place = self._collective.group.rank
        with torch.no_grad():
            for number, slots in enumerate(self._own):
                buffer = PartBuffer(slots, self._tensors, self._parts, _zeros)
                buffer.write_row(place, self._updates)
                key = f"{self._name}.{number}"
                buffer.rows.copy_(self._collective.all_gather(buffer.rows[place], key).wait())
                for slot in slots:
                    p = self._tensors[slot]
                    p.untyped_storage().resize_(p.numel() * p.element_size())
                    buffer.read(slot, p.data)
        self._is_here = True

    def release(self) -> None:
        """Give the memory back."""
        for p in self._tensors.values():
            p.untyped_storage().resize_(0)
        self._is_here, self._waited_for = False, set()

    def _before_backward(self) -> None:
        self.gather()
        self._waited_for = set(self._tensors)

    def _has_gradient(self, slot: Slot, _p: Any) -> None:
        self._waited_for.discard(slot)
        if self._is_here and not self._waited_for:
            self.release()


def _zeros(num_values: int, like: Tensor) -> Tensor:
    return like.new_zeros(num_values)
