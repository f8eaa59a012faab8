"""This rank's end of the network: every collective is counted, has a deadline, and names what failed.

Invariant: a collective on a group of one rank is a copy and costs nothing, so callers need no special case
for one process. Calls here use the native backend (NCCL or Gloo); which ranks reduce what is decided
elsewhere.

Rows that ranks exchange on the CPU are sent in both directions of a link at once. Gloo sends to a peer only
after that peer has announced a receive. Its own all-to-all sends first: where a peer was earlier, its whole
message goes before the announcement of this rank's receive, so one direction waits for the other, and two
ranks take twice as long as the link needs. Here a rank announces its receives first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.ledger import ByteLedger, LedgerEntry
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.mesh import RankGroup
from paceline.observe.rank_activity import RankActivity, TracedCall

LOCAL_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": lambda x: x.prod(0, dtype=x.dtype),
}
"""Reductions of tensors of this process, along the first dimension."""

_BACKEND_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def backend_reduce_op(reduction: str, x: Tensor) -> Any:
    """Return the reduction of the backend that carries `x`; Gloo computes complex sums as pairs of reals."""
    if x.is_complex() and reduction != "sum":
        raise CommunicationError(
            f"reduction {reduction!r} is not supported for complex numbers",
            next_step="gather them, or reduce their absolute values",
        )
    return _BACKEND_REDUCE_OPS[reduction]


# Routes count their calls upwards from 1 and never come near this; the tags of exchanges are just below it.
_EXCHANGE_TAG = (1 << 31) - 1


class RowExchange:
    """An exchange of rows in flight, with the interface of the backend's own calls.

    Gloo does not report the end of a send, so an exchange is complete only once it was waited for.
    """

    def __init__(self, works: list[Any]) -> None:
        self._works = works
        self._callbacks: list[Callable[[Any], None]] = []

    def wait(self, timeout: timedelta) -> None:
        """Block until all rows have arrived and those of this rank are on their way.

        Raises:
            RuntimeError: it took longer, or a peer is gone.
        """
        end = time.monotonic() + timeout.total_seconds()
        try:
            while self._works:
                # Gloo treats a timeout of zero as none, so there is always a millisecond left.
                left = timedelta(seconds=max(0.001, end - time.monotonic()))
                self._works.pop().wait(left)
        finally:
            for callback in self._callbacks:
                callback(self)

    def get_future(self) -> RowExchange:
        """Return itself: it has the one method of a future that is used here."""
        return self

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` when the exchange has been waited for."""
        self._callbacks.append(callback)

    def is_completed(self) -> bool:
        """Return whether the exchange has been waited for; Gloo does not report it earlier."""
        return not self._works


def start_row_exchange(process_group: Any, rank: int, x: Tensor, out: Tensor, tag: int = 0) -> Any:
    """Send row i of `x` [P, ...] to rank i, and fill row i of `out` with what rank i sent here.

    Args:
        tag: of exchanges that peers may launch in different orders; a backend without tags takes them in
            order.
    """
    if x.device.type != "cpu":
        return process_group.alltoall_base(out, x, [], [])
    # This rank's own row never leaves the process.
    out[rank].copy_(x[rank])
    if out.numel() == 0:
        return RowExchange([])
    size = len(x)
    others = [(rank + step) % size for step in range(1, size)]
    # Receives come before sends: a peer may send as soon as they are announced (see the top of the file).
    works = [process_group.recv([out[source]], source, _EXCHANGE_TAG - tag) for source in reversed(others)]
    return RowExchange([*works, *(process_group.send([x[to]], to, _EXCHANGE_TAG - tag) for to in others)])


