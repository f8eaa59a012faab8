"""Jobs of Paceline on four hosts: what holds across hosts, and what happens when something breaks.

Ends are bounded by `settle_seconds`: a host that does not end by itself within it is in `forced`.
"""

import json
from pathlib import Path

import pytest

from paceline.comm.link_profile import LinkProfile
from paceline.lab import FaultPlan, Links

ROOT = Path(__file__).parents[2]
SUM = str(ROOT / "recipes" / "sum.toml")
LONG = ["--set", "steps=1000000"]
ENDS = ["--set", "elastic.mode=off"]


def train(run_dir: Path, *more: str) -> list[str]:
    return ["paceline", "train", SUM, "--set", f"run_dir={run_dir}", *more]


@pytest.mark.soak
@pytest.mark.capability("O2", "O9", "Z2", "G14")
def test_verify_holds_across_four_hosts_and_a_planted_fault_does_not(lab) -> None:
    made = lab(hosts=4, links=Links(rate="100mbit"))
    found = made.run(["paceline", "verify", SUM, "-n", "4", "--steps", "4"])
    assert found.exit_code == 0, found.output
    assert "verified: 4 steps" in "\n".join(found.output["h0"])
    assert all(traffic.up.num_bytes > 50_000 for traffic in found.traffic.values())
    two = lab(hosts=2)
    twin = two.run(["paceline", "verify", SUM, "-n", "2", "--steps", "1", "--plant", "sum-instead-of-mean"])
    assert twin.exit_codes["h0"] == 1 and "sum instead of mean" in "\n".join(twin.output["h0"])


@pytest.mark.soak
@pytest.mark.capability("B1")
def test_hosts_share_no_memory_and_say_so(lab) -> None:
    """Two hosts of the lab are on one machine, and are two hosts all the same."""
    made = lab(hosts=2)
    found = made.run(
        ["paceline", "verify", SUM, "-n", "2", "--steps", "1", "--strategy", "route=shared-memory"]
    )
    said = "\n".join(found.output["h0"])
    assert found.exit_codes["h0"] == 2 and "its ranks are on several hosts" in said, said
    assert "choose route=auto" in said


@pytest.mark.soak
@pytest.mark.capability("O9", "N12", "O2")
def test_a_host_that_dies_ends_the_job_within_ten_seconds_and_is_named(lab, tmp_path) -> None:
    made = lab(hosts=4)
    plan = FaultPlan().kill("h2", step=3)
    found = made.run(train(tmp_path, "-n", "4", *LONG, *ENDS), faults=plan, settle_seconds=10.0)
    assert found.exit_codes["h2"] == -9 and found.forced == []
    for host in ("h0", "h1", "h3"):
        said = "\n".join(found.output[host])
        assert found.exit_codes[host] == 4 and "cause: node 2 (h2, 10.0.0.3) is gone" in said, said
        assert said.count("cause: node") == 1, "those that live are not accused"
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if record["event"] == "step"]
    assert steps in ([0, 1, 2], [0, 1]), "three steps were taken; the third may not have been written"
    assert found.events == [{"fault": "kill", "hosts": ["h2"], "when": "step 3"}]


@pytest.mark.soak
@pytest.mark.capability("O9", "N12")
def test_a_partition_is_named_on_both_sides(lab, tmp_path) -> None:
    made = lab(hosts=4)
    plan = FaultPlan().partition(["h0"], ["h1", "h2", "h3"], step=3)
    short = ["--set", "runtime.deadline_seconds=6"]
    found = made.run(train(tmp_path, "-n", "4", *short, *LONG, *ENDS), faults=plan, settle_seconds=60.0)
    assert set(found.exit_codes.values()) == {4} and found.forced == []
    silent = {
        host: [line.partition(" (")[0][-6:] for line in found.output[host] if "does not respond" in line]
        for host in made.hosts
    }
    assert silent["h0"] == ["node 1", "node 2", "node 3"]
    assert silent["h1"] == silent["h2"] == silent["h3"] == ["node 0"]


@pytest.mark.soak  # the suite has a partition of two hosts, in test_chaos.py
@pytest.mark.capability("N12", "Z9")
def test_of_a_partition_only_the_side_with_the_store_continues(lab, tmp_path) -> None:
    """Two sides that both continue would write one run folder."""
    made = lab(hosts=3)
    plan = FaultPlan().partition(["h2"], ["h0", "h1"], step=3)
    words = ["--set", "runtime.deadline_seconds=6", *LONG]
    found = made.run(train(tmp_path, "-n", "3", *words), faults=plan, settle_seconds=20.0)
    said = {host: "\n".join(found.output[host]) for host in made.hosts}
    assert found.exit_codes["h2"] == 4 and "does not respond" in said["h2"], said
    # The others train until the lab stops them, on a busy machine by SIGKILL.
    assert {found.exit_codes[host] for host in ("h0", "h1")} <= {143, -9}, said
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (members,) = [record for record in records if record["event"] == "members"]
    steps = [record["step"] for record in records if record["event"] == "step"]
    assert members["lost"] == [2] and steps[-1] > members["step"] and steps == sorted(set(steps))


@pytest.mark.soak
@pytest.mark.capability("N12", "K8")
def test_a_nan_in_a_parameter_of_one_host_is_reported_as_one(lab, tmp_path) -> None:
    made = lab(hosts=2)
    found = made.run(train(tmp_path, "-n", "2", *LONG), faults=FaultPlan(seed=2).nan("h1", step=2))
    assert set(found.exit_codes.values()) == {5}, found.output
    assert "step 2" in "\n".join(found.output["h0"])


