"""The shared memory route: ranks of one host add up their buffers where they lie, and nothing is sent.

A buffer is memory that every rank of the group has mapped. Each rank adds one slice of all buffers, in the
order of the ranks, and writes the sum into all of them. Invariant: between launch and the end of `wait` a
rank's buffer belongs to the group. The memory has no name, so it is freed with the last process that has
mapped it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective, ReceiveBuffer
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.routes.host_links import HostLinks, HostSignal, connect_single_host_group
from paceline.comm.routes.native import NativeCollective, build_native
from paceline.comm.routes.route_context import RouteContext
from paceline.comm.workspace import Workspace
from paceline.errors import CommunicationError, StrategyError
from paceline.job.mesh import RankGroup


def allocate_shared_memory(num_bytes: int, name: str) -> int:
    """Return an open file of `num_bytes` zeroed bytes of memory that no other process has; the caller closes
    it.

    Args:
        name: shown among the open files and maps of a process, and nowhere else.
    Raises:
        CommunicationError: the machine has no such memory left.
    """
    with ExitStack() as cleanup:
        try:
            file = os.memfd_create(name)
            cleanup.callback(os.close, file)
            # Reserve the pages now: without memory, a later write would kill the process (SIGBUS).
            os.posix_fallocate(file, 0, num_bytes)
        except OSError as error:
            raise CommunicationError(
                f"cannot allocate {num_bytes} bytes of shared memory: {error}",
                next_step="free memory, or choose route=native",
            ) from error
        cleanup.pop_all()
    return file


def map_shared_tensor(file: int, num_values: int, dtype: torch.dtype) -> Tensor:
    """Map the memory of an open file as a tensor [n]; the file need not stay open."""
    path = f"/proc/self/fd/{file}"
    return torch.from_file(path, shared=True, size=max(1, num_values), dtype=dtype)[:num_values]


_FILLED, _SUMMED = 0, 1
# Slices end at these multiples, so that no cache line is written by two ranks.
_CACHE_LINE_VALUES = 64
# Values that were added are still in the cache when they are written to the others.
CHUNK_VALUES = 1 << 16


WireCalls = Sequence[tuple[str, RankGroup, int]]
"""Operation, group and bytes of each collective that a sum replaces, for the ledger."""


class SharedMemoryCollective:
    """A collective over the ranks of one host, in CPU memory.

    Args:
        links: connects the group; `close` closes it.
    Wire: nothing. Of the other ranks' memory 2 (P-1)/P n bytes are read or written in an all_reduce and
        (P-1)/P n in a reduce_scatter, and the ledger counts these.
    Exactness: equal bits on every rank and in every run: values are added in the order of the ranks.
    Source: Hashmi et al. 2018, Designing Efficient Shared Address Space Reduction Collectives for
    Multi-/Many-cores, IPDPS.
    """

    feedback = None

    def __init__(self, net: Net, group: RankGroup, links: HostLinks) -> None:
        self.net, self.group = net, group
        self._links = links
        self._buffers: dict[str, list[Tensor]] = {}
        self._num_sums = 0
        self._workspace = Workspace()

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """Allocate zeros [n] that all ranks have mapped; collective. Sums of this very tensor copy
        nothing.
        """
        self._buffers[key] = self._map(num_values, like.dtype)
        return self._buffers[key][self.group.rank]

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """Launch a sum, which a `wait` or a poll computes on its thread."""
        buffers = self._buffers_of(x, key)
        local = buffers[self.group.rank]
        in_place = x.data_ptr() == local.data_ptr()
        if not in_place:
            local.copy_(x.reshape(-1))

        def add() -> None:
            sum_slice_in_all(buffers, self.group.rank)

        calls = [("all_reduce", self.group, x.numel() * x.element_size())]
        return self._launch(calls, key, add, lambda: x if in_place else x.copy_(local.view_as(x)))

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """Sum rows; the result lies in this rank's buffer, whose own row no other rank reads."""
        buffers, rank = self._buffers_of(x, key), self.group.rank
        if x.data_ptr() != buffers[rank].data_ptr():
            buffers[rank].copy_(x.reshape(-1))
        rows = [buffer.view_as(x)[rank] for buffer in buffers]
        scratch = self._workspace.take("slice", (CHUNK_VALUES,), x.dtype)

        def add() -> None:
            sum_into_row([row.reshape(-1) for row in rows], rank, scratch)

        calls = [("reduce_scatter", self.group, x.numel() * x.element_size())]
        return self._launch(calls, key, add, lambda: rows[rank])

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """Copy the values of all ranks from where they lie."""
        buffers = self._buffers_of(x, key)
        local = buffers[self.group.rank]
        if x.data_ptr() != local.data_ptr():
            local.copy_(x.reshape(-1))
        rows = torch.empty(self.group.size, x.numel(), dtype=x.dtype) if out is None else out

        def collect() -> None:
            for row, buffer in zip(rows, buffers, strict=True):
                row.copy_(buffer)

        calls = [("all_gather", self.group, x.numel() * x.element_size())]
        return self._launch(calls, key, collect, lambda: rows.view(self.group.size, *x.shape))

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        buffers = self._buffers_of(x, key)
        if self.group.rank == source:
            buffers[source].copy_(x.reshape(-1))
        calls = [("broadcast", self.group, x.numel() * x.element_size())]
        return self._launch(calls, key, lambda: x.copy_(buffers[source].view_as(x)), lambda: x)

    def combine(
        self, keys: Sequence[str], calls: WireCalls, add: Callable[[Sequence[Sequence[Tensor]]], None]
    ) -> Handle:
        """Let every rank change its share of all ranks' buffers, once all are filled.

        Args:
            keys: keys of buffers made by `buffer`.
            calls: collectives that this replaces, for the ledger.
            add: called with the buffers by key and rank; no two ranks may touch the same values.
        """
        buffers = [self._buffers[key] for key in keys]
        return self._launch(calls, keys[0], lambda: add(buffers), lambda: buffers[0][self.group.rank])

    def abort(self) -> None:
        """Do nothing: no state is kept between steps."""

    def close(self) -> None:
        """Close the links to the other ranks; buffers stay readable."""
        self._links.close()

    def _launch(
        self, calls: WireCalls, key: str, add: Callable[[], object], result: Callable[[], Tensor]
    ) -> Handle:
        ledger = self.net.ledger
        entries = [ledger.count_call(op, group.name, num_bytes, group.size) for op, group, num_bytes in calls]
        activity, (op, group, num_bytes) = self.net.activity, calls[0]
        place, number = activity.place_of(group.name), activity.latest_call(group.name)
        call = activity.launch(op, group.name, num_bytes, group.size)
        label = f"buffer '{key}' of {calls[0][2]} bytes"
        filled, summed = (HostSignal(phase, self._num_sums, label) for phase in (_FILLED, _SUMMED))
        self._num_sums += 1
        # Sent at the launch and not in `wait`: the others may start as soon as all buffers are filled.
        self._links.broadcast_signal(filled)
        has_added = False

        def add_once() -> None:
            nonlocal has_added
            if not has_added:
                for entry in entries:
                    entry.begin_call()
                self._links.wait_for_all(filled)
                add()
                has_added = True
                self._links.broadcast_signal(summed)

        def poll() -> bool:
            """Add this rank's share if all buffers are filled; return whether all ranks have added theirs."""
            if not has_added and self._links.poll_all(filled):
                add_once()
            is_complete = has_added and self._links.poll_all(summed)
            if is_complete and call is not None and not call.ended:
                call.complete()
            return is_complete

        def finish(deadline_seconds: float | None, exposed: bool) -> Tensor:
            began = time.perf_counter()
            waited_for = activity.begin_wait(op, place, group.name, number, num_bytes) if exposed else ""
            try:
                add_once()
                # No rank may touch its buffer before all have written their slices into it.
                self._links.wait_for_all(summed)
            finally:
                now = time.perf_counter()
                if exposed:
                    activity.end_wait(waited_for, began, now)
                for entry in entries:
                    entry.end_call()
                entries[0].exposed_seconds += now - began
            if call is not None and not call.ended:
                call.complete()
            return result()

        return Handle(finish, poll)

    def _buffers_of(self, x: Tensor, key: str) -> list[Tensor]:
        buffers = self._buffers.get(key)
        if buffers is None or buffers[0].numel() < x.numel() or buffers[0].dtype != x.dtype:
            buffers = self._buffers[key] = self._map(x.numel(), x.dtype)
        return buffers if buffers[0].numel() == x.numel() else [buffer[: x.numel()] for buffer in buffers]

    def allocate_shared_once(self, num_values: int, like: Tensor) -> Tensor:
        """Allocate zeros [n] that exist once, and that every rank of the group has mapped; collective."""
        shares = [num_values if rank == 0 else 0 for rank in range(self.group.size)]
        return self._map(shares[self.group.rank], like.dtype, shares)[0]

    def _map(self, num_values: int, dtype: torch.dtype, shares: Sequence[int] | None = None) -> list[Tensor]:
        """Map memory of every rank of the group, and return it by group rank; this rank's is zeroed.

        Args:
            num_values: values of this rank.
            shares: values of every rank; as many on each if None.
        """
        num_bytes = max(1, num_values) * dtype.itemsize
        local_file = allocate_shared_memory(num_bytes, "paceline-sums")
        files = {self.group.ranks[self.group.rank]: local_file}
        try:
            files |= self._links.share(local_file)
            sizes = shares or [num_values] * self.group.size
            return [self._view(files[r], n, dtype) for r, n in zip(self.group.ranks, sizes, strict=True)]
        finally:
            # A map stays valid without the open file.
            for file in files.values():
                os.close(file)

    def _view(self, file: int, num_values: int, dtype: torch.dtype) -> Tensor:
        num_bytes = max(1, num_values) * dtype.itemsize
        # Ranks out of step would map each other's memory with a wrong size.
        if os.fstat(file).st_size != num_bytes:
            raise CommunicationError(
                f"a rank of {self.group.ranks} shares {os.fstat(file).st_size} bytes, this one {num_bytes}",
                next_step="every rank must sum the same buffers in the same order",
            )
        return map_shared_tensor(file, num_values, dtype)


