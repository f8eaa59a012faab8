"""Real frames on real (shaped) links. Bounds are one-sided: a busy machine is slower, never faster.

How exact rates and latencies are is measured in `benchmarks/lab.py`.
"""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from paceline.errors import LabError
from paceline.lab import Links
from paceline.lab.network import ForwarderDelays
from paceline.lab.topology import parse_rate_bits
from tests.dist.lab.probes import ECHO, SINK, ask, burst, push, pushes_faster, serving, trips

OVERHEAD = 1514 / 1448


@pytest.mark.capability("O9", "Z16")
def test_a_latency_is_added_to_every_way_and_no_rate_is_exceeded(lab) -> None:
    made = lab(hosts=2, links=Links(rate="20mbit", latency="30ms"))
    with serving(made, "h1", ECHO), serving(made, "h1", SINK):
        found = trips(made, "h0", "h1")
        assert min(found) >= 0.060
        seconds = push(made, "h0", "h1", 1_000_000)
    before = 8 * 1_000_000 * OVERHEAD / parse_rate_bits("20mbit")
    assert seconds >= 0.95 * before + 0.03
    up = made.network.traffic()["h0"].up
    assert 1_000_000 * OVERHEAD * 0.99 <= up.num_bytes <= 1_000_000 * 1.2
    assert "forwarder" in "".join(made.remarks()) or "netem" in "".join(made.remarks())


def test_without_a_latency_there_is_none_and_rates_may_differ_by_direction(lab) -> None:
    """The twin: what is asserted above comes from the link, not from the lab."""
    made = lab(hosts=2, host_links={"h0": Links(up="8mbit", down="80mbit")})
    with serving(made, "h1", ECHO), serving(made, "h0", SINK), serving(made, "h1", SINK):
        assert min(trips(made, "h0", "h1")) < 0.030
        least = 0.95 * 8 * 400_000 / 8e6
        assert push(made, "h0", "h1", 400_000) >= least
        assert pushes_faster(made, "h1", "h0", 400_000, least)
    assert not any("latency" in line for line in made.remarks())


@pytest.mark.capability("O9")
def test_racks_share_their_uplink_and_neighbours_do_not_use_it(lab) -> None:
    racks = {"left": ["a", "b"], "right": ["c"]}
    made = lab(hosts=["a", "b", "c"], racks=racks, uplinks=Links(rate="16mbit", latency="10ms"))
    with serving(made, "b", SINK), serving(made, "c", SINK), serving(made, "c", ECHO):
        push(made, "a", "b", 300_000)
        assert made.network.traffic()["left"].up.num_bytes < 1000
        assert push(made, "a", "c", 300_000) >= 0.95 * 8 * 300_000 / 16e6
        assert min(trips(made, "b", "c")) >= 0.020
    found = made.network.traffic()
    assert found["left"].up.num_bytes > 300_000 < found["right"].down.num_bytes
    assert (
        ask(made, "b", "import socket; print(socket.gethostname(), socket.gethostbyname('c'))")
        == "b 10.0.0.3\n"
    )


def test_lost_frames_follow_from_the_seed(lab) -> None:
    made = [lab(hosts=2, links=Links(latency="1ms", loss="20%"), seed=seed) for seed in (1, 1, 2)]
    with ExitStack() as served, ThreadPoolExecutor(len(made)) as pool:
        for one in made:
            served.enter_context(serving(one, "h1", ECHO))
        found = list(pool.map(lambda one: burst(one, "h0", "h1", 16), made))
    assert found[0] == found[1] != found[2]
    assert 2 <= len(found[0]) <= 15  # 36 % of the round trips lose one of two frames


