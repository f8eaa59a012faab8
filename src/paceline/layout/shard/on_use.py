"""ZeRO 3: a rank keeps its parts; whole tensors exist while a block computes with them.

Before a block's forward its parameters are gathered, after it their memory is given back; before its
backward they are gathered again, and given back when the last of their gradients is there. While a block
computes, the next one is on its way. What lies in no block is gathered for a whole `run`. A gathered
parameter has the bits of the whole one.

The parameters of the modules keep their shape; only their memory comes and goes, so that autograd finds in
backward what it saved in forward.
Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.3; Zhao et al. 2023, PyTorch FSDP,
arXiv:2304.11277, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import Collective, Handle, Net
from paceline.comm.reduction import PartBuffer
from paceline.comm.reduction.part_buffer import Parts, plan_buckets
from paceline.comm.reduction.reducer import drain
from paceline.slot import Slot


class GatherOnUse:
    """Gathers and releases one rank's parameters around their use.

    Ranks may have different numbers of micro-batches. Before each micro-batch the ranks agree whether anyone
    has one; a rank that has none left gathers what the others gather.

    Args:
        computes: whole-shaped parameters; their memory is given back here.
        updates: this rank's parts.
        parts: of every rank of the shard group.
        blocks: modules that are gathered by themselves, each computing once a micro-batch, in this order;
            none: everything is gathered for a whole run.
        collective: over the shard group; exact.
        net: carries the agreement.
    Wire: for every micro-batch two gathers of (S-1)/S n bytes, one in evaluation, and an all_reduce of 8
    bytes.
    """

    def __init__(
        self,
        computes: Mapping[Slot, nn.Parameter],
        updates: Mapping[Slot, nn.Parameter],
        parts: Parts,
        blocks: Sequence[nn.Module],
        collective: Collective,
        net: Net,
    ) -> None:
        self._group, self._net = collective.group, net
        self._blocks: list[_Block] = []
        left = dict(computes)
        for block in blocks:
            inside = set(block.parameters())
            own = {slot: p for slot, p in left.items() if p in inside}
            if own:
                left = {slot: p for slot, p in left.items() if slot not in own}
                self._add(block, _Block(own, updates, parts, collective, f"block {len(self._blocks)}"))
        self._rest = _Block(left, updates, parts, collective, "rest") if left else None
        self.in_backward = bool(self._blocks)
        self.drop()

    def _add(self, module: nn.Module, block: _Block) -> None:
        """Gather and release as the module computes."""
        number = len(self._blocks)
        self._blocks.append(block)
        module.register_forward_pre_hook(lambda *_: self._come(number))
        module.register_forward_hook(lambda *_: self._go(number))
        module.register_full_backward_pre_hook(lambda *_: self._come_back(number))
        for slot, p in block.tensors.items():
            p.register_post_accumulate_grad_hook(partial(block.has_gradient, slot))

    def begin(self) -> None:
        """See `Use`."""
        if self._rest is not None:
            self._rest.gather()

    def next(self) -> None:
        """See `Use`."""
        if self._blocks:
            self._agree(1.0)
            for block in self._blocks:
                block.release()

    def end(self) -> None:
        """See `Use`."""
        while self._blocks and self._agree(0.0):
            for block in [*self._blocks, *(reversed(self._blocks) if torch.is_grad_enabled() else ())]:
                block.gather()
                block.release()
        self.drop()

    def drop(self) -> None:
        """See `Use`."""
        for block in (*self._blocks, *([self._rest] if self._rest is not None else [])):
            block.release()

    def _agree(self, mine: float) -> bool:
        """Whether any rank has a micro-batch left."""
        flag = torch.tensor([mine], dtype=torch.float64)
        return bool(self._net.all_reduce(flag, self._group).wait() > 0)

    def _come(self, number: int) -> None:
        """A forward begins, or one is done again inside a backward."""
        self._blocks[number].gather()
        if not _is_in_backward() and number + 1 < len(self._blocks):
            self._blocks[number + 1].start()

    def _go(self, number: int) -> None:
        """A forward has ended; one that was done again is followed by its backward."""
        if not _is_in_backward():
            self._blocks[number].release()

    def _come_back(self, number: int) -> None:
        """A backward begins."""
        self._blocks[number].gather()
        self._blocks[number].waits_for_gradients()
        if number > 0:
            self._blocks[number - 1].start()


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


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
        self.tensors, self._updates, self._parts = tensors, updates, parts
        self._collective, self._name = collective, name
        self._groups: Sequence[Sequence[Slot]] = plan_buckets(tensors, 2**62)
        self._is_here = True
        self._arriving: list[tuple[PartBuffer, Handle]] = []
        self._waited_for: set[Slot] = set()
        for p in tensors.values():
            if p.untyped_storage().size():
                p.data = torch.empty_like(p).copy_(p.detach())  # memory of its own, that can be given back

    def start(self) -> None:
        """Begin to gather, unless it is here or on its way; collective."""
        if self._is_here or self._arriving:
            return
        place = self._collective.group.rank
        with torch.no_grad():
            for number, slots in enumerate(self._groups):
                buffer = PartBuffer(slots, self.tensors, self._parts, _zeros)
                buffer.write_row(place, self._updates)
                rows = self._collective.all_gather(buffer.rows[place], f"{self._name}.{number}")
                self._arriving.append((buffer, rows))

    def gather(self) -> None:
        """Bring everything here; collective, unless it is here."""
        if self._is_here:
            return
        self.start()
        with torch.no_grad():
            for buffer, rows in self._arriving:
                buffer.rows.copy_(rows.wait())
                for slot in buffer.slots:
                    p = self.tensors[slot]
                    p.untyped_storage().resize_(p.numel() * p.element_size())
                    buffer.read(slot, p.data)
        self._arriving, self._is_here = [], True

    def release(self) -> None:
        """Give the memory back, also of what is on its way."""
        drain(rows for _, rows in self._arriving)
        for p in self.tensors.values():
            p.untyped_storage().resize_(0)
        self._arriving, self._is_here, self._waited_for = [], False, set()

    def waits_for_gradients(self) -> None:
        """A backward begins: once all gradients are there, nobody needs the parameters."""
        self._waited_for = set(self.tensors)

    def has_gradient(self, slot: Slot, _p: Any) -> None:
        """A gradient is complete."""
        self._waited_for.discard(slot)
        if self._is_here and not self._waited_for:
            self.release()


def _zeros(num_values: int, like: Tensor) -> Tensor:
    return like.new_zeros(num_values)
