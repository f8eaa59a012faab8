"""Samples agree with the kernel's own counters, which this test reads itself; what is missing is named."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from paceline.errors import MissingExtraError, RecipeError
from paceline.job.cluster import Cluster
from paceline.observe.metrics_schema import find_schema_errors
from paceline.observe.process_info import process_start_ticks
from paceline.recipe import Recipe
from paceline.recipe.log_recipe import LogRecipe
from paceline.session import companion_processes, fit
from paceline.session.companion_processes import SystemSampler, plan_sampler
from paceline.session.sink_setup import build_sinks
from paceline.testing.parity import build_test_session
from paceline.watch.run_watch import RunWatch
from tests.unit.watch.records import append, run_record

pytest.importorskip("psutil", reason="needs paceline[system]")
from paceline.watch.host_sampler import (
    CounterDifferences,
    HostSampler,
    RankProcess,
    RaplCounters,
    parse_connections,
    read_stalls,
    why_no_connections,
)

SECONDS = 60.0
TICKS = os.sysconf("SC_CLK_TCK")
LOAD = """
import os, socket, subprocess, sys, time
burn = "import time\\nwhile time.process_time() < 1.0: pass"
sys.stdin.readline()
subprocess.run([sys.executable, "-c", burn])  # it ends, and its time is in that of its parent
exec(burn)
with open(sys.argv[1], "wb") as file:
    file.write(os.urandom(2**24)); file.flush(); os.fsync(file.fileno())
link = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
link.sendall(bytes(3_000_000))
link.recv(1)
print("done", flush=True)
sys.stdin.readline()
"""


BURN = """
import sys, time
sys.stdin.readline()
while time.process_time() < 1.0:
    pass
print(1, flush=True)
time.sleep(600)
"""


def cpu_seconds(pid: int) -> float:
    """From /proc, those of children that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def io_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/io").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def pages(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def meminfo(name: str) -> int:
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def interface_bytes(name: str) -> int:
    """Return the bytes that an interface has sent."""
    lines = Path("/proc/net/dev").read_text("ascii").splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith(f"{name}:"))


