"""The default process group: how it is made, and how its ranks wait for each other without a collective.

Invariant: waiting here is polling, so that a signal is seen at once, and errors name the late ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline.errors import CommunicationError, DeadlineError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_POLL_SECONDS = 0.05
_TELL_SECONDS = 10.0


def make_group(store: Store, global_rank: int, world_size: int, device_type: str, seconds: float) -> None:
    """Make torch's default group: Gloo for CPU tensors, and NCCL beside it on "cuda".

    Args:
        seconds: the deadline of every collective.
    Raises:
        CommunicationError: the ranks cannot be reached.
    """
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=global_rank,
            world_size=world_size,
            timeout=timedelta(seconds=seconds),
        )
    except RuntimeError as error:
        raise CommunicationError(
            f"Rank {global_rank} of {world_size} cannot connect to the other ranks: {error}",
            next_step="check that the nodes reach each other on all ports, or set GLOO_SOCKET_IFNAME",
        ) from error


def await_ranks(
    what: str,
    global_rank: int,
    world_size: int,
    seconds: float,
    say: Callable[[str], object] = lambda text: None,
) -> None:
    """Wait until every rank of the default group has come here.

    Args:
        what: what each of them has done then, as in "built the task"; all ranks do it equally often.
        seconds: how long to wait at most.
        say: is told every few seconds who is missing.
    Raises:
        DeadlineError: some ranks did not come; names them.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    turn = store.add(f"paceline/{what}/times/{global_rank}", 1)
    keys = [f"paceline/{what}/{turn}/{rank}" for rank in range(world_size)]
    store.set(keys[global_rank], "1")
    began = told = time.monotonic()
    while not store.check(keys):
        now = time.monotonic()
        if now > began + seconds:
            raise DeadlineError(
                f"{_missing(store, keys)} has not {what} within {seconds:g} s",
                next_step="look at what that rank does, or raise runtime.setup_deadline_seconds",
            )
        if now > told + _TELL_SECONDS:
            told = now
            say(f"waiting until {_missing(store, keys)} has {what}: {now - began:.0f} s of {seconds:g} s")
        time.sleep(_POLL_SECONDS)


def _missing(store: Store, keys: list[str]) -> str:
    late = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    return f"rank {', '.join(late)}" if late else "no rank"
