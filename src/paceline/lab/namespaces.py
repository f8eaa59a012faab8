"""Hosts as namespaces: start one, run something in it, find its processes.

Invariant: nothing has a name in the system (no entry in /run/netns, no interface outside), so labs cannot
collide, and a namespace is gone when its last process is. What a host shares with the machine: the file
system (but /dev/shm and /proc), the kernel, the clock. Linux only.

The processes of a host and its interfaces' counts, seen from outside.

Invariant: looking enters nothing and starts nothing.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LabError
from paceline.lab import inside

_SCRIPT_FOLDER = Path(inside.__file__).parent
_READY_SECONDS = 20.0
_COMMAND_SECONDS = 20.0
_NAMESPACE_KINDS = ("pid", "uts", "ipc", "net", "mnt")  # mnt last: /proc is looked up before
_WITHOUT_LAB = (
    "without it still work: processes on the loopback (paceline train -n 4, paceline verify -n 4), "
    "and kill -9, kill -STOP and kill -CONT on them"
)


def inside_script(name: str, lab: str, *arguments: str) -> list[str]:
    """The argument vector of a script of `inside`; the lab's name in it is how its processes are known."""
    return [sys.executable, "-I", "-S", str(_SCRIPT_FOLDER / f"{name}.py"), lab, *arguments]


