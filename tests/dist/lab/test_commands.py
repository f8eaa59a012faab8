"""Commands in the lab: prefixed lines, exit codes, looking in from elsewhere, cleaning up."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import LabError
from paceline.lab import FaultPlan, Lab, Links, clean, host_commands
from paceline.lab.lab_registry import read_lab_records
from paceline.testing.lab_fixture import LabFootprint

ROOT = Path(__file__).parents[3]
SLEEP = ["sh", "-c", "echo $(hostname) sleeps; exec sleep 600"]


def paceline(*arguments: object, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False)


def start(*arguments: object) -> subprocess.Popen[str]:
    """`paceline lab run` in the background; returns when its hosts say that they sleep."""
    command = [sys.executable, "-m", "paceline", "lab", "run", *map(str, arguments), "--", *SLEEP]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    seen = {process.stdout.readline() for _ in range(2)}
    assert seen == {"[h0] h0 sleeps\n", "[h1] h1 sleeps\n"}
    return process


def own(process: subprocess.Popen[str]):
    """The record of the lab that a process made."""
    return next(record for record in read_lab_records() if record.owner.pid == process.pid)


@pytest.fixture(autouse=True)
def allowed(lab_obstacle: str) -> None:
    if lab_obstacle:
        pytest.skip(f"no lab can be started here: {lab_obstacle}")


@pytest.mark.capability("O9")
def test_lines_have_their_host_and_the_first_failure_is_the_exit_code() -> None:
    done = paceline(
        "lab", "run", "--hosts", "a,b", "--", "sh", "-c", "echo I am $(hostname); test $(hostname) = a"
    )
    assert done.returncode == 1
    assert {"[a] I am a", "[b] I am b"} <= set(done.stdout.splitlines())
    table = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("a ", "b "))]
    assert table == [["a", "0"], ["b", "1"]]


def test_a_lab_in_use_is_listed_entered_and_spared_and_ctrl_c_ends_it() -> None:
    process = start("--hosts", "2")
    record = own(process)
    footprint = LabFootprint.of(record)
    listed = paceline("lab", "ps").stdout
    assert record.name in listed and "h1          10.0.0.2      1 process" in listed
    inside = paceline("lab", "shell", "h1", "--lab", record.name, "--", "hostname")
    assert (inside.returncode, inside.stdout) == (0, "h1\n")
    assert paceline("lab", "shell", "h9", "--lab", record.name).returncode == 6
    assert record.name in clean().running and process.poll() is None
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 143 and "lab: 2 hosts" in printed
    assert footprint.find_leftovers() == []


@pytest.mark.capability("O9")
def test_what_a_killed_lab_leaves_is_gone_after_clean() -> None:
    process = start("--hosts", "2", "--cores", "0.5") if os.geteuid() == 0 else start("--hosts", "2")
    record = own(process)
    footprint = LabFootprint.of(record)
    process.kill()
    process.communicate(timeout=120)
    assert record.folder.exists(), "a kill cannot be caught, so something is left"
    listed = paceline("lab", "ps").stdout
    assert "its process has ended" in listed
    done = paceline("lab", "clean")
    assert done.returncode == 0 and "removed" in done.stdout
    assert footprint.find_leftovers() == []
    assert record.name not in paceline("lab", "ps").stdout


def test_namespaces_with_numbers_that_another_lab_has_now_are_no_leak(lab, monkeypatch) -> None:
    """The system gives the numbers of namespaces that are gone to the next ones."""
    ended, after = LabFootprint.of(lab(hosts=1).record), LabFootprint.of(lab(hosts=1).record)
    assert ended.namespaces.isdisjoint(after.namespaces)
    nothing = {"processes": frozenset(), "folder": Path("/nonexistent")}
    gone = replace(ended, name="paceline-lab-gone", namespaces=after.namespaces, **nothing)
    assert gone.find_leftovers() == []
    monkeypatch.setattr("paceline.testing.lab_fixture._SETTLE_SECONDS", 0.0)  # it stays
    assert {line.split()[0] for line in after.find_leftovers()} >= {"namespace", "process", "folder"}


def test_an_exception_ends_a_lab_and_so_does_clean_of_running_ones() -> None:
    with pytest.raises(ZeroDivisionError), Lab(hosts=2) as made:
        footprint = LabFootprint.of(made.record)
        with pytest.raises(LabError, match="before"):
            made.__enter__()
        raise ZeroDivisionError
    assert footprint.find_leftovers() == []
    process = start("--hosts", "2")
    footprint = LabFootprint.of(own(process))
    names = {record.name for record in read_lab_records() if record.owner.alive} - {footprint.name}
    if names:
        process.kill()
        pytest.skip("other labs of this user are in use")
    clean(running=True)
    process.communicate(timeout=120)
    assert footprint.find_leftovers() == []


def test_a_deadline_ends_what_runs_on_and_says_so(lab) -> None:
    made = lab(hosts=2)
    found = made.run(
        ["sh", "-c", "trap '' TERM; test $(hostname) = h0 || exit 3; sleep 0.2"], deadline_seconds=20
    )
    assert dict(found.exit_codes) == {"h0": 0, "h1": 3} and found.forced == []
    ended = made.run(["sleep", "600"], deadline_seconds=0.3)
    assert set(ended.exit_codes.values()) == {-signal.SIGTERM} and ended.exit_code == 143


@pytest.mark.capability("N12")
def test_faults_by_time_act_on_real_processes_files_and_disks(lab, tmp_path) -> None:
    made = lab(hosts=3, disk="2mb")
    (tmp_path / "data.bin").write_bytes(bytes(1000))
    until_killed = "test $(hostname) = h2 && sleep 600; "
    until_corrupt = "while ! tr -d '\\000' < data.bin | grep -q .; do sleep 0.02; done; "
    count = until_killed + until_corrupt + "i=0; while [ $i -lt 60 ]; do sleep 0.02; i=$((i+1)); done; "
    write = f"head -c 1000 /dev/zero > {made.disk}/x 2>/dev/null && echo wrote || echo full"
    plan = FaultPlan(seed=4).kill("h2", at=0.2).stop("h1", seconds=0.5, at=0.2)
    plan = plan.disk_full("h0", at=0.0).corrupt("h0", "data.bin", at=0.1)
    log = tmp_path / "events.jsonl"
    found = made.run(["sh", "-c", count + write], faults=plan, directory=tmp_path, event_log=log)
    assert dict(found.exit_codes) == {"h0": 0, "h1": 0, "h2": -signal.SIGKILL}
    assert list(found.output["h0"]) == ["full"] and list(found.output["h1"]) == ["wrote"]
    assert sum(bin(byte).count("1") for byte in (tmp_path / "data.bin").read_bytes()) == 1
    assert [event["fault"] for event in found.events] == ["disk_full", "corrupt", "kill", "stop"]
    assert len(log.read_text().splitlines()) == 4 and "killed by the fault plan" in found.summary
    again = made.run(["sh", "-c", write])
    assert list(again.output["h0"]) == ["wrote"], "a fault is healed when the job has ended"


@pytest.mark.capability("N12")
def test_a_host_that_is_slow_to_start_meets_its_fault_all_the_same(lab, monkeypatch) -> None:
    """The clock of a plan begins when the commands run: else one comes after its host was killed."""
    begin = host_commands._start_process

    def late(argv, *given):
        return begin(["sh", "-c", 'sleep 1; exec "$@"', "sh", *argv], *given)

    monkeypatch.setattr(host_commands, "_start_process", late)
    found = lab(hosts=1).run(
        ["sleep", "600"], faults=FaultPlan(seed=1).kill("h0", at=0.2), deadline_seconds=60
    )
    assert dict(found.exit_codes) == {"h0": -signal.SIGKILL} and found.forced == []


def test_a_slowed_host_stands_still_most_of_the_time(lab) -> None:
    """A busy machine makes gaps larger, so only the slowed host is judged."""
    made = lab(hosts=2)
    program = """
