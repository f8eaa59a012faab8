"""Choose the codec of `codec=auto:int8,topk:0.01`: one of these if the link is slow enough, else none.

Sent bytes, time to encode and bandwidth are measured by all_reduces over all ranks, forward and backward
by a micro-batch on a copy of the model. Invariant: ranks decide from equal numbers with a pure function,
so they choose alike. A resumed run keeps the codec of its folder.
"""

from __future__ import annotations

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
from paceline.models.module_copy import deep_copy
from paceline.models.training_mode import enter_training
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.recipe.recipe import Recipe, num_micro_batches
from paceline.recipe.strategy import Strategy
from paceline.task import Task
from paceline.tuning.comm_benchmark import AllReduceTiming, measure_all_reduce_of

MIN_CODEC_GAIN = 1.1
"""A codec is chosen if it makes a step this many times as fast as those that the user named before it."""
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
    """Cost of a codec in a step of one rank.

    Args:
        sent_bytes: bytes that are sent for all gradients.
        seconds: CPU time to encode and decode them.
    """

    codec: str
    sent_bytes: float
    seconds: float


class CodecMeasurements(NamedTuple):
    """Measurements from which a codec is chosen, equal on every rank.

    Args:
        compute_seconds: forward and backward between two sums, on the slowest rank.
        bits_per_second: bandwidth of the link in an all_reduce.
        costs: of fp32 first, then of the codecs in the user's order.
    """

    compute_seconds: float
    bits_per_second: float
    costs: Sequence[CodecCost]

    def seconds(self, cost: CodecCost) -> float:
        """Return the seconds of a step: sending overlaps with backward, encoding takes CPU time from it."""
        sending = 8 * cost.sent_bytes / self.bits_per_second
        return max(self.compute_seconds + cost.seconds, sending)

    def break_even(self, cost: CodecCost) -> float:
        """Return the bits per second below which a codec makes a step shorter; 0: it never does."""
        plain_bytes = self.costs[0].sent_bytes
        if cost.sent_bytes >= plain_bytes:
            return 0.0
        return 8 * plain_bytes / (self.compute_seconds + cost.seconds)


class CodecChoice(NamedTuple):
    """Codec, with the reason."""

    codec: str
    reason: str

    def __str__(self) -> str:
        return f"codec: {self.codec} ({self.reason}); set codec=NAME in the strategy to use another"


def choose_fastest_codec(measured: CodecMeasurements) -> CodecChoice:
    """Choose the first codec, in the user's order, that is nearly as fast as the fastest; pure."""
    costs = measured.costs
    best = min(measured.seconds(cost) for cost in costs)
    chosen = next(cost for cost in costs if measured.seconds(cost) <= MIN_CODEC_GAIN * best)
    times = ", ".join(f"{cost.codec} {measured.seconds(cost) * 1e3:.3g} ms" for cost in costs)
    limits = ", ".join(f"{cost.codec} {_spell_bandwidth(measured.break_even(cost))}" for cost in costs[1:])
    return CodecChoice(
        chosen.codec,
        f"the link has {_spell_bandwidth(measured.bits_per_second)} and a step takes {times}, of which"
        f" compute {measured.compute_seconds * 1e3:.3g} ms; break-even bandwidth: {limits}",
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
    """Return recipe and strategy with a codec in place of `auto`; collective.

    Args:
        recipe: with the number format of forward and backward.
        strategy: the recipe's, with its replicas filled in, and with several codecs.
        warn: receives the choice with its reason.
        note: receives the event `codec`.
    """
    choice, record = _choose_or_skip(recipe, strategy, task, cluster, device)
    warn(str(choice))
    note("codec", {**choice._asdict(), **record})
    recipe = recipe.replace(strategy=recipe.strategy.replace(codec=choice.codec))
    return recipe, strategy.replace(codec=choice.codec)


def _choose_or_skip(
    recipe: Recipe, strategy: Strategy, task: Task, cluster: Cluster, device: torch.device
) -> tuple[CodecChoice, Mapping[str, Any]]:
    for holds, reason in (
        (cluster.world_size == 1, "a single rank sends nothing"),
        (recipe.is_ordered, "in an ordered run nothing depends on measurements"),
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
    if strategy.route_spec.chooses and len(hosts) == 1 and hosts != {""}:
        return CodecChoice(
            "fp32", "the ranks share the memory of one host, so nothing is sent"
        ), _NO_MEASUREMENTS
    measured = measure_codecs(recipe, strategy, task, cluster, group, net)
    record = {
        "compute_seconds": measured.compute_seconds,
        "bits_per_second": measured.bits_per_second,
        "step_seconds": {cost.codec: measured.seconds(cost) for cost in measured.costs},
        "break_even": {cost.codec: measured.break_even(cost) for cost in measured.costs[1:]},
    }
    return choose_fastest_codec(measured), record


def measure_codecs(
    recipe: Recipe, strategy: Strategy, task: Task, cluster: Cluster, group: RankGroup, net: Net
) -> CodecMeasurements:
    """Measure the cost of each codec, the link and the compute; collective, equal on every rank."""
    num_values = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    most_bytes = 4 * max(1, min(num_values, recipe.runtime.bucket_bytes // 4))
    codecs = [alternative.codec for alternative in strategy.codec_alternatives]

    def measure(codec: str, num_bytes: int) -> AllReduceTiming:
        timing = measure_all_reduce_of(cluster, group, net, Strategy(route="native", codec=codec), num_bytes)
        assert timing is not None  # the native route exists everywhere
        return timing

    # A small buffer first: it shows how large a buffer the link can send in the time of the probe.
    first = measure("fp32", min(_FIRST_BYTES, most_bytes))
    affordable = int(_PROBE_SECONDS / first.seconds * first.num_bytes) // 4 * 4
    probe_bytes = min(max(affordable, first.num_bytes), most_bytes)
    timings = [measure(codec, probe_bytes) for codec in codecs]
    times = 4 * num_values / probe_bytes
    costs = [CodecCost(t.codec, times * t.sent_bytes, times * coding_seconds(t, timings[0])) for t in timings]
    # Local rules send once in several steps, whose compute all overlaps with it.
    argument = strategy.sync_word.argument
    steps = argument if isinstance(argument, int) else 1
    local = torch.tensor([steps * _compute_seconds(recipe, task, cluster)], dtype=torch.float64)
    compute_seconds = float(net.all_reduce(local, group, "max").wait())
    return CodecMeasurements(compute_seconds, timings[0].busbw, costs)


def coding_seconds(timing: AllReduceTiming, plain: AllReduceTiming) -> float:
    """Return the CPU time of a codec in addition to that of sending as many plain bytes."""
    return max(0.0, timing.processor_seconds - plain.processor_seconds * timing.sent_bytes / plain.sent_bytes)


def _compute_seconds(recipe: Recipe, task: Task, cluster: Cluster) -> float:
    """Measure forward and backward of a step on this rank; 0 if the model has no memory yet."""
    if any(p.is_meta for p in task.model.parameters()):
        return 0.0
    micro_batches = num_micro_batches(recipe, cluster.world_size)
    samples = -(-recipe.batch.size // micro_batches)
    model, device = enter_training(deep_copy(task.model)), torch.device("cpu")
    precision, times = MixedPrecision(recipe.precision.compute, device.type), []
    with torch.random.fork_rng():  # the run draws the same random numbers as without a measurement
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