@dataclass(frozen=True)
class HostNamespaces:
    """The namespaces of one host.

    Args:
        lab, name: of whom.
        holder: keeps them; they end when its input does.
        first: the host's first process, as the machine numbers it.
        kinds: all that a process inside has entered.
    """

    lab: str
    name: str
    holder: subprocess.Popen[bytes]
    first: int
    kinds: tuple[str, ...]

    def command(
        self,
        argv: Sequence[str],
        *,
        network_only: bool = False,
        cores: Sequence[int] = (),
        cgroups: Sequence[str] = (),
    ) -> list[str]:
        """The argument vector that runs `argv` inside; with `network_only`, on the machine's own files."""
        return enter_command(self.lab, self.first, self.kinds, argv, network_only, cores, cgroups)

    def tool(self, argv: Sequence[str], lines: Sequence[str] = ()) -> str:
        """Run a short command on this host's network, with `lines` as its input; what it printed.

        Raises:
            LabError: it failed, or took too long.
        """
        if not lines and "-batch" in argv:
            return ""
        try:
            done = subprocess.run(
                self.command(argv, network_only=True),
                input="".join(f"{line}\n" for line in lines),
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise LabError(
                f"{' '.join(argv)} took longer than {_COMMAND_SECONDS:g} s", where=self.name
            ) from error
        if done.returncode:
            raise LabError(
                f"{' '.join(argv)} failed: {done.stderr.strip()}{_failed_line(done.stderr, lines)}",
                where=self.name,
            )
        return done.stdout

    def end(self) -> None:
        """End every process of the host; returns when they are gone."""
        if self.holder.stdin is not None:
            self.holder.stdin.close()
        try:
            self.holder.wait(_READY_SECONDS)
        except subprocess.TimeoutExpired:
            self.holder.kill()
            self.holder.wait(_READY_SECONDS)
        if self.holder.stdout is not None:
            self.holder.stdout.close()


def _failed_line(errors: str, lines: Sequence[str]) -> str:
    found = re.search(r"Command failed -:(\d+)", errors)
    return f" (line: {lines[int(found[1]) - 1]})" if found and int(found[1]) <= len(lines) else ""


def enter_command(
    lab: str,
    first: int,
    kinds: Sequence[str],
    argv: Sequence[str],
    network_only: bool = False,
    cores: Sequence[int] = (),
    cgroups: Sequence[str] = (),
) -> list[str]:
    """The argument vector that runs `argv` in the namespaces of process `first`."""
    wanted = [kind for kind in kinds if not network_only or kind in ("user", "net")]
    options = {"pid": first, "kinds": wanted, "cores": list(cores), "cgroups": list(cgroups)}
    return inside_script("enter", lab, json.dumps(options), *argv)


def start_namespaces(
    lab: str, name: str, join: str, names: str = "", disk: Sequence[str] = ()
) -> HostNamespaces:
    """Make the namespaces of a host.

    Args:
        names: a file that stands in for /etc/hosts; "": the machine's own.
        disk: a folder and the bytes of a disk of the host's own that is mounted there; empty: none.
        join: "root", "new" or the number of a process whose user namespace is joined.
    Raises:
        LabError: the system does not allow it.
    """
    holder = subprocess.Popen(
        inside_script("holder", lab, name, join, names, *disk),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    said = read_json_line(holder)
    if said.get("said") != "ok":
        if holder.stdin is not None:
            holder.stdin.close()
        holder.kill()
        holder.wait(_READY_SECONDS)
        if holder.stdout is not None:
            holder.stdout.close()
        raise LabError(
            f"The system does not let this user make a host: {said.get('said', 'no answer')}.",
            where="Linux namespaces (user, net, mnt, pid, uts, ipc)",
            next_step=f"run as root, or allow user namespaces (sysctl user.max_user_namespaces, "
            f"kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns); {_WITHOUT_LAB}",
        )
    kinds = _NAMESPACE_KINDS if join == "root" else ("user", *_NAMESPACE_KINDS)
    return HostNamespaces(lab, name, holder, int(said["pid"]), kinds)


def read_json_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The next line of JSON that a script of `inside` prints; empty if it ended or took too long."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], _READY_SECONDS)[0]:
            return {}
        more = os.read(process.stdout.fileno(), 4096)
        if not more:
            return {}
        line += more
    found: dict[str, Any] = json.loads(line.splitlines()[0])
    return found


def check_tools() -> None:
    """Raises:
    LabError: this is not Linux, or a tool is missing.
    """
    missing = [tool for tool in ("ip", "tc", "bridge") if shutil.which(tool) is None]
    if sys.platform != "linux":
        raise LabError("A lab needs the namespaces of Linux.", next_step=_WITHOUT_LAB)
    if missing:
        raise LabError(
            f"A lab needs {', '.join(missing)}, which this machine has not.",
            next_step=f"install iproute2 (apt-get install iproute2); {_WITHOUT_LAB}",
        )


def find_obstacle() -> str:
    """Why no lab can be made here; empty if one can."""
    try:
        check_tools()
        space = start_first_namespaces("paceline-lab-probe", "probe")
    except LabError as error:
        return error.what
    space.end()
    return ""


def start_first_namespaces(lab: str, name: str) -> HostNamespaces:
    """A space as root; where this process is not root, or root is not enough, in a user namespace of its own.

    Raises:
        LabError: neither works.
    """
    if os.geteuid() == 0:
        with suppress(LabError):
            return start_namespaces(lab, name, "root")
    return start_namespaces(lab, name, "new")


def host_pids(first: int) -> list[int]:
    """The processes of a host but its first, as the machine numbers them; empty if the host is gone."""
    own = _process_namespace(str(first))
    if own is None:
        return []
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _process_namespace(path.name) == own]
    return sorted(pid for pid in found if pid != first)


def _process_namespace(pid: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115, called for every process of the machine
    except OSError:
        return None


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def interface_counts(first: int) -> Mapping[str, tuple[int, int]]:
    """Bytes received and sent by interface, in the network namespace of a process, from the kernel.

    Large segments that the kernel has not cut yet count with one header; see `counters` for bytes on the
    wire.
    """
    try:
        lines = Path(f"/proc/{first}/net/dev").read_text().splitlines()[2:]
    except OSError:
        return {}
    rows = {line.partition(":")[0].strip(): line.partition(":")[2].split() for line in lines}
    return {name: (int(row[0]), int(row[8])) for name, row in rows.items()}
