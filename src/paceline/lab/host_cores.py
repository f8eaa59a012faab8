"""The cores of each host: affinity where cores divide evenly, control groups for quotas and shared cores.

Invariant: a quota that was requested and cannot be kept is an error. Without a request every host gets the
same, and the summary says how.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LabError, format_count

# Short, so that a host that has used its quota waits milliseconds, not a tenth of a second.
_PERIOD_US = 10_000
_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CoreShare:
    """The cores of one host.

    Args:
        cores: cores on which its processes can run; empty for all.
        quota: number of cores whose time it can use; 0 for no limit.
        threads: intra-op threads of each process; 0 for one per core. Where hosts share cores, threads that
            spin while they wait for a descheduled one would take the time of the others.
    """

    cores: tuple[int, ...]
    quota: float = 0.0
    threads: int = 0

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of its processes; an inherited OMP_NUM_THREADS is kept."""
        return ({"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}) | dict(inherited)


def plan_core_shares(num_hosts: int, cores: Sequence[int], wanted: float = 0.0) -> list[CoreShare]:
    """Divide cores among hosts: `wanted` cores for each, or an equal part if 0. Pure."""
    if wanted:
        # Rounded up: a host with the time of 1.5 cores runs on two.
        width = max(1, -(-int(wanted * 1000) // 1000))
        return [
            CoreShare(_cores_from(cores, i * width, min(width, len(cores))), wanted) for i in range(num_hosts)
        ]
    if num_hosts % len(cores) == 0:
        return [CoreShare((cores[i % len(cores)],)) for i in range(num_hosts)]
    if len(cores) % num_hosts == 0:
        width = len(cores) // num_hosts
        return [CoreShare(tuple(cores[i * width : (i + 1) * width])) for i in range(num_hosts)]
    return [CoreShare((), threads=1 if num_hosts > len(cores) else 0)] * num_hosts


def _cores_from(cores: Sequence[int], start: int, width: int) -> tuple[int, ...]:
    return tuple(sorted({cores[(start + k) % len(cores)] for k in range(width)}))


def describe_core_shares(shares: Sequence[CoreShare], num_cores: int, grouped: bool) -> str:
    """Return one line about the cores of the hosts, for the summary."""
    if shares[0].quota:
        return f"{shares[0].quota:g} of {num_cores} cores per host (control groups)"
    if shares[0].cores and len(shares) >= num_cores:
        each = len(shares) // num_cores
        return (
            f"{'one host' if each == 1 else f'{each} hosts'} on each of"
            f" {format_count(num_cores, 'core')} (affinity)"
        )
    if shares[0].cores:
        return f"{len(shares[0].cores)} of {num_cores} cores per host (affinity)"
    method = "with equal weights (control groups)" if grouped else "not evenly, for lack of control groups"
    return f"{format_count(num_cores, 'core')} shared by all hosts, {method}"


class ControlGroups:
    """The control groups of a lab: one folder, with a folder for each host inside.

    Args:
        lab: name of the lab.
        base: a folder of the `cpu` hierarchy that this process can write to.
        v2: whether it is the unified hierarchy.
    """

    def __init__(self, lab: str, base: Path, *, v2: bool) -> None:
        self._top, self._v2 = base / lab, v2
        self.folders: list[Path] = []

    def make(self, host: str, quota: float) -> Path:
        """Create the group of a host; all hosts have the same weight.

        Raises:
            OSError: the system does not allow it.
        """
        if not self.folders:
            self._mkdir(self._top)
            if self._v2:
                # Groups of version 2 have a controller only if the group above enables it for them.
                (self._top / "cgroup.subtree_control").write_text("+cpu")
        folder = self._top / host
        self._mkdir(folder)
        if quota and self._v2:
            (folder / "cpu.max").write_text(f"{int(quota * _PERIOD_US)} {_PERIOD_US}")
        elif quota:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(int(quota * _PERIOD_US)))
        return folder

    def _mkdir(self, folder: Path) -> None:
        folder.mkdir()
        self.folders.append(folder)

    def remove(self) -> None:
        """Remove the groups; their processes have ended by then."""
        remove_control_groups([str(folder) for folder in self.folders])


def remove_control_groups(folders: Sequence[str]) -> None:
    """Remove control groups, given outer ones first."""
    for folder in reversed(folders):
        with suppress(OSError):
            Path(folder).rmdir()


def find_control_groups(lab: str, root: Path = _CGROUP_ROOT) -> ControlGroups | None:
    """Return the control groups that this process can create; None if it cannot create any."""
    v1 = next((root / name for name in ("cpu", "cpu,cpuacct") if (root / name / "cpu.shares").exists()), None)
    if v1 is not None and os.access(v1, os.W_OK):
        return ControlGroups(lab, v1, v2=False)
    control = root / "cgroup.subtree_control"
    if control.exists() and "cpu" in control.read_text().split() and os.access(root, os.W_OK):
        return ControlGroups(lab, root, v2=True)
    return None


def assign_cores(
    lab: str, hosts: Sequence[str], wanted: float
) -> tuple[list[CoreShare], ControlGroups | None]:
    """Divide the cores of this process among hosts, and create the control groups for it.

    Raises:
        LabError: a quota was requested and this user cannot create control groups.
    """
    shares = plan_core_shares(len(hosts), sorted(os.sched_getaffinity(0)), wanted)
    groups = find_control_groups(lab) if wanted or not shares[0].cores else None
    if groups is not None:
        try:
            for host, share in zip(hosts, shares, strict=True):
                groups.make(host, share.quota)
        except OSError:
            groups.remove()
            groups = None
    if wanted and groups is None:
        raise LabError(
            f"A quota of {wanted:g} cores per host needs control groups, which this user cannot create.",
            where=str(_CGROUP_ROOT),
            next_step="run as root, or leave out --cores: hosts then share the cores evenly",
        )
    return shares, groups
