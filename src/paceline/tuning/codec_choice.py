"""`codec=auto:int8,topk:0.01`: a codec that was allowed, where the link is so slow that it pays; else none.

Bytes, coding and the link are measured by sums over all ranks, and forward and backward by a micro-batch on a
copy of the model. Invariant: ranks decide from equal numbers, by a pure function, so they decide alike; a run
that goes on has the codec of its folder.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.comm.routes.host_links import host_id
from paceline.data.loader import collate_samples
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.models.dropout import set_micro_batch_key
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.recipe.recipe import Recipe, num_micro_batches
from paceline.recipe.strategy import Strategy
from paceline.task import Task
from paceline.tuning.comm_benchmark import AllReduceTiming, measure_all_reduce_of

MIN_CODEC_GAIN = 1.1
"""A codec is chosen where it makes a step this many times as fast as those that were named before it."""
_FIRST_BYTES = 1 << 16
_PROBE_SECONDS = 0.3
_REPEATS = 2
_NO_MEASUREMENTS: Mapping[str, Any] = {
    "compute_seconds": 0.0,
    "bits_per_second": 0.0,
    "step_seconds": {},
    "break_even": {},
}


class CodecCost(NamedTuple):
    """What a codec does to a step of one rank.

    Args:
        sent_bytes: of its gradients.
        seconds: of a processor, to code and decode.
    """

    codec: str
    sent_bytes: float
    seconds: float


class CodecMeasurements(NamedTuple):
    """What was measured, equal on every rank.

    Args:
        compute_seconds: between two sums, on the slowest rank.
        bits_per_second: of the link, in a sum.
        codings: values as they are, then what is allowed, in the user's order.
    """

    compute_seconds: float
    bits_per_second: float
    codings: Sequence[CodecCost]

    def seconds(self, coding: CodecCost) -> float:
        """A step: sums go on beside backward, and coding takes the processor from it."""
        sending = 8 * coding.sent_bytes / self.bits_per_second
        return max(self.compute_seconds + coding.seconds, sending)

    def break_even(self, coding: CodecCost) -> float:
        """Bits per second below which a codec makes a step shorter; 0: nowhere."""
        plain = self.codings[0].sent_bytes
        return 8 * plain / (self.compute_seconds + coding.seconds) if coding.sent_bytes < plain else 0.0


class CodecChoice(NamedTuple):
    """A codec, and why."""

    codec: str
    reason: str

    def __str__(self) -> str:
        return f"codec: {self.codec}, as {self.reason}; codec=NAME in the strategy chooses another"


def choose_fastest_codec(found: CodecMeasurements) -> CodecChoice:
    """The first coding that is nearly as fast as the fastest; pure."""
    best = min(found.seconds(coding) for coding in found.codings)
    chosen = next(one for one in found.codings if found.seconds(one) <= MIN_CODEC_GAIN * best)
    times = ", ".join(f"{one.codec} {found.seconds(one) * 1e3:.3g} ms" for one in found.codings)
    pays = ", ".join(f"{one.codec} {_spell_bandwidth(found.break_even(one))}" for one in found.codings[1:])
    return CodecChoice(
        chosen.codec,
        f"the link carries {_spell_bandwidth(found.bits_per_second)} and a step takes {times} (compute"
        f" {found.compute_seconds * 1e3:.3g} ms); break-even bandwidth: {pays}",
    )


def choose_codec(
    recipe: Recipe,
    strategy: Strategy,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    warn: Callable[[str], None],
    note: Callable[[str, Mapping[str, Any]], None],
) -> tuple[Recipe, Strategy]:
    """Both with a codec in place of `auto`; collective.

    Args:
        recipe: with the number format of forward and backward.
        strategy: the recipe's, with its replicas filled in.
        warn: is told what was chosen and why.
        note: the same, for the run folder.
    """
    choice, record = _choose_or_skip(recipe, strategy, task, cluster, device)
    warn(str(choice))
    note("codec", {**choice._asdict(), **record})
    mended = recipe.strategy.replace(codec=choice.codec)
    return recipe.replace(strategy=mended), strategy.replace(codec=choice.codec)


def _choose_or_skip(
    recipe: Recipe, strategy: Strategy, task: Task, cluster: Cluster, device: torch.device
) -> tuple[CodecChoice, Mapping[str, Any]]:
    for holds, reason in (
        (cluster.world_size == 1, "one rank sends nothing"),
        (recipe.is_ordered, "sums in one order leave nothing to what is measured"),
        (device.type != "cpu", "this job computes on GPUs, whose links are not measured"),
    ):
        if holds:
            return CodecChoice("fp32", reason), _NO_MEASUREMENTS
    mesh = Mesh.build(cluster, {"replica": cluster.world_size})
    group, net = mesh.replica, Net(recipe.runtime.deadline_seconds)
    try:
        return _measure_and_choose(recipe, strategy, task, cluster, group, net)
    finally:
        mesh.give_back()


def _measure_and_choose(
    recipe: Recipe, strategy: Strategy, task: Task, cluster: Cluster, group: RankGroup, net: Net
) -> tuple[CodecChoice, Mapping[str, Any]]:
    hosts = set(all_gather_texts(host_id(), group, net))
    if strategy.route == "auto" and len(hosts) == 1 and hosts != {""}:
        return CodecChoice(
            "fp32", "the ranks share the memory of one host, so nothing is sent"
        ), _NO_MEASUREMENTS
    found = measure_codecs(recipe, strategy, task, cluster, group, net)
    record = {
        "compute_seconds": found.compute_seconds,
        "bits_per_second": found.bits_per_second,
        "step_seconds": {one.codec: found.seconds(one) for one in found.codings},
        "break_even": {one.codec: found.break_even(one) for one in found.codings[1:]},
    }
    return choose_fastest_codec(found), record


def measure_codecs(
    recipe: Recipe, strategy: Strategy, task: Task, cluster: Cluster, group: RankGroup, net: Net
) -> CodecMeasurements:
    """Bytes, coding, link and compute; collective, equal on every rank."""
    num_values = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    most = 4 * max(1, min(num_values, recipe.runtime.bucket_bytes // 4))
    words = [one.codec for one in strategy.codec_alternatives]

    def row(codec: str, num_bytes: int) -> AllReduceTiming:
        found = measure_all_reduce_of(cluster, group, net, Strategy(route="native", codec=codec), num_bytes)
        assert found is not None  # the native route can be had everywhere
        return found

    first = row("fp32", min(_FIRST_BYTES, most))
    fits = int(_PROBE_SECONDS / first.seconds * first.num_bytes) // 4 * 4
    probe = min(max(fits, first.num_bytes), most)
    rows = [row(codec, probe) for codec in words]
    times = 4 * num_values / probe
    codings = [
        CodecCost(one.codec, times * one.sent_bytes, times * coding_seconds(one, rows[0])) for one in rows
    ]
    rule = strategy.phase(0).rule.partition(":")[2]
    steps = int(rule) if rule.isdecimal() else 1
    mine = torch.tensor([steps * _compute_seconds(recipe, task, cluster)], dtype=torch.float64)
    compute = float(net.all_reduce(mine, group, "max").wait())
    return CodecMeasurements(compute, rows[0].busbw, codings)


def coding_seconds(row: AllReduceTiming, plain: AllReduceTiming) -> float:
    """Processor time beside that of sending as many bytes."""
    return max(0.0, row.processor_seconds - plain.processor_seconds * row.sent_bytes / plain.sent_bytes)


def _compute_seconds(recipe: Recipe, task: Task, cluster: Cluster) -> float:
    """Forward and backward of this rank's micro-batches in a step; 0 where the model has no memory yet."""
    if any(p.is_meta for p in task.model.parameters()):
        return 0.0
    micro_batches = num_micro_batches(recipe, cluster.world_size)
    samples = -(-recipe.batch.size // micro_batches)
    model, device = copy.deepcopy(task.model).train(), torch.device("cpu")
    precision, times = MixedPrecision(recipe.precision.compute, device.type), []
    with torch.random.fork_rng():
        batch = collate_samples(task, [task.data[0]] * samples, device)
        for _ in range(_REPEATS + 1):
            set_micro_batch_key(model, 0)
            began = time.perf_counter()
            with precision.autocast():
                loss = task.loss(model, batch)
            loss.total.backward()
            times.append(time.perf_counter() - began)
    return min(times[1:]) * micro_batches / cluster.world_size


def _spell_bandwidth(bits_per_second: float) -> str:
    return f"{bits_per_second / 1e6:.3g} Mbit/s" if bits_per_second else "never"
