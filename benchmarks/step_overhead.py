"""One process: Paceline's step against the bare PyTorch loop of the same model.

Both train copies of one model on the same samples in the same micro-batches, with the same optimizer, clip,
schedule, precision and threads, and take turns in one process. The last table has a model so small that
its step is all overhead: what Paceline costs a step and a micro-batch, in microseconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from benchmarks.allocator import keep_freed_memory
from benchmarks.loops import HandLoop, bare, paceline_side
from benchmarks.measure import Series, take_turns
from benchmarks.report import Options, Report, Table, blocks, comparison_table, present, series_data
from benchmarks.subjects import Subject, byte_gpt, mlp
from paceline.job.cluster import Cluster

_REFERENCE = "bare PyTorch"
_BUDGET_SECONDS = 30.0  # for the blocks of a case


@dataclass(frozen=True)
class Case:
    """A subject and how long to look at it."""

    title: str
    subject: Subject
    steps: int
    repeats: int = 11
    unit: str = "ms"
    threads: int = 0  # 0: all cores


def cases(options: Options) -> list[Case]:
    """What is measured."""
    quick = options.quick
    gpt, gpt_fp32 = (byte_gpt(quick=quick, precision=name) for name in (options.precision, "fp32"))
    shards = gpt.recipe.batch.shards
    wide = mlp((64,) if quick else (1024, 1024), batch_size=256, shards=1)
    found = [
        Case(f"recipes/byte-gpt.toml as it is: {options.precision}, {shards} micro-batches", gpt, 6),
        Case("the same, 1 micro-batch", gpt.with_shards(1), 6),
        Case("the same, 8 micro-batches", gpt.with_shards(8), 6),
        *(
            [Case(f"the same, fp32, {shards} micro-batches", gpt_fp32, 4)]
            if options.precision != "fp32"
            else []
        ),
        Case("MLP 1024-1024-1024-10, fp32, batch 256, 1 micro-batch", wide, 40),
        Case("the same, 8 micro-batches", wide.with_shards(8), 20),
    ]
    return [Case(c.title, c.subject, 2, 3) for c in found[:1]] if quick else found


def overhead_cases(quick: bool) -> list[Case]:
    """A model that computes nothing to speak of."""
    tiny = mlp((16,), batch_size=8, shards=1, inputs=256)
    steps, repeats = (5, 3) if quick else (200, 15)
    return [
        Case("MLP 256-16-10, batch 8, 1 micro-batch", tiny, steps, repeats, "us", 1),
        Case("the same, 8 micro-batches", tiny.with_shards(8), steps, repeats, "us", 1),
    ]


def run(case: Case, threads: int) -> list[Series]:
    """Measure one case, in one process."""
    torch.set_num_threads(threads)
    sides = [
        HandLoop(case.subject, bare(case.subject, _REFERENCE)).side(),
        paceline_side("Paceline", case.subject, Cluster.single(), threads),
    ]
    return take_turns(
        sides,
        repeats=case.repeats,
        steps=case.steps,
        warmup=max(2, case.steps // 4),
        budget_seconds=_BUDGET_SECONDS,
    )


def measure(options: Options) -> Report:
    """Run all cases."""
    keep_freed_memory()
    tables: list[Table] = []
    data = {}
    for found_case in [*cases(options), *overhead_cases(options.quick)]:
        runtime = found_case.subject.recipe.runtime.replace(device=options.device)
        case = replace(found_case, subject=found_case.subject.changed(runtime=runtime))
        threads = case.threads or len(os.sched_getaffinity(0))
        found = run(case, threads)
        size = f"{case.subject.num_parameters / 1e6:.2f} M parameters, {threads} thread(s)"
        title = f"{case.title} ({size}, {blocks(found)})"
        tables.append(comparison_table(title, found, _REFERENCE, case.unit))
        data[case.title] = series_data(found)
    where = "" if options.device == "cpu" else f" on {torch.cuda.get_device_name()}"
    return Report(
        f"One process: Paceline's step against the bare PyTorch loop{where}.", tables, {"cases": data}
    )


if __name__ == "__main__":
    present(measure, __doc__ or "")