def start_exchange_with_others(process_group: Any, rank: int, x: Tensor, out: Tensor) -> RowExchange:
    """Do the same on the CPU without this rank's row: `out` [P - 1, ...] gets the rows of the others, by
    rank.
    """
    size = len(x)
    others = [(rank + step) % size for step in range(1, size)]
    rows = [out[other - (other > rank)] for other in others]
    pairs = reversed([*zip(others, rows, strict=True)])
    works = [process_group.recv([row], source, _EXCHANGE_TAG) for source, row in pairs]
    return RowExchange([*works, *(process_group.send([x[to]], to, _EXCHANGE_TAG) for to in others)])


def start_row_gather(process_group: Any, rank: int, x: Tensor, out: Tensor) -> Any:
    """Fill row i of `out` [P, ...] with `x` of rank i.

    Three ranks and more pass rows along Gloo's ring, where each receives from one rank and sends to another;
    a slow link between racks then carries every row once.
    """
    # With two ranks the ring is an exchange, and that uses both directions of the link at once.
    if len(out) != 2 or x.device.type != "cpu":
        return process_group._allgather_base(out.view(-1), x.view(-1))
    return start_row_exchange(process_group, rank, x.unsqueeze(0).expand(out.shape), out)


_WIDER_DTYPES = {torch.bool: torch.uint8, torch.int16: torch.int32}
"""Types that Gloo does not carry, and the ones that carry them exactly."""


