"""Time to the first step of a two-rank job under Slurm and Open MPI, and what it is made of.

Each is compared with the start of the engine itself, of two ranks that print a word, plus our own start of
the same job by `paceline train -n 2`. Slurm is the cluster of the tests: its nodes are this machine. The
first step ends when rank 0 has recorded it in metrics.jsonl; a word ends with its command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import FEWEST_BLOCKS, Spread
from benchmarks.report import Options, Report, Table, present
from paceline.job.cluster import process_environment
from tests.slurm_cluster import missing_programs, slurm_cluster

_DEADLINE_SECONDS = 300.0
_BUDGET_SECONDS = 600.0
_GOAL = 1.2
_RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "sum.toml"
_HELLO = ("echo", "hello")
_PACELINE = (sys.executable, "-m", "paceline", "train", str(_RECIPE), "--set", "steps=1")
_MPI = ("mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none")
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass
class Start:
    """One way to start two processes.

    Args:
        name: in the tables.
        words: the command.
        environ: its variables.
        trains: whether it ends with a step, and is timed until then.
    Attributes:
        seconds: until the first step, or until the end of a command that has none; one entry a round.
    """

    name: str
    words: Sequence[str]
    environ: Mapping[str, str]
    trains: bool = True
    seconds: list[float] = field(default_factory=list)

    def run(self, folder: Path) -> float:
        """Start it in a folder of its own; returns the seconds."""
        run_dir = folder / "run"
        words = [*self.words, "--set", f"run_dir={run_dir}"] if self.trains else [*self.words]
        begin = time.time()
        done = subprocess.run(
            words,
            cwd=folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_SECONDS,
            check=False,
        )
        ended = time.time()
        if done.returncode:
            raise RuntimeError(f"{self.name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        if not self.trains:
            assert done.stdout.split() == ["hello", "hello"], done.stdout
            return ended - begin
        events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
        assert next(event for event in events if event["event"] == "run")["ranks"] == 2
        return next(event for event in events if event["event"] == "step")["time"] - begin


@dataclass(frozen=True)
class Engine:
    """The starts of an engine: of a word, and of a job in each way in which it starts one."""

    hello: Start
    jobs: Sequence[Start]


@contextmanager
def engines_here(folder: Path) -> Iterator[list[Engine]]:
    """Start a Slurm cluster, if it is installed, and yield the engines of this machine."""
    found = []
    if shutil.which("mpirun") is not None:
        environ = {**process_environment(), **_ROOT}
        jobs = [Start("mpirun: two ranks", [*_MPI, *_PACELINE], environ)]
        found.append(Engine(Start("mpirun: hello", [*_MPI, *_HELLO], environ, trains=False), jobs))
    if missing_programs():
        yield found
        return
    with slurm_cluster(folder / "cluster") as cluster:
        srun, environ = ("srun", "-N", "1"), cluster.environ
        jobs = [
            Start("srun: two ranks", [*srun, "-n", "2", *_PACELINE], environ),
            Start("srun: one task with -n 2", [*srun, "-n", "1", "-c", "2", *_PACELINE, "-n", "2"], environ),
        ]
        hello = Start("srun: hello", [*srun, "-n", "2", *_HELLO], environ, trains=False)
        yield [Engine(hello, jobs), *found]


def measure(options: Options) -> Report:
    """Start everything once for warm-up, then by turns, in an order that is reversed after each round."""
    rounds = 2 if options.quick else 11
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o711)  # munge refuses a socket in a folder that others cannot enter
        with engines_here(place) as engines:
            local = Start("paceline train -n 2", [*_PACELINE, "-n", "2"], process_environment())
            starts = [local, *(start for engine in engines for start in (engine.hello, *engine.jobs))]
            expires = time.monotonic() + _BUDGET_SECONDS
            for number in range(rounds + 1):
                if number > FEWEST_BLOCKS and time.monotonic() > expires:
                    break
                for start in starts if number % 2 else reversed(starts):
                    folder = place / "job"
                    folder.mkdir()
                    seconds = start.run(folder)
                    shutil.rmtree(folder)
                    if number:
                        start.seconds.append(seconds)
            return _report(local, engines, starts)


def _report(local: Start, engines: Sequence[Engine], starts: Sequence[Start]) -> Report:
    rounds = len(local.seconds)
    rows = [(start.name, f"{Spread.of(start.seconds).median:.2f}", _range(start.seconds)) for start in starts]
    ratios = []
    for engine in engines:
        for job in engine.jobs:
            sums = [a + b for a, b in zip(engine.hello.seconds, local.seconds, strict=True)]
            ratio = Spread.of(job.seconds).median / Spread.of(sums).median
            paired = [a / b for a, b in zip(job.seconds, sums, strict=True)]
            spread = Spread.of(paired)
            ratios.append(
                (
                    job.name,
                    f"{Spread.of(job.seconds).median:.2f}",
                    f"{Spread.of(sums).median:.2f}",
                    f"{ratio:.3f}",
                    f"{spread.median:.3f} ({spread.low:.3f} .. {spread.high:.3f})",
                    _range(paired),
                    "met" if ratio <= _GOAL else "missed",
                )
            )
    columns = ("job", "first step s", "hello + local s", "ratio", "paired ratio", "min .. max", f"<= {_GOAL}")
    return Report(
        "Time to the first step of two ranks under an engine, against the engine's own start plus ours.",
        [
            Table(f"Seconds, {rounds} starts of each, by turns", ("start", "median s", "min .. max"), rows),
            Table("Ratios", columns, ratios),
        ],
        {"seconds": {start.name: start.seconds for start in starts}, "load": os.getloadavg()},
    )


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} .. {max(values):.2f}"


if __name__ == "__main__":
    present(measure, __doc__ or "")
