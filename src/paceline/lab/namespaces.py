"""Hosts as namespaces: start one, run a command inside it, find its processes. Linux only.

Invariant: nothing has a name in the system (no entry in /run/netns, no interface outside), so labs cannot
collide, and namespaces vanish with their last process. A host shares with the machine the file system (except
/dev/shm and /proc), the kernel and the clock. Looking at the processes of a host enters and starts nothing.
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
# `mnt` comes last, because /proc of the machine is needed to enter the others.
_NAMESPACE_KINDS = ("pid", "uts", "ipc", "net", "mnt")
_WITHOUT_LAB = (
    "without a lab you can use processes on the loopback (paceline train -n 4, paceline verify -n 4), "
    "with kill -9, kill -STOP and kill -CONT"
)


def inside_script(name: str, lab: str, *arguments: str) -> list[str]:
    """Return the command line of a script of `inside`; processes of a lab are found by its name there."""
    return [sys.executable, "-I", "-S", str(_SCRIPT_FOLDER / f"{name}.py"), lab, *arguments]


@dataclass(frozen=True)
class HostNamespaces:
    """The namespaces of one host.

    Args:
        lab, name: names of the lab and of the host.
        holder: the process that holds them; they end when its standard input does.
        first: the first process of the host, with its number outside.
        kinds: the namespaces that a process enters to be inside.
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
        """Return the command line that runs `argv` inside; `network_only` keeps the files of the machine."""
        return enter_command(self.lab, self.first, self.kinds, argv, network_only, cores, cgroups)

    def tool(self, argv: Sequence[str], lines: Sequence[str] = ()) -> str:
        """Run a short command in the network of the host, with `lines` as input; return its output.

        Raises:
            LabError: it failed, or took too long.
        """
        # An empty batch changes nothing, and entering the namespace would cost a process.
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
        """End every process of the host, and wait until they are gone."""
        if self.holder.stdin is not None:
            # The holder ends with its input, and the kernel then ends the host.
            self.holder.stdin.close()
        try:
            self.holder.wait(_READY_SECONDS)
        except subprocess.TimeoutExpired:
            self.holder.kill()
            self.holder.wait(_READY_SECONDS)
        if self.holder.stdout is not None:
            self.holder.stdout.close()


def _failed_line(errors: str, lines: Sequence[str]) -> str:
    match = re.search(r"Command failed -:(\d+)", errors)
    return f" (line: {lines[int(match[1]) - 1]})" if match and int(match[1]) <= len(lines) else ""


def enter_command(
    lab: str,
    first: int,
    kinds: Sequence[str],
    argv: Sequence[str],
    network_only: bool = False,
    cores: Sequence[int] = (),
    cgroups: Sequence[str] = (),
) -> list[str]:
    """Return the command line that runs `argv` in the namespaces of process `first`."""
    entered = [kind for kind in kinds if not network_only or kind in ("user", "net")]
    options = {"pid": first, "kinds": entered, "cores": list(cores), "cgroups": list(cgroups)}
    return inside_script("enter", lab, json.dumps(options), *argv)


def start_namespaces(
    lab: str, name: str, join: str, names: str = "", disk: Sequence[str] = ()
) -> HostNamespaces:
    """Start the namespaces of a host.

    Args:
        join: "root", "new", or the number of a process whose user namespace is joined.
        names: a file that replaces /etc/hosts; empty for that of the machine.
        disk: folder and size in bytes of a disk that only this host has; empty for none.
    Raises:
        LabError: the system does not allow it.
    """
    holder = subprocess.Popen(
        inside_script("holder", lab, name, join, names, *disk),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    answer = read_json_line(holder)
    if answer.get("said") != "ok":
        if holder.stdin is not None:
            holder.stdin.close()
        holder.kill()
        holder.wait(_READY_SECONDS)
        if holder.stdout is not None:
            holder.stdout.close()
        raise LabError(
            f"The system does not let this user start a host: {answer.get('said', 'no answer')}.",
            where="Linux namespaces (user, net, mnt, pid, uts, ipc)",
            next_step="run as root, or allow user namespaces (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns); "
            f"{_WITHOUT_LAB}",
        )
    kinds = _NAMESPACE_KINDS if join == "root" else ("user", *_NAMESPACE_KINDS)
    return HostNamespaces(lab, name, holder, int(answer["pid"]), kinds)


def read_json_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Read the next line of JSON from a script of `inside`; empty if it ended or took too long."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], _READY_SECONDS)[0]:
            return {}
        # Without a buffer, since `select` does not see what a buffer holds.
        data = os.read(process.stdout.fileno(), 4096)
        if not data:
            return {}
        line += data
    record: dict[str, Any] = json.loads(line.splitlines()[0])
    return record


def check_tools() -> None:
    """Check that this machine has what a lab needs.

    Raises:
        LabError: it is not Linux, or a tool is missing.
    """
    missing = [tool for tool in ("ip", "tc", "bridge") if shutil.which(tool) is None]
    if sys.platform != "linux":
        raise LabError("A lab needs Linux namespaces.", next_step=_WITHOUT_LAB)
    if missing:
        raise LabError(
            f"A lab needs {', '.join(missing)}, which this machine does not have.",
            next_step=f"install iproute2 (apt-get install iproute2); {_WITHOUT_LAB}",
        )


def find_obstacle() -> str:
    """Return why no lab can be started here; empty if one can."""
    try:
        check_tools()
        space = start_first_namespaces("paceline-lab-probe", "probe")
    except LabError as error:
        return error.what
    space.end()
    return ""


def start_first_namespaces(lab: str, name: str) -> HostNamespaces:
    """Start namespaces as root; if that is not possible, inside a new user namespace.

    Raises:
        LabError: neither works.
    """
    if os.geteuid() == 0:
        # Root of a container may lack the rights to do this, and can still have a user namespace.
        with suppress(LabError):
            return start_namespaces(lab, name, "root")
    return start_namespaces(lab, name, "new")


def host_pids(first: int) -> list[int]:
    """Return the processes of a host without its first, by their numbers outside; empty if it is gone."""
    namespace = _process_namespace(str(first))
    if namespace is None:
        return []
    processes = [path.name for path in Path("/proc").glob("[0-9]*")]
    return sorted(int(pid) for pid in processes if _process_namespace(pid) == namespace and int(pid) != first)


def _process_namespace(pid: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115, called for every process of the machine
    except OSError:
        return None


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def interface_counts(first: int) -> Mapping[str, tuple[int, int]]:
    """Return bytes received and sent by interface, in the network namespace of a process.

    The kernel counts a large segment that it has not cut yet with one header; for bytes on the wire use
    `paceline.lab.utilization.read_traffic`.
    """
    try:
        lines = Path(f"/proc/{first}/net/dev").read_text().splitlines()[2:]
    except OSError:
        return {}
    rows = {line.partition(":")[0].strip(): line.partition(":")[2].split() for line in lines}
    return {name: (int(row[0]), int(row[8])) for name, row in rows.items()}
