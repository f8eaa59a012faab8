"""What pays on this processor: processes or threads, bf16, compilation, the number of shards, bucket sizes.

Every side is Paceline itself with another setting. Sides of one process run on rank 0 while rank 1 sleeps at
the barrier, so that both kinds take turns. The answers are the defaults of the recipes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.loops import paceline_side
from benchmarks.measure import Side
from benchmarks.pair import measure_pair
from benchmarks.report import Options, Report, Table, blocks, present, rate_table, series_data
from benchmarks.subjects import Subject, byte_gpt, mlp
from paceline.job.cluster import Cluster


@dataclass(frozen=True)
class Setting:
    """One way to run the same job."""

    name: str
    processes: int = 2
    threads: int = 1
    precision: str = "bf16"
    shards: int = 2
    compiled: bool = False
    bucket_bytes: int = 4 * 2**20


@dataclass(frozen=True)
class Group:
    """Settings that are compared with the first of them."""

    title: str
    subject: str
    settings: tuple[Setting, ...]
    steps: int
    repeats: int = 7


GROUPS = (
    Group(
        "byte-gpt: processes, threads and precision",
        "gpt",
        (
            Setting("1 process x 2 threads, fp32", 1, 2, "fp32"),
            Setting("1 process x 2 threads, bf16", 1, 2),
            Setting("2 processes x 1 thread, fp32", precision="fp32"),
            Setting("2 processes x 1 thread, bf16"),
        ),
        steps=2,
    ),
    Group(
        "byte-gpt, 2 processes, bf16: compilation",
        "gpt",
        (Setting("not compiled"), Setting("compiled", compiled=True)),
        steps=4,
    ),
    Group(
        "byte-gpt, 2 processes, bf16: virtual shards of the same batch",
        "gpt",
        tuple(Setting(f"batch.shards = {n}", shards=n) for n in (2, 4, 8)),
        steps=4,
    ),
    Group(
        "MLP of 8.4 M parameters, 2 processes, fp32: runtime.bucket_bytes",
        "mlp",
        tuple(
            Setting(f"{mb:g} MiB", precision="fp32", bucket_bytes=int(mb * 2**20))
            for mb in (4, 0.25, 1, 2, 8, 16, 64)
        ),
        steps=8,
        repeats=9,
    ),
)


def build_subject(name: str, precision: str, quick: bool) -> Subject:
    """The job of a group."""
    if name == "gpt":
        return byte_gpt(quick=quick, precision=precision)
    return mlp((64, 64) if quick else (2048, 2048, 1024), batch_size=32, shards=2)


def build_sides(group: Group, quick: bool, cluster: Cluster) -> Sequence[Side]:
    """One session a setting."""
    subjects = {
        precision: build_subject(group.subject, precision, quick)
        for precision in sorted({setting.precision for setting in group.settings})
    }
    return [_side(setting, subjects[setting.precision], cluster) for setting in group.settings]


def _side(setting: Setting, subject: Subject, cluster: Cluster) -> Side:
    if setting.processes == 1 and cluster.global_rank > 0:
        return Side(setting.name, lambda: math.nan)
    runtime = subject.recipe.runtime.replace(
        device="cpu", compile=setting.compiled, bucket_bytes=setting.bucket_bytes, deadline_seconds=150.0
    )
    place = Cluster.single() if setting.processes == 1 else cluster
    changed = subject.with_shards(setting.shards).changed(runtime=runtime)
    return paceline_side(setting.name, changed, place, setting.threads)


def measure(options: Options) -> Report:
    """Run all groups."""
    tables: list[Table] = []
    data = {}
    for group in GROUPS:
        repeats, steps = (2, 2) if options.quick else (group.repeats, group.steps)
        found = measure_pair(
            partial(build_sides, group, options.quick), repeats=repeats, steps=steps, warmup=3
        )
        subject = build_subject(group.subject, "bf16", options.quick)
        tokens = subject.recipe.batch.size * (subject.task.num_tokens_per_sample or 1)
        items = "tokens" if subject.task.num_tokens_per_sample else "samples"
        tables.append(rate_table(f"{group.title} ({blocks(found)})", found, tokens, items))
        data[group.title] = series_data(found)
    return Report(
        "What of processes, threads, bf16, compilation and sizes pays here.", tables, {"groups": data}
    )


if __name__ == "__main__":
    present(measure, __doc__ or "")
