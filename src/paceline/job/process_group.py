"""Process groups of torch, made by their members only, with a deadline, and ended at once.

Invariant: every group's own time-out is longer than our deadline, so that our error, which names the rank,
comes first. Which ranks are in a group is decided elsewhere: `paceline.job.membership`, `paceline.job.mesh`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.errors import CommunicationError, DeviceError

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

SLACK_SECONDS = 30.0
"""How much longer than our own deadline a group's is."""

_OPEN_FILES = "/proc/self/fd"


@dataclass(eq=False)
class OwnedProcessGroup:
    """A process group, and the sockets that it has opened: file and number of its inode."""

    _torch: Any
    sockets: tuple[tuple[int, int], ...] = ()

    @property
    def handle(self) -> Any:
        """Torch's process group.

        Raises:
            CommunicationError: it has ended.
        """
        if self._torch is None:
            raise CommunicationError(
                "a process group is used that has ended with the session it was made for",
                next_step="build another session: one that is closed cannot communicate",
            )
        return self._torch

    def let_go(self) -> Any:
        """End the use of the group; its threads end with the last reference, which should be what returns."""
        found, self._torch = self._torch, None
        return found

    def abort(self) -> None:
        """Let every call that is under way fail at once, here and on the ranks at the other ends.

        Gloo's own abort wakes nobody, so its connections are shut.
        """
        for file, inode in self.sockets:
            with contextlib.suppress(OSError):
                if os.fstat(file).st_ino == inode:
                    with socket.socket(fileno=os.dup(file)) as line:
                        line.shutdown(socket.SHUT_RDWR)
        self.sockets = ()
        for backend in _nccl_backends(self._torch):
            backend.abort()


@dataclass
class _SocketRecorder:
    """Sockets that are opened while it looks."""

    before: dict[int, int] = field(default_factory=dict)

    def begin(self) -> None:
        self.before = _open_sockets()

    def found(self) -> tuple[tuple[int, int], ...]:
        return tuple(one for one in _open_sockets().items() if self.before.get(one[0]) != one[1])


def _open_sockets() -> dict[int, int]:
    """Inode by open file, of TCP connections; empty where the system does not tell."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_OPEN_FILES):  # noqa: PTH208, names are all that is wanted
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and _is_connection(int(name)):
                    found[int(name)] = status.st_ino
    return found


def _is_connection(file: int) -> bool:
    """Of TCP; a listening socket that is shut ends the process (Gloo's thread throws)."""
    with socket.socket(fileno=os.dup(file)) as one:
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        return is_tcp and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def claim_device(device_type: str, local_rank: int) -> torch.device:
    """This rank's device; a GPU becomes torch's current one.

    Raises:
        DeviceError: this node has fewer GPUs than processes.
    """
    import torch

    if device_type != "cuda":
        return torch.device(device_type)
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"Local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}.",
            next_step="start at most one process per GPU, or choose runtime.device = 'cpu'",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def make_world(store: Store, rank: int, size: int, device: torch.device, seconds: float) -> OwnedProcessGroup:
    """Make torch's default group: Gloo for CPU tensors, and NCCL beside it, bound to its GPU, on "cuda".

    Raises:
        RuntimeError: as torch raises it.
    """
    import torch
    import torch.distributed as dist

    watch, cuda = _SocketRecorder(), device.type == "cuda"
    watch.begin()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds + (SLACK_SECONDS if cuda else 0.0)),
        device_id=device if cuda else None,
    )
    world: Any = dist.group.WORLD
    _set_timeout(world._get_backend(torch.device("cpu")), seconds)
    return OwnedProcessGroup(world, watch.found())


def make_subgroup(
    store: Store, name: str, rank: int, size: int, device: torch.device, seconds: float
) -> OwnedProcessGroup:
    """Make a group that only its members know of, and torch's registry does not: nobody else takes part.

    Args:
        rank: in the group.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    watch, kinds = _SocketRecorder(), dist.ProcessGroup.BackendType
    watch.begin()
    handle: Any = dist.ProcessGroup(store, rank, size)
    handle._set_group_name(name)
    handle._set_default_backend(kinds.NCCL if device.type == "cuda" else kinds.GLOO)
    gloo = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timedelta(seconds=seconds))
    gloo._set_sequence_number_for_group()
    handle._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    _set_timeout(gloo, seconds)
    if device.type == "cuda":
        _add_nccl(handle, PrefixStore("cuda", store), device, seconds)
    return OwnedProcessGroup(handle, watch.found())


def _add_nccl(handle: Any, store: Store, device: torch.device, seconds: float) -> None:
    import torch
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds + SLACK_SECONDS)
    nccl = dist.ProcessGroupNCCL(store, handle.rank(), handle.size(), options)
    nccl._set_sequence_number_for_group()
    handle._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    handle.bound_device_id = device
    nccl.eager_connect_single_device(device)


def _set_timeout(backend: Any, seconds: float) -> None:
    backend._set_default_timeout(timedelta(seconds=seconds + SLACK_SECONDS))


def _nccl_backends(handle: Any) -> list[Any]:
    import torch

    with contextlib.suppress(RuntimeError):  # there is none of GPUs
        found = handle._get_backend(torch.device("cuda"))
        return [found] if found.name() == "nccl" else []
    return []


def end_world(made: OwnedProcessGroup | None) -> None:
    """Take torch's default group out of its registry; it is gone when its last reference is."""
    import torch.distributed as dist

    if made is not None and dist.is_initialized() and dist.group.WORLD is made.handle:
        dist.destroy_process_group()


def release_in_background(handles: list[Any]) -> None:
    """Let go of groups that nobody else holds, beside what comes next: torch takes 20 ms for each."""
    threading.Thread(target=_release_groups, args=(handles,), name="paceline-ending-groups").start()


def _release_groups(handles: list[Any]) -> None:
    """NCCL wants to be told, as torch's own `destroy_process_group` does."""
    for nccl in [found for one in handles for found in _nccl_backends(one)]:
        with contextlib.suppress(RuntimeError):  # a peer is gone by now
            nccl.shutdown()
    handles.clear()


def destroy_leftover_groups() -> None:
    """End what a script has left of torch's groups: one that outlives it aborts about one exit in ten."""
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