import time
began = last = time.perf_counter()
still = 0.0
while last < began + 2:
    now = time.perf_counter()
    still += now - last if now - last > 0.015 else 0.0
    last = now
print(still / 2)
"""
    plan = FaultPlan().slow("h1", 4.0, at=0.0)
    found = made.run([sys.executable, "-I", "-S", "-c", program], faults=plan)
    assert float(found.output["h1"][0]) >= 0.5 and found.events[0]["value"] == 4.0


def test_a_plan_for_a_host_that_is_not_there_is_refused_before_anything_runs() -> None:
    done = paceline("lab", "run", "--hosts", "2", "--fault", "kill h7 at=1", "--", "touch", "/nonexistent/x")
    assert done.returncode == 2 and "h7" in done.stderr


def test_where_it_is_not_allowed_one_error_says_what_is_missing_and_what_still_works() -> None:
    """In a user namespace that may not make network namespaces: the kernel really refuses."""
    forbid = "echo 0 > /proc/sys/user/max_net_namespaces && exec "
    run = f"{sys.executable} -m paceline lab run --hosts 2 -- true"
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", forbid + run],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 6 and done.stderr.startswith("error: The system does not let this user")
    assert (
        "creating a net namespace" in done.stderr
        and "without a lab you can use processes on the" in done.stderr
    )


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_of_each_end_leave_nothing_behind() -> None:
    for repeat in range(40):
        process = start("--hosts", "2", "--rate", "100mbit", "--latency", "1ms", "--disk", "1mb")
        footprint = LabFootprint.of(own(process))
        if repeat % 2:
            process.kill()
        else:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
        clean()
        assert footprint.find_leftovers() == []
    for _ in range(20):
        with Lab(hosts=2, links=Links(rate="100mbit", latency="1ms"), disk="1mb") as made:
            assert made.run(["true"]).exit_code == 0
            footprint = LabFootprint.of(made.record)
        assert footprint.find_leftovers() == []
        with pytest.raises(ZeroDivisionError), Lab(hosts=2) as made:
            footprint = LabFootprint.of(made.record)
            raise ZeroDivisionError
        assert footprint.find_leftovers() == []


def test_the_outcome_has_the_signal_that_stopped_the_commands() -> None:
    with Lab(1) as lab:
        job = ["sh", "-c", "echo sleeps; exec sleep 600"]
        first = lab.run(job, on_line=lambda line: os.kill(os.getpid(), signal.SIGTERM), deadline_seconds=60.0)
        assert (first.signal, first.exit_code) == (signal.SIGTERM, 128 + signal.SIGTERM)
        assert lab.run(["true"]).signal == 0


COMPANION = 'import sys; print(\'{"HAS_COMPANION": "yes"}\', flush=True); sys.stdin.read()'


def test_a_companion_outlives_commands_and_ends_with_its_lab() -> None:
    job = ["sh", "-c", "sleep 600 & echo companion: $HAS_COMPANION"]
    with Lab(1) as lab:
        lab.start_companions([sys.executable, "-c", COMPANION])
        (pid,) = lab.companions["h0"][0].pids
        for _ in range(2):
            assert lab.run(job).output["h0"] == ["companion: yes"]
            assert host_commands.host_pids(lab.spaces["h0"].first) == [pid], "the sleep has ended"
    assert not Path(f"/proc/{pid}").exists()


def test_a_companion_that_does_not_start_is_an_error() -> None:
    with Lab(1) as lab, pytest.raises(LabError, match="did not start"):
        lab.start_companions([sys.executable, "-c", "pass"])