@contextmanager
def cpu_group() -> Iterator[Path]:
    """Yield a new cgroup that counts CPU time, of version 1 or 2."""
    for parent in (Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")):
        group = parent / f"paceline-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            if (group / "cgroup.procs").exists():
                break
            group.rmdir()
    else:
        pytest.skip("this user may make no cgroup")
    try:
        yield group
    finally:
        expires = time.monotonic() + SECONDS
        while time.monotonic() < expires:  # an ended process is in it for a moment
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def group_cpu_seconds(group: Path) -> float:
    if (group / "cpuacct.usage").exists():
        return int((group / "cpuacct.usage").read_text("ascii")) / 1e9
    return int((group / "cpu.stat").read_text("ascii").split()[1]) / 1e6


@contextmanager
def loaded_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = [sys.executable, "-c", LOAD, str(folder / "load.bin"), str(listener.getsockname()[1])]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield process, listener
        finally:
            process.kill()
            process.communicate()


@pytest.mark.capability("P6", clause="CPU, memory, network and disk")
def test_a_sample_is_within_five_percent_of_the_kernels_counters(tmp_path: Path) -> None:
    with loaded_process(tmp_path) as (process, listener):
        pid = process.pid
        sampler = HostSampler([RankProcess(3, pid, process_start_ticks(pid))], tmp_path)
        cpu, written, sent = cpu_seconds(pid), io_bytes(pid, "write_bytes"), interface_bytes("lo")
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        link, _ = listener.accept()
        with link:
            received = 0
            while received < 3_000_000:
                received += len(link.recv(2**20))
            link.sendall(b"x")
            assert process.stdout.readline() == "done\n"
            records = dict(sampler.sample())
            cpu, written = cpu_seconds(pid) - cpu, io_bytes(pid, "write_bytes") - written
            found = records["process"]
            assert find_schema_errors({**COMMON, "event": "process", **found}) == []
            assert find_schema_errors({**COMMON, "event": "system", **records["system"]}) == []
            assert found["rank"] == 3 and found["pid"] == pid and cpu > 1.9
            assert sum(found["cpu_seconds"].values()) == pytest.approx(cpu, rel=0.05)
            assert found["disk_bytes"]["written"] == pytest.approx(written, rel=0.05)
            assert found["memory_bytes"]["rss"] == pytest.approx(pages(pid, "Rss"), rel=0.05)
            assert found["memory_bytes"]["pss"] == pytest.approx(pages(pid, "Pss"), rel=0.05)
            if not why_no_connections():
                assert found["link_sent_bytes"] == {"127.0.0.1": pytest.approx(3_000_000, rel=0.05)}
                assert found["link_round_trip_seconds"]["127.0.0.1"] > 0
            host = records["system"]
            assert sum(host["cpu_seconds"].values()) == pytest.approx(
                host["cores"] * host["seconds"], rel=0.1, abs=0.5
            )
            assert host["memory_bytes"]["total"] == meminfo("MemTotal")
            assert host["memory_bytes"]["available"] == pytest.approx(meminfo("MemAvailable"), rel=0.05)
            sent = interface_bytes("lo") - sent
            assert 3_000_000 <= host["network_sent_bytes"]["lo"] == pytest.approx(sent, rel=0.05)
            assert host["folder_bytes"]["free"] > 0 and host["memory_bytes"]["available"] > 0
            assert host["energy_joules"] or "energy" in host["unavailable"]
            assert host["gpu_utilization"] or "gpu" in host["unavailable"]
        again = dict(sampler.sample())["process"]
        assert sum(again["cpu_seconds"].values()) < 0.2 and again["disk_bytes"]["written"] == 0


@pytest.mark.capability("P6", clause="CPU of a cgroup")
def test_the_cpu_time_of_several_ranks_is_that_of_their_cgroup(tmp_path: Path) -> None:
    with cpu_group() as group, ExitStack() as stack:
        ranks = []
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            (group / "cgroup.procs").write_text(str(process.pid), "ascii")
            ranks.append(process)
        places = [RankProcess(n, one.pid, process_start_ticks(one.pid)) for n, one in enumerate(ranks)]
        sampler, before = HostSampler(places, tmp_path), group_cpu_seconds(group)
        for process in ranks:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "1\n"
        samples = [record for name, record in sampler.sample() if name == "process"]
        total = sum(sum(sample["cpu_seconds"].values()) for sample in samples)
        assert [sample["rank"] for sample in samples] == [0, 1] and total > 1.5
        assert total == pytest.approx(group_cpu_seconds(group) - before, rel=0.05)


COMMON = {"level": "info", "time": 1.0, "rank": 0}


def test_a_process_that_is_gone_or_another_one_has_no_record(tmp_path: Path) -> None:
    sampler = HostSampler([RankProcess(0, os.getpid(), 1), RankProcess(1, 2**22 + 1, 5)], tmp_path)
    assert [name for name, _ in sampler.sample()] == ["system"]


def test_a_run_with_a_sampler_has_its_records(tmp_path: Path) -> None:
    """It samples the ranks, it ends with the run, and its numbers are metrics; at most 200 of them a rank."""
    recipe = Recipe(
        task="digits",
        steps=4,
        options={"model": "mlp", "hidden": [8]},
        batch={"size": 8, "shards": 2},
        log={"sample_seconds": 0.1},
    )
    session = build_test_session(Cluster.single(), recipe)
    sinks = build_sinks(session, tmp_path, None)
    expires = time.monotonic() + SECONDS
    while not (tmp_path / "system.jsonl").is_file() or not (tmp_path / "system.jsonl").stat().st_size:
        assert time.monotonic() < expires
        time.sleep(0.05)
    fit(session, tmp_path, sinks)
    records = [json.loads(line) for line in (tmp_path / "system.jsonl").read_text("utf-8").splitlines()]
    assert [error for record in records for error in find_schema_errors(record)] == []
    assert {record["event"] for record in records} == {"process", "system"}
    assert {record["pid"] for record in records if record["event"] == "process"} == {os.getpid()}
    run = RunWatch(tmp_path)
    while run.update() and not run.is_complete:
        pass
    state = run.state()
    assert state["processes"][0]["threads"] >= 1 and state["hosts"][0]["host"] == socket.gethostname()
    assert state["damaged_lines"] == 0
    samples = {(sample.metric.name, *sample.labels): sample.value for sample in run.values.samples()}
    assert samples["paceline_process_memory_bytes", "0", "rss"] > 1e6
    assert samples["paceline_host_memory_bytes", socket.gethostname(), "total"] > 1e6
    total = sum(record["cpu_seconds"].get("user", 0.0) for record in records if record["event"] == "process")
    assert samples["paceline_process_cpu_seconds_total", "0", "user"] == pytest.approx(total)
    assert len(samples) < 200


def test_counters_of_samples_continue_across_a_resume_and_every_host_is_read(tmp_path: Path) -> None:
    append(tmp_path, run_record())
    run = RunWatch(tmp_path)
    run.update()
    sample = {"event": "process", "rank": 5, "time": 1.0, "cpu_seconds": {"user": 2.0}}
    for name in ("system.jsonl", "system-4.jsonl", "system-4.0001.jsonl", "system-x.jsonl"):
        (tmp_path / name).write_text(f"{json.dumps(sample)}\nnot a record\n", "utf-8")
    expires = time.monotonic() + SECONDS
    while run.values.value("paceline_process_cpu_seconds_total", "5", "user") != 6.0:
        run.update()  # two files, and a full one of the second
        assert time.monotonic() < expires
    assert run.state()["damaged_lines"] == 3 and run.state()["updated"] == 1000.0
    with (tmp_path / "system.jsonl").open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(sample)}\n{json.dumps({**sample, 'event': 'end'})}\n")
    assert run.update() and run.values.value("paceline_process_cpu_seconds_total", "5", "user") == 8.0
    assert run.status != "finished"  # a sampler does not speak for the run


