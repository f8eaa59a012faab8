"""The place that an engine (Slurm, MPI, torchrun, ...) has given to this process, from its variables.

`ENGINES` is a table: how each engine is detected, and from which variables rank, world size, local rank,
nodes and rendezvous are read. `place_from` is pure. Invariant: a process that an engine started as one of
several gets a place that agrees with every engine in its environment, or an error that names both sides.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import CommunicationError, format_count
from paceline.job.addresses import loopback_address

Variables = Mapping[str, str]

RENDEZVOUS, NODES = "PACELINE_RENDEZVOUS", "PACELINE_NODES"
CLUSTER_FILE, TASK = "PACELINE_CLUSTER_FILE", "PACELINE_TASK"
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below the ports that Linux gives to outgoing connections
_CONTROL_SECONDS = 5.0
_LOCAL_NAMES = ("localhost", "ip6-localhost")


@dataclass(frozen=True)
class EnginePlace:
    """This process among the processes that an engine has started.

    Args:
        engine, command: name of the engine, and the command with which users start it.
        global_rank, world_size, local_rank, local_world_size, node_rank, num_nodes: as in `Cluster`.
        address: host of rank 0, as the engine names it; empty: the engine does not tell.
        port: port of the job's store there; 0: it follows from `job`.
        job: name of the job, equal on all of its processes; jobs at one time have different ones.
        settings: the variables that decided, as text, for errors.
        starts_launchers: the engine starts one process on each node, which starts the ranks of that node.
        num_servers: number of servers among the ranks, which come first; None: the strategy decides.
        has_mpi: the engine has started each rank as a process of MPI.
    """

    engine: str
    command: str
    global_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    address: str = ""
    port: int = 0
    job: str = ""
    settings: str = ""
    starts_launchers: bool = False
    num_servers: int | None = None
    has_mpi: bool = False

    @property
    def has_one_task_per_node(self) -> bool:
        """True if no node has two of these processes, so that each of them can be a launcher."""
        return self.world_size == self.num_nodes

    def roles(self, num_servers: int) -> tuple[str, ...]:
        """Return the role of every rank: "coordinator" (rank 0, if it serves), "server" or "worker".

        Args:
            num_servers: `servers` of the strategy, or 1 for a strategy whose rank 0 serves; 0: all train.
        """
        serving = ("coordinator", *("server",) * (num_servers - 1))[:num_servers]
        return serving + ("worker",) * (self.world_size - len(serving))


class _Values:
    """The variables of one engine, with errors that name them."""

    def __init__(self, engine: str, values: Variables) -> None:
        self._engine, self.values = engine, values
        self._read: dict[str, str] = {}

    def text(self, *names: str, default: str | None = None) -> str:
        """Return the first of these variables that is set."""
        for name in names:
            if self.values.get(name, ""):
                self._read[name] = self.values[name]
                return self.values[name]
        if default is None:
            raise _error(self._engine, f"{names[0]} is not set", f"{self.settings()} is")
        return default

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the first of these variables that is set, as an integer."""
        text = self.text(*names, default=None if default is None else str(default))
        if not re.fullmatch(r"\d+", text):
            raise _error(self._engine, f"{names[0]}={text!r} is not a number", f"{self.settings()}")
        return int(text)

    def require_equal(self, name: str, expected: int, why: str) -> None:
        """Refuse a variable that says another number, if it is set."""
        text = self.values.get(name)
        if text is not None and text != str(expected):
            raise _error(self._engine, f"{name}={text}", f"{why} is {expected}")

    def settings(self) -> str:
        """Return what was read, as NAME=VALUE with commas."""
        return ", ".join(f"{name}={value}" for name, value in self._read.items())


@dataclass(frozen=True)
class EngineRow:
    """One row of the table of engines.

    Args:
        name, command: as in `EnginePlace`.
        detect: returns whether the engine has started this process; pure.
        read: returns the place from the engine's variables; pure but for a cluster file.
    """

    name: str
    command: str
    detect: Callable[[Variables], bool]
    read: Callable[[_Values], EnginePlace]


