"""The place that an engine gives, from recorded environments; what contradicts itself is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import CommunicationError
from paceline.job import engines
from paceline.job.cluster import Cluster, refuse_engine_tasks
from paceline.job.engines import (
    EnginePlace,
    first_host,
    place_from,
    refuse_loopback_name,
    resolve_host,
    store_endpoint_of,
)

Variables = dict[str, str]

_STORED = json.loads(Path(__file__).with_name("engine_environments.json").read_text("utf-8"))
RECORDED: dict[str, Variables] = {name: entry["environment"] for name, entry in _STORED.items()}

PLACES = {  # rank, world size, local rank, local world size, node rank, nodes, address of rank 0
    "slurm, one node": (1, 2, 1, 2, 0, 1, "n1"),
    "slurm, two nodes": (1, 2, 0, 1, 1, 2, "n1"),
    "slurm, uneven": (2, 3, 0, 1, 1, 2, "n1"),
    "slurm, four tasks": (3, 4, 1, 2, 1, 2, "n1"),
    "slurm, srun in a script of sbatch": (1, 2, 0, 1, 1, 2, "n1"),
    "slurm, srun in salloc": (1, 2, 0, 1, 1, 2, "n1"),
    "open mpi, one node": (1, 2, 1, 2, 0, 1, "192.0.2.2"),
    "open mpi, two nodes of slurm": (2, 4, 0, 2, 1, 2, "192.0.2.2"),
    "mpich, one node": (1, 2, 1, 2, 0, 1, ""),
    "torchrun, one node": (1, 2, 1, 2, 0, 1, "localhost"),
    "kubernetes, pod 1 of 2": (1, 2, 0, 1, 1, 2, ""),
    "ray train, two nodes": (1, 2, 0, 1, 1, 2, "10.0.0.1"),
    "tf_config": (3, 4, 1, 2, 1, 2, "10.0.0.1"),
}
ALONE = ("slurm, one task", "slurm, a script of sbatch", "slurm, a shell of salloc")


def place_of(name: str, **changes: str) -> EnginePlace | None:
    return place_from({**RECORDED[name], **changes})


@pytest.mark.capability("B6", "O3", "O7")
@pytest.mark.parametrize("name", PLACES)
def test_a_recorded_environment_gives_its_place(name: str) -> None:
    place = place_of(name)
    assert place is not None
    ranks = (place.global_rank, place.world_size, place.local_rank, place.local_world_size)
    assert (*ranks, place.node_rank, place.num_nodes, place.address) == PLACES[name]


@pytest.mark.capability("B6")
@pytest.mark.parametrize("name", ALONE)
def test_a_process_that_is_alone_in_its_engine_stays_local(name: str) -> None:
    """A shell of salloc and a script of sbatch know how many tasks srun would start, and are none of them."""
    assert place_of(name) is None
    assert Cluster.from_env(RECORDED[name]) == Cluster.single()


WRONG = {
    "slurm: count": (
        "slurm, two nodes",
        {"SLURM_STEP_NUM_TASKS": "3"},
        "SLURM_STEP_NUM_TASKS=3",
        "SLURM_STEP_TASKS_PER_NODE=1(x2)",
    ),
    "slurm: duplicate": ("slurm, two nodes", {"SLURM_PROCID": "0"}, "SLURM_PROCID=0", "SLURM_GTIDS=1"),
    "slurm: mix": (
        "slurm, two nodes",
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        | {"MASTER_ADDR": "h", "MASTER_PORT": "1"},
        "torchrun says rank 0 of 2 (RANK=0",
        "Slurm says rank 1 of 2 (SLURM_PROCID=1",
    ),
    "open mpi: count": (
        "open mpi, one node",
        {"OMPI_COMM_WORLD_SIZE": "4"},
        "OMPI_MCA_orte_ess_num_procs=2",
        "OMPI_COMM_WORLD_SIZE is 4",
    ),
    "open mpi: duplicate": (
        "open mpi, one node",
        {"OMPI_COMM_WORLD_RANK": "0"},
        "PMIX_RANK=1",
        "OMPI_COMM_WORLD_RANK is 0",
    ),
    "open mpi: mix": (
        "open mpi, one node",
        RECORDED["slurm, four tasks"],
        "Open MPI says rank 1 of 2 (OMPI_COMM_WORLD_RANK=1",
        "Slurm says rank 3 of 4 (SLURM_PROCID=3",
    ),
    "mpich: count": ("mpich, one node", {"MPI_LOCALNRANKS": "4"}, "rank 1 of 2", "local rank 1 of 4"),
    "mpich: duplicate": ("mpich, one node", {"PMI_RANK": "0"}, "rank 0 of 2", "local rank 1 of 2"),
    "mpich: mix": (
        "mpich, one node",
        RECORDED["open mpi, one node"]
        | {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        "Open MPI says rank 0 of 2",
        "MPICH says rank 1 of 2",
    ),
    "torchrun: count": ("torchrun, one node", {"RANK": "2"}, "rank 2 of 2", "RANK=2, WORLD_SIZE=2"),
    "torchrun: duplicate": ("torchrun, one node", {"RANK": "0"}, "rank 0 of 2", "local rank 1 of 2"),
    "torchrun: mix": (
        "torchrun, one node",
        RECORDED["slurm, two nodes"] | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"},
        "torchrun says rank 1 of 2",
        "each of the 2 tasks of srun would be a job of its own",
    ),
    "kubernetes: count": (
        "kubernetes, pod 1 of 2",
        {"PACELINE_NODES": "1"},
        "rank 1 of 1",
        "JOB_COMPLETION_INDEX=1, PACELINE_NODES=1",
    ),
    "kubernetes: duplicate": (
        "kubernetes, pod 1 of 2",
        {"JOB_COMPLETION_INDEX": "0"},
        "JOB_COMPLETION_INDEX=0",
        "HOSTNAME=digits-1",
    ),
    "kubernetes: mix": (
        "kubernetes, pod 1 of 2",
        RECORDED["torchrun, one node"] | {"RANK": "0", "LOCAL_RANK": "0"},
        "torchrun says rank 0 of 2",
        "Kubernetes says rank 1 of 2",
    ),
    "tf_config: count": (
        "tf_config",
        {"TF_CONFIG": RECORDED["tf_config"]["TF_CONFIG"].replace('"index": 2', '"index": 3')},
        "this task is worker:3",
        "the cluster has 1 ps, 3 worker",
    ),
    "tf_config: duplicate": (
        "tf_config",
        {"TF_CONFIG": RECORDED["tf_config"]["TF_CONFIG"].replace("10.0.0.2:29501", "10.0.0.2:29500")},
        "worker:1 is at 10.0.0.2:29500",
        "worker:2 is there, too",
    ),
    "tf_config: mix": (
        "tf_config",
        RECORDED["slurm, four tasks"] | {"SLURM_PROCID": "2", "SLURM_GTIDS": "2,3", "SLURM_LOCALID": "0"},
        "TF_CONFIG says rank 3 of 4",
        "Slurm says rank 2 of 4",
    ),
}


@pytest.mark.capability("B6", "O3", "O7")
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_environment_is_refused_and_both_sides_are_named(case: str) -> None:
    """Six engines, three kinds: a wrong count, a duplicate rank, a mix of two engines."""
    name, changes, one, other = WRONG[case]
    with pytest.raises(CommunicationError) as caught:
        place_of(name, **changes)
    assert one in caught.value.what and other in caught.value.what
    assert caught.value.next_step


def test_engines_that_say_the_same_or_start_launchers_of_the_other_are_no_conflict() -> None:
    same = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = place_of("slurm, two nodes", **same, MASTER_ADDR="n1", MASTER_PORT="29500")
    assert place is not None and place.engine == "torchrun"
    pmi = place_of("slurm, two nodes", PMI_RANK="1", PMI_SIZE="2")
    assert pmi is not None and (pmi.engine, pmi.num_nodes, pmi.address) == ("Slurm", 2, "n1")
    nested = place_of("open mpi, two nodes of slurm")
    assert nested is not None and (nested.engine, nested.world_size) == ("Open MPI", 4)
    own = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "PACELINE_STORE_PORT": "29500"}
    assert place_of("slurm, two nodes", **own) is None


@pytest.mark.capability("B6")
def test_a_file_has_the_table_and_a_variable_the_task(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps({"cluster": {"coordinator": ["a:1"], "ps": ["a:2"], "worker": ["b:1", "b:2"]}})
    )
    variables = {"PACELINE_CLUSTER_FILE": str(path), "PACELINE_TASK": "worker:1"}
    place = place_from(variables)
    assert place is not None
    assert (place.global_rank, place.local_rank, place.node_rank, place.num_servers) == (3, 1, 1, 2)
    assert place.roles(2) == ("coordinator", "server", "worker", "worker")
    assert store_endpoint_of(place, {"PACELINE_RENDEZVOUS": "10.0.0.7:99"}) == ("10.0.0.7", 99)
    for wrong in ("no json", '{"cluster": []}', '{"cluster": {"evaluator": ["a:1"]}}'):
        path.write_text(wrong)
        with pytest.raises(CommunicationError) as caught:
            place_from(variables)
        assert caught.value.next_step
    with pytest.raises(CommunicationError, match="cannot read the cluster file"):
        place_from({**variables, "PACELINE_CLUSTER_FILE": str(tmp_path / "none")})


def test_roles_of_an_engine_without_roles_follow_from_the_strategy() -> None:
    place = place_of("slurm, four tasks")
    assert place is not None and place.num_servers is None
    assert place.roles(0) == ("worker",) * 4
    assert place.roles(1) == ("coordinator", "worker", "worker", "worker")


def test_a_shell_with_variables_of_a_step_is_told_to_unset_them() -> None:
    with pytest.raises(CommunicationError, match="this is an interactive shell") as caught:
        place_from(RECORDED["slurm, one node"], has_terminal=True)
    assert "unset SLURM_PROCID" in caught.value.next_step
    assert place_from(RECORDED["slurm, a shell of salloc"], has_terminal=True) is None


def test_several_nodes_need_a_key_and_one_node_does_not() -> None:
    with pytest.raises(CommunicationError, match="a job on 2 nodes needs a key"):
        Cluster.from_env(RECORDED["slurm, two nodes"])
    keyed = RECORDED["slurm, two nodes"] | {"PACELINE_TOKEN": "k", "PACELINE_RENDEZVOUS": "10.0.0.1:5"}
    cluster = Cluster.from_env(keyed)
    assert (cluster.address, cluster.port, cluster.token, cluster.launched) == ("10.0.0.1", 5, "k", True)
    local = Cluster.from_env(RECORDED["slurm, one node"])
    assert (local.address, local.num_nodes) == ("127.0.0.1", 1)
    other_step = Cluster.from_env(RECORDED["slurm, one node"] | {"SLURM_STEP_ID": "1"})
    assert (local.port, local.token) != (other_step.port, other_step.token)


def test_a_pod_is_a_launcher_and_other_commands_refuse_to_run_several_times() -> None:
    with pytest.raises(CommunicationError, match="starts the ranks of its node"):
        Cluster.from_env(RECORDED["kubernetes, pod 1 of 2"])
    with pytest.raises(CommunicationError, match="task 1 of 2 of srun"):
        refuse_engine_tasks(place_of("slurm, one node"), "paceline sweep")


def test_a_name_that_only_its_host_can_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommunicationError, match=r"node7 is 127\.0\.1\.1 here") as caught:
        refuse_loopback_name("node7", "127.0.1.1")
    assert "/etc/hosts" in caught.value.next_step
    refuse_loopback_name("127.0.0.1", "127.0.0.1")
    refuse_loopback_name("localhost", "127.0.0.1")
    with pytest.raises(CommunicationError, match="cannot be resolved here"):
        resolve_host("no.such.host.invalid")
    monkeypatch.setattr(engines, "_slurm_address", lambda node: "10.0.0.9")
    assert resolve_host("no.such.host.invalid", in_slurm=True) == "10.0.0.9"


def test_rank_0_of_an_engine_that_does_not_name_it_has_to_be_named() -> None:
    place = place_from({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"})
    assert place is not None and (place.node_rank, place.num_nodes) == (1, 2)
    with pytest.raises(CommunicationError, match="does not tell where rank 0") as caught:
        store_endpoint_of(place, {})
    assert "PACELINE_RENDEZVOUS=HOST:PORT" in caught.value.next_step
    with pytest.raises(CommunicationError, match="is not HOST:PORT"):
        store_endpoint_of(place, {"PACELINE_RENDEZVOUS": "host"})


@pytest.mark.parametrize(
    "names, first",
    [("n1", "n1"), ("n[01-03,7],m2", "n01"), ("n[3,5]", "n3"), ("m2,n[1-2]", "m2"), ("r[1-2]n[4-5]", "r1n4")],
)
def test_the_first_host_of_a_list_of_slurm(names: str, first: str) -> None:
    assert first_host(names) == first