def test_links_can_be_cut_partitioned_slowed_and_mended(lab) -> None:
    made = lab(hosts=3, links=Links(rate="100mbit"))
    network = made.network
    with serving(made, "h1", ECHO), serving(made, "h2", ECHO), serving(made, "h1", SINK):

        def reaches(*right: bool) -> bool:
            """Whether h1 and h2 answer where they should; an answer that is to come may take its time."""
            waits = [60.0 if there else 0.3 for there in right]
            back = [trips(made, "h0", to, 1, wait) for to, wait in zip(("h1", "h2"), waits, strict=True)]
            return [one != [None] for one in back] == [*right]

        least = 0.95 * 8 * 250_000 / 2e6
        assert reaches(True, True)
        network.set_reachable(["h0"], ["h1"], reachable=False)
        assert reaches(False, True)
        network.set_reachable(["h0"], ["h1"], reachable=True)
        network.set_link(["h0"], up=False)
        assert reaches(False, False)
        network.set_link(["h0"], up=True)
        assert reaches(True, True)
        network.set_delay(["h0"], latency_seconds=0.04)
        assert trips(made, "h0", "h1", 1)[0] >= 0.04
        network.set_delay(["h0"], loss=1.0)
        assert reaches(False, False)
        network.set_delay(["h0"])
        assert reaches(True, True)
        assert network.delay_counts()["lost"] == 2
        assert pushes_faster(made, "h0", "h1", 250_000, least)
        network.set_rate(["h0"], 2e6)
        assert push(made, "h0", "h1", 250_000) >= least
        network.set_rate(["h0"], None)
        assert pushes_faster(made, "h0", "h1", 250_000, least)


def test_hosts_reach_nothing_outside_and_nothing_outside_reaches_them(lab) -> None:
    one, two = lab(hosts=2), lab(hosts=2)
    assert one.topology.hosts[1].address == two.topology.hosts[1].address, "labs do not collide"
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        attempt = f"import socket; print(socket.socket().connect_ex(('127.0.0.1', {port})))"
        assert ask(one, "h0", attempt) != "0\n"
        far = (
            "import socket\n"
            "try: socket.create_connection(('192.0.2.1', 9), 1)\n"
            "except OSError as e: print(e.errno)"
        )
        assert ask(one, "h0", far) == "101\n"  # no route
    with serving(one, "h1", ECHO):
        assert trips(one, "h0", "h1", 1) != [None]
        assert trips(two, "h0", "h1", 1, 0.3) == [None], "the other lab's h1 answers nobody here"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside, pytest.raises(OSError):
            outside.settimeout(0.3)
            outside.connect((one.topology.hosts[1].address, 7))
            outside.send(b"x")
            outside.recv(100)


def test_hosts_have_processes_names_memory_and_disks_of_their_own(lab) -> None:
    made = lab(hosts=2, disk="1mb")
    program = f"""
import os, pathlib
pathlib.Path("/dev/shm/lab-test").write_text("x")
pathlib.Path({str(made.disk)!r}, "own").write_text(os.uname().nodename)
print(len([p for p in os.listdir("/proc") if p.isdigit()]) < 6, os.uname().nodename)
"""
    assert ask(made, "h0", program) == "True h0\n"
    look = f"import os; print(os.listdir('/dev/shm'), os.listdir({str(made.disk)!r}))"
    assert ask(made, "h1", look) == "[] []\n"
    assert made.inside("h0", made.disk / "own").read_text() == "h0"


@pytest.mark.capability("O9")
def test_user_namespaces_carry_a_lab_without_root(lab, monkeypatch) -> None:
    monkeypatch.setattr("paceline.lab.namespaces.os.geteuid", lambda: 1000)
    made = lab(hosts=2, links=Links(rate="50mbit"), disk="1mb")
    assert "without root" in made.remarks()[-1]
    with serving(made, "h1", ECHO):
        assert trips(made, "h0", "h1", 1) != [None]


def test_a_forwarder_that_is_killed_ends_the_run_and_its_link_is_named(lab) -> None:
    """Where the kernel has netem there is none."""
    made = lab(hosts=2, links=Links(latency="1ms"))
    if not isinstance(made.network.delays, ForwarderDelays):
        pytest.skip("this kernel has netem")
    running = made.network.delays._running
    with ThreadPoolExecutor(1) as other:
        found = other.submit(made.run, ["sleep", "600"])
        running["h1"].kill()
        with pytest.raises(LabError, match="no frames pass the links of h1 any more"):
            found.result()
