"""The number of cores that this process can use: those of its affinity, limited by the quota of its cgroup.

A container often has the CPU time of two cores on a machine that shows 64. Threads beyond the quota wait for
each other inside every operation.
Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst (cfs_quota_us).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.errors import format_count

_MOUNT, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class CoreCount(NamedTuple):
    """A number of cores, and where it comes from.

    Args:
        number: at least one.
        reason: words for a log line, as in "2 threads: REASON".
    """

    number: int
    reason: str


def num_cores() -> int:
    """Return the number of cores that this process can use."""
    return find_cores().number


def find_cores(mount: Path = _MOUNT, mine: Path = _OWN_CGROUPS) -> CoreCount:
    """Return the number of cores that this process can use, with the reason.

    Args:
        mount: mount point of the cgroup file system.
        mine: file that lists the cgroups of this process.
    """
    affinity = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = min(_cgroup_quotas(mount, mine), default=float(affinity))
    if quota >= affinity:
        return CoreCount(affinity, "one core" if affinity == 1 else f"{affinity} cores")
    return CoreCount(max(1, int(quota)), f"a cgroup quota of {format_count(quota, 'core')} (of {affinity})")


def _cgroup_quotas(mount: Path, mine: Path) -> Iterator[float]:
    """Yield the CPU quota of each cgroup that contains this process, in cores."""
    for folder in {mount, mount / "cpu", *_cgroup_folders(mount, mine)}:
        try:
            limit = (folder / "cpu.max").read_text(encoding="ascii").split()
            if limit[0] != "max":
                yield int(limit[0]) / int(limit[1])
        except (OSError, ValueError, IndexError, ZeroDivisionError):
            pass
        try:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = (int((folder / name).read_text(encoding="ascii")) for name in names)
            if quota > 0 and period > 0:
                yield quota / period
        except (OSError, ValueError):
            pass


def _cgroup_folders(mount: Path, mine: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups and their parents; in a container some are missing."""
    try:
        lines = mine.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if controllers and "cpu" not in controllers.split(","):
            continue
        cgroup = Path(path.lstrip("/"))
        roots = [mount] if not controllers else [mount / "cpu", mount / controllers]
        for root in roots:
            yield from (root / folder for folder in (cgroup, *cgroup.parents))
