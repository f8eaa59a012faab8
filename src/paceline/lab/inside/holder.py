"""Holds the namespaces of one host (or of the switch) for as long as its standard input stays open.

Run as a script, on the standard library alone: `holder.py LAB NAME JOIN NAMES [FOLDER SIZE]`, JOIN being
"root" (no user namespace), "new" (make one) or the number of a process whose user namespace is joined; NAMES
a file for /etc/hosts; FOLDER becomes a disk of SIZE bytes that is the host's own. It prints the number of
the host's first process as JSON, or what went wrong. Invariant: when the lab is gone, however it went, the
input ends; then the first process is killed and the kernel ends every other process of the host, its links
and its mounts.
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
    """Turn an error of the system into an exception that says what was tried."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def enter_user_namespace(join: str) -> None:
    """Make or join a user namespace in which this user is root; nothing for "root"."""
    if join == "root":
        return
    if join != "new":
        fd = os.open(f"/proc/{join}/ns/user", os.O_RDONLY)
        check_result(_libc.setns(fd, _NEW_USER), "joining the lab's user namespace")
        os.close(fd)
        return
    uid, gid = os.getuid(), os.getgid()
    check_result(_libc.unshare(_NEW_USER), "making a user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as stream:  # noqa: PTH123
            stream.write(text)


def mount(source: bytes, target: bytes, kind: bytes, flags: int, options: bytes = b"") -> None:
    """Mount, or say what could not be mounted."""
    check_result(
        _libc.mount(source, target, kind, flags, options),
        f"mounting {kind.decode() or 'private'} on {target.decode()}",
    )


def set_up_mounts(name: str, names: str, disk: list[str]) -> None:
    """The host's own mounts, name and settings; `names` is a file that replaces /etc/hosts."""
    mount(b"none", b"/", b"", _MS_REC | _MS_PRIVATE)
    mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if os.path.isdir("/dev/shm"):  # noqa: PTH112, hosts share no memory
        mount(b"tmpfs", b"/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV)
    if disk:
        mount(b"tmpfs", disk[0].encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk[1]}".encode())
    if os.path.exists(names) and os.path.exists("/etc/hosts"):  # noqa: PTH110
        mount(names.encode(), b"/etc/hosts", b"", _MS_BIND)
    check_result(_libc.sethostname(name.encode(), len(name)), "naming the host")
    for which in ("all", "default"):  # the kernel's own IPv6 messages would be counted on the links
        path = f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6"
        if os.path.exists(path):  # noqa: PTH110
            with open(path, "w", encoding="ascii") as stream:  # noqa: PTH123
                stream.write("1")


def run_init_process(name: str, names: str, disk: list[str], ready: int) -> None:
    """The first process of the host: nothing but taking leave of orphans."""
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
    """Wait for orphans, for good."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        signal.sigwait([signal.SIGCHLD])
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue


def start_init_process(name: str, join: str, names: str, disk: list[str]) -> tuple[int, str]:
    """Start the first process; its number, and "ok" or what went wrong."""
    enter_user_namespace(join)
    for kind, flag in _NEW.items():
        check_result(_libc.unshare(flag), f"making a {kind} namespace")
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(reading)
        run_init_process(name, names, disk, writing)
    os.close(writing)
    said = os.read(reading, 4096).decode()
    return first, said or "the first process of the host ended"


def main(name: str, join: str, names: str, *disk: str) -> int:
    """Hold until the input ends or the first process does."""
    try:
        first, said = start_init_process(name, join, names, list(disk))
    except OSError as error:
        first, said = 0, str(error.args[1])
    os.write(1, (json.dumps({"pid": first, "said": said}) + "\n").encode())
    if said != "ok":
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handle = os.pidfd_open(first)
    select.select([0, handle], [], [])
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[2:]))
