"""Two processes that share the state of one model: Paceline's ZeRO 1 to 3 against PyTorch's.

FSDP2 (`fully_shard` on every block and on the model) and ZeroRedundancyOptimizer over DDP, in the same
hand-written loop as the other libraries. All sides live in the same two processes and take turns; replicas
that share nothing stand beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.libraries import announce
from benchmarks.loops import HandLoop, Wrapping, adamw, autocast_of, paceline_side
from benchmarks.measure import Series, Side
from benchmarks.pair import measure_pair
from benchmarks.report import Report, Table, comparison_table, present, series_data
from benchmarks.subjects import Subject, byte_gpt
from paceline.cluster import Cluster
from paceline.recipe import Strategy

STRATEGIES = {
    "replicas": "replicas=2",
    "zero=1": "replicas=1 shard=2 zero=1",
    "zero=2": "replicas=1 shard=2 zero=2",
    "zero=3": "replicas=1 shard=2 zero=3",
    "zero=2, native route": "replicas=1 shard=2 zero=2 route=native",
    "zero=3, native route": "replicas=1 shard=2 zero=3 route=native",
}


@dataclass(frozen=True)
class Case:
    """What two processes train, and how long."""

    title: str
    shards: int
    steps: int
    quick: bool = False
    repeats: int = 5


def cases(quick: bool) -> list[Case]:
    """What is measured."""
    if quick:
        return [Case("GPT, quick", 2, 2, quick=True, repeats=3)]
    return [
        Case("byte-gpt, batch 16 x 256 bytes, bf16, 1 micro-batch a rank", 2, 2),
        Case("the same GPT, 4 micro-batches a rank", 8, 1),
    ]


def fsdp2(subject: Subject) -> Wrapping:
    """PyTorch's FSDP2, which gathers a block for its forward and again for its backward."""
    model = subject.fresh().model.train()
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block)
    fully_shard(model)
    return Wrapping(
        "FSDP2",
        model,
        adamw(model, subject.recipe),
        clip=partial(nn.utils.clip_grad_norm_, list(model.parameters())),
        autocast=autocast_of(subject.recipe),
    )


def zero_redundancy(subject: Subject) -> Wrapping:
    """PyTorch's ZeRO-1: whole gradients by DDP, an optimizer that updates a part and broadcasts it."""
    plain = subject.fresh().model.train()
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    usual = adamw(plain, subject.recipe)
    optimizer = ZeroRedundancyOptimizer(usual.param_groups, type(usual), lr=usual.defaults["lr"], fused=True)
    return Wrapping(
        "ZeroRedundancyOptimizer",
        model,
        optimizer,
        clip=partial(nn.utils.clip_grad_norm_, list(model.parameters())),
        autocast=autocast_of(subject.recipe),
        quiet=model.no_sync,
    )


def build_sides(case: Case, cluster: Cluster) -> Sequence[Side]:
    """Each with its own copy of the model."""
    announce(cluster)
    subject = byte_gpt(quick=True) if case.quick else byte_gpt(wide=True)
    subject = subject.with_shards(case.shards)
    loops = [
        HandLoop(subject, wrap(subject), cluster.global_rank, cluster.world_size)
        for wrap in (fsdp2, zero_redundancy)
    ]
    ours = [
        paceline_side(name, subject.changed(strategy=Strategy.parse(text)), cluster, 1)
        for name, text in STRATEGIES.items()
    ]
    return [*ours, *(loop.side() for loop in loops)]


def run(case: Case) -> list[Series]:
    """Measure one case."""
    return measure_pair(partial(build_sides, case), repeats=case.repeats, steps=case.steps, warmup=2)


def measure(quick: bool) -> Report:
    """Run all cases."""
    tables: list[Table] = []
    data = {}
    for case in cases(quick):
        found = run(case)
        tables.append(comparison_table(case.title, found, "FSDP2"))
        data[case.title] = series_data(found)
    question = "Two processes of one host, of one thread each, share the state of a model; reference: FSDP2."
    return Report(question, tables, {"cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
