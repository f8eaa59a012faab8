"""The process group of a job: made once in a process, kept between calls, destroyed when the process ends.

Invariant: after an error nothing is destroyed, because that would wait for ranks that may be gone. It does
not decide who is in the group: that is `paceline.cluster`.
"""

from __future__ import annotations

import atexit
import gc
from typing import Any

_FREE, _TAKEN = "paceline: between two calls", "paceline: in use"


def is_connected(rank: int, world_size: int) -> bool:
    """Whether an earlier call has met these ranks and let go; then the group is this call's.

    A group that is in use is nobody else's: a second connection beside it is made, or refused, anew. One of
    another number of ranks is destroyed: the job has changed its size.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or _world().group_desc != _FREE:
        return False
    atexit.unregister(leave)
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        leave()
        return False
    _world()._set_group_desc(_TAKEN)
    return True


def _world() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD


def let_go() -> None:
    """Destroy the groups that a call has made; the job's own stays for the next call of this process.

    Garbage is collected first: a group that outlives its last user aborts about one exit in ten.
    """
    import torch.distributed as dist

    gc.collect()
    if not dist.is_initialized():
        return
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    _world()._set_group_desc(_FREE)
    atexit.register(leave)


def leave() -> None:
    """Destroy the job's group, and with it all others."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
