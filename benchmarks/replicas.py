"""Two processes: Paceline against DDP, Accelerate and Lightning Fabric.

The same model, global batch, samples, optimizer, clip and schedule; every side fetches its samples, runs
forward and backward, reduces, clips, updates and reads its loss in every step. All sides live in the same two
processes and on the same process group, and take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.libraries import Library, accelerate, announce, ddp, fabric
from benchmarks.loops import HandLoop, paceline_side
from benchmarks.measure import Series, Side
from benchmarks.pair import measure_pair
from benchmarks.report import Options, Report, Table, blocks, comparison_table, present, series_data
from benchmarks.subjects import Subject, byte_gpt, mlp
from paceline.job.cluster import Cluster

LIBRARIES: dict[str, Library] = {
    "ddp": ddp,
    "ddp-4": partial(ddp, bucket_mb=4),
    "accelerate": accelerate,
    "fabric": fabric,
}


@dataclass(frozen=True)
class Case:
    """What two processes train, and how long.

    Args:
        subject: "gpt" or "mlp"; each rank builds its own.
        libraries: names in `LIBRARIES`.
    """

    title: str
    subject: str
    shards: int
    steps: int
    libraries: tuple[str, ...] = ("ddp", "accelerate", "fabric")
    repeats: int = 11


def build_subject(case: Case, options: Options) -> Subject:
    """The job of a case."""
    if case.subject == "gpt":
        return byte_gpt(quick=options.quick, precision=options.precision, wide=not options.quick)
    return mlp((64, 64) if options.quick else (2048, 2048, 1024), batch_size=32, shards=2)


def cases(options: Options) -> list[Case]:
    """What is measured."""
    if options.quick:
        return [
            Case("GPT, quick", "gpt", 2, 2, repeats=3),
            Case("MLP, quick", "mlp", 2, 2, tuple(LIBRARIES), repeats=3),
            Case("GPT, quick, accumulation", "gpt", 8, 2, repeats=3),
        ]
    return [
        Case(
            f"compute-bound: GPT, batch 16 x 256 bytes, {options.precision}, 1 micro-batch a rank",
            "gpt",
            2,
            4,
        ),
        Case(
            "communication-bound: MLP 1024-2048-2048-1024-10, fp32, batch 32", "mlp", 2, 10, tuple(LIBRARIES)
        ),
        Case("the same GPT, 4 micro-batches a rank (accumulation)", "gpt", 8, 4),
    ]


def build_sides(case: Case, options: Options, cluster: Cluster) -> Sequence[Side]:
    """Paceline by memory and by Gloo, and every library, each with its own copy of the model."""
    announce(cluster)
    subject = build_subject(case, options).with_shards(case.shards)
    loops = [
        HandLoop(subject, LIBRARIES[name](subject), cluster.global_rank, cluster.world_size)
        for name in case.libraries
    ]
    native = subject.changed(strategy=subject.recipe.strategy.replace(route="native"))
    return [
        paceline_side("Paceline", subject, cluster, 1),
        paceline_side("Paceline, native route", native, cluster, 1),
        *(loop.side() for loop in loops),
    ]


def run(case: Case, options: Options) -> list[Series]:
    """Measure one case."""
    build = partial(build_sides, case, options)
    return measure_pair(build, repeats=case.repeats, steps=case.steps, warmup=3)


def measure(options: Options) -> Report:
    """Run all cases."""
    tables: list[Table] = []
    data = {}
    for case in cases(options):
        found = run(case, options)
        fastest = min(found[2:], key=lambda series: series.median_seconds)
        size = build_subject(case, options).num_parameters / 1e6
        title = f"{case.title} ({size:.2f} M parameters, {blocks(found)})"
        tables.append(comparison_table(title, found, fastest.name))
        data[case.title] = series_data(found)
    question = (
        "Two processes of one host, one thread each: Paceline against other libraries, which use Gloo;"
        " reference: the fastest of them."
    )
    return Report(question, tables, {"cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