def place_from(environment: Variables, *, has_terminal: bool = False) -> EnginePlace | None:
    """Return the place of this process among several that an engine has started; None: it is alone.

    Args:
        environment: the variables of this process.
        has_terminal: standard input is a terminal, which tasks of a batch engine do not have.
    Raises:
        CommunicationError: variables of an engine contradict each other, or two engines do; names both sides.
    """
    # what Paceline's own launcher starts is inside of the place that the launcher has checked
    if "PACELINE_STORE_FD" in environment or "PACELINE_STORE_PORT" in environment:
        return None
    places = []
    for engine in ENGINES:
        if engine.detect(environment):
            values = _Values(engine.name, environment)
            places.append(_checked(replace(engine.read(values), settings=values.settings())))
    several = [place for place in places if place.world_size > 1]
    for i, inner in enumerate(places):
        for outer in several:
            if outer not in places[: i + 1]:
                _refuse_conflict(inner, outer)
    chosen = _most_detailed(several)
    if chosen is not None and chosen.engine == "Slurm" and has_terminal:
        raise CommunicationError(
            f"this is an interactive shell, but {chosen.settings} say that it is task {chosen.global_rank} of"
            f" {chosen.world_size}",
            where="the environment variables of this process",
            next_step="to train in this shell: unset SLURM_PROCID SLURM_STEP_ID SLURM_STEPID; to train on all"
            f" tasks: srun -n {chosen.world_size} paceline train ...",
        )
    return chosen


def _most_detailed(places: Sequence[EnginePlace]) -> EnginePlace | None:
    """Return the innermost place; of two that agree, the one that knows where rank 0 is."""
    if not places:
        return None
    agreeing = [place for place in places if _same_ranks(place, places[0])]
    return next((place for place in agreeing if place.address), places[0])


def _same_ranks(a: EnginePlace, b: EnginePlace) -> bool:
    return (a.global_rank, a.world_size) == (b.global_rank, b.world_size)


def _refuse_conflict(inner: EnginePlace, outer: EnginePlace) -> None:
    """Refuse two engines that describe two different jobs.

    They may describe the same ranks, or the inner engine may have one launcher in each task of the outer one
    (`srun torchrun`, or an mpirun that starts its daemons by srun).
    """
    if _same_ranks(inner, outer) or (inner.num_nodes == outer.world_size and inner.world_size > 1):
        return
    each = (
        f": each of the {outer.world_size} tasks of {outer.command} would be a job of its own"
        if inner.num_nodes == 1
        else ""
    )
    raise CommunicationError(
        f"two engines contradict each other: {inner.engine} says rank {inner.global_rank} of"
        f" {inner.world_size} ({inner.settings}), {outer.engine} says rank {outer.global_rank} of"
        f" {outer.world_size} ({outer.settings}){each}",
        where="the environment variables of this process",
        next_step=f"start the job by one of them; to leave {outer.engine} out, unset its variables",
    )


def _checked(place: EnginePlace) -> EnginePlace:
    """Return the place if its numbers can be true together.

    A rank that two processes have shows in its local rank: local rank L of a node cannot be below rank L.
    """
    behind = place.world_size - place.global_rank
    consistent = (
        0 <= place.global_rank < place.world_size
        and 0 <= place.local_rank < place.local_world_size <= place.world_size
        and 0 <= place.node_rank < place.num_nodes <= place.world_size
        and (place.num_nodes > 1 or place.local_world_size == place.world_size)
        and place.local_rank <= place.global_rank
        and place.local_world_size - place.local_rank <= behind
    )
    if not consistent:
        raise _error(
            place.engine,
            f"rank {place.global_rank} of {place.world_size}",
            f"local rank {place.local_rank} of {place.local_world_size} on node {place.node_rank} of"
            f" {place.num_nodes} ({place.settings})",
        )
    return place


def _error(engine: str, what: str, other: str) -> CommunicationError:
    return CommunicationError(
        f"the variables of {engine} contradict each other: {what}, but {other}",
        where="the environment variables of this process",
        next_step=f"start the command by {engine} again, and change none of its variables",
    )


# The engines, from the innermost to the outermost where one can start the other


