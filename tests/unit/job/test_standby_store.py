"""The store of a job is lost with the launcher of node 0: who continues in another one, and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import CommunicationError
from paceline.job import standby_store
from paceline.job.addresses import listen_at
from paceline.job.epochs import form_next_membership
from paceline.job.launcher_reports import (
    LauncherAddress,
    encode_launcher_address,
    read_node_list,
    write_node_list,
)
from paceline.job.membership import JobMembership, MembershipGroups
from paceline.job.rendezvous import StoreAccess, open_store
from paceline.job.standby_store import announce_end, choose_standby_node, move_to_standby_store
from paceline.job.store_client import StoreLostError
from paceline.job.store_server import StoreServer
from tests.ports import free_port

SECONDS, TOKEN = 20.0, "key"
LOST = StoreLostError("the store of the job is gone")


@contextmanager
def served_store() -> Iterator[tuple[StoreServer, int]]:
    with StoreServer() as server:
        port = free_port()
        server.admit(listen_at("127.0.0.1", port, 8), TOKEN)
        yield server, port


@pytest.fixture
def standby() -> Iterator[int]:
    with served_store() as (_, port):
        yield port


def member(rank: int, first_port: int, standby_port: int, prefix: str = "0.1.ab/3") -> JobMembership:
    """One of the ranks 0 and 1 on node 0, 2 on node 1 and 3 on node 2."""
    access = StoreAccess(rank, "127.0.0.1", first_port, TOKEN)
    store = open_store(access, SECONDS)
    nodes = (0, 0, 1, 2)
    ports = (0, 0, standby_port, 1)
    notes = tuple(encode_launcher_address(n, 9, "127.0.0.1", 9, p) for n, p in zip(nodes, ports, strict=True))
    groups = MembershipGroups(store, prefix, (0, 1, 2, 3), rank, torch.device("cpu"), SECONDS)
    return JobMembership(3, (0, 1, 2, 3), rank, notes, prefix, store, groups)


@pytest.mark.capability("N8", clause="the store of the launcher where the job has a second host")
def test_members_of_other_nodes_meet_in_the_store_of_the_lowest_of_them(standby: int) -> None:
    with served_store() as (_, port):
        members = [member(rank, port, standby) for rank in (2, 3)]
    for one in members:
        moved, gone = move_to_standby_store(one, LOST)
        assert gone == {0, 1} and moved.members == one.members
        moved.store.set(f"here/{one.rank}", "1")
        assert moved.store.access == replace(one.store.access, port=standby, node_rank=1)
    assert moved.store.wait_for_keys(["here/2", "here/3"], SECONDS) == [b"1", b"1"]


@pytest.mark.capability("N8", clause="the store of the launcher where the job has a second host")
def test_the_only_member_that_is_left_continues_whenever_the_store_is_lost(standby: int) -> None:
    """Rank 2 has agreed to continue with the others when it is lost, and forms the next membership alone."""
    with served_store() as (_, port):
        one = replace(member(2, port, standby), members=(0, 1, 2), notes=member(3, port, standby).notes[:3])
        one.store.set(f"{one.continuation_key}/2", one.notes[2])
    following = form_next_membership(one, SECONDS)
    assert (following.members, following.rank, following.epoch) == ((2,), 0, 4)
    assert following.prefix == "0.1.ab/4" and following.groups.world is None
    following.leave()


def test_nobody_continues_while_the_store_may_be_in_use(
    standby: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server has hung up on one member, or it is behind a partition and does not respond."""
    monkeypatch.setattr(standby_store, "_PROBE_SECONDS", 0.2)
    with served_store() as (_, port):
        one = member(2, port, standby)
        with pytest.raises(StoreLostError):
            move_to_standby_store(one, LOST)

        def silent(*address: object, timeout: float) -> None:
            raise TimeoutError

        monkeypatch.setattr(standby_store.socket, "create_connection", silent)
        with pytest.raises(StoreLostError):
            move_to_standby_store(one, LOST)


def test_members_of_one_epoch_continue_and_those_of_another_do_not(standby: int) -> None:
    with served_store() as (_, port):
        early, late = member(2, port, standby), member(3, port, standby, prefix="0.1.ab/4")
    move_to_standby_store(late, LOST)
    with pytest.raises(CommunicationError, match="other ranks have continued") as caught:
        move_to_standby_store(early, LOST)
    assert caught.value.__cause__ is LOST


def test_nobody_continues_after_an_announced_end(standby: int, tmp_path: Path) -> None:
    """Node 0 announces its end after an error of a rank, which another rank would raise as well."""
    with served_store() as (_, port):
        one = member(2, port, standby)
        write_node_list(tmp_path, one.notes[:3])
        announce_end(read_node_list(tmp_path), TOKEN, tls=False)
    with pytest.raises(StoreLostError):
        move_to_standby_store(one, LOST)


def test_the_lost_node_and_nodes_without_a_store_are_not_chosen() -> None:
    nodes = [LauncherAddress(n, "h", "10.0.0.1", 9, port) for n, port in ((0, 5), (1, 0), (3, 7), (2, 6))]
    assert choose_standby_node([None, *nodes], lost_node=0) == nodes[3]
    assert choose_standby_node(nodes, lost_node=2) == nodes[0]
    assert choose_standby_node(nodes[:2], lost_node=0) is None