def sum_into_row(rows: Sequence[Tensor], index: int, scratch: Tensor) -> None:
    """Replace row `index`, [n] each, by the sum of all rows, added in their order.

    Args:
        scratch: memory for the values that are added at a time [m].
    """
    for start in range(0, rows[0].numel(), scratch.numel()):
        first, *others = (row[start : start + scratch.numel()] for row in rows)
        total = scratch[: first.numel()].copy_(first)
        for other in others:
            total.add_(other)
        rows[index][start : start + scratch.numel()].copy_(total)


def sum_slice_in_all(buffers: Sequence[Tensor], index: int) -> None:
    """Replace slice `index` of every buffer, [n] each, by the sum of that slice over all buffers.

    If every rank does this with its own index, all buffers end as the sum.
    """
    num_values = buffers[0].numel()
    width = -(-num_values // (len(buffers) * _CACHE_LINE_VALUES)) * _CACHE_LINE_VALUES
    begin, end = min(index * width, num_values), min((index + 1) * width, num_values)
    for start in range(begin, end, CHUNK_VALUES):
        total, *others = (buffer[start : min(start + CHUNK_VALUES, end)] for buffer in buffers)
        for other in others:
            total.add_(other)
        for other in others:
            other.copy_(total)


def build_shared_memory(group: RankGroup, context: RouteContext) -> Collective:
    """Build sums in the memory of one host.

    Raises:
        StrategyError: the ranks of the group share none.
    """
    path = shared_or_native(group, context)
    if isinstance(path, NativeCollective):
        why = "the job uses GPUs" if context.device.type != "cpu" else "its ranks are on several hosts"
        raise StrategyError(
            f"route=shared-memory cannot sum over group '{group.name}' {group.ranks}: {why}",
            next_step="choose route=auto, which uses shared memory where possible, or route=native",
        )
    return path


def shared_or_native(group: RankGroup, context: RouteContext) -> Collective:
    """Build sums in shared memory if all ranks of the group are on one host and there is no codec; else
    native ones.
    """
    if context.is_coded:
        return build_native(group, context)
    return host_memory_or_none(group, context) or NativeCollective(context.net, group)


def host_memory_or_none(group: RankGroup, context: RouteContext) -> SharedMemoryCollective | None:
    """Return sums in the memory of the host of a group; None if its ranks are on several hosts, or on
    GPUs.
    """
    links = connect_single_host_group(group, context.net) if context.device.type == "cpu" else None
    if links is None:
        return None
    path = SharedMemoryCollective(context.net, group, links)
    context.close_callbacks.append(path.close)
    return path
