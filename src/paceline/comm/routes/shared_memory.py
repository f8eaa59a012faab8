"""Memory without a name that ranks of one host have mapped: it is gone when the last of them is.

The route through memory: ranks of one host add up their buffers where they lie, and nothing is sent.

A buffer is memory that every rank of the group has mapped. Each rank adds one slice of all buffers, in the
order of the ranks, and writes the sum into all of them. Invariant: between launch and the end of `wait` a
rank's buffer belongs to the group. The memory has no name, so it is gone when the last rank is.
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
    """An open file of so many zeroed bytes, which nobody else has; the caller closes it.

    Args:
        name: seen among the open files and maps of a process, and nowhere else.
    Raises:
        CommunicationError: the machine has no such memory left.
    """
    with ExitStack() as cleanup:
        try:
            file = os.memfd_create(name)
            cleanup.callback(os.close, file)
            os.posix_fallocate(file, 0, num_bytes)
        except OSError as error:
            raise CommunicationError(
                f"there are no {num_bytes} bytes of shared memory: {error}",
                next_step="free memory, or choose route=native",
            ) from error
        cleanup.pop_all()
    return file


def map_shared_tensor(file: int, num_values: int, dtype: torch.dtype) -> Tensor:
    """The memory of an open file as a tensor [n]; the file need not stay open."""
    path = f"/proc/self/fd/{file}"
    return torch.from_file(path, shared=True, size=max(1, num_values), dtype=dtype)[:num_values]


_FILLED, _SUMMED = 0, 1
_CACHE_LINE_VALUES = 64  # slices end at these multiples, so that no cache line is written by two ranks
CHUNK_VALUES = 1 << 16  # what was added is still in the cache when it is written to the others


WireCalls = Sequence[tuple[str, RankGroup, int]]
"""Operation, group and bytes, of what a sum would cost on a wire."""


class SharedMemoryCollective:
    """Sums over the ranks of one host, in processor memory.

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
        self._parts: dict[str, list[Tensor]] = {}
        self._num_sums = 0
        self._workspace = Workspace()

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`; collective. Sums of this very tensor copy nothing."""
        self._parts[key] = self._map(num_values, like.dtype)
        return self._parts[key][self.group.rank]

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`; the sum is made in `wait`, by the thread that waits."""
        parts = self._parts_of(x, key)
        mine = parts[self.group.rank]
        in_place = x.data_ptr() == mine.data_ptr()
        if not in_place:
            mine.copy_(x.reshape(-1))

        def add() -> None:
            sum_slice_in_all(parts, self.group.rank)

        calls = [("all_reduce", self.group, x.numel() * x.element_size())]
        return self._launch(calls, key, add, lambda: x if in_place else x.copy_(mine.view_as(x)))

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """See `Collective`; the result lies in this rank's buffer, whose own row nobody else reads."""
        parts, place = self._parts_of(x, key), self.group.rank
        if x.data_ptr() != parts[place].data_ptr():
            parts[place].copy_(x.reshape(-1))
        rows = [part.view_as(x)[place] for part in parts]
        scratch = self._workspace.take("slice", (CHUNK_VALUES,), x.dtype)

        def add() -> None:
            sum_into_row([row.reshape(-1) for row in rows], place, scratch)

        calls = [("reduce_scatter", self.group, x.numel() * x.element_size())]
        return self._launch(calls, key, add, lambda: rows[place])

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """See `Collective`; every rank copies the others' values from where they lie."""
        parts = self._parts_of(x, key)
        mine = parts[self.group.rank]
        if x.data_ptr() != mine.data_ptr():
            mine.copy_(x.reshape(-1))
        rows = torch.empty(self.group.size, x.numel(), dtype=x.dtype) if out is None else out

        def collect() -> None:
            for row, part in zip(rows, parts, strict=True):
                row.copy_(part)

        calls = [("all_gather", self.group, x.numel() * x.element_size())]
        return self._launch(calls, key, collect, lambda: rows.view(self.group.size, *x.shape))

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`."""
        parts = self._parts_of(x, key)
        if self.group.rank == source:
            parts[source].copy_(x.reshape(-1))
        calls = [("broadcast", self.group, x.numel() * x.element_size())]
        return self._launch(calls, key, lambda: x.copy_(parts[source].view_as(x)), lambda: x)

    def combine(
        self, keys: Sequence[str], calls: WireCalls, add: Callable[[Sequence[Sequence[Tensor]]], None]
    ) -> Handle:
        """Let every rank change its share of all ranks' buffers, once all are filled.

        Args:
            keys: of buffers made by `buffer`.
            calls: what this would cost on a wire, for the ledger.
            add: is given the buffers by key and rank; no two ranks may touch the same values.
        """
        parts = [self._parts[key] for key in keys]
        return self._launch(calls, keys[0], lambda: add(parts), lambda: parts[0][self.group.rank])

    def abort(self) -> None:
        """See `Collective`; nothing is kept between steps."""

    def close(self) -> None:
        """Leave the other ranks; buffers stay readable."""
        self._links.close()

    def _launch(
        self, calls: WireCalls, key: str, add: Callable[[], object], result: Callable[[], Tensor]
    ) -> Handle:
        ledger = self.net.ledger
        entries = [ledger.count_call(op, group.name, num_bytes, group.size) for op, group, num_bytes in calls]
        label = f"buffer '{key}' of {calls[0][2]} bytes"
        filled, summed = (HostSignal(phase, self._num_sums, label) for phase in (_FILLED, _SUMMED))
        self._num_sums += 1
        self._links.broadcast_signal(filled)

        def finish(deadline_seconds: float | None, exposed: bool) -> Tensor:
            began = time.perf_counter()
            for entry in entries:
                entry.begin_call()
            try:
                self._links.wait_for_all(filled)
                add()
                self._links.broadcast_signal(summed)
                self._links.wait_for_all(summed)
            finally:
                for entry in entries:
                    entry.end_call()
                entries[0].exposed_seconds += time.perf_counter() - began
            return result()

        return Handle(finish)

    def _parts_of(self, x: Tensor, key: str) -> list[Tensor]:
        parts = self._parts.get(key)
        if parts is None or parts[0].numel() < x.numel() or parts[0].dtype != x.dtype:
            parts = self._parts[key] = self._map(x.numel(), x.dtype)
        return parts if parts[0].numel() == x.numel() else [part[: x.numel()] for part in parts]

    def allocate_shared_once(self, num_values: int, like: Tensor) -> Tensor:
        """Zeros [n] that lie once, and that every rank of the group has mapped; collective."""
        shares = [num_values if rank == 0 else 0 for rank in range(self.group.size)]
        return self._map(shares[self.group.rank], like.dtype, shares)[0]

    def _map(self, num_values: int, dtype: torch.dtype, shares: Sequence[int] | None = None) -> list[Tensor]:
        """Memory of every rank of the group, by place in the group; this rank's is zeroed.

        Args:
            num_values: of this rank.
            shares: of every rank; as many on each if None.
        """
        num_bytes = max(1, num_values) * dtype.itemsize
        mine = allocate_shared_memory(num_bytes, "paceline-sums")
        files = {self.group.ranks[self.group.rank]: mine}
        try:
            files |= self._links.share(mine)
            sizes = shares or [num_values] * self.group.size
            return [self._view(files[r], n, dtype) for r, n in zip(self.group.ranks, sizes, strict=True)]
        finally:
            for file in files.values():
                os.close(file)

    def _view(self, file: int, num_values: int, dtype: torch.dtype) -> Tensor:
        num_bytes = max(1, num_values) * dtype.itemsize
        if os.fstat(file).st_size != num_bytes:
            raise CommunicationError(
                f"a rank of {self.group.ranks} shares {os.fstat(file).st_size} bytes, this one {num_bytes}",
                next_step="every rank must sum the same buffers in the same order",
            )
        return map_shared_tensor(file, num_values, dtype)


def sum_into_row(rows: Sequence[Tensor], place: int, scratch: Tensor) -> None:
    """Replace row number `place`, [n] each, by the sum of all, added in their order.

    Args:
        scratch: as much as is added at a time [m].
    """
    for start in range(0, rows[0].numel(), scratch.numel()):
        first, *others = (row[start : start + scratch.numel()] for row in rows)
        total = scratch[: first.numel()].copy_(first)
        for other in others:
            total.add_(other)
        rows[place][start : start + scratch.numel()].copy_(total)


def sum_slice_in_all(parts: Sequence[Tensor], place: int) -> None:
    """Replace slice number `place` of every part, [n] each, by the sum of that slice over all parts.

    If every rank does this with its own place, all parts end as the sum.
    """
    num_values = parts[0].numel()
    width = -(-num_values // (len(parts) * _CACHE_LINE_VALUES)) * _CACHE_LINE_VALUES
    begin, end = min(place * width, num_values), min((place + 1) * width, num_values)
    for start in range(begin, end, CHUNK_VALUES):
        total, *others = (part[start : min(start + CHUNK_VALUES, end)] for part in parts)
        for other in others:
            total.add_(other)
        for other in others:
            other.copy_(total)


def build_shared_memory(group: RankGroup, context: RouteContext) -> Collective:
    """The memory of one host.

    Raises:
        StrategyError: the group has none in common.
    """
    found = shared_or_native(group, context)
    if isinstance(found, NativeCollective):
        why = (
            "this job computes on GPUs" if context.device.type != "cpu" else "its ranks run on several hosts"
        )
        raise StrategyError(
            f"route=shared-memory cannot sum over group '{group.name}' {group.ranks}: {why}",
            next_step="choose route=auto, which takes memory where it can, or route=native",
        )
    return found


def shared_or_native(group: RankGroup, context: RouteContext) -> Collective:
    """Memory where all ranks of the group are on one host, and nothing is coded."""
    if context.is_coded:
        return build_native(group, context)
    return host_memory_or_none(group, context) or NativeCollective(context.net, group)


def host_memory_or_none(group: RankGroup, context: RouteContext) -> SharedMemoryCollective | None:
    """The memory of the host on which all ranks of a group run; None: they run on several, or on GPUs."""
    links = connect_single_host_group(group, context.net) if context.device.type == "cpu" else None
    if links is None:
        return None
    found = SharedMemoryCollective(context.net, group, links)
    context.close_callbacks.append(found.close)
    return found
