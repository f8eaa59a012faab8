"""The pytest fixture `lab`: makes labs for a test, skips where the system allows none, and finds what a lab
left.

Invariant: other labs on the machine are never taken for a leak of the one under test.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.lab.lab_registry import LabRecord, ProcessIdentity, find_lab_processes, read_lab_records
from paceline.lab.namespaces import find_obstacle, host_pids
from paceline.lab.virtual_cluster import Lab

_SETTLE_SECONDS = 60.0  # also on a busy machine
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_NAMESPACE_KINDS = ("net", "mnt", "pid", "uts", "ipc")


@dataclass(frozen=True)
class LabFootprint:
    """The resources of a running lab, and the state of the machine outside of it.

    Args:
        name: name of the lab.
        folder: the folder of the lab.
        namespaces: names in /proc; the system reuses them when the namespaces are gone.
        processes: all processes in its hosts, and those that hold them.
        links, mounts: of the namespaces of this process; a lab adds none.
    """

    name: str
    folder: Path
    namespaces: frozenset[str]
    processes: frozenset[ProcessIdentity]
    links: frozenset[str]
    mounts: frozenset[str]

    @classmethod
    def of(cls, record: LabRecord) -> LabFootprint:
        """Record the footprint of a running lab."""
        firsts = [process.pid for process in record.first.values()]
        inside = {pid for first in firsts for pid in host_pids(first)}
        holders = {process.pid for process in record.holders.values()}
        spaces = {name for first in firsts for name in _namespaces(first)} - _namespaces(os.getpid())
        return cls(
            record.name,
            record.folder,
            frozenset(spaces),
            frozenset(ProcessIdentity.of(pid) for pid in {*firsts, *inside, *holders}),
            _links(),
            _mounts(),
        )

    def find_leftovers(self) -> list[str]:
        """Return one line for each resource that is left; those that are still ending get a minute."""
        expires = time.monotonic() + _SETTLE_SECONDS
        while (leftovers := self._list_leftovers()) and time.monotonic() < expires:
            time.sleep(0.02)
        return leftovers

    def _list_leftovers(self) -> list[str]:
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        spaces = {name for pid in pids for name in _namespaces(pid)} - self._of_other_labs()
        groups = [str(path) for path in _CGROUP_ROOT.glob(f"*/{self.name}")]
        groups += [str(path) for path in _CGROUP_ROOT.glob(self.name)]
        holder_pids = [pid for pid, lab in find_lab_processes().items() if lab == self.name]
        return [
            *(f"namespace {name}" for name in sorted(spaces & self.namespaces)),
            *(
                f"process {pid}"
                for pid in sorted({*holder_pids, *(p.pid for p in self.processes if p.alive)})
            ),
            *(f"control group {group}" for group in groups),
            *(f"link {name}" for name in sorted(_links() - self.links)),
            *(f"mount {name}" for name in sorted(_mounts() - self.mounts)),
            *([f"folder {self.folder}"] if self.folder.exists() else []),
        ]

    def _of_other_labs(self) -> set[str]:
        others = [record for record in read_lab_records() if record.name != self.name]
        firsts = [first.pid for other in others for first in other.first.values() if first.alive]
        return {name for first in firsts for name in _namespaces(first)}


def _namespaces(pid: int) -> set[str]:
    names = set()
    for kind in _NAMESPACE_KINDS:
        with suppress(OSError):
            names.add(os.readlink(f"/proc/{pid}/ns/{kind}"))  # noqa: PTH115, called for every process
    return names


def _links() -> frozenset[str]:
    return frozenset(path.name for path in Path("/sys/class/net").iterdir())


def _mounts() -> frozenset[str]:
    return frozenset(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="session")
def lab_obstacle() -> str:
    """Return why no lab can be started here; empty if one can."""
    return find_obstacle()


@pytest.fixture
def lab(lab_obstacle: str) -> Iterator[Callable[..., Lab]]:
    """Return a function that starts a lab for this test, with the arguments of `Lab`.

    The labs end with the test, which fails if one leaves something behind. The test is skipped where
    namespaces are not allowed.
    """
    if lab_obstacle:
        pytest.skip(f"no lab can be started here: {lab_obstacle}")
    footprints: list[LabFootprint] = []
    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Lab:
            entered = stack.enter_context(Lab(*args, **options))
            footprints.append(LabFootprint.of(entered.record))
            return entered

        yield make
    leftovers = [line for footprint in footprints for line in footprint.find_leftovers()]
    if leftovers:
        pytest.fail("the lab left behind: " + "; ".join(leftovers), pytrace=False)