def _read_torchrun(values: _Values) -> EnginePlace:
    rank, size = values.integer("RANK"), values.integer("WORLD_SIZE")
    local_size = values.integer("LOCAL_WORLD_SIZE", default=1 if size == 1 else None)
    local_rank = values.integer("LOCAL_RANK", default=0 if size == 1 else None)
    num_nodes = values.integer("GROUP_WORLD_SIZE", default=-(-size // max(1, local_size)))
    node_rank = values.integer("GROUP_RANK", default=rank // max(1, local_size))
    address = values.text("MASTER_ADDR", default="" if size == 1 else None)
    port = values.integer("MASTER_PORT", default=0 if size == 1 else None)
    ranks = (rank, size, local_rank, local_size, node_rank, num_nodes)
    return EnginePlace("torchrun", "torchrun", *ranks, address=address, port=port, job=f"{address}:{port}")


def _read_ray(values: _Values) -> EnginePlace:
    """Read what Ray Train sets; torch's own store has MASTER_PORT, so the job's port is another."""
    rank, size = values.integer("RANK"), values.integer("WORLD_SIZE")
    local_rank, local_size = values.integer("LOCAL_RANK"), values.integer("LOCAL_WORLD_SIZE")
    num_nodes = -(-size // max(1, local_size))
    ranks = (rank, size, local_rank, local_size, values.integer("NODE_RANK"), num_nodes)
    address = values.text("MASTER_ADDR", default="" if num_nodes == 1 else None)
    port = values.text("MASTER_PORT", default="0")
    return EnginePlace("Ray", "ray", *ranks, address=address, job=f"ray {address}:{port}")


_TASK_ORDER = ("coordinator", "ps", "chief", "master", "worker")
_SERVING = ("coordinator", "ps")


def _read_tf_config(values: _Values) -> EnginePlace:
    return _place_in_table("TF_CONFIG", values.text("TF_CONFIG"), values)


def _read_cluster_file(values: _Values) -> EnginePlace:
    path = Path(values.text(CLUSTER_FILE))
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise CommunicationError(
            f"cannot read the cluster file {path}: {error.strerror}",
            where=CLUSTER_FILE,
            next_step="write {'cluster': {'worker': ['HOST:PORT', ...]}} as JSON to it, on every host",
        ) from error
    return _place_in_table("cluster file", text, values)


def _place_in_table(engine: str, text: str, values: _Values) -> EnginePlace:
    """Return the place that a table {"cluster": {TYPE: [HOST:PORT, ...]}, "task": {...}} gives.

    Servers come first, as in Paceline. Ranks of one host have one node.
    """
    cluster, kind, index = _parse_table(engine, text, values.values.get(TASK, ""))
    table = [
        (name, number, address)
        for name in _TASK_ORDER
        for number, address in enumerate(cluster.get(name, ()))
    ]
    addresses = [address for _, _, address in table]
    twice = next((address for address in addresses if addresses.count(address) > 1), None)
    if twice is not None:
        ranks = [f"{name}:{number}" for name, number, address in table if address == twice]
        raise _error(engine, f"{ranks[0]} is at {twice}", f"{ranks[1]} is there, too")
    rank = next((i for i, row in enumerate(table) if row[:2] == (kind, index)), None)
    if rank is None:
        known = ", ".join(f"{len(cluster[name])} {name}" for name in _TASK_ORDER if name in cluster)
        raise _error(engine, f"this task is {kind}:{index}", f"the cluster has {known or 'no tasks'}")
    hosts = [address.rpartition(":")[0] for address in addresses]
    nodes, host = [*dict.fromkeys(hosts)], hosts[rank]
    port = addresses[0].rpartition(":")[2]
    return EnginePlace(
        engine,
        engine,
        rank,
        len(table),
        hosts[:rank].count(host),
        hosts.count(host),
        nodes.index(host),
        len(nodes),
        address=hosts[0].strip("[]"),
        port=int(port) if port.isdecimal() else 0,
        job=f"{engine} {addresses[0]}",
        num_servers=sum(name in _SERVING for name, _, _ in table),
    )


def _parse_table(engine: str, text: str, task: str) -> tuple[dict[str, list[str]], str, int]:
    """Return the addresses by type of task, and the type and index of this task."""
    try:
        table = json.loads(text)
        cluster = {
            str(name): [str(address) for address in table["cluster"][name]] for name in table["cluster"]
        }
        own: Any = table.get("task") or {}
        kind, _, number = task.partition(":") if task else (own["type"], ":", str(own["index"]))
        index = int(number)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommunicationError(
            f"{engine} is not a table of a cluster: {error!r}",
            where="the environment variables of this process",
            next_step='expected {"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker",'
            f' "index": 0}}}} as JSON; the task may be in {TASK} instead, as in "worker:0"',
        ) from error
    unknown = [name for name in (*cluster, kind) if name not in _TASK_ORDER]
    if unknown:
        raise _error(
            engine, f"there is a task of type {unknown[0]}", f"Paceline has {', '.join(_TASK_ORDER)}"
        )
    return cluster, kind, index


def _read_open_mpi(values: _Values) -> EnginePlace:
    rank, size = values.integer("OMPI_COMM_WORLD_RANK"), values.integer("OMPI_COMM_WORLD_SIZE")
    local_rank = values.integer("OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = values.integer("OMPI_COMM_WORLD_LOCAL_SIZE")
    values.require_equal("PMIX_RANK", rank, "OMPI_COMM_WORLD_RANK")
    values.require_equal("OMPI_MCA_orte_ess_num_procs", size, "OMPI_COMM_WORLD_SIZE")
    num_nodes = values.integer("OMPI_MCA_orte_num_nodes", default=-(-size // max(1, local_size)))
    node_rank = _open_mpi_node(values, num_nodes, rank // max(1, local_size))
    # "1628831744.0;tcp://192.0.2.2,10.0.0.2:45189;tcp6://...": the addresses of mpirun itself
    found = re.search(r";tcp://([^,:]+)|;tcp6://\[([^\],]+)", values.values.get("OMPI_MCA_orte_hnp_uri", ""))
    job = values.values.get("PMIX_NAMESPACE", values.values.get("OMPI_MCA_ess_base_jobid", ""))
    ranks = (rank, size, local_rank, local_size, node_rank, num_nodes)
    address = "" if found is None else found[1] or found[2]
    return EnginePlace("Open MPI", "mpirun", *ranks, address=address, job=f"mpi {job}", has_mpi=True)


def _open_mpi_node(values: _Values, num_nodes: int, by_rank: int) -> int:
    """Return the number of this node: that of its daemon, which is 0 where mpirun runs."""
    found = re.match(r"\d+\.(\d+);", values.values.get("OMPI_MCA_orte_local_daemon_uri", ""))
    if found is None or num_nodes == 1:
        return min(by_rank, num_nodes - 1)
    # mpirun's own node is no member if there are more daemons than nodes
    num_daemons = int(values.values.get("OMPI_MCA_ess_base_num_procs", num_nodes))
    return min(max(0, int(found[1]) - (num_daemons > num_nodes)), num_nodes - 1)


def _read_mpich(values: _Values) -> EnginePlace:
    """Read what Hydra sets, the process manager of MPICH and Intel MPI; it does not tell where rank 0 is."""
    rank, size = values.integer("PMI_RANK"), values.integer("PMI_SIZE")
    if "SLURM_PROCID" in values.values and "MPI_LOCALNRANKS" not in values.values:
        return EnginePlace("PMI", "srun --mpi=pmi2", rank, size, 0, 1, rank, size)  # Slurm knows the nodes
    local_rank, local_size = values.integer("MPI_LOCALRANKID"), values.integer("MPI_LOCALNRANKS")
    ranks = (rank, size, local_rank, local_size, rank // max(1, local_size), -(-size // max(1, local_size)))
    return EnginePlace("MPICH", "mpiexec", *ranks, has_mpi=True)


def _is_slurm_task(values: Variables) -> bool:
    # a script of sbatch has a rank as well, but it is no step: it runs once
    in_batch_script = values.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in values
    return "SLURM_PROCID" in values and not in_batch_script


def _read_slurm(values: _Values) -> EnginePlace:
    rank, size = values.integer("SLURM_PROCID"), values.integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    by_node = _expand_counts(values.values.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_rank = values.integer("SLURM_LOCALID", default=0 if size == 1 else None)
    node_rank = values.integer("SLURM_NODEID", default=0)
    num_nodes = values.integer("SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    if by_node and sum(by_node) != size:
        shown = values.text("SLURM_STEP_TASKS_PER_NODE")
        raise _error("Slurm", f"SLURM_STEP_NUM_TASKS={size}", f"SLURM_STEP_TASKS_PER_NODE={shown}")
    if by_node and len(by_node) != num_nodes:
        shown = values.text("SLURM_STEP_TASKS_PER_NODE")
        raise _error("Slurm", f"SLURM_STEP_NUM_NODES={num_nodes}", f"SLURM_STEP_TASKS_PER_NODE={shown}")
    ids = [int(word) for word in re.findall(r"\d+", values.values.get("SLURM_GTIDS", ""))]
    if local_rank < len(ids) and ids[local_rank] != rank:
        listed = values.text("SLURM_GTIDS")
        raise _error("Slurm", f"SLURM_PROCID={rank}", f"SLURM_GTIDS={listed} at SLURM_LOCALID={local_rank}")
    local_size = by_node[node_rank] if node_rank < len(by_node) else len(ids) or -(-size // num_nodes)
    job = f"slurm {values.values.get('SLURM_JOB_ID', '')}.{values.values.get('SLURM_STEP_ID', '')}"
    names = values.values.get("SLURM_STEP_NODELIST", values.values.get("SLURM_JOB_NODELIST", ""))
    ranks = (rank, size, local_rank, local_size, node_rank, num_nodes)
    return EnginePlace("Slurm", "srun", *ranks, address=first_host(names), job=job)


def _expand_counts(text: str) -> list[int]:
    """Return the numbers of a list as Slurm writes it: "2(x2),1" is [2, 2, 1]."""
    counts = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts


def first_host(names: str) -> str:
    """Return the first host of a list as Slurm writes it: "n[01-03,7],m2" begins with n01."""
    first = re.split(r",(?![^\[]*\])", names)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _read_kubernetes(values: _Values) -> EnginePlace:
    """Read the index of a pod of an Indexed Job or JobSet; `PACELINE_NODES` comes from its manifest."""
    rank, size = values.integer("JOB_COMPLETION_INDEX"), values.integer(NODES)
    values.text(RENDEZVOUS, default="" if size == 1 else None)
    named = re.fullmatch(r".*-(\d+)", values.values.get("HOSTNAME", ""))
    if named is not None and int(named[1]) != rank:
        host = values.text("HOSTNAME")
        raise _error("Kubernetes", f"JOB_COMPLETION_INDEX={rank}", f"HOSTNAME={host}")
    ranks = (rank, size, 0, 1, rank, size)
    return EnginePlace("Kubernetes", "an Indexed Job", *ranks, job="kubernetes", starts_launchers=True)


def _is_pod_of_job(values: Variables) -> bool:
    return "JOB_COMPLETION_INDEX" in values and NODES in values


def _has_rank(values: Variables) -> bool:
    return "RANK" in values or "WORLD_SIZE" in values


def _is_ray(values: Variables) -> bool:
    return _has_rank(values) and "NODE_RANK" in values and "GROUP_RANK" not in values


ENGINES = (
    EngineRow("torchrun", "torchrun", lambda v: _has_rank(v) and not _is_ray(v), _read_torchrun),
    EngineRow("Ray", "ray", _is_ray, _read_ray),
    EngineRow("TF_CONFIG", "TF_CONFIG", lambda v: "TF_CONFIG" in v, _read_tf_config),
    EngineRow("cluster file", CLUSTER_FILE, lambda v: CLUSTER_FILE in v, _read_cluster_file),
    EngineRow("Open MPI", "mpirun", lambda v: "OMPI_COMM_WORLD_SIZE" in v, _read_open_mpi),
    EngineRow("MPICH", "mpiexec", lambda v: "PMI_RANK" in v and "PMI_SIZE" in v, _read_mpich),
    EngineRow("Slurm", "srun", _is_slurm_task, _read_slurm),
    EngineRow("Kubernetes", "an Indexed Job", _is_pod_of_job, _read_kubernetes),
)


# From a place to the store of the job


def named_by_proxy(place: EnginePlace | None) -> EnginePlace | None:
    """Return the place with the name of its job, if the engine's variables have none (MPICH).

    Hydra has one proxy on each node of each job, which is an ancestor of all of its ranks there.

    Raises:
        CommunicationError: there is no such ancestor, so that two jobs could take each other for one.
    """
    if place is None or place.job:
        return place
    process = os.getpid()
    while process > 1:
        try:
            name, _, rest = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")
        except OSError:
            break
        if name.endswith("(hydra_pmi_proxy"):
            return replace(place, job=f"mpich {process}")
        process = int(rest.split()[1])
    raise CommunicationError(
        f"this is rank {place.global_rank} of {place.world_size} of {place.command}, but no process above"
        " this one is Hydra, its process manager",
        where=f"the variables of {place.engine}: {place.settings}",
        next_step="unset PMI_RANK PMI_SIZE if they are inherited; else pass --rendezvous and --token-file",
    )


def store_endpoint_of(place: EnginePlace, environment: Variables) -> tuple[str, int]:
    """Return the host and the port at which rank 0 of an engine's job serves the store.

    A host that cannot be resolved is looked up in Slurm, which knows the address of every node.

    Raises:
        CommunicationError: rank 0 cannot be found, or has a name that only its own host can use.
    """
    given = environment.get(RENDEZVOUS, "")
    port = place.port or _FIRST_PORT + zlib.crc32(place.job.encode()) % _NUM_PORTS
    if given:
        host, _, number = given.rpartition(":")
        if not host or not number.isdecimal():
            raise CommunicationError(
                f"{RENDEZVOUS}={given!r} is not HOST:PORT",
                where="the environment variables of this process",
                next_step=f"for example {RENDEZVOUS}=10.0.0.1:29500, an address of the host of rank 0",
            )
        return host.strip("[]"), int(number)
    if place.num_nodes == 1:
        return loopback_address(), port
    if not place.address:
        raise CommunicationError(
            f"{place.engine} does not tell where rank 0 of {place.world_size} is, and the job has"
            f" {format_count(place.num_nodes, 'node')}",
            where="the environment variables of this process",
            next_step=f"set {RENDEZVOUS}=HOST:PORT on all ranks, an address of the host of rank 0",
        )
    return resolve_host(place.address, place.engine == "Slurm"), port


def resolve_host(name: str, in_slurm: bool = False) -> str:
    """Return a name or an address by which other hosts reach a host.

    Raises:
        CommunicationError: the name is unknown, or means the loopback of whoever resolves it (127.0.1.1).
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        known = _slurm_address(name) if in_slurm else ""
        if known:
            return known
        raise CommunicationError(
            f"the host name {name} of rank 0 cannot be resolved here: {error}",
            where="the rendezvous",
            next_step="add it to DNS or /etc/hosts, or name an address of that host: --rendezvous IP:PORT",
        ) from error
    refuse_loopback_name(name, str(found))
    return name


def refuse_loopback_name(name: str, address: str) -> None:
    """Refuse a host name that means the loopback, which other hosts resolve to themselves; pure.

    Raises:
        CommunicationError: it does. An address, or the name localhost, is taken as meant.
    """
    if address.startswith("127.") and name != address and name not in _LOCAL_NAMES:
        raise CommunicationError(
            f"the host name {name} is {address} here, where no other host can reach it",
            where="the rendezvous",
            next_step=f"give {name} its real address in /etc/hosts (Debian writes 127.0.1.1), or name the"
            " address: --rendezvous IP:PORT",
        )


def _slurm_address(node: str) -> str:
    """Return the address that Slurm has for one of its nodes; empty if it tells none."""
    with suppress(OSError, subprocess.TimeoutExpired):
        shown = subprocess.run(
            ["scontrol", "show", "node", "-o", node],
            capture_output=True,
            text=True,
            timeout=_CONTROL_SECONDS,
            check=False,
        )
        found = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
        return found[1] if found and found[1] != node else ""
    return ""
