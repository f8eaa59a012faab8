"""Kills and stops of ranks at random points of random configurations: every job continues to the same bits.

`NUM_JOBS` jobs with a fault each; `python -m tests.soak.test_survive_kills SECONDS [SEED]` runs those
from a seed on that fit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from paceline.launch.fork_client import fork_server
from paceline.observe.rank_activity import read_operations
from tests import command_jobs

NUM_JOBS, STEPS, PATIENCE_SECONDS = 1000, 60, 600.0
STRATEGIES = (
    "replicas=all",
    "replicas=all route=native",
    "shard=all zero=1",
    "shard=all zero=2",
    "shard=all zero=3",
)
TASK = """
import time
import torch
from torch import nn
from paceline import Loss, Task

def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    rows = torch.randn(96, 8), torch.randint(0, 3, (96,))
    def loss(model, batch):
        inputs, targets = batch
        time.sleep(0.02)
        return Loss(nn.functional.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))
    return Task(model=model, data=torch.utils.data.TensorDataset(*rows), loss=loss,
                held_out=torch.utils.data.TensorDataset(*(x[:12] for x in rows)))
"""
RECIPE = f"""
task = "task.py:build"
steps = {STEPS}
run_dir = "run"
reproducible = true
[batch]
size = 12
shards = 6
[checkpoint]
every_steps = 20
[evaluate]
every_steps = 10
[optimizer]
name = "adamw"
lr = 0.01
"""


@dataclass(frozen=True)
class KillTrial:
    """A job, and the signal that one of its ranks gets at a step, some time after its begin."""

    seed: int
    strategy: str
    processes: int
    victim: int
    signal: str
    step: int
    delay_seconds: float


@dataclass(frozen=True)
class KillResult:
    """The end of a trial: empty `wrong` if the job has continued to the hash of an undisturbed one."""

    trial: KillTrial
    hit: bool
    repeated: int
    stall_seconds: float
    wrong: str


def trial_of(seed: int) -> KillTrial:
    chance = random.Random(seed)
    processes = chance.choice((2, 3))
    return KillTrial(
        seed,
        chance.choice(STRATEGIES),
        processes,
        chance.randrange(processes),
        "SIGSTOP" if chance.random() < 0.1 else "SIGKILL",
        chance.randrange(1, STEPS - 5),
        chance.uniform(0.0, 0.05),
    )


def train(
    folder: Path, trial: KillTrial, variables: Mapping[str, str], *, hits: bool
) -> tuple[bool, int, str, list[dict[str, object]]]:
    command_jobs.prepare(folder, TASK)
    (folder / "recipe.toml").write_text(RECIPE)
    words = ["train", "recipe.toml", "-n", str(trial.processes), "--strategy", trial.strategy]
    words += ["--set", "elastic.redundancy=buddy"] if "shard" in trial.strategy else []
    with command_jobs.start(folder, *words, **variables) as job:
        hit = False
        expires = time.monotonic() + PATIENCE_SECONDS
        while hits and not hit and job.poll() is None and time.monotonic() < expires:
            found = [one for one in read_operations(folder / "run") if one.rank == trial.victim]
            if found and found[0].step >= trial.step and found[0].alive:
                time.sleep(trial.delay_seconds)
                os.kill(found[0].pid, signal.Signals[trial.signal])
                hit = True
            time.sleep(0.002)
        output = "".join(text or "" for text in job.communicate(timeout=PATIENCE_SECONDS))
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return hit, job.returncode, output, [json.loads(line) for line in lines]


def hash_in(output: str) -> str:
    return output.rpartition("state sha256: ")[2].partition("\n")[0].strip()


def events_of(events: list[dict[str, object]]) -> list[dict[str, object]]:
    """The changes of members that lost one."""
    return [event for event in events if event["event"] == "members" and event["lost"]]


def judge(trial: KillTrial, expected: str, variables: Mapping[str, str]) -> KillResult:
    with TemporaryDirectory() as folder:
        hit, code, output, events = train(Path(folder), trial, variables, hits=True)
    steps = Counter(int(str(event["step"])) for event in events if event["event"] == "step")
    repeated = sum(steps.values()) - len(steps)
    changes = events_of(events)
    # One for the loss, and one where copies are used and a new process joins.
    num_allowed = max(1, sum(event["event"] == "members" for event in events))
    wrong = ""
    if code or hash_in(output) != expected:
        wrong = f"exit code {code}, hash {hash_in(output)[:8]}: {output[-1500:]}"
    elif set(steps) != set(range(STEPS)) or repeated > num_allowed:
        wrong = f"steps: {sorted(set(range(STEPS)) - set(steps))} missing, {repeated} repeated"
    elif hit and not changes and "resume" in {event["event"] for event in events}:
        wrong = "the job was started again from a checkpoint"
    stall = max((float(str(event["seconds"])) for event in changes), default=0.0)
    return KillResult(trial, hit, repeated, stall, wrong)


def kill_jobs(seeds: Iterator[int], seconds: float) -> Iterator[KillResult]:
    """Yield the results of trials until the time is over."""
    expires = time.monotonic() + seconds
    with fork_server() as variables:  # makes the imports of all jobs
        with TemporaryDirectory() as folder:
            plain = KillTrial(-1, "replicas=all", 2, 0, "SIGKILL", 0, 0.0)
            _, code, output, _ = train(Path(folder), plain, variables, hits=False)
            expected = hash_in(output)
            assert code == 0 and expected, output
        for seed in seeds:
            if time.monotonic() > expires:
                return
            yield judge(trial_of(seed), expected, variables)


@pytest.mark.soak
@pytest.mark.timeout(14400)
@pytest.mark.capability("N8", clause="scripted kills and stops")
def test_every_job_continues_to_the_bits_of_one_that_loses_nobody() -> None:
    results = list(kill_jobs(iter(range(NUM_JOBS)), 14000.0))
    assert [one for one in results if one.wrong] == []
    assert sum(one.hit for one in results) > 0.9 * len(results)


if __name__ == "__main__":
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for result in kill_jobs(iter(range(first, NUM_JOBS)), float(sys.argv[1])):
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.flush()
