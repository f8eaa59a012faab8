"""What is counted, and what is said about it."""

import json
import os
import subprocess
import sys

import pytest

from paceline.lab.lab_outcome import LabOutcome
from paceline.lab.lab_registry import LabRecord, ProcessIdentity
from paceline.lab.topology import LinkDirection, VethCable
from paceline.lab.utilization import (
    DirectionCount,
    LinkTraffic,
    UtilizationSample,
    busiest_link,
    describe_bottleneck,
    parse_queues,
)
from paceline.lab.virtual_cluster import find_metrics_line, read_ledger_bytes


def traffic(up: int, down: int) -> LinkTraffic:
    return LinkTraffic(DirectionCount(up, 10), DirectionCount(down, 10, 2))


def test_the_summary_names_who_was_killed_and_explains_the_bytes() -> None:
    found = LabOutcome(
        exit_codes={"h0": 4, "h1": -9},
        seconds=7.25,
        traffic={"h0": traffic(1500, 900), "h1": traffic(900, 2_500_000)},
        output={"h0": [], "h1": []},
        events=[{"fault": "kill", "hosts": ["h1"], "when": "step 3"}],
        remarks=["cores: some"],
        ledger_bytes=2000.0,
    )
    assert found.exit_code == 4
    assert found.summary.splitlines() == [
        "lab: 2 hosts, 7.2 s",
        "link        exit            up          down  dropped",
        "h0             4        1.5 kB         900 B        2",
        "h1            -9         900 B        2.5 MB        2  killed by the fault plan",
        "wire: 2.4 kB sent by all hosts; byte ledger: 2 kB (the wire has 20.0% more)",
        "  Ethernet, IP and TCP headers are 66 of the 1514 bytes of a full frame (4.4%); "
        "the remainder is acknowledgements, the store and connections",
        "fault: kill h1 at step 3",
        "cores: some",
    ]


def test_exit_codes_of_hosts_become_one() -> None:
    assert LabOutcome({"h0": 0, "h1": 0}, 1.0, {}, {}).exit_code == 0
    assert LabOutcome({"h0": 0, "h1": -9}, 1.0, {}, {}).exit_code == 137


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], "too short"),
        (
            [UtilizationSample(1.0, 0.1)] * 8 + [UtilizationSample(0.2, 0.9)] * 2,
            "the bottleneck was the cores, not the links",
        ),
        (
            [UtilizationSample(0.3, 1.0)] * 6 + [UtilizationSample(0.9, 0.1)] * 4,
            "the bottleneck was the links",
        ),
        ([UtilizationSample(0.5, 0.5)] * 4, "neither"),
    ],
)
def test_the_verdict(samples: list[UtilizationSample], said: str) -> None:
    assert said in describe_bottleneck(samples)


def test_the_busiest_direction_counts() -> None:
    cable = VethCable("h0", "h0", "eth0", "p0", "core", LinkDirection(8e6), LinkDirection(16e6))
    assert busiest_link([cable], {"p0": (0, 0)}, {"p0": (500_000, 1_500_000)}, 1.0) == pytest.approx(0.75)


def test_queues_of_a_link_are_read_and_inner_ones_are_not() -> None:
    rows = [
        {"kind": "tbf", "dev": "eth0", "root": True, "bytes": 5, "packets": 1, "drops": 3},
        {"kind": "netem", "dev": "eth0", "parent": "1:1", "bytes": 9, "packets": 1, "drops": 0},
    ]
    assert parse_queues(json.dumps(rows)) == {"eth0": DirectionCount(5, 1, 3)}


def test_the_ledger_of_the_last_run_is_read(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = {
        "event": "communication",
        "rows": {"all_reduce world": {"sent_bytes": 10.0}, "broadcast world": {"sent_bytes": 2.0}},
    }
    path.write_text('{"event": "step", "step": 0}\n' + json.dumps(row) + "\n")
    assert read_ledger_bytes(path) == 12.0
    path.write_text('{"event": "step", "step": 0}\n')
    assert read_ledger_bytes(path) is None


def test_the_metrics_of_a_job_are_found_in_what_it_prints() -> None:
    """As `print_summary` writes it; without the lines of the end there is nothing to find."""
    end = ["checkpoint: run/checkpoints/step-00000020", "metrics:    run/metrics.jsonl"]
    resume = "resume:     paceline train --resume run -n 4 --set steps=40"
    assert find_metrics_line([*end, "report:     run/report.html", resume]) == ("run/metrics.jsonl", 4)
    assert find_metrics_line(end) is None


def test_a_process_is_known_by_its_start_and_a_record_survives_its_file(tmp_path) -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me.alive and not ProcessIdentity(me.pid, me.started + 1).alive
    child = subprocess.Popen([sys.executable, "-c", ""])
    gone = ProcessIdentity.of(child.pid)
    child.wait()
    assert not gone.alive
    record = LabRecord(
        "paceline-lab-x", tmp_path, me, {"h0": gone}, {"h0": me}, {"h0": "10.0.0.1"}, ("net", "pid")
    )
    record.save()
    assert LabRecord.load(tmp_path) == record
