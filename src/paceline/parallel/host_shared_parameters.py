"""Parameters that lie once on a host, in memory that all ranks have mapped: for ZeRO 3, and without a lock.

Under ZeRO 3 a gather is no copy: every rank computes with the whole tensors where they lie, and writes its
own parts only. Invariant: a part is written after the tally of a step, for which every rank has run its
micro-batches, and before the meeting after which everybody reads; so a parameter has the bits of the whole
one, at any time. No rank waits for others between its last micro-batch and its reduction, since those may
wait for what it has to scatter.
Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.3, where the ranks share one memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.comm.reduction.bucket_buffers import dense_strides
from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.slot import TensorSlot

_CACHE_LINE_BYTES = 64


class HostSharedParameters:
    """The use of parameters that lie in common memory.

    Args:
        memory: of the ranks that share the parameters.
    Wire: nothing; a meeting before each run, and before and after each evaluation.
    """

    gathers, pace = True, None

    def __init__(self, memory: SharedMemoryCollective) -> None:
        self._memory, self._flag = memory, torch.zeros(1)

    def begin(self) -> None:
        """Whatever was written is there for all."""
        self._memory.all_reduce(self._flag, "meeting").wait()

    def next(self) -> None:
        """Nothing comes or goes."""

    def end(self) -> None:
        """After an evaluation nobody changes the parameters before all have computed with them."""
        if not torch.is_grad_enabled():
            self.begin()

    def drop(self) -> None:
        """Nothing is under way."""


def share_sharded_parameters(sharded_model: ShardedModel, memory: SharedMemoryCollective) -> ShardedModel:
    """Move what a rank computes with into memory that lies once; collective.

    Args:
        sharded_model: its parts are whole, what it computes with has no memory.
    Returns:
        The same, whose parts are views of what is computed with.
    """
    places = _allocate_shared(sharded_model, memory)
    for one in sharded_model.held.values():
        p, own = sharded_model.computes[one.computes], one.updates
        p.data = places[one.computes]
        if own is not None:
            place = p.detach()[own.inside(one.computes)]
            sharded_model.updates[own].data = place.copy_(sharded_model.updates[own].detach())
    return replace(sharded_model, use=HostSharedParameters(memory))


def share_whole_parameters(sharded_model: ShardedModel, memory: SharedMemoryCollective) -> None:
    """Move whole parameters, equal on all ranks, into memory that lies once; collective, in place.

    Each rank may then read and write all of them at any time, and nobody waits.
    """
    for slot, place in _allocate_shared(sharded_model, memory).items():
        p = sharded_model.computes[slot]
        p.data = place.copy_(p.detach())  # every rank writes the same values
    memory.all_reduce(torch.zeros(1), "laid").wait()


def _allocate_shared(sharded_model: ShardedModel, memory: SharedMemoryCollective) -> dict[TensorSlot, Tensor]:
    """Zeros in common memory for what a rank computes with, in its shape and strides; collective."""
    found: dict[TensorSlot, Tensor] = {}
    for dtype in sorted({p.dtype for p in sharded_model.computes.values()}, key=str):
        alike = {slot: p for slot, p in sharded_model.computes.items() if p.dtype == dtype}
        step = max(1, _CACHE_LINE_BYTES // dtype.itemsize)
        sizes = [-(-slot.numel // step) * step for slot in alike]
        flat = memory.allocate_shared_once(sum(sizes), torch.empty(0, dtype=dtype))
        for (slot, p), piece in zip(alike.items(), flat.split(sizes), strict=True):
            strides = dense_strides(torch.empty_strided(p.shape, p.stride(), device="meta"))
            found[slot] = piece.as_strided(p.shape, strides, piece.storage_offset())
    return found
