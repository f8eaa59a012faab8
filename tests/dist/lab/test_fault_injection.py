"""Faults of links and files, each injected into a job that runs, seen by its processes, and then healed."""

import sys
from pathlib import Path

import pytest

from paceline.lab import FaultPlan, Links
from tests.dist.lab.probes import ECHO, SINK, push, serving, trips

JOB = """
import socket, sys, time
from pathlib import Path
kind, address, end = sys.argv[1], sys.argv[2], time.monotonic() + 60
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(3.0 if kind == "rate" else 0.2)
if socket.gethostname() == "h1":
    s.bind(("", 7))
    while not Path("seen").exists() and time.monotonic() < end:
        try:
            data, sender = s.recvfrom(65536)
            s.sendto(data, sender)
        except OSError:
            pass
    sys.exit()

def trip(size):
    began = time.monotonic()
    try:
        s.sendto(bytes(size), (address, 7))
        s.recv(65536)
    except OSError:
        return None
    return time.monotonic() - began

def met():
    if kind == "torn_write":
        return Path("data.bin").stat().st_size < 4096
    found = [trip(30000 if kind == "rate" else 64) for _ in range(3)]
    if kind in ("drop", "link_down"):
        return found == [None] * 3
    return None not in found and min(found) >= (0.15 if kind == "rate" else 0.06)

while not met():
    assert time.monotonic() < end, "nothing happened"
    time.sleep(0.01)
Path("seen").touch()
print("saw", kind)
"""
PLANS = {
    "delay": FaultPlan().delay("h0", "60ms", at=0.0),
    "drop": FaultPlan().drop("h0", "100%", at=0.0),
    "rate": FaultPlan().rate("h0", "1mbit", at=0.0),
    "link_down": FaultPlan().link_down("h0", at=0.0),
    "torn_write": FaultPlan(seed=4).torn_write("h0", "data.bin", at=0.0),
}


@pytest.mark.capability("N12")
@pytest.mark.soak
def test_a_job_meets_the_fault_that_was_planned_and_the_link_is_as_it_was(lab, tmp_path: Path) -> None:
    """The checks behind each job are the twin: without the fault no link is slow or lossy."""
    made = lab(hosts=2, links=Links(rate="100mbit"))
    address = made.topology.host("h1").address
    for kind, plan in PLANS.items():
        place = tmp_path / kind
        place.mkdir()
        (place / "data.bin").write_bytes(bytes(4096))
        command = [sys.executable, "-I", "-S", "-c", JOB, kind, address]
        found = made.run(command, faults=plan, directory=place)
        assert found.exit_code == 0 and found.output["h0"] == ["saw " + kind], (kind, found.output)
        (event,) = found.events
        assert (event["fault"], event["hosts"], event["when"]) == (kind, ["h0"], "0 s")
        with serving(made, "h1", ECHO), serving(made, "h1", SINK):
            assert min(trip for trip in trips(made, "h0", "h1", 5) if trip is not None) < 0.02, kind
            assert push(made, "h0", "h1", 250_000) < 8 * 250_000 / 1e6, kind
    kept = (tmp_path / "torn_write" / "data.bin").stat().st_size
    assert (event["kept_bytes"], event["of_bytes"]) == (kept, 4096) and kept < 4096
