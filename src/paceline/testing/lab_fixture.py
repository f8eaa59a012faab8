"""The lab in tests: a fixture that makes labs or skips with the reason, and a look for what is left behind.

Invariant: what other labs on the machine have is no leak of the one that is asked about.
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
    """What a lab has on this machine, and what the machine had outside of it.

    Args:
        name: of the lab.
        folder: its files.
        namespaces: by their names in /proc, which the system gives to new ones when these are gone.
        processes: all that run in its hosts, and those that hold them.
        links, mounts: of this process's own namespaces; a lab adds none.
    """

    name: str
    folder: Path
    namespaces: frozenset[str]
    processes: frozenset[ProcessIdentity]
    links: frozenset[str]
    mounts: frozenset[str]

    @classmethod
    def of(cls, record: LabRecord) -> LabFootprint:
        """Take it while the lab runs."""
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
        """One line for each thing that is left; what is on its way out gets a moment."""
        expires = time.monotonic() + _SETTLE_SECONDS
        while (left := self._list_leftovers()) and time.monotonic() < expires:
            time.sleep(0.02)
        return left

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
    found = set()
    for kind in _NAMESPACE_KINDS:
        with suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))  # noqa: PTH115, called for every process
    return found


def _links() -> frozenset[str]:
    return frozenset(path.name for path in Path("/sys/class/net").iterdir())


def _mounts() -> frozenset[str]:
    return frozenset(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="session")
def why_no_lab() -> str:
    """Why no lab can be made here; empty if one can."""
    return find_obstacle()


@pytest.fixture
def lab(why_no_lab: str) -> Iterator[Callable[..., Lab]]:
    """Makes labs for one test: `lab(hosts=4, links=Links(rate="100mbit"))`, with the arguments of `Lab`.

    They are ended with the test, which fails if one leaves something behind. Skips where namespaces are not
    allowed.
    """
    if why_no_lab:
        pytest.skip(f"no lab can be made here: {why_no_lab}")
    footprints: list[LabFootprint] = []
    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Lab:
            made = stack.enter_context(Lab(*args, **options))
            footprints.append(LabFootprint.of(made.record))
            return made

        yield make
    left = [line for footprint in footprints for line in footprint.find_leftovers()]
    if left:
        pytest.fail("the lab leaves behind: " + "; ".join(left), pytrace=False)
