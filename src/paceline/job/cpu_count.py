"""How many cores this process may use: those of its affinity, and no more than its control group may spend.

A container is often given the time of two cores of a machine that shows sixty-four. Threads beyond that wait
for each other inside every operation.
Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst (cfs_quota_us).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOUNT, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class CoreCount(NamedTuple):
    """How many, and why.

    Args:
        number: at least one.
        reason: as in "as REASON".
    """

    number: int
    reason: str


def num_cores() -> int:
    """Cores that this process may use."""
    return find_cores().number


def find_cores(mount: Path = _MOUNT, mine: Path = _OWN_CGROUPS) -> CoreCount:
    """Cores that this process may use, and what they follow from.

    Args:
        mount: where control groups are.
        mine: what says in which of them this process is.
    """
    there = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = min(_cgroup_quotas(mount, mine), default=float(there))
    if quota >= there:
        return CoreCount(there, "one core" if there == 1 else f"{there} cores")
    return CoreCount(max(1, int(quota)), f"the time of {quota:g} cores (of {there}, by the control group)")


def _cgroup_quotas(mount: Path, mine: Path) -> Iterator[float]:
    """Of each control group around this process: the time that it may spend, in cores."""
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
    """The folders of this process's groups, and of those around them; inside a container they may be gone."""
    try:
        lines = mine.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if controllers and "cpu" not in controllers.split(","):
            continue
        place = Path(path.lstrip("/"))
        roots = [mount] if not controllers else [mount / "cpu", mount / controllers]
        for root in roots:
            yield from (root / part for part in (place, *place.parents))
