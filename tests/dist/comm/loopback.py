"""The process inside a network namespace of its own: what the kernel and the ledgers count, printed as JSON.

It does not import torch, only its ranks do: that halves the time to the first collective.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.job.cluster import Cluster
from paceline.testing import run_ranks

if TYPE_CHECKING:
    from paceline.comm import Net
    from paceline.job.mesh import RankGroup

WORLDS, NUM_CALLS = (2, 3, 4), 5
LARGE, SMALL = 4 << 20, 768 << 10  # bytes of payload; SMALL can be split in 2, 3 and 4
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1


def count(cluster: Cluster) -> dict[str, tuple[int, float]]:
    """By operation: bytes the kernel moved for the calls of all ranks, and this rank's ledger of them."""
    from paceline.comm import Net
    from paceline.job.mesh import Mesh

    group = Mesh.build(cluster, {"replica": cluster.world_size}).replica
    found = {}
    for op, call in calls(group).items():
        call(Net(20.0, times_calls=False))  # connections are made at the first call
        net, clock = Net(20.0, times_calls=False), Net(20.0)
        clock.barrier(group)
        before = loopback_bytes()
        clock.barrier(group)  # nobody calls before all have read
        for _ in range(NUM_CALLS):
            call(net)
        clock.barrier(group)
        found[op] = loopback_bytes() - before, net.ledger.total().sent_bytes
        clock.barrier(group)
    return found


def calls(group: RankGroup) -> dict[str, Callable[[Net], object]]:
    """How to call every operation once."""
    import torch

    large, small = torch.ones(LARGE // 4), torch.ones(SMALL // 4)
    parts = list(small.chunk(group.size))
    return {
        "all_reduce": lambda net: net.all_reduce(large, group).wait(),
        "all_gather": lambda net: net.all_gather(small, group).wait(),
        "reduce_scatter": lambda net: net.reduce_scatter(small, group).wait(),
        "all_to_all": lambda net: net.all_to_all(parts, group).wait(),
        "broadcast": lambda net: net.broadcast(small, group).wait(),
        "reduce": lambda net: net.reduce(small, group).wait(),
        "gather": lambda net: net.gather(parts[0], group).wait(),
        "scatter": lambda net: net.scatter(parts, parts[0], group).wait(),
    }


def loopback_bytes() -> int:
    """Bytes that the loopback of this namespace has transmitted."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def raise_loopback() -> None:
    """A new namespace has a loopback that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control.fileno(), SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


if __name__ == "__main__":
    raise_loopback()
    sys.stdout.write(json.dumps({world: run_ranks(count, world) for world in WORLDS}))
