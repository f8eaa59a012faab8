"""The script that holds the namespaces of one host (or the switch) while its standard input is open.

`holder.py LAB NAME JOIN NAMES [FOLDER SIZE]`, with the standard library alone. JOIN is "root" (no user
namespace), "new" (create one) or the number of a process whose user namespace is joined. NAMES is a file for
/etc/hosts. At FOLDER a disk of SIZE bytes is mounted that only this host has. The script prints the number of
the first process of the host as JSON, or an error. Invariant: when the lab ends for any reason, the input
ends; then the first process is killed, and the kernel ends all other processes, links and mounts of the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys

_NEW_USER = 0x10000000
_NEW = {"net": 0x40000000, "mnt": 0x00020000, "pid": 0x20000000, "uts": 0x04000000, "ipc": 0x08000000}
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x1000, 0x4000, 1 << 18, 2, 4, 8
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def check_result(result: int, what: str) -> None:
    """Raise an OSError with the failed operation if a system call failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def enter_user_namespace(join: str) -> None:
    """Create or join a user namespace in which this user is root; do nothing for "root"."""
    if join == "root":
        return
    if join != "new":
        fd = os.open(f"/proc/{join}/ns/user", os.O_RDONLY)
        check_result(_libc.setns(fd, _NEW_USER), "joining the user namespace of the lab")
        os.close(fd)
        return
    uid, gid = os.getuid(), os.getgid()
    check_result(_libc.unshare(_NEW_USER), "creating a user namespace")
    # The kernel accepts the gid_map of a user without privileges only after setgroups is denied.
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as stream:  # noqa: PTH123
            stream.write(text)


def mount(source: bytes, target: bytes, kind: bytes, flags: int, options: bytes = b"") -> None:
    """Mount a file system.

    Raises:
        OSError: with the type and the target.
    """
    check_result(
        _libc.mount(source, target, kind, flags, options),
        f"mounting {kind.decode() or 'private'} on {target.decode()}",
    )


def set_up_mounts(name: str, names: str, disk: list[str]) -> None:
    """Set up mounts, host name and settings; `names` is a file that replaces /etc/hosts."""
    # Private, or the mounts of the host would appear on the machine.
    mount(b"none", b"/", b"", _MS_REC | _MS_PRIVATE)
    mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if os.path.isdir("/dev/shm"):  # noqa: PTH112, hosts share no memory
        mount(b"tmpfs", b"/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV)
    if disk:
        mount(b"tmpfs", disk[0].encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk[1]}".encode())
    if os.path.exists(names) and os.path.exists("/etc/hosts"):  # noqa: PTH110
        mount(names.encode(), b"/etc/hosts", b"", _MS_BIND)
    check_result(_libc.sethostname(name.encode(), len(name)), "naming the host")
    for which in ("all", "default"):  # IPv6 messages of the kernel would be counted on the links
        path = f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6"
        if os.path.exists(path):  # noqa: PTH110
            with open(path, "w", encoding="ascii") as stream:  # noqa: PTH123
                stream.write("1")


def run_init_process(name: str, names: str, disk: list[str], ready: int) -> None:
    """Run as the first process of the host: set up mounts, then reap orphans until killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        set_up_mounts(name, names, disk)
    except OSError as error:
        os.write(ready, str(error.args[1]).encode())
        os._exit(1)
    os.write(ready, b"ok")
    for fd in (0, 1, ready):
        os.close(fd)
    reap_orphans()


def reap_orphans() -> None:
    """Reap orphans forever."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        signal.sigwait([signal.SIGCHLD])
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue


def start_init_process(name: str, join: str, names: str, disk: list[str]) -> tuple[int, str]:
    """Start the first process; return its number, and "ok" or an error."""
    enter_user_namespace(join)
    for kind, flag in _NEW.items():
        check_result(_libc.unshare(flag), f"creating a {kind} namespace")
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(reading)
        run_init_process(name, names, disk, writing)
    os.close(writing)
    answer = os.read(reading, 4096).decode()
    return first, answer or "the first process of the host ended"


def main(name: str, join: str, names: str, *disk: str) -> int:
    """Hold the namespaces until the input or the first process ends."""
    try:
        first, answer = start_init_process(name, join, names, list(disk))
    except OSError as error:
        first, answer = 0, str(error.args[1])
    os.write(1, (json.dumps({"pid": first, "said": answer}) + "\n").encode())
    if answer != "ok":
        return 1
    # Only the end of the lab ends a host, and the lab stops its commands itself.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handle = os.pidfd_open(first)
    select.select([0, handle], [], [])
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[2:]))
