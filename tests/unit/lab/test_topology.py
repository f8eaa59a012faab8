"""Quantities, topologies, commands and shares: values in, values out."""

import sys

import pytest

from paceline.errors import RecipeError
from paceline.lab.host_commands import spread_over_hosts
from paceline.lab.host_cores import ControlGroups, CoreShare, describe_core_shares, plan_core_shares
from paceline.lab.network import render_netem, render_rate, render_redirect
from paceline.lab.topology import (
    LinkDirection,
    Links,
    build_topology,
    parse_duration_seconds,
    parse_fraction,
    parse_rate_bits,
    parse_size_bytes,
    plan_cables,
    render_forwarding_tables,
    render_host,
    render_switch,
)


def test_quantities_and_what_is_none() -> None:
    assert [parse_rate_bits(text) for text in ("100mbit", "1.5Gbit", "")] == [1e8, 1.5e9, 0]
    assert [parse_duration_seconds(text) for text in ("500us", "2 ms")] == pytest.approx([5e-4, 2e-3])
    assert parse_size_bytes("64mb") == 64 << 20 and parse_fraction("0.5%") == pytest.approx(0.005)
    rates = [(parse_rate_bits, text) for text in ("100", "10mb")]
    for read, text in (*rates, (parse_duration_seconds, "fast"), (parse_fraction, "101%")):
        with pytest.raises(RecipeError):
            read(text)


def test_a_latency_is_paid_on_the_way_up_and_rates_may_differ() -> None:
    links = Links(rate="100mbit", up="10mbit", latency="2ms", jitter="1ms", loss="1%")
    assert links.upwards == LinkDirection(1e7, 2e-3, 1e-3, 0.01)
    assert links.downwards == LinkDirection(1e8)
    with pytest.raises(RecipeError, match="jitter"):
        Links(latency="1ms", jitter="2ms")


@pytest.mark.parametrize(
    "arguments",
    [
        {"hosts": 0},
        {"hosts": ["a", "a"]},
        {"hosts": ["core"]},
        {"hosts": ["Upper"]},
        {"hosts": 3, "racks": {"r": ["h0", "h1"]}},
        {"hosts": 2, "racks": {"r": ["h0"], "s": ["h0", "h1"]}},
        {"hosts": 1, "host_links": {"h7": Links()}},
    ],
)
def test_topologies_that_cannot_be_are_refused(arguments: dict) -> None:
    with pytest.raises(RecipeError):
        build_topology(links=Links(), **arguments)


@pytest.mark.capability("O9")
def test_two_racks_are_two_switches_with_uplinks_and_complete_tables() -> None:
    topology = build_topology(
        3, Links(), racks={"a": ["h0", "h1"], "b": ["h2"]}, uplinks=Links(rate="10mbit")
    )
    cables = plan_cables(topology)
    assert [(c.name, c.near_device, c.far_device, c.bridge) for c in cables] == [
        ("h0", "eth0", "p0", "sw0"),
        ("h1", "eth0", "p1", "sw0"),
        ("h2", "eth0", "p2", "sw1"),
        ("a", "u0", "r0", "core"),
        ("b", "u1", "r1", "core"),
    ]
    switch = render_switch(topology, cables, {"h0": 11, "h1": 12, "h2": 13})
    assert "link add name p2 type veth peer name eth0 netns 13" in switch
    assert "link add name r0 type veth peer name u0" in switch
    assert "link set dev u1 master sw1 up" in switch
    tables = render_forwarding_tables(topology, cables)
    h2 = [line.split(" dev ")[1] for line in tables if topology.hosts[2].mac in line]
    assert h2 == ["p2 master static", "r1 master static", "u0 master static"]
    assert render_host(topology, topology.hosts[0])[-1] == (
        "neighbour replace 10.0.0.3 lladdr 02:00:00:00:00:02 dev eth0 nud permanent"
    )


def test_what_tc_is_told() -> None:
    assert render_rate("eth0", LinkDirection(1e8)) == (
        "qdisc add dev eth0 root handle 1: tbf rate 100000000bit burst 12500 limit 637500"
    )
    assert "rate 100000000000bit" in render_rate("p0", LinkDirection())
    assert render_netem("eth0", LinkDirection(0, 2e-3, 5e-4, 0.01), 7) == (
        "qdisc add dev eth0 parent 1:1 handle 10: netem limit 100000 delay 2000us 500us loss 1% seed 7"
    )
    assert render_redirect("p0", "tp0")[1].endswith("action mirred egress redirect dev tp0")


def test_a_command_of_one_machine_is_spread_over_the_hosts() -> None:
    found = spread_over_hosts(
        ["paceline", "train", "r.toml", "-n", "4", "--set", "seed=1"], ["10.0.0.1", "10.0.0.2"]
    )
    assert found[1][:4] == [sys.executable, "-m", "paceline", "train"]
    meeting = "--nodes 2 --rendezvous 10.0.0.1:29500 --node-rank 1 r.toml -n 2 --set seed=1"
    assert " ".join(found[1][4:]) == meeting
    script = spread_over_hosts(["paceline", "run", "--logs", "l", "-n", "2", "s.py", "-n", "9"], ["a", "b"])
    assert " ".join(script[0][-7:]) == "--logs l -n 1 s.py -n 9"
    plain = spread_over_hosts(["paceline", "run", "s.py", "-n", "9"], ["a", "b"])
    assert " ".join(plain[0][-4:]) == "0 s.py -n 9"
    for what in ("link", "comm"):
        assert spread_over_hosts(["paceline", "bench", what], ["a", "b"])[1][-2:] == ["--node-rank", "1"]
    assert spread_over_hosts(["hostname"], ["a", "b"]) == [["hostname"], ["hostname"]]
    for wrong in (["paceline", "train", "r.toml", "-n", "3"], []):
        with pytest.raises(RecipeError):
            spread_over_hosts(wrong, ["a", "b"])


def test_cores_are_dealt_evenly_or_weighed() -> None:
    assert plan_core_shares(4, [0, 1]) == [CoreShare((0,)), CoreShare((1,)), CoreShare((0,)), CoreShare((1,))]
    assert plan_core_shares(2, [0, 1, 2, 3]) == [CoreShare((0, 1)), CoreShare((2, 3))]
    assert plan_core_shares(3, [0, 1]) == [CoreShare((), threads=1)] * 3
    assert plan_core_shares(3, [0, 1, 2, 3]) == [CoreShare(())] * 3
    assert plan_core_shares(2, [0, 1], 0.5) == [CoreShare((0,), 0.5), CoreShare((1,), 0.5)]
    assert "2 hosts on each of 2 cores" in describe_core_shares(plan_core_shares(4, [0, 1]), 2, False)
    assert "not evenly" in describe_core_shares(plan_core_shares(3, [0, 1]), 2, False)


def test_processes_that_have_no_core_of_their_own_have_one_thread() -> None:
    assert CoreShare((), threads=1).environ({"A": "b"}) == {"A": "b", "OMP_NUM_THREADS": "1"}
    assert CoreShare((), threads=1).environ({"OMP_NUM_THREADS": "4"}) == {"OMP_NUM_THREADS": "4"}
    assert CoreShare((0, 1)).environ({"A": "b"}) == {"A": "b"}


def test_control_groups_of_the_unified_hierarchy(tmp_path) -> None:
    groups = ControlGroups("paceline-lab-x", tmp_path, v2=True)
    folder = groups.make("h0", 0.5)
    assert (folder / "cpu.max").read_text() == "5000 10000"
    assert (folder.parent / "cgroup.subtree_control").read_text() == "+cpu"
