"""The most memory that a side takes in its steps, on each rank, as the kernel counts it.

Not PyTorch's own count: that sees neither what Gloo's threads free nor what a library takes by itself. The
kernel's is the largest resident set since it was told to forget, above what the process had before the side
was built. Memory that ranks share counts by the part that falls to each of them.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.allocator import return_freed_memory
from benchmarks.measure import Side
from benchmarks.pair import DEADLINE_SECONDS
from benchmarks.report import Table
from paceline.job.cluster import Cluster
from paceline.testing import run_ranks

Build = Callable[[], Side]
MIB = 2**20
_PROCESS = Path("/proc/self")
_WARM_UP, _STEPS = 2, 3


class Peak(NamedTuple):
    """Of one side.

    Args:
        most_bytes: on the rank that needs most.
    """

    name: str
    most_bytes: int


class _Resident(NamedTuple):
    """Bytes of this process that are in memory.

    Args:
        shared: mapped with others; `share`: divided by how many have mapped it.
        most: the largest sum of both kinds since the kernel was told to forget.
    """

    own: int
    shared: int
    share: int
    most: int

    @classmethod
    def now(cls) -> _Resident:
        status = _kibibytes("status")
        shared = status["RssShmem"]
        share = _kibibytes("smaps_rollup")["Pss_Shmem"]
        return cls(*(1024 * x for x in (status["VmRSS"] - shared, shared, share, status["VmHWM"])))


def _kibibytes(name: str) -> dict[str, int]:
    text = (_PROCESS / name).read_text(encoding="utf-8")
    return {key: int(value) for key, value in re.findall(r"(\w+):\s+(\d+) kB", text)}


def measure_memory(build: Callable[[Cluster], Sequence[Build]], num_ranks: int = 2) -> list[Peak]:
    """Build every side by itself and run some steps of it; all in the same processes, one after another.

    Args:
        build: called on all ranks: what builds each side. Each is built twice, as code that is loaded at the
            first use of a library is no memory of the layout.
    """
    ranks = run_ranks(partial(_measure_rank, build), num_ranks, deadline=DEADLINE_SECONDS)
    return [Peak(own[0].name, max(peak.most_bytes for peak in own)) for own in zip(*ranks, strict=True)]


def _measure_rank(build: Callable[[Cluster], Sequence[Build]], cluster: Cluster) -> list[Peak]:
    torch.set_num_threads(1)
    return_freed_memory()
    return [_peak(one) for one in build(cluster) for _ in range(2)][1::2]


def _peak(build: Build) -> Peak:
    gc.collect()
    return_freed_memory()
    before = _Resident.now()
    side = build()
    side.begin()
    for _ in range(_WARM_UP):
        side.step()
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")  # forgets the largest resident set
    for _ in range(_STEPS):
        side.step()
    dist.barrier()  # all ranks have mapped what they share
    after = _Resident.now()
    dist.barrier()
    own = after.most - after.shared - before.own
    return Peak(side.name, own + after.share - before.share)


def memory_table(title: str, found: Sequence[Peak], reference: str) -> Table:
    """Every side against one of them."""
    base = next(peak.most_bytes for peak in found if peak.name == reference)
    rows = [(peak.name, f"{peak.most_bytes / MIB:.1f}", f"{peak.most_bytes / base:.3f}") for peak in found]
    return Table(title, ("side", "MiB", "ratio"), rows)
