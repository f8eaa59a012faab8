"""Process groups of torch that only their members create, with a deadline, and that can be aborted at once.

Invariant: the time-out of every group is longer than Paceline's deadline, so that Paceline's error, which
names the rank, comes first. Which ranks form a group is decided in `paceline.job.membership` and
`paceline.job.mesh`.
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
"""How much longer than Paceline's own deadline the time-out of a group is."""

_OPEN_FILES = "/proc/self/fd"


@dataclass(eq=False)
class OwnedProcessGroup:
    """A process group, with the sockets that it has opened: descriptor and inode."""

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
                "this process group has ended with the session that it was created for",
                next_step="build another session: a closed session cannot communicate",
            )
        return self._torch

    def detach(self) -> Any:
        """Stop using the group and return it; its threads end when the last reference is dropped."""
        group, self._torch = self._torch, None
        return group

    def abort(self) -> None:
        """Make every running call fail at once, here and on the ranks that take part in it."""
        # Gloo's own abort wakes no waiting thread, so its connections are shut down
        for file, inode in self.sockets:
            with contextlib.suppress(OSError):
                if os.fstat(file).st_ino == inode:  # else the number belongs to another file by now
                    with socket.socket(fileno=os.dup(file)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
        self.sockets = ()
        for backend in _nccl_backends(self._torch):
            backend.abort()


@dataclass
class _SocketRecorder:
    """The sockets that are opened between `begin` and `opened`."""

    before: dict[int, int] = field(default_factory=dict)

    def begin(self) -> None:
        self.before = _open_sockets()

    def opened(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (file, inode) for file, inode in _open_sockets().items() if self.before.get(file) != inode
        )


def _open_sockets() -> dict[int, int]:
    """Return the inodes of all TCP connections by descriptor; empty on systems without /proc."""
    inodes = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_OPEN_FILES):  # noqa: PTH208, only the names are needed
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and _is_connection(int(name)):
                    inodes[int(name)] = status.st_ino
    return inodes


def _is_connection(file: int) -> bool:
    with socket.socket(fileno=os.dup(file)) as opened:
        is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
        # shutting down a listening socket makes Gloo's thread throw, which ends the process
        return is_tcp and not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def claim_device(device_type: str, local_rank: int) -> torch.device:
    """Return this rank's device; a GPU becomes torch's current device.

    Raises:
        DeviceError: this node has fewer GPUs than processes.
    """
    import torch

    if device_type != "cuda":
        return torch.device(device_type)
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}",
            next_step="start at most one process per GPU, or set runtime.device = 'cpu'",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def make_world(store: Store, rank: int, size: int, device: torch.device, seconds: float) -> OwnedProcessGroup:
    """Create torch's default group: Gloo for CPU tensors, and on "cuda" also NCCL, bound to its GPU.

    Raises:
        RuntimeError: torch could not connect the ranks.
    """
    import torch
    import torch.distributed as dist

    _end_abandoned_world()
    recorder, cuda = _SocketRecorder(), device.type == "cuda"
    recorder.begin()
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
    return OwnedProcessGroup(world, recorder.opened())


def make_subgroup(
    store: Store, name: str, rank: int, size: int, device: torch.device, seconds: float
) -> OwnedProcessGroup:
    """Create a group that is not in torch's registry, so that only its members take part in its creation.

    Args:
        rank: rank of this process in the group.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    recorder, kinds = _SocketRecorder(), dist.ProcessGroup.BackendType
    recorder.begin()
    handle: Any = dist.ProcessGroup(store, rank, size)
    handle._set_group_name(name)
    handle._set_default_backend(kinds.NCCL if device.type == "cuda" else kinds.GLOO)
    gloo = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timedelta(seconds=seconds))
    gloo._set_sequence_number_for_group()
    handle._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    _set_timeout(gloo, seconds)
    if device.type == "cuda":
        _add_nccl(handle, PrefixStore("cuda", store), device, seconds)
    return OwnedProcessGroup(handle, recorder.opened())


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

    with contextlib.suppress(RuntimeError):  # the group has no backend for GPUs
        backend = handle._get_backend(torch.device("cuda"))
        return [backend] if backend.name() == "nccl" else []
    return []


_ABANDONED = "abandoned by paceline"


def mark_abandoned(world: OwnedProcessGroup) -> None:
    """Mark torch's default group after an error: this process uses it no more, and may replace it."""
    world.handle._set_group_desc(_ABANDONED)


def _end_abandoned_world() -> None:
    """Remove a default group from torch's registry that an earlier session of this process has abandoned."""
    import torch.distributed as dist

    if dist.is_initialized():
        handle: Any = dist.group.WORLD
        if handle.group_desc == _ABANDONED:
            dist.destroy_process_group()
            release_in_background([handle])


def end_world(world: OwnedProcessGroup | None) -> None:
    """Remove torch's default group from its registry; it is destroyed with its last reference."""
    import torch.distributed as dist

    if world is not None and dist.is_initialized() and dist.group.WORLD is world.handle:
        dist.destroy_process_group()


def release_in_background(handles: list[Any]) -> None:
    """Drop the last references to some groups in a thread: torch takes 20 ms for each."""
    threading.Thread(target=_release_groups, args=(handles,), name="paceline-ending-groups").start()


def _release_groups(handles: list[Any]) -> None:
    # NCCL has to be shut down explicitly, as torch's own `destroy_process_group` does
    for nccl in [backend for handle in handles for backend in _nccl_backends(handle)]:
        with contextlib.suppress(RuntimeError):  # a peer is gone by now
            nccl.shutdown()
    handles.clear()


def destroy_leftover_groups() -> None:
    """Destroy groups that a script has left: a group that outlives it aborts about one exit in ten."""
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
