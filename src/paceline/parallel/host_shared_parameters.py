"""Parameters that exist once on a host, in memory that all of its ranks map: for ZeRO 3 and for Hogwild.

Under ZeRO 3 nothing is copied in a gather: every rank computes with the whole tensors in place and writes
only its own parts. Invariant: a part is written after the tally of a step, when every rank has run its
micro-batches, and before the barrier after which ranks read again; so a parameter always has the bits of the
whole one. No rank waits for others between its last micro-batch and its reduction, since those may wait for
what it scatters.

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
    """Lifecycle of parameters in shared memory.

    Args:
        memory: of the ranks that share the parameters.
    Wire: nothing; a barrier before each run, and before and after each evaluation.
    """

    gathers, pace = True, None

    def __init__(self, memory: SharedMemoryCollective) -> None:
        self._memory, self._flag = memory, torch.zeros(1)

    def begin(self) -> None:
        """Wait until all ranks have written their parts."""
        self._memory.all_reduce(self._flag, "meeting").wait()

    def next(self) -> None:
        """Do nothing: the parameters stay in memory."""

    def end(self) -> None:
        """Wait after an evaluation, so that no rank changes parameters that another still reads."""
        if not torch.is_grad_enabled():
            self.begin()

    def drop(self) -> None:
        """Do nothing: nothing is in flight."""


def share_sharded_parameters(sharded_model: ShardedModel, memory: SharedMemoryCollective) -> ShardedModel:
    """Move the whole parameters that a rank computes with into memory shared on the host; collective.

    Args:
        sharded_model: its own parts are allocated; the whole parameters are not.
    Returns:
        The same model; its own parts are views of the whole parameters.
    """
    shared = _allocate_shared(sharded_model, memory)
    for placement in sharded_model.held.values():
        p, updated = sharded_model.computes[placement.computes], placement.updates
        p.data = shared[placement.computes]
        if updated is not None:
            part = p.detach()[updated.inside(placement.computes)]
            sharded_model.updates[updated].data = part.copy_(sharded_model.updates[updated].detach())
    # No barrier: `begin` waits until all ranks have written their parts.
    return replace(sharded_model, use=HostSharedParameters(memory))


def share_whole_parameters(sharded_model: ShardedModel, memory: SharedMemoryCollective) -> None:
    """Move whole parameters, equal on all ranks, into memory shared on the host; collective, in place.

    Each rank may then read and write all of them at any time, without a lock.
    """
    for slot, shared in _allocate_shared(sharded_model, memory).items():
        p = sharded_model.computes[slot]
        # Every rank writes the same values, so the order of the writes does not matter.
        p.data = shared.copy_(p.detach())
    # A barrier: no rank may train before all have written.
    memory.all_reduce(torch.zeros(1), "laid").wait()


def _allocate_shared(sharded_model: ShardedModel, memory: SharedMemoryCollective) -> dict[TensorSlot, Tensor]:
    """Allocate zeros in shared memory for what a rank computes with, in its shape and strides; collective."""
    tensors: dict[TensorSlot, Tensor] = {}
    # Sorted, since allocating is collective.
    for dtype in sorted({p.dtype for p in sharded_model.computes.values()}, key=str):
        same_dtype = {slot: p for slot, p in sharded_model.computes.items() if p.dtype == dtype}
        # Tensors begin at cache lines, so that ranks that write neighbours do not share one.
        step = max(1, _CACHE_LINE_BYTES // dtype.itemsize)
        sizes = [-(-slot.numel // step) * step for slot in same_dtype]
        flat = memory.allocate_shared_once(sum(sizes), torch.empty(0, dtype=dtype))
        for (slot, p), piece in zip(same_dtype.items(), flat.split(sizes), strict=True):
            strides = dense_strides(torch.empty_strided(p.shape, p.stride(), device="meta"))
            tensors[slot] = piece.as_strided(p.shape, strides, piece.storage_offset())
    return tensors
