"""A Slurm cluster of two nodes on this machine, without root daemons: munged, slurmctld and two slurmd.

Every daemon runs in the foreground as a child of this process and dies with it. Both nodes have the address
127.0.0.1 and a port of their own; their names (n1, n2) resolve nowhere, as on a cluster without DNS.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.job.cluster import process_environment
from paceline.launch.worker_process import die_with_parent
from tests.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
_READY_SECONDS, _COMMAND_SECONDS, _END_SECONDS = 60.0, 240.0, 10.0
_ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"

_CONFIGURATION = """
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
EnforcePartLimits=ALL
KillWait=10
SlurmdTimeout=30
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MailProg=/bin/true
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{second_port}] CPUs=2 State=UNKNOWN
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} MaxTime=60
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF MaxTime=60
"""


def missing_programs() -> str:
    """The programs of Slurm that are not installed here, with commas; empty if all are."""
    return ", ".join(name for name in PROGRAMS if _program(name) is None)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{process_environment().get('PATH', '')}:{_SYSTEM_PATH}")


@dataclass
class SlurmCluster:
    """A running cluster.

    Args:
        folder: with its configuration and the logs of its daemons.
        environ: variables with which the commands of Slurm find it.
        daemons: by name: slurmctld, n1 and n2.
    """

    folder: Path
    environ: Mapping[str, str]
    daemons: dict[str, subprocess.Popen[bytes]]

    def run(self, *words: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm to its end."""
        return subprocess.run(
            words,
            cwd=cwd,
            env={**self.environ, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )

    def start(self, *words: str, cwd: Path) -> subprocess.Popen[str]:
        """Start a command, whose output has its errors as well; it dies with this process."""
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=dict(self.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509, one system call
        )

    def job_state(self, job: str) -> str:
        """The state of a job, such as RUNNING; empty if Slurm knows it no more."""
        shown = self.run("scontrol", "show", "job", "-o", job).stdout
        return shown.partition("JobState=")[2].partition(" ")[0]

    def wait_for_state(self, job: str, *states: str, seconds: float = 60.0) -> str:
        """Wait until a job is in one of these states; an end in another one is an error at once."""
        expires = time.monotonic() + seconds
        while (state := self.job_state(job)) not in states:
            assert time.monotonic() < expires and state not in _ENDS, self.describe(job)
            time.sleep(0.1)
        return state

    def start_soon(self, job: str) -> None:
        """Let a job that was queued again start after two seconds, not after two minutes.

        Slurm remembers when it has revoked the credentials of a job in whole seconds: a start in the same
        second is refused ("Job credential revoked"), and the job fails with exit code 1.
        """
        done = self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
        assert done.returncode == 0, done.stderr + self.describe(job)

    def start_daemon(self, node: str) -> None:
        """Start the daemon of a node, and wait until Slurm has heard of it."""
        self.daemons[node] = _start(self.environ, "slurmd", "-D", "-N", node)
        expires = time.monotonic() + _READY_SECONDS
        while set(_state(self, node)) & set("*~#$%@^"):
            assert time.monotonic() < expires, self.run("scontrol", "show", "node", node).stdout
            time.sleep(0.1)

    def kill_daemon(self, node: str) -> None:
        """Kill the daemon of a node; its tasks go on."""
        self.daemons[node].kill()
        self.daemons[node].wait()

    def kill_node(self, node: str, job: str) -> None:
        """Kill the daemon of a node and all processes of a job there, as a loss of power would."""
        self.kill_daemon(node)
        configuration = f"SLURM_CONF={self.environ['SLURM_CONF']}"
        wanted = {configuration, f"SLURM_JOB_ID={job}", f"SLURMD_NODENAME={node}"}
        tasks, parents = [], {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                parents[int(path.name)] = int(fields[1])
                if wanted <= {*(path / "environ").read_text(errors="replace").split("\0")}:
                    tasks.append(int(path.name))
        # the parent of the first task is the step's own daemon, which would report its end
        above = {parents[task] for task in tasks} - {*tasks}
        named = [pid for pid in above if "slurmstepd" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert named and tasks, self.describe(job)
        for pid in (*named, *tasks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def describe(self, job: str) -> str:
        """Return what Slurm knows about a job, its output, and the lines about it in the daemons' logs."""
        shown = self.run("scontrol", "show", "job", job).stdout
        found = re.search(r"StdOut=(\S+)", shown)
        parts = [shown]
        if found is not None and Path(found[1]).is_file():
            parts.append(Path(found[1]).read_text(errors="replace"))
        named = re.compile(rf"(JobId=|StepId=|job |Job ){job}\b")
        for path in sorted(self.folder.glob("slurm*.log")):
            lines = path.read_text(errors="replace").splitlines()
            parts += [f"{path.name}: {line}" for line in lines if named.search(line)]
        return "\n".join(parts)


@contextmanager
def slurm_cluster(folder: Path, grace_seconds: int = 30) -> Iterator[SlurmCluster]:
    """Run a cluster during the block; at its end all jobs are cancelled and all daemons have ended."""
    host, control_port, first = socket.gethostname().split(".")[0], free_port(), _two_ports()
    (folder / "munge").mkdir(parents=True)
    (folder / "munge").chmod(0o711)
    (folder / "state").mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    values = {"host": host, "user": _user(), "folder": folder, "control_port": control_port}
    values |= {"first_port": first, "second_port": first + 1, "grace": grace_seconds}
    configuration = folder / "slurm.conf"
    configuration.write_text(_CONFIGURATION.format(**values))
    inherited = {k: v for k, v in process_environment().items() if not k.startswith(("SLURM_", "PACELINE_"))}
    environ = {**inherited, "SLURM_CONF": str(configuration)}
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    cluster = SlurmCluster(folder, environ, daemons)
    try:
        munge = [f"--{name}={folder}/munge/{name.removesuffix('-file')}" for name in ("key-file", "socket")]
        munge += [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "seed", "log")]
        daemons["munged"] = _start(environ, "munged", "-F", "--force", *munge)
        _wait_for((folder / "munge" / "socket").exists, daemons["munged"], "munged", folder)
        daemons["slurmctld"] = _start(environ, "slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            (folder / f"spool-{node}").mkdir()
            daemons[node] = _start(environ, "slurmd", "-D", "-N", node)
        _wait_for(lambda: _idle(cluster), daemons["slurmctld"], "slurmctld", folder)
        yield cluster
    finally:
        _end(cluster)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _two_ports() -> int:
    while True:
        first = free_port()
        with suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first


def _start(environ: Mapping[str, str], name: str, *words: str) -> subprocess.Popen[bytes]:
    program = _program(name)
    assert program is not None
    return subprocess.Popen(
        [program, *words],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509, one system call
    )


def _idle(cluster: SlurmCluster) -> bool:
    return cluster.run("sinfo", "-h", "-N", "-p", "low", "-o", "%t").stdout.split() == ["idle", "idle"]


def _state(cluster: SlurmCluster, node: str) -> str:
    return cluster.run("sinfo", "-h", "-n", node, "-p", "low", "-o", "%t").stdout.strip()


def _wait_for(is_ready: object, daemon: subprocess.Popen[bytes], name: str, folder: Path) -> None:
    assert callable(is_ready)
    expires = time.monotonic() + _READY_SECONDS
    while not is_ready():
        logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
        assert daemon.poll() is None and time.monotonic() < expires, f"{name} is not ready: {logs}"
        time.sleep(0.1)


def _end(cluster: SlurmCluster) -> None:
    with suppress(subprocess.TimeoutExpired):
        cluster.run("scancel", "--signal=KILL", "--full", "--user", _user())
        cluster.run("scancel", "--user", _user())
        expires = time.monotonic() + _END_SECONDS
        while cluster.run("squeue", "-h").stdout.strip() and time.monotonic() < expires:
            time.sleep(0.1)
    for name in ("n1", "n2", "slurmctld", "munged"):
        daemon = cluster.daemons.get(name)
        if daemon is None:
            continue
        daemon.terminate()
        try:
            daemon.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
