"""run_ranks: results by rank, every kind of failure told with its cause first, and nothing left."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from paceline.errors import CommunicationError, DataError, DeadlineError
from paceline.job import membership
from paceline.job.cluster import Cluster
from paceline.job.epochs import InitialRendezvous, MemberCandidate, form_first_membership
from paceline.job.membership import SetupDeadline
from paceline.recipe import Recipe, Strategy
from paceline.testing import RanksFailed, run_ranks
from paceline.testing.parity import build_test_session


def imports_of_a_session(cluster: Cluster) -> list[str]:
    """Modules of the package that this rank imports itself, and tables that it builds."""
    before = {*sys.modules}
    tables = [table.__name__ for table in (Recipe, Strategy) if not table.__pydantic_complete__]
    recipe = Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [4]},
        steps=1,
        batch={"size": 4, "shards": 2},
        strategy="servers=1 sync=server-async",
    )
    build_test_session(cluster, recipe).close()
    return tables + [name for name in {*sys.modules} - before if name.startswith("paceline.")]


@dataclass
class Answer:
    """A class that only this test module knows."""

    rank: int
    total: float


def add_up(cluster: Cluster, extra: float = 0.0) -> Answer:
    """The sum of all ranks, by an all-reduce."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([cluster.global_rank + extra])
    if cluster.world_size > 1:
        dist.all_reduce(total)
    return Answer(cluster.global_rank, total.item())


def fail(cluster: Cluster, how: Callable[[], object]) -> None:
    """Rank 1 fails, the others are in a collective that needs it."""
    import torch.distributed as dist

    if cluster.global_rank == 1:
        how()
    dist.barrier()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_data() -> None:
    raise DataError("empty")


def hang() -> None:
    time.sleep(1000)


def test_results_come_by_rank() -> None:
    assert run_ranks(add_up, 3, 1.0) == [Answer(0, 6.0), Answer(1, 6.0), Answer(2, 6.0)]


def test_a_rank_finds_imported_what_a_session_needs() -> None:
    assert run_ranks(imports_of_a_session, 3) == [[], [], []]


def test_one_rank_has_no_group() -> None:
    assert run_ranks(add_up, 1) == [Answer(0, 0.0)]


def test_local_functions_and_the_environment_of_the_test_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEST_COLOUR", "green")
    word = "local"

    def look(cluster: Cluster) -> tuple[str, str, str]:
        return word, os.environ["PACELINE_TEST_COLOUR"], os.environ["OMP_NUM_THREADS"]

    assert run_ranks(look, 2) == [("local", "green", "1")] * 2


def test_a_rank_has_one_thread_and_a_loopback_group() -> None:
    def look(cluster: Cluster) -> tuple[int, str]:
        import torch

        return torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"]

    assert run_ranks(look, 2) == [(1, "lo")] * 2


@pytest.mark.parametrize(
    ("how", "headline"),
    [(raise_data, "raised DataError: empty"), (kill, "was killed by SIGKILL (out of memory?)")],
)
def test_the_cause_comes_first_and_every_rank_is_told(how: Callable[[], object], headline: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail, 3, how)
    first, *others = caught.value.failures
    assert (first.global_rank, first.headline) == (1, headline)
    assert sorted((other.global_rank, other.kind) for other in others) == [
        (0, "connection"),
        (2, "connection"),
    ]
    assert all("in fail" in other.details for other in others)
    assert ("in raise_data" in str(caught.value)) == (how is raise_data)


def test_a_deadlock_ends_at_the_deadline_and_says_where() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail, 2, hang, deadline=3)
    assert [failure.kind for failure in caught.value.failures] == ["stopped", "stopped"]
    assert "in hang (test_ranks.py" in caught.value.of(1).headline
    assert "called from fail (test_ranks.py" in caught.value.of(0).headline


def test_ranks_that_need_not_wait_for_the_failed_one_are_ended(tmp_path: Path) -> None:
    def split(cluster: Cluster) -> None:
        if cluster.global_rank == 1:
            (tmp_path / "ready").touch()
            time.sleep(1000)
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        raise ValueError("boom")

    with pytest.raises(RanksFailed) as caught:
        run_ranks(split, 2)
    assert caught.value.failures[0].headline == "raised ValueError: boom"
    assert caught.value.of(1).headline.startswith("was ended because of that; it was in split")


