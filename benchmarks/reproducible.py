"""What the same bits on any number of processes cost: reproducible runs beside ordinary ones, and lanes.

Every side is Paceline itself, on the same job with as many virtual shards. In one process an ordinary run has
the cores by two threads inside each operation, a reproducible one by two lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.loops import paceline_side
from benchmarks.measure import Side
from benchmarks.pair import measure_pair
from benchmarks.report import Options, Report, Table, blocks, present, rate_table, series_data
from benchmarks.subjects import Subject, byte_gpt, mlp
from paceline.job.cluster import Cluster
from paceline.recipe import Strategy


@dataclass(frozen=True)
class Way:
    """One way to run the job; the first of a case is what the others are compared with."""

    name: str
    reproducible: bool = False
    threads: int = 1
    lanes: int = 1


@dataclass(frozen=True)
class Case:
    """A job on some processes."""

    title: str
    subject: str
    processes: int
    ways: tuple[Way, ...]
    steps: int
    repeats: int = 9
    precision: str = ""  # that of the options


ORDINARY, REPRODUCIBLE = Way("ordinary"), Way("reproducible", reproducible=True)
ALONE = (
    Way("ordinary, 2 threads", threads=2),
    Way("ordinary, 1 thread"),
    Way("reproducible, 1 lane", reproducible=True),
    Way("reproducible, 2 lanes", reproducible=True, lanes=2),
    Way("not reproducible, 2 lanes", lanes=2),
)
CASES = (
    Case("byte-gpt, fp32, 1 process", "gpt", 1, ALONE, 2, precision="fp32"),
    Case("byte-gpt, 1 process", "gpt", 1, ALONE, 2),
    Case("byte-gpt, 2 processes", "gpt", 2, (ORDINARY, REPRODUCIBLE), 4),
    Case("byte-gpt, 4 processes on these cores", "gpt", 4, (ORDINARY, REPRODUCIBLE), 4),
    Case("MLP of 8.4 M parameters, 1 process", "mlp", 1, ALONE, 4, precision="fp32"),
    Case("the same MLP, 2 processes", "mlp", 2, (ORDINARY, REPRODUCIBLE), 6, precision="fp32"),
    Case("the same MLP, 4 processes on these cores", "mlp", 4, (ORDINARY, REPRODUCIBLE), 4, precision="fp32"),
)


def build_subject(case: Case, options: Options) -> Subject:
    """The job, in as many shards on any number of processes."""
    if case.subject == "gpt":
        return byte_gpt(quick=options.quick, precision=case.precision or options.precision).with_shards(4)
    return mlp((64, 64) if options.quick else (2048, 2048, 1024), batch_size=32, shards=4)


def build_sides(case: Case, options: Options, cluster: Cluster) -> Sequence[Side]:
    """One session a way."""
    subject = build_subject(case, options)
    return [_side(way, subject, cluster) for way in case.ways]


def _side(way: Way, subject: Subject, cluster: Cluster) -> Side:
    runtime = subject.recipe.runtime.replace(device="cpu", deadline_seconds=150.0)
    strategy = Strategy.parse(f"replicas={cluster.world_size} lanes={way.lanes}")
    changed = subject.changed(runtime=runtime, strategy=strategy, reproducible=way.reproducible)
    return paceline_side(way.name, changed, cluster, way.threads)


def measure(options: Options) -> Report:
    """Run all cases."""
    tables: list[Table] = []
    data = {}
    for case in CASES:
        repeats, steps = (2, 2) if options.quick else (case.repeats, case.steps)
        build = partial(build_sides, case, options)
        found = measure_pair(build, repeats=repeats, steps=steps, warmup=3, num_ranks=case.processes)
        batch = build_subject(case, options)
        tokens = batch.recipe.batch.size * (batch.task.num_tokens_per_sample or 1)
        items = "tokens" if batch.task.num_tokens_per_sample else "samples"
        tables.append(rate_table(f"{case.title} ({blocks(found)})", found, tokens, items))
        data[case.title] = series_data(found)
    return Report("Reproducible beside ordinary, 4 virtual shards.", tables, {"cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
