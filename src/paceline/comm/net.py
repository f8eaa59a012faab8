"""The net: this rank's end of every wire. Each collective is counted, has a deadline, and fails by name.

Invariant: a collective on a group of one rank is a copy and costs nothing, so callers need no special
case for one process. What goes through here is native (NCCL or Gloo); it does *not* decide who reduces what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.handle import Handle, failure, launched
from paceline.comm.ledger import ByteLedger, Entry
from paceline.comm.operations import REDUCE, by_backend
from paceline.comm.rows import exchange, gather
from paceline.errors import CommunicationError
from paceline.mesh import Group

_WIDENED = {torch.bool: torch.uint8, torch.int16: torch.int32}
"""Types that Gloo does not carry, and the ones that carry them exactly."""


class Net:
    """Collectives of one rank, counted in `ledger`.

    Args:
        deadline_seconds: the longest that any wait may take.
        times_calls: measure the busy time of every call (CPU backends only; NCCL completes on a stream).
    """

    def __init__(self, deadline_seconds: float = 120.0, *, times_calls: bool = True) -> None:
        self.ledger = ByteLedger()
        self.deadline_seconds = deadline_seconds
        self.times_calls = times_calls
        self.step = 0

    # -- every rank ends with something -----------------------------------------------------------------

    def all_reduce(self, x: Tensor, group: Group, reduction: str = "sum") -> Handle:
        """Reduce over the group, in place; the handle returns `x`.

        Exactness: equal bits on every rank; the order of the sum is the backend's.
        Wire: 2 (P-1)/P n bytes, 2 (P-1) rounds (ring).
        """
        op = by_backend(reduction, x)
        return self._in_place("all_reduce", x, group, lambda t, pg: pg.allreduce([t], op))

    def broadcast(self, x: Tensor, group: Group, source: int = 0) -> Handle:
        """Copy `x` of the group's rank `source` to all, in place; the handle returns `x`."""
        return self._in_place("broadcast", x, group, lambda t, pg: pg.broadcast(t, source))

    def reduce(self, x: Tensor, group: Group, destination: int = 0, reduction: str = "sum") -> Handle:
        """Reduce to one rank, in place; on other ranks the content of `x` is undefined afterwards."""
        op = by_backend(reduction, x)
        return self._in_place("reduce", x, group, lambda t, pg: pg.reduce(t, destination, op))

    def all_gather(self, x: Tensor, group: Group, *, equal: bool = False) -> Handle:
        """The handle returns a list of every rank's tensor; shapes may differ in the first dimension.

        Wire: (P-1) times the largest tensor; unless shapes are `equal`, one more small all_gather.
        """
        if group.handle is None:
            return Handle.ready([x.clone()])
        lengths = [len(x)] * group.size if equal else self._lengths(x, group)
        padded = _padded(x, max(lengths))
        out = padded.new_empty((group.size, *padded.shape))
        shape = x.shape[1:] if x.dim() else ()

        def unpack(out: Tensor) -> list[Tensor]:
            parts = [out[i][: lengths[i] * _row(x)].to(x.dtype) for i in range(group.size)]
            if x.dim() == 0:
                return [part.reshape(()) for part in parts]
            return [part.reshape(n, *shape) for part, n in zip(parts, lengths, strict=True)]

        return self.gather_rows(padded, out, group).then(unpack)

    def gather_rows(self, x: Tensor, out: Tensor, group: Group) -> Handle:
        """Fill row i of `out` [P, ...] with `x` of rank i, which may be that row; else as `exchange_rows`."""
        if group.handle is None:
            return Handle.ready(out.copy_(x.unsqueeze(0)))
        entry = self._launch("all_gather", x, group)
        work = self._call("all_gather", group, lambda pg: gather(pg, group.rank, _real(x), _real(out)))
        return launched("all_gather", group, self, work, entry, lambda: out)

    def reduce_scatter(self, x: Tensor, group: Group, reduction: str = "sum") -> Handle:
        """Reduce, and keep part `group.rank`; the first dimension must be a multiple of the group's size.

        Parts are exchanged and reduced here, in the order of the ranks: Gloo's own reduce_scatter moves
        the bytes of an all_reduce, and its wait knows no deadline.

        Wire: (P-1)/P n bytes, 1 round.
        """
        if x.dim() == 0 or x.shape[0] % group.size:
            raise CommunicationError(
                f"reduce_scatter over {group.size} ranks cannot split shape {tuple(x.shape)}",
                next_step="pad the first dimension to a multiple of the group's size",
            )
        if group.handle is None:
            return Handle.ready(x.clone())
        source = _carried(x)
        entry = self._launch("reduce_scatter", source, group)
        parts = torch.empty_like(source).view(group.size, x.shape[0] // group.size, *x.shape[1:])
        rows = source.view(parts.shape)
        work = self._call(
            "reduce_scatter", group, lambda pg: exchange(pg, group.rank, _real(rows), _real(parts))
        )
        return launched(
            "reduce_scatter", group, self, work, entry, lambda: REDUCE[reduction](parts).to(x.dtype)
        )

    def all_to_all(self, parts: Sequence[Tensor], group: Group) -> Handle:
        """Send `parts[i]` to rank i; the handle returns what each rank sent here. All parts are alike."""
        if group.handle is None:
            return Handle.ready([part.clone() for part in parts])
        source, kind = _carried(torch.stack(list(parts))), parts[0].dtype  # the parts may go
        arriving = self.exchange_rows(source, torch.empty_like(source), group)
        return arriving.then(lambda out: list(out.to(kind)))

    def exchange_rows(self, x: Tensor, out: Tensor, group: Group, tag: int = 0) -> Handle:
        """Send row i of `x` [P, ...] to rank i; the handle returns `out`, what each rank sent here.

        Both are contiguous, of a type that the backend carries. Wire: (P-1)/P n bytes, 1 round.

        Args:
            tag: 0 to 3; on the processor, ranks may launch those of different tags in different orders.
        """
        if group.handle is None:
            return Handle.ready(out.copy_(x))
        entry = self._launch("all_to_all", x, group)
        work = self._call("all_to_all", group, lambda pg: exchange(pg, group.rank, _real(x), _real(out), tag))
        return launched("all_to_all", group, self, work, entry, lambda: out)

    # -- one rank has, or gets, all ---------------------------------------------------------------------

    def gather(self, x: Tensor, group: Group, destination: int = 0) -> Handle:
        """The handle returns a list of every rank's tensor on `destination`, an empty list elsewhere."""
        if group.handle is None:
            return Handle.ready([x.clone()])
        source = _carried(x)
        out = [torch.empty_like(source) for _ in group.ranks] if group.rank == destination else []
        entry = self._launch("gather", source, group, times=group.size)
        work = self._call(
            "gather",
            group,
            lambda pg: pg.gather([out] if out else [], [source], _rooted(dist.GatherOptions(), destination)),
        )
        return launched("gather", group, self, work, entry, lambda: [part.to(x.dtype) for part in out])

    def scatter(self, parts: Sequence[Tensor] | None, like: Tensor, group: Group, source: int = 0) -> Handle:
        """Give `parts[i]` of rank `source` to rank i; `like` tells the others shape and type."""
        if group.handle is None:
            return Handle.ready((parts or [like])[0].clone())
        out = torch.empty_like(_carried(like))
        sent = [_carried(part) for part in parts] if parts is not None and group.rank == source else []
        entry = self._launch("scatter", out, group, times=group.size)
        work = self._call(
            "scatter",
            group,
            lambda pg: pg.scatter([out], [sent] if sent else [], _rooted(dist.ScatterOptions(), source)),
        )
        return launched("scatter", group, self, work, entry, lambda: out.to(like.dtype))

    # -- one rank to another ----------------------------------------------------------------------------

    def send(self, x: Tensor, group: Group, to: int, tag: int = 0) -> Handle:
        """Send a contiguous tensor to the group's rank `to`; do not change it before `wait`."""
        self._launch("send", x, group)
        work = self._call("send", group, lambda pg: pg.send([_real(_carried(x))], to, tag))
        there = f"send to rank {group.ranks[to]}"
        return launched(there, group, self, work, None, lambda: x)  # Gloo does not tell when it ends

    def receive(self, x: Tensor, group: Group, source: int, tag: int = 0) -> Handle:
        """Receive into a contiguous tensor from the group's rank `source`; the handle returns it."""
        work = self._call("receive", group, lambda pg: pg.recv([_real(x)], source, tag))
        return launched(f"receive from rank {group.ranks[source]}", group, self, work, None, lambda: x)

    def barrier(self, group: Group) -> None:
        """Wait until all ranks of the group are here."""
        flag = torch.zeros(1, dtype=torch.uint8, device=device_of(group))
        self._in_place("barrier", flag, group, lambda t, pg: pg.allreduce([t])).wait()

    # -- the few lines around the backend ---------------------------------------------------------------

    def _in_place(self, op: str, x: Tensor, group: Group, call: Callable[[Tensor, Any], Any]) -> Handle:
        if group.handle is None or (x.numel() == 0):
            return Handle.ready(x)
        carried = _carried(x)
        entry = self._launch(op, carried, group)
        work = self._call(op, group, lambda pg: call(_real(carried), pg))

        def copy_back() -> Tensor:
            return x if carried is x else x.copy_(carried)

        return launched(op, group, self, work, entry, copy_back)

    def _call(self, op: str, group: Group, call: Callable[[Any], Any]) -> Any:
        try:
            return call(group.handle)
        except RuntimeError as error:
            raise failure(op, group, self, error, self.deadline_seconds) from error

    def _launch(self, op: str, x: Tensor, group: Group, times: int = 1) -> Entry:
        return self.ledger.launched(op, group.name, times * x.numel() * x.element_size(), group.size)

    def _lengths(self, x: Tensor, group: Group) -> list[int]:
        mine = torch.tensor([x.shape[0] if x.dim() else 1], device=x.device)
        out = mine.new_empty(group.size)
        self._launch("all_gather", mine, group)
        work = self._call("all_gather", group, lambda pg: pg._allgather_base(out, mine))
        launched("all_gather", group, self, work, None, lambda: out).wait()
        return [int(n) for n in out]


def _carried(x: Tensor) -> Tensor:
    """The same values in a contiguous tensor of a type that the backend carries; `x` itself if it is one."""
    wide = _WIDENED.get(x.dtype)
    return (x if wide is None else x.to(wide)).contiguous()


def _row(x: Tensor) -> int:
    """Number of elements per entry of the first dimension."""
    return prod(x.shape[1:])


def _real(x: Tensor) -> Tensor:
    """Complex values as pairs of real ones, in the same memory: Gloo knows no complex types."""
    return torch.view_as_real(x) if x.is_complex() else x


def _padded(x: Tensor, length: int) -> Tensor:
    flat = _carried(x).reshape(-1)
    out = flat.new_zeros(max(1, length * _row(x)))
    out[: flat.numel()] = flat
    return out


def _rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def device_of(group: Group) -> torch.device:
    """Where tensors lie that the group's ranks exchange: the processor, or this process's GPU."""
    return torch.device("cpu") if group.groups is None else group.groups.device