def test_no_process_is_left(tmp_path: Path) -> None:
    def leave_a_child(cluster: Cluster) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(1000)
            os._exit(0)
        (tmp_path / str(cluster.global_rank)).write_text(str(child))
        raise ValueError("boom")

    with pytest.raises(RanksFailed):
        run_ranks(leave_a_child, 2)
    for path in tmp_path.iterdir():
        stat = Path(f"/proc/{path.read_text()}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.02)


@pytest.mark.capability("O2")
def test_a_process_that_expects_another_number_of_ranks_is_turned_away_and_the_job_goes_on() -> None:
    def disturb(cluster: Cluster) -> tuple[str, Answer]:
        change = {"world_size": 2 + cluster.global_rank, "local_world_size": 2 + cluster.global_rank}
        with pytest.raises(CommunicationError) as caught:  # the first waits for nobody, the second for it
            replace(cluster, **change).connect("cpu", 60.0 if cluster.global_rank else 1.0)
        return caught.value.what, add_up(cluster)

    (first, answer), (second, _) = run_ranks(disturb, 2)
    assert first == "rank 1 has not joined within 1 s"
    assert second == "rank 1 expects 3 processes, but the job has 2"
    assert answer.total == 1.0


@pytest.mark.capability("O2")
def test_ranks_that_do_not_come_are_named() -> None:
    def wait_for_more(cluster: Cluster) -> str:
        with pytest.raises(DeadlineError) as caught:
            replace(cluster, world_size=3, local_world_size=3).connect("cpu", 0.5)
        return caught.value.what

    assert run_ranks(wait_for_more, 1) == ["ranks 1, 2 have not joined within 0.5 s"]


def test_a_rank_that_starts_late_is_named_and_may_take_longer_than_any_other_wait() -> None:
    def come(cluster: Cluster) -> tuple[str, int]:
        store, membership.LOG_INTERVAL_SECONDS = cluster.connected.store, 0.1
        if cluster.global_rank == 1:
            store.wait_for_keys(["said"], 60.0)
        candidate = MemberCandidate(cluster.global_rank, "", store, torch.device("cpu"), 0.2)
        patience = SetupDeadline(60.0, lambda text: store.compare_set("said", "", text))
        member = form_first_membership(candidate, InitialRendezvous(2, 1, "the job", patience))
        return store.get("said").decode(), member.rank

    (said, first), (_, second) = run_ranks(come, 2)
    assert (first, second) == (0, 1)
    assert re.match(r"waiting until rank 1 has joined: \d+ s of 60 s", said)


def test_a_rank_that_is_started_anew_meets_the_others_and_its_earlier_life_does_not() -> None:
    """As after the end of a fork server: others may have seen the process that went with it."""

    def come(cluster: Cluster) -> tuple[str, bool]:
        rank, store, cpu = cluster.global_rank, cluster.connected.store, torch.device("cpu")
        if rank == 0:
            with pytest.raises(DeadlineError):
                form_first_membership(
                    MemberCandidate(0, "", store, cpu, 9.0, "early"),
                    InitialRendezvous(2, 1, "the job", SetupDeadline(0.2)),
                )
            store.set("died", "1")
            time.sleep(1.0)
            store.set("began anew", "1")
        store.wait_for_keys(["died"], 60.0)
        candidate = MemberCandidate(rank, "", store, cpu, 9.0, "late")
        membership = form_first_membership(candidate, InitialRendezvous(2, 1, "the job", SetupDeadline(60.0)))
        return membership.prefix, store.check(["began anew"])

    (first, _), (second, after) = run_ranks(come, 2)
    assert first == second and after


@pytest.mark.capability("O2")
def test_a_port_that_accepts_but_does_not_answer_ends_at_the_deadline() -> None:

    def knock(cluster: Cluster) -> str:
        silent = socket.create_server(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(DeadlineError) as caught:
            replace(cluster, global_rank=1, world_size=2, port=port, store_fd=None).connect("cpu", 0.3)
        return caught.value.what

    assert "accepts connections but does not respond" in run_ranks(knock, 1)[0]
