"""ZeRO 3: a rank keeps its parts; whole tensors exist while a block computes with them.

Before a block's forward its parameters are gathered, after it their memory is given back; before its
backward they are gathered again, and given back when the last of their gradients is there and the next block
computes. While a block computes, the next one is on its way. What lies in no block is gathered for a whole
`run`. A gathered parameter has the bits of the whole one.

A parameter that is used outside its block, as by a loss, is gathered with its block at its first use, and
stays until the micro-batch has ended, since nobody knows who needs it in backward.

The parameters of the modules keep their shape; only their memory comes and goes, so that autograd finds in
backward what it saved in forward.
Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.3; Zhao et al. 2023, PyTorch FSDP,
arXiv:2304.11277, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from paceline.comm import Collective, Net
from paceline.comm.reduction import Pace, behind_bytes
from paceline.comm.reduction.part_buffer import Parts
from paceline.comm.workspace import Workspace
from paceline.errors import TaskError
from paceline.layout.shard.away import away_class
from paceline.layout.shard.block import Block
from paceline.layout.shard.cycle import Cycle
from paceline.slot import Slot


class GatherOnUse:
    """Gathers and releases one rank's parameters around their use.

    Ranks may have different numbers of micro-batches, and use blocks in different orders: see `Cycle`.

    Args:
        computes: whole-shaped parameters; their memory is given back here.
        updates: this rank's parts.
        parts: of every rank of the shard group.
        blocks: modules that are gathered by themselves, in the order in which most micro-batches use them;
            none: everything is gathered for a whole run.
        collective: over the shard group; exact.
        net: carries the agreement.
    Wire: for every micro-batch two gathers of (S-1)/S n bytes, one in evaluation, and all_reduces of 8 bytes
    and 16 for each reduction, one and, but in evaluation, one for each block. As much again for every time
    that a micro-batch uses blocks in another order.
    """

    gathers = True

    def __init__(
        self,
        computes: Mapping[Slot, nn.Parameter],
        updates: Mapping[Slot, nn.Parameter],
        parts: Parts,
        blocks: Sequence[nn.Module],
        collective: Collective,
        net: Net,
    ) -> None:
        self._blocks: list[Block] = []
        self._home: dict[int, tuple[str, int]] = {}
        away = away_class(self._use_elsewhere)
        left, memory = dict(computes), Workspace()
        for block in blocks:
            inside = set(block.parameters())
            own = {slot: p for slot, p in left.items() if p in inside}
            if own:
                left = {slot: p for slot, p in left.items() if slot not in own}
                name = f"block {len(self._blocks)}"
                self._add(block, Block(own, updates, parts, collective, name, away, memory))
        self._rest = Block(left, updates, parts, collective, "rest", away) if left else None
        self._home |= {id(p): (slot.name, len(self._blocks)) for slot, p in left.items()}
        self.pace = self._make_pace() if self._blocks else None
        self._cycle = Cycle(self._blocks, collective.group, net, self.pace)
        self.drop()

    def _make_pace(self) -> Pace:
        rest = 0 if self._rest is None else self._rest.num_bytes
        return Pace(behind_bytes([block.num_bytes for block in self._blocks], rest))

    def _add(self, module: nn.Module, block: Block) -> None:
        """Gather and release as the module computes."""
        number = len(self._blocks)
        self._blocks.append(block)
        module.register_forward_pre_hook(lambda *_: self._bring(number))
        module.register_forward_hook(lambda *_: self._go(number))
        module.register_full_backward_pre_hook(lambda *_: self._come_back(number))
        for slot, p in block.tensors.items():
            self._home[id(p)] = slot.name, number
            p.register_post_accumulate_grad_hook(partial(block.has_gradient, slot))

    def begin(self) -> None:
        """See `Use`."""
        if self._rest is not None:
            self._rest.gather()
        self._cycle.begin(both_ways=torch.is_grad_enabled())
        self._is_running = True

    def next(self) -> None:
        """See `Use`."""
        if self._blocks:
            self._cycle.next()
            for block in self._blocks:
                block.release()

    def end(self) -> None:
        """See `Use`."""
        if self._blocks:
            self._cycle.end()
        self.drop()

    def drop(self) -> None:
        """See `Use`."""
        for block in (*self._blocks, *([self._rest] if self._rest is not None else [])):
            block.release()
        self._cycle.stop()
        self._is_running = False

    def _go(self, number: int) -> None:
        """A forward has ended; one that was done again inside a backward is followed by its backward."""
        block = self._blocks[number]
        if not (_is_in_backward() or block.stays):
            block.release()

    def _come_back(self, number: int) -> None:
        """A backward begins."""
        self._bring(number)
        self._blocks[number].waits_for_gradients()

    def _use_elsewhere(self, p: nn.Parameter) -> None:
        """Somebody computes with a parameter that is not here."""
        name, number = self._home[id(p)]
        self._require_running(name)
        self._bring(number)
        self._blocks[number].stays = True

    def _bring(self, number: int) -> None:
        self._require_running(next(iter(self._blocks[number].tensors)).name)
        self._cycle.bring(number)

    def _require_running(self, name: str) -> None:
        """Where ranks gather.

        Raises:
            TaskError: this is between two runs.
        """
        if not self._is_running:
            raise TaskError(
                f"'{name}' is used between steps, when a rank holds its part of it only (zero=3)",
                next_step="use it in the loss, take whole tensors from session.snapshot() on every rank, or"
                " choose zero=2",
            )


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