@pytest.mark.capability("N12")
@pytest.mark.soak
def test_a_full_disk_fails_the_write_and_damage_to_a_checkpoint_is_found(lab) -> None:
    made = lab(hosts=1, disk="2mb")
    every = ["--set", "checkpoint.every_steps=2"]
    full = made.run(
        train(made.disk / "run", "-n", "1", *every, *LONG), faults=FaultPlan().disk_full("h0", step=5)
    )
    assert full.exit_code != 0 and "No space left on device" in "\n".join(full.output["h0"])
    where = str(made.disk / "run" / "checkpoints" / "step-*" / "*.safetensors")
    plan = FaultPlan(seed=1).corrupt("h0", where, at=0.0)
    resumed = made.run(["paceline", "train", "--resume", str(made.disk / "run"), "-n", "1"], faults=plan)
    assert resumed.exit_code == 3, resumed.output


STEPS = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""


@pytest.mark.capability("N12")
@pytest.mark.soak
def test_the_same_seed_writes_the_same_log_of_a_users_own_loop(lab, tmp_path) -> None:
    made = lab(hosts=1)
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "data.bin").write_bytes(bytes(4096))
    logs = []
    for _ in range(2):
        plan = (
            FaultPlan(seed=1)
            .stop("h0", seconds=0.01, probability=0.3)
            .corrupt("h0", "data.bin", probability=0.2)
        )
        log = tmp_path / f"{len(logs)}.jsonl"
        command = ["paceline", "run", "-n", "1", str(tmp_path / "steps.py")]
        done = made.run(command, faults=plan, directory=tmp_path, event_log=log)
        assert done.exit_code == 0, done.output
        logs.append(log.read_text())
    assert logs[0] == logs[1] and len(logs[0].splitlines()) >= 3


@pytest.mark.soak
@pytest.mark.capability("G13", "G9", "O9")
def test_bench_link_finds_the_latency_and_the_slower_direction(lab, tmp_path) -> None:
    made = lab(hosts=2, host_links={"h0": Links(up="80mbit", down="400mbit", latency="20ms")})
    found = made.run(["paceline", "bench", "link", "--out", str(tmp_path / "links.json")])
    assert found.exit_code == 0, found.output
    profile = LinkProfile.load(tmp_path / "links.json")
    there, back = profile.pairs
    assert profile.hosts == ("h0", "h1") and (there.source, there.target) == (0, 1)
    assert there.line.alpha_seconds >= 0.009  # half of a round trip with 20 ms on one way
    assert there.line.bits_per_second < 88e6 and there.line.bits_per_second < back.line.bits_per_second
    assert profile.all_reduce.alpha_seconds >= 0.009 and len(profile.all_reduce.points) > 3
    assert {*profile.routes} == {"native", "ring", "tree", "recursive-doubling"}  # two hosts of one rank
    assert all(line.points[0].seconds >= 0.009 for line in profile.routes.values())
    file = ["--set", f"runtime.link_profile={tmp_path / 'links.json'}"]
    for words in (file, []):  # by the file, then measured by the session itself
        done = made.run(train(tmp_path / f"run{len(words)}", "-n", "2", "--set", "steps=3", *words))
        said = "\n".join(done.output["h0"])
        assert done.exit_code == 0 and "route: " in said, said
        assert ("links.json" in said) == bool(words) and "route=NAME in the strategy" in said
        records = [
            json.loads(line)
            for line in (tmp_path / f"run{len(words)}" / "metrics.jsonl").read_text().splitlines()
        ]
        kept = [record for record in records if record["event"] == "route"]
        assert [record["choice"] in said for record in kept] == [True]


@pytest.mark.soak
@pytest.mark.capability("P6", clause="one sampler per host; bytes, retransmits and round trips of links")
def test_each_host_has_one_sampler_for_all_its_ranks_and_links_are_those_of_the_lab(lab, tmp_path) -> None:
    pytest.importorskip("psutil", reason="needs paceline[system]")
    made = lab(hosts=2, links=Links(rate="100mbit", latency="5ms", loss="2%"))
    sampled = ["--set", "steps=60", "--set", "log.sample_seconds=0.2"]
    found = made.run(train(tmp_path, "-n", "4", *sampled))
    assert found.exit_code == 0, found.output
    assert sorted(path.name for path in tmp_path.glob("system*")) == ["system-2.jsonl", "system.jsonl"]
    trips, sent, retransmits = [], {"h0": 0.0, "h1": 0.0}, 0.0
    for name, host, ranks in (("system.jsonl", "h0", {0, 1}), ("system-2.jsonl", "h1", {2, 3})):
        records = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert {record["host"] for record in records if record["event"] == "system"} == {host}
        processes = [record for record in records if record["event"] == "process"]
        assert {record["rank"] for record in processes} == ranks
        other = "10.0.0.2" if host == "h0" else "10.0.0.1"
        for record in processes:
            sent[host] += record["link_sent_bytes"].get(other, 0.0)
            retransmits += record["link_retransmits"].get(other, 0.0)
            trips += (
                [record["link_round_trip_seconds"][other]]
                if other in record["link_round_trip_seconds"]
                else []
            )
        # What the ranks have sent to the other host is on its way in frames of the interface.
        frames = sum(r["network_sent_bytes"].get("eth0", 0.0) for r in records if r["event"] == "system")
        assert 0 < sent[host] <= frames <= found.traffic[host].up.num_bytes * 1.05
    assert min(trips) >= 0.010 and retransmits > 0