def test_a_sampler_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from paceline.recipe.log_recipe import LogRecipe\n"
        "from paceline.session.companion_processes import SystemSampler\n"
        "s = SystemSampler(Path(sys.argv[1]), 'system.jsonl', [], LogRecipe(sample_seconds=60.0))\n"
        "print(s._process.pid, flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    expires = time.monotonic() + SECONDS
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < expires
        time.sleep(0.1)


def test_without_psutil_the_next_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companion_processes, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="psutil") as caught:
        companion_processes.check_psutil()
    assert "paceline[system]" in caught.value.next_step
    with pytest.raises(RecipeError, match=r"0 or at least 0\.1"):
        Recipe(task="digits", steps=1, log={"sample_seconds": 0.01})
    assert LogRecipe().sample_seconds == 0 and SystemSampler is not None


def test_the_first_rank_of_every_host_starts_a_sampler() -> None:
    texts = ["0:10:7 a", "1:11:7 b", "2:12:7 a", "3:13:7 b", "4:14:7 a"]
    plans = [plan_sampler(texts, text) for text in texts]
    assert plans[0] == ("system.jsonl", ["0:10:7", "2:12:7", "4:14:7"])
    assert plans[1] == ("system-1.jsonl", ["1:11:7", "3:13:7"])
    assert plans[2:] == [None, None, None]


def test_counters_begin_where_they_are_and_never_fall() -> None:
    differences = CounterDifferences()
    assert differences.update("x", {"a": 10.0}) == {}
    assert differences.update("x", {"a": 12.0, "b": 5.0}) == {"a": 2.0, "b": 0.0}
    assert differences.update("x", {"a": 3.0, "c": 5.0}, new_from_zero=True) == {"a": 0.0, "c": 5.0}


def test_output_of_ss_is_parsed_with_and_without_a_line_for_the_details() -> None:
    first = 'ESTAB 0 0 10.0.0.1:5000 10.0.0.2:41 users:(("python",pid=7,fd=3),("python",pid=9,fd=3))'
    details = (
        "\t cubic rtt:0.5/0.1 bytes_sent:100 bytes_retrans:9 bytes_received:20 retrans:1/61 minrtt:0.004"
    )
    second = 'ESTAB 0 0 [::ffff:10.0.0.1]:6000 [::ffff:10.0.0.3]:42 users:(("a b",pid=8,fd=4)) rtt:1/1'
    found = list(parse_connections(f"{first}\n{details}\n{second}\nLISTEN 0 5\nnonsense\n"))
    assert Counter(connection.pids for connection in found) == {(7, 9): 1, (8,): 1}
    assert found[0][3:] == (100, 20, 61, 0.0005) and found[0].peer_host == "10.0.0.2"
    assert found[1].peer_host == "10.0.0.3" and found[1].sent_bytes == 0


@pytest.mark.capability("P15", clause="RAPL, or why it is unavailable")
def test_energy_is_counted_over_the_end_of_a_counter_or_named_as_missing(tmp_path: Path) -> None:
    assert "no RAPL" in RaplCounters(tmp_path).why_none
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in {
        "name": "package-0",
        "energy_uj": "9000000",
        "max_energy_range_uj": "10000000",
    }.items():
        (zone / name).write_text(f"{text}\n", "ascii")
    counters = RaplCounters(tmp_path)
    assert counters.why_none == "" and counters.read() == {"package-0 0": 0.0}
    (zone / "energy_uj").write_text("500000\n", "ascii")
    assert counters.read() == {"package-0 0": pytest.approx(1.5)}
    (zone / "energy_uj").unlink()
    assert "root" in RaplCounters(tmp_path).why_none


def test_stalls_are_read_where_the_kernel_has_them(tmp_path: Path) -> None:
    assert read_stalls(tmp_path) == {}
    (tmp_path / "io").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull ...\n", "ascii")
    assert read_stalls(tmp_path) == {"io": 2.5}
