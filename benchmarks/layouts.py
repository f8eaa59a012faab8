"""Layouts: Paceline's ZeRO and tensor shards against what others offer, and what each costs beside replicas.

All sides of a case live in the same processes of one thread each and take turns. First two processes against
FSDP2, ZeroRedundancyOptimizer, DeepSpeed where it is installed, and `parallelize_module`; then the byte-gpt
under every layout of 2, 4 and 8 ranks; then the most memory of a rank under each (`benchmarks.memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.layout_libraries import SHARING, deepspeed_if_installed, parallelized_llama
from benchmarks.libraries import Library, announce
from benchmarks.loops import HandLoop, paceline_side
from benchmarks.measure import Series, Side
from benchmarks.memory import Build, measure_memory, memory_table
from benchmarks.pair import measure_pair
from benchmarks.report import Options, Report, Table, blocks, comparison_table, present, series_data
from benchmarks.subjects import Subject, byte_gpt, large_gpt, llama
from paceline.job.cluster import Cluster
from paceline.recipe import Strategy

_ZERO = {
    "replicas": "replicas=2",
    "zero=1": "replicas=1 shard=2 zero=1",
    "zero=2": "replicas=1 shard=2 zero=2",
    "zero=3": "replicas=1 shard=2 zero=3",
    "zero=2, native route": "replicas=1 shard=2 zero=2 route=native",
    "zero=3, native route": "replicas=1 shard=2 zero=3 route=native",
}
_TENSOR = {"tensor=2": "replicas=1 tensor=2"}
_GPT = "GPT, batch 16 x 256 bytes"
_LARGE = "GPT of 19 M parameters, batch 2 x 128 bytes"
_LLAMA = "Llama, batch 8 x 128 tokens"


@dataclass(frozen=True)
class Case:
    """What some processes train, under which layouts, and how long.

    Args:
        subject: what it is called in `build_subject`.
        shards: of the global batch.
        strategies: Paceline's sides, by name.
        others: beside them.
        reference: the side to which all are compared.
    """

    title: str
    subject: str
    shards: int
    strategies: Mapping[str, str]
    reference: str
    others: Sequence[Library] = ()
    num_ranks: int = 2
    repeats: int = 5
    steps: int = 1
    options: Options = field(default_factory=Options)


def build_subject(case: Case) -> Subject:
    """The job of a case."""
    quick, precision = case.options.quick, case.options.precision
    make = {
        _GPT: partial(byte_gpt, wide=not quick),
        _LARGE: large_gpt,
        _LLAMA: llama,
        "byte-gpt": byte_gpt,
    }
    return make[case.subject](quick=quick, precision=precision).with_shards(case.shards)


def peers(options: Options) -> list[Case]:
    """Two ranks, against other libraries."""
    repeats = 3 if options.quick else 5
    sharing = partial(
        Case,
        strategies=_ZERO,
        reference="FSDP2",
        others=(*SHARING, *deepspeed_if_installed()),
        repeats=repeats,
        options=options,
    )
    tensor = Case(_LLAMA, _LLAMA, 1, _TENSOR, "parallelize_module", (parallelized_llama,), options=options)
    found = [
        sharing(f"{_GPT}, 1 micro-batch a rank", _GPT, 2),
        sharing(f"{_GPT}, 4 micro-batches a rank", _GPT, 8),
        sharing(_LARGE, _LARGE, 2),
        tensor,
    ]
    return found[1:] if options.quick else found


def remembered(options: Options) -> list[Case]:
    """Whose memory is measured: much state and few activations, and the reverse."""
    return [case for case in peers(options) if case.shards < 8]


def layouts_of(ranks: int) -> dict[str, str]:
    """The layouts of so many ranks, with their names."""
    half = ranks // 2
    found = {
        "replicas": f"replicas={ranks}",
        **{f"zero={k}": f"replicas=1 shard={ranks} zero={k}" for k in (1, 2, 3)},
        "tensor=2": f"replicas={half} tensor=2",
        "context=2": f"replicas={half} context=2",
        "pipeline=2, 1f1b": f"replicas={half} pipeline=2 schedule=1f1b",
    }
    if ranks >= 4:
        found["replicas x zero=3"] = f"replicas={half} shard=2 zero=3"
        found["tensor x pipeline"] = f"replicas={ranks // 4} tensor=2 pipeline=2 schedule=1f1b"
    if ranks >= 8:
        found["zero=3 x tensor x pipe"] = "shard=2 zero=3 tensor=2 pipeline=2 replicas=1"
    return found


def costs(options: Options) -> list[Case]:
    """The same batch in the same eight micro-batches on 2, 4 and 8 ranks."""
    return [
        Case(
            f"byte-gpt, 8 micro-batches of 256 bytes, {ranks} ranks",
            "byte-gpt",
            8,
            layouts_of(ranks),
            "replicas",
            num_ranks=ranks,
            repeats=3,
            options=options,
        )
        for ranks in ((2,) if options.quick else (2, 4, 8))
    ]


def builds(case: Case, cluster: Cluster) -> Sequence[Build]:
    """What builds each side, with its own copy of the model."""
    announce(cluster)
    subject = build_subject(case)
    ours = [
        partial(paceline_side, name, subject.changed(strategy=Strategy.parse(text)), cluster, 1)
        for name, text in case.strategies.items()
    ]
    return [*ours, *(partial(_by_hand, subject, wrap, cluster) for wrap in case.others)]


def _by_hand(subject: Subject, wrap: Library, cluster: Cluster) -> Side:
    """Ranks that cut layers see the same samples."""
    torch.set_num_threads(1)
    replicas = 1 if wrap is parallelized_llama else cluster.world_size
    return HandLoop(subject, wrap(subject), cluster.global_rank % replicas, replicas).side()


def build_sides(case: Case, cluster: Cluster) -> Sequence[Side]:
    """All of them, in the same processes."""
    return [build() for build in builds(case, cluster)]


def run(case: Case) -> list[Series]:
    """Measure the time of one case."""
    return measure_pair(
        partial(build_sides, case),
        repeats=case.repeats,
        steps=case.steps,
        warmup=2,
        num_ranks=case.num_ranks,
    )


def measure(options: Options) -> Report:
    """Run all cases."""
    tables: list[Table] = []
    data, most = {}, {}
    for case in (*peers(options), *costs(options)):
        found = run(case)
        size = build_subject(case).num_parameters / 1e6
        title = f"{case.title}, {options.precision} ({size:.2f} M parameters, {blocks(found)})"
        tables.append(comparison_table(title, found, case.reference))
        data[case.title] = series_data(found)
    for case in remembered(options):
        peaks = measure_memory(partial(builds, case))
        tables.append(memory_table(f"{case.title}: most memory of a rank", peaks, case.reference))
        most[case.title] = {peak.name: peak.most_bytes for peak in peaks}
    question = (
        "Ranks of one host, of one thread each, share the state, the layers or the positions of a model."
    )
    return Report(question, tables, {"cases": data, "most_bytes": most})


if __name__ == "__main__":
    present(measure, __doc__ or "")
