"""The bytes of the closed form are those that the kernel has sent, also of the backend's own collectives.

The kernel counts acknowledged bytes of every TCP connection (`tcpi_bytes_acked`), so a collective that sends
more than its form, or less, is found without asking the ledger, which counts native calls by the form itself.
"""

import os
import socket
import struct
import time
from pathlib import Path

import pytest
import torch

from paceline.comm import Net
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.testing import run_ranks

VALUES = 840 * 1024  # divides by every number of ranks up to 8
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_BYTES_ACKED = 120  # offset in `struct tcp_info`: 8 bytes, 24 words of 32 bits, two of 64 bits
_INFO_BYTES = 128


def acknowledged_bytes() -> int:
    """The bytes that peers have acknowledged, over all TCP connections of this process."""
    total = 0
    for path in [*Path("/proc/self/fd").iterdir()]:
        try:
            if not path.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:  # a listener, a UDP socket, or one that was closed meanwhile
            continue
        total += struct.unpack_from("<Q", info, _BYTES_ACKED)[0] if len(info) == _INFO_BYTES else 0
    return total


def settled_bytes() -> int:
    """The same, when nothing is on its way any more."""
    before, now = -1, acknowledged_bytes()
    while now != before:
        time.sleep(0.05)
        before, now = now, acknowledged_bytes()
    return now


def counts(cluster: Cluster, doubles: bool = False) -> dict[str, tuple[float, int]]:
    """Return the bytes of the ledger and those that the kernel has sent, by operation."""
    net, found = Net(30.0), {}
    group = Mesh.build(cluster, {"replica": cluster.world_size}).replica
    x = torch.arange(VALUES, dtype=torch.float32) % 7
    parts = x.view(group.size, -1)
    calls = {
        "all_reduce": lambda: net.all_reduce(x.clone(), group).wait(),
        "reduce_scatter": lambda: net.reduce_scatter(x, group).wait(),
        "all_gather": lambda: net.all_gather(parts[group.rank], group, equal=True).wait(),
        "all_to_all": lambda: net.all_to_all([*parts], group).wait(),
    }
    assert tuple(calls) == OPERATIONS
    net.barrier(group)
    for name, call in calls.items():
        call()  # the first call connects
        net.barrier(group)
        before, sent = settled_bytes(), net.ledger.total().sent_bytes
        call()
        own = net.ledger.total().sent_bytes - sent
        if doubles:
            group.handle.allreduce([x.clone()]).wait()
        found[name] = own, settled_bytes() - before
        net.barrier(group)
    return found


@pytest.mark.capability("Z4", "G5", "A11", clause="native calls, by the counters of the kernel")
@pytest.mark.parametrize("world", [2, 3, 4, *(pytest.param(n, marks=pytest.mark.soak) for n in range(5, 9))])
def test_the_kernel_has_sent_the_bytes_of_the_closed_form(world: int) -> None:
    for rank, found in enumerate(run_ranks(counts, world)):
        for name, (form, sent) in found.items():
            # Gloo's messages have headers, and ranks agree on the end.
            assert form <= sent <= 1.01 * form + 4096, (world, rank, name, form, sent)


def test_bytes_that_no_form_has_are_found() -> None:
    """The mutation twin: a collective beside the ledger."""
    for found in run_ranks(counts, 2, True):
        for form, sent in found.values():
            assert sent > 1.01 * form + 4096
