"""The MPI route: the collectives of an MPI library, by mpi4py, for machines with a good MPI.

It needs ranks that mpirun (or mpiexec) has started, one MPI process each; else the ranks agree on the native
route, and say why. MPI moves a call forward only inside of other calls, so nothing overlaps with training,
and there is no codec: whoever has a fast network under MPI needs none, and `route=auto` never chooses it.
Invariant: every call is one of the non-blocking kind, so that each wait has the deadline of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective, ReceiveBuffer
from paceline.comm.handle import Handle
from paceline.comm.net import Net, RowExchange, collective_error, handle_of_work
from paceline.comm.routes.native import build_native
from paceline.comm.routes.route_context import RouteContext, require_cpu
from paceline.job.cluster import change_environment, current_place, process_environment
from paceline.job.cpu_count import find_cores
from paceline.job.mesh import RankGroup

_YIELD = "OMPI_MCA_mpi_yield_when_idle"
_NO_RANK = -1


class MpiCall:
    """A call in flight, with the interface of the backend's own calls."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self, timeout: timedelta) -> None:
        """Move the call forward until it is complete.

        Raises:
            RuntimeError: it took longer, or MPI has failed (`MPI.Exception` is one).
        """
        expires = time.monotonic() + timeout.total_seconds()
        while not self._request.Test():
            if time.monotonic() > expires:
                raise RuntimeError("timed out: another rank has not called it")
            time.sleep(0)  # a core that MPI polls on is free for other ranks


class MpiCollective:
    """A collective that sends values as they are, with the calls of an MPI library.

    Args:
        communicator: `mpi4py.MPI.Comm` of the ranks of the group, in their order.
    Wire: counted by the closed forms of the native route; MPI does not say what it sends.
    Exactness: that of rounding; the order of a sum is MPI's, with equal bits on every rank. Half-precision
        values are summed in float32.
    """

    feedback = None

    def __init__(self, net: Net, group: RankGroup, communicator: Any) -> None:
        from mpi4py import MPI

        self.net, self.group = net, group
        self._mpi, self._communicator = MPI, communicator

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        flat = _summable(x)

        def result() -> Tensor:
            return x if flat.data_ptr() == x.data_ptr() else x.copy_(_like(flat, x).view(x.shape))

        return self._launch(
            "all_reduce",
            x,
            lambda comm: comm.Iallreduce(self._mpi.IN_PLACE, flat.numpy(), op=self._mpi.SUM),
            result,
        )

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        rows = _summable(x)
        total = rows.new_empty(rows.numel() // self.group.size)
        return self._launch(
            "reduce_scatter",
            x,
            lambda comm: comm.Ireduce_scatter_block(rows.numpy(), total.numpy(), op=self._mpi.SUM),
            lambda: _like(total, x),
        )

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        rows = x.new_empty(self.group.size, *x.shape) if out is None else out
        rows[self.group.rank] = x  # MPI refuses memory that is sent and received into
        return self._launch(
            "all_gather",
            x,
            lambda comm: comm.Iallgather(self._mpi.IN_PLACE, _bytes(rows)),
            lambda: rows,
        )

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        flat = x.reshape(-1).contiguous()
        return self._launch(
            "broadcast",
            x,
            lambda comm: comm.Ibcast(_bytes(flat), root=source),
            lambda: x if flat.data_ptr() == x.data_ptr() else x.copy_(flat.view(x.shape)),
        )

    def abort(self) -> None:
        """Do nothing: no state is kept between steps."""

    def close(self) -> None:
        """Free the communicator; collective, as everything that was launched has been waited for."""
        self._communicator.Free()

    def _launch(self, op: str, x: Tensor, call: Callable[[Any], Any], result: Callable[[], Tensor]) -> Handle:
        if x.numel() == 0:
            return Handle.ready(result())
        entry = self.net.ledger.count_call(op, self.group.name, x.nbytes, self.group.size)
        try:
            work = RowExchange([MpiCall(call(self._communicator))])
        except RuntimeError as error:
            raise collective_error(op, self.group, self.net, error, self.net.deadline_seconds) from error
        return handle_of_work(op, self.group, self.net, work, entry, result)


def _summable(x: Tensor) -> Tensor:
    """Return values as MPI can sum them, flat; in the memory of `x` where that is possible."""
    real = torch.view_as_real(x) if x.is_complex() else x
    wide = real.float() if real.dtype in (torch.float16, torch.bfloat16) else real
    return wide.detach().reshape(-1).contiguous()


def _like(flat: Tensor, x: Tensor) -> Tensor:
    """Return sums of `_summable` in the dtype of `x`."""
    return torch.view_as_complex(flat.view(-1, 2)) if x.is_complex() else flat.to(x.dtype)


def _bytes(x: Tensor) -> Any:
    """Return the memory of a contiguous tensor, which MPI copies whatever its dtype."""
    return x.detach().reshape(-1).view(torch.uint8).numpy()


def build_mpi(group: RankGroup, context: RouteContext) -> Collective:
    """Build the collectives of an MPI library, or the native ones if the ranks have none; collective."""
    require_cpu(context, "mpi", "NCCL is faster between GPUs than a copy to the host")
    if group.size == 1:
        return build_native(group, context)
    world, obstacle = _join_mpi(context.cluster.local_world_size)
    own = torch.tensor([_NO_RANK if world is None else world.rank])
    gathered = context.net.all_gather(own, group, equal=True).wait()
    ranks = [int(rank) for rank in torch.cat(gathered)]
    if _NO_RANK in ranks or len({*ranks}) < group.size:
        why = obstacle or "another rank of the group has no MPI"
        context.warn(f"warning: route=mpi is not possible: {why}. These sums use route=native.")
        return build_native(group, context)
    assert world is not None
    collective = MpiCollective(context.net, group, world.Create_group(world.group.Incl(ranks)))
    context.record("mpi", {"group": group.name, "ranks": list(group.ranks), "library": describe_mpi()})
    context.close_callbacks.append(collective.close)
    return collective


def _join_mpi(ranks_of_host: int) -> tuple[Any, str]:
    """Return `MPI.COMM_WORLD`; or None, and why this process is no rank of an MPI job."""
    place = current_place()
    if place is None or not place.has_mpi:
        return None, "mpirun has not started these ranks: mpirun -n 2 paceline train RECIPE"
    # MPI reads it when it is imported: ranks beyond the cores would wait for each other's busy loops
    if ranks_of_host > find_cores().number and _YIELD not in process_environment():
        change_environment({_YIELD: "1"})
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        step = "pip install mpi4py" if isinstance(error, ModuleNotFoundError) else "install Open MPI or MPICH"
        return None, f"mpi4py cannot be imported ({error}): {step}"
    if MPI.COMM_WORLD.size != place.world_size:
        return None, (
            f"mpi4py uses {describe_mpi()}, which sees {MPI.COMM_WORLD.size} of the {place.world_size} ranks"
            f" of {place.command}: it is another MPI"
        )
    return MPI.COMM_WORLD, ""


def describe_mpi() -> str:
    """Return the MPI library of this process with its version, as in "Open MPI v4.1.4 (mpi4py 4.1.1)"."""
    from mpi4py import MPI

    library = MPI.Get_library_version().strip().partition("\n")[0].partition(",")[0]
    return f"{library} (mpi4py {metadata.version('mpi4py')})"