class Net:
    """Collectives of one rank, counted in `ledger`.

    Args:
        deadline_seconds: the longest that any wait may take.
        times_calls: measure the busy time of every call (CPU backends only; NCCL completes on a stream).
    Attributes:
        activity: shows what this rank waits for, and records calls of steps that are traced.
    """

    def __init__(self, deadline_seconds: float = 120.0, *, times_calls: bool = True) -> None:
        self.activity = RankActivity()
        self.ledger = ByteLedger(self.activity)
        self.deadline_seconds = deadline_seconds
        self.times_calls = times_calls

    @property
    def step(self) -> int:
        """Index of the present step, which errors of collectives name."""
        return self.activity.step

    @step.setter
    def step(self, step: int) -> None:
        self.activity.step = step

    # -- every rank ends with something -----------------------------------------------------------------

    def all_reduce(self, x: Tensor, group: RankGroup, reduction: str = "sum") -> Handle:
        """Reduce over the group, in place; the handle returns `x`.

        Exactness: equal bits on every rank; the order of the sum is the backend's.
        Wire: 2 (P-1)/P n bytes, 2 (P-1) rounds (ring).
        """
        op = backend_reduce_op(reduction, x)
        return self._in_place("all_reduce", x, group, lambda t, pg: pg.allreduce([t], op))

    def broadcast(self, x: Tensor, group: RankGroup, source: int = 0) -> Handle:
        """Copy `x` of the group's rank `source` to all, in place; the handle returns `x`."""
        return self._in_place("broadcast", x, group, lambda t, pg: pg.broadcast(t, source))

    def reduce(self, x: Tensor, group: RankGroup, destination: int = 0, reduction: str = "sum") -> Handle:
        """Reduce to one rank, in place; on other ranks the content of `x` is undefined afterwards."""
        op = backend_reduce_op(reduction, x)
        return self._in_place("reduce", x, group, lambda t, pg: pg.reduce(t, destination, op))

    def all_gather(self, x: Tensor, group: RankGroup, *, equal: bool = False) -> Handle:
        """Collect a list of every rank's tensor; shapes may differ in the first dimension.

        Wire: (P-1) times the largest tensor; unless shapes are `equal`, one more small all_gather.
        """
        if group.handle is None:
            return Handle.ready([x.clone()])
        # Ragged gathers need the lengths first: the backend gathers tensors of one size.
        lengths = [len(x)] * group.size if equal else self._lengths(x, group)
        # The backend gathers equal sizes only, so rows are padded to the longest and cut again.
        padded = _pad_rows(x, max(lengths))
        out = padded.new_empty((group.size, *padded.shape))
        shape = x.shape[1:] if x.dim() else ()

        def unpack(out: Tensor) -> list[Tensor]:
            tensors = [out[i][: lengths[i] * _row_numel(x)].to(x.dtype) for i in range(group.size)]
            if x.dim() == 0:
                return [tensor.reshape(()) for tensor in tensors]
            return [tensor.reshape(n, *shape) for tensor, n in zip(tensors, lengths, strict=True)]

        return self.gather_rows(padded, out, group).then(unpack)

    def gather_rows(self, x: Tensor, out: Tensor, group: RankGroup) -> Handle:
        """Fill row i of `out` [P, ...] with `x` of rank i, which may be that row; the handle returns `out`.

        Both are contiguous, of a dtype that the backend carries.
        """
        if group.handle is None:
            return Handle.ready(out.copy_(x.unsqueeze(0)))
        entry = self._launch("all_gather", x, group)
        work = self._call(
            "all_gather", group, lambda pg: start_row_gather(pg, group.rank, _as_real(x), _as_real(out))
        )
        return handle_of_work("all_gather", group, self, work, entry, lambda: out)

    def reduce_scatter(self, x: Tensor, group: RankGroup, reduction: str = "sum") -> Handle:
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
        source = _as_backend_dtype(x)
        entry = self._launch("reduce_scatter", source, group)
        received = torch.empty_like(source).view(group.size, x.shape[0] // group.size, *x.shape[1:])
        rows = source.view(received.shape)
        work = self._call(
            "reduce_scatter",
            group,
            lambda pg: start_row_exchange(pg, group.rank, _as_real(rows), _as_real(received)),
        )
        return handle_of_work(
            "reduce_scatter",
            group,
            self,
            work,
            entry,
            lambda: LOCAL_REDUCTIONS[reduction](received).to(x.dtype),
        )

    def all_to_all(self, parts: Sequence[Tensor], group: RankGroup) -> Handle:
        """Send `parts[i]` to rank i; the handle returns a list of what each rank sent here. All have one
        shape and dtype.
        """
        if group.handle is None:
            return Handle.ready([part.clone() for part in parts])
        # Callers may change the parts after this returns, so the rows are copies.
        source, dtype = _as_backend_dtype(torch.stack(list(parts))), parts[0].dtype
        arriving = self.exchange_rows(source, torch.empty_like(source), group)
        return arriving.then(lambda out: list(out.to(dtype)))

    def exchange_rows(self, x: Tensor, out: Tensor, group: RankGroup, tag: int = 0) -> Handle:
        """Send row i of `x` [P, ...] to rank i; the handle returns `out`, what each rank sent here.

        Both are contiguous, of a dtype that the backend carries. Wire: (P-1)/P n bytes, 1 round.

        Args:
            tag: 0 to 3; on the CPU, ranks may launch exchanges of different tags in different orders.
        """
        if group.handle is None:
            return Handle.ready(out.copy_(x))
        entry = self._launch("all_to_all", x, group)
        work = self._call(
            "all_to_all",
            group,
            lambda pg: start_row_exchange(pg, group.rank, _as_real(x), _as_real(out), tag),
        )
        return handle_of_work("all_to_all", group, self, work, entry, lambda: out)

    # -- one rank has, or gets, all ---------------------------------------------------------------------

    def gather(self, x: Tensor, group: RankGroup, destination: int = 0) -> Handle:
        """Collect a list of every rank's tensor on `destination`; the handle returns an empty list
        elsewhere.
        """
        if group.handle is None:
            return Handle.ready([x.clone()])
        source = _as_backend_dtype(x)
        out = [torch.empty_like(source) for _ in group.ranks] if group.rank == destination else []
        entry = self._launch("gather", source, group, times=group.size)
        work = self._call(
            "gather",
            group,
            lambda pg: pg.gather(
                [out] if out else [], [source], _with_root(dist.GatherOptions(), destination)
            ),
        )
        return handle_of_work(
            "gather", group, self, work, entry, lambda: [tensor.to(x.dtype) for tensor in out]
        )

    def scatter(
        self, parts: Sequence[Tensor] | None, like: Tensor, group: RankGroup, source: int = 0
    ) -> Handle:
        """Send `parts[i]` of rank `source` to rank i; `like` has the shape and dtype of a part."""
        if group.handle is None:
            return Handle.ready((parts or [like])[0].clone())
        out = torch.empty_like(_as_backend_dtype(like))
        sent = (
            [_as_backend_dtype(part) for part in parts] if parts is not None and group.rank == source else []
        )
        entry = self._launch("scatter", out, group, times=group.size)
        work = self._call(
            "scatter",
            group,
            lambda pg: pg.scatter([out], [sent] if sent else [], _with_root(dist.ScatterOptions(), source)),
        )
        return handle_of_work("scatter", group, self, work, entry, lambda: out.to(like.dtype))

    # -- one rank to another ----------------------------------------------------------------------------

    def send(self, x: Tensor, group: RankGroup, to: int, tag: int = 0) -> Handle:
        """Send a contiguous tensor to the group's rank `to`; do not change it before `wait`."""
        self._launch("send", x, group)
        work = self._call("send", group, lambda pg: pg.send([_as_real(_as_backend_dtype(x))], to, tag))
        # Gloo does not report the end of a send, so there is no row of the ledger to add seconds to.
        label = f"send to rank {group.ranks[to]}"
        return handle_of_work(label, group, self, work, None, lambda: x)

    def receive(self, x: Tensor, group: RankGroup, source: int, tag: int = 0) -> Handle:
        """Receive into a contiguous tensor from the group's rank `source`; the handle returns it."""
        work = self._call("receive", group, lambda pg: pg.recv([_as_real(x)], source, tag))
        return handle_of_work(f"receive from rank {group.ranks[source]}", group, self, work, None, lambda: x)

    def barrier(self, group: RankGroup) -> None:
        """Wait until all ranks of the group have called this."""
        # An all_reduce of one byte has the deadline, the errors and the row of the ledger of other calls.
        flag = torch.zeros(1, dtype=torch.uint8, device=group_device(group))
        self._in_place("barrier", flag, group, lambda t, pg: pg.allreduce([t])).wait()

    # -- the few lines around the backend ---------------------------------------------------------------

    def _in_place(self, op: str, x: Tensor, group: RankGroup, call: Callable[[Tensor, Any], Any]) -> Handle:
        if group.handle is None or (x.numel() == 0):
            return Handle.ready(x)
        wire_x = _as_backend_dtype(x)
        entry = self._launch(op, wire_x, group)
        work = self._call(op, group, lambda pg: call(_as_real(wire_x), pg))

        def copy_back() -> Tensor:
            return x if wire_x is x else x.copy_(wire_x)

        return handle_of_work(op, group, self, work, entry, copy_back)

    def _call(self, op: str, group: RankGroup, call: Callable[[Any], Any]) -> Any:
        try:
            return call(group.handle)
        except RuntimeError as error:
            # A launch fails at once if an earlier failure has closed the connection to a peer.
            raise collective_error(op, group, self, error, self.deadline_seconds) from error

    def _launch(self, op: str, x: Tensor, group: RankGroup, times: int = 1) -> LedgerEntry:
        return self.ledger.count_call(op, group.name, times * x.numel() * x.element_size(), group.size)

    def _lengths(self, x: Tensor, group: RankGroup) -> list[int]:
        mine = torch.tensor([x.shape[0] if x.dim() else 1], device=x.device)
        out = mine.new_empty(group.size)
        self._launch("all_gather", mine, group)
        work = self._call("all_gather", group, lambda pg: pg._allgather_base(out, mine))
        handle_of_work("all_gather", group, self, work, None, lambda: out).wait()
        return [int(n) for n in out]


def _as_backend_dtype(x: Tensor) -> Tensor:
    """Return the same values, contiguous, in a dtype that the backend carries; `x` itself if it is one."""
    wide = _WIDER_DTYPES.get(x.dtype)
    return (x if wide is None else x.to(wide)).contiguous()


def _row_numel(x: Tensor) -> int:
    """Return the number of elements per entry of the first dimension."""
    return prod(x.shape[1:])


def _as_real(x: Tensor) -> Tensor:
    """View complex values as pairs of reals, in the same memory: Gloo has no complex dtypes."""
    return torch.view_as_real(x) if x.is_complex() else x


def _pad_rows(x: Tensor, length: int) -> Tensor:
    flat = _as_backend_dtype(x).reshape(-1)
    out = flat.new_zeros(max(1, length * _row_numel(x)))
    out[: flat.numel()] = flat
    return out


def _with_root(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def group_device(group: RankGroup) -> torch.device:
    """Return the device of tensors that the group's ranks exchange: the CPU, or this process's GPU."""
    return torch.device("cpu") if group.lease is None else group.lease.device


def handle_of_work(
    op: str, group: RankGroup, net: Net, work: Any, entry: LedgerEntry | None, finish: Callable[[], Any]
) -> Handle:
    """Return the handle of a call of the backend.

    Args:
        work: what the backend returned.
        entry: the ledger's row that gets the seconds; None: they are not counted.
        finish: makes the result once the call is complete.
    """
    activity, place = net.activity, net.activity.place_of(group.name)
    # A message concerns two ranks of the group, so it is not counted.
    number = 0 if op.startswith(("send", "receive")) else activity.latest_call(group.name)
    num_bytes = 0 if entry is None else entry.latest_bytes
    if entry is not None and net.times_calls:
        entry.begin_call()
        call = activity.launch(op, group.name, entry.latest_bytes, group.size)
        # The call ends when its bytes have arrived, which may be long before it is waited for.
        work.get_future().add_done_callback(_ledger_callback(entry, call))

    def resolve(deadline_seconds: float | None, exposed: bool) -> Any:
        limit = net.deadline_seconds if deadline_seconds is None else deadline_seconds
        began = time.perf_counter()
        waited_for = activity.begin_wait(op, place, group.name, number, num_bytes) if exposed else ""
        try:
            work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            # The text of the backend does not always say that it was a timeout.
            late = time.perf_counter() - began >= limit
            raise collective_error(op, group, net, error, limit, late=late) from error
        finally:
            if exposed:
                now = time.perf_counter()
                activity.end_wait(waited_for, began, now)
                if entry is not None:
                    entry.exposed_seconds += now - began
        return finish()

    return Handle(resolve, lambda: bool(work.is_completed()))


def collective_error(
    op: str, group: RankGroup, net: Net, error: Exception, limit_seconds: float, *, late: bool = False
) -> CommunicationError:
    """Return the error of a collective that failed: a deadline, or a peer that is gone.

    Args:
        limit_seconds: the longest wait that was allowed.
        late: it took longer than that.
    """
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    where = f"rank {group.ranks[group.rank]}, {op} over group '{group.name}' {group.ranks}, step {net.step}"
    if late or "imed out" in text:
        return DeadlineError(
            f"{op} did not finish within {limit_seconds:g} s: {text}",
            where=where,
            next_step="look for the rank that did not call it, or raise runtime.deadline_seconds",
        )
    return CommunicationError(
        f"{op} failed: {text}", where=where, next_step="look at the first rank that ended: it is the cause"
    )


def _ledger_callback(entry: LedgerEntry, call: TracedCall | None) -> Callable[[Any], None]:
    """Return a callback that ends a call in the ledger, and in the trace if there is one."""

    # The callback runs on a thread of the backend and must not hold the process group: the last reference
    # dropped there would make the group wait for its own thread, which aborts the process.
    def completed(_future: Any) -> None:
        entry.end_call()
        if call is not None:
            call.complete()

    return completed
