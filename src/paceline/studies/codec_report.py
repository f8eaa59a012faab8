"""The comparison of codecs on one task: bytes, losses over seeds, and the time of a step at three bandwidths.

Every codec trains the recipe with every seed in the same processes, on the native route. Ratios and losses
are measured, and so is the step on the links of the job; the time of a step at a bandwidth is computed from
measurements, as `codec=auto` does. `codec_lab` runs the steps at these bandwidths.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.comm.net import Net
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.session.build import build_session
from paceline.session.evaluation import evaluate
from paceline.session.start_rank import build_task
from paceline.studies.codec_lab import BANDWIDTHS
from paceline.tuning.codec_choice import CodecMeasurements, measure_codecs

CODECS = ("bf16", "int8", "topk:0.01", "topk:0.01+int4")
_WARM_UP_STEPS = 3
_LAST_FRACTION = 0.1  # without held-out data, the loss is the mean over this part of the steps


@dataclass(frozen=True)
class CodecComparison:
    """The results of one codec.

    Args:
        codec: its word, with argument.
        ratio: bytes that fp32 sent in training divided by those of this codec.
        losses: held-out loss for each seed; without held-out data, the mean of the last tenth of the steps.
        gap: difference of the mean loss to that of fp32, relative to it; 0.01 is 1 % worse.
        step_seconds: expected time of a step at each of `BANDWIDTHS`.
        break_even: bits per second below which the codec pays off.
        measured_seconds: median time of a step on the links of this job, over the seeds.
        expected_seconds: what the measurements of these links say of it.
    """

    codec: str
    ratio: float
    losses: tuple[float, ...]
    gap: float
    step_seconds: tuple[float, ...]
    break_even: float
    measured_seconds: float
    expected_seconds: float

    @property
    def spread(self) -> float:
        """Standard deviation of the losses over the seeds."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else 0.0

    def record(self) -> dict[str, Any]:
        """Return the results as plain values."""
        return {**asdict(self), "spread": self.spread, "bandwidths": BANDWIDTHS}


def report_codecs(
    recipe: Recipe,
    cluster: Cluster,
    codecs: Sequence[str],
    seeds: Sequence[int],
    *,
    base_dir: Path | None = None,
    log: Callable[[str], object] = lambda text: None,
) -> list[CodecComparison]:
    """Train with every codec and seed, and compare; collective, equal on every rank.

    Args:
        cluster: connected, with at least two ranks.
        codecs: words of codecs; fp32 is added as the reference.
        log: receives a line when a codec is done.
    """
    words, trained = ["fp32", *codecs], dict[str, list[_TrainedRun]]()
    for codec in words:
        coded_recipe = recipe.replace(
            strategy=Strategy(replicas=cluster.world_size, route="native", codec=codec)
        )
        trained[codec] = [_train(coded_recipe.replace(seed=seed), cluster, base_dir) for seed in seeds]
        log(f"{codec}: losses {', '.join(f'{run.loss:.4f}' for run in trained[codec])}")
    return compare_codecs(trained, _measure(recipe, cluster, codecs, base_dir))


class _TrainedRun(NamedTuple):
    """One run: its loss, the bytes that a rank sent in the steps, and the median seconds of a step."""

    loss: float
    sent_bytes: float
    seconds: float


def compare_codecs(
    trained: Mapping[str, Sequence[_TrainedRun]], measured: CodecMeasurements
) -> list[CodecComparison]:
    """Compare codecs with fp32; pure.

    Args:
        trained: by codec, one run for each seed.
        measured: times of the codecs and of the links.
    """
    plain, codings = trained["fp32"], {cost.codec: cost for cost in measured.costs}
    plain_loss = statistics.fmean(run.loss for run in plain)
    rows = []
    for codec, runs in trained.items():
        losses = tuple(run.loss for run in runs)
        ratio = sum(run.sent_bytes for run in plain) / sum(run.sent_bytes for run in runs)
        cost = codings[codec]
        times = (measured._replace(bits_per_second=bits).seconds(cost) for bits in BANDWIDTHS)
        gap = statistics.fmean(losses) / plain_loss - 1
        rows.append(
            CodecComparison(
                codec,
                ratio,
                losses,
                gap,
                tuple(times),
                measured.break_even(cost),
                statistics.median(run.seconds for run in runs),
                measured.seconds(cost),
            )
        )
    return rows


def _train(recipe: Recipe, cluster: Cluster, base_dir: Path | None) -> _TrainedRun:
    """Train once; bytes and seconds are averaged over ranks."""
    # What the session draws must be the same with every codec, so that only the codec differs.
    torch.manual_seed(recipe.seed)
    task = build_task(recipe, None, base_dir)
    session = build_session(recipe, task, cluster, torch.device("cpu"))
    before = session.net.ledger.total().sent_bytes
    steps = [(stats.loss, stats.seconds) for stats in session.rounds()]
    losses = [loss for loss, _ in steps]
    sent = session.sum(session.net.ledger.total().sent_bytes - before) / cluster.world_size
    # The first steps also connect and allocate.
    settled = [seconds for _, seconds in steps[_WARM_UP_STEPS:] or steps]
    seconds = session.sum(statistics.median(settled)) / cluster.world_size
    held_out = evaluate(session)
    session.close()
    last = losses[-max(1, int(_LAST_FRACTION * len(losses))) :]
    loss = statistics.fmean(last) if held_out is None else held_out.loss
    return _TrainedRun(loss, sent, seconds)


def _measure(
    recipe: Recipe, cluster: Cluster, codecs: Sequence[str], base_dir: Path | None
) -> CodecMeasurements:
    mesh = Mesh.build(cluster, {"replica": cluster.world_size})
    strategy = Strategy(replicas=cluster.world_size, route="native", codec=f"auto:{','.join(codecs)}")
    # `auto` is resolved when a run starts, and this measurement starts none.
    compute = "fp32" if recipe.precision.compute == "auto" else recipe.precision.compute
    recipe = recipe.replace(strategy=strategy, precision=recipe.precision.replace(compute=compute))
    task = build_task(recipe, None, base_dir)
    measured = measure_codecs(
        recipe, strategy, task, cluster, mesh.replica, Net(recipe.runtime.deadline_seconds)
    )
    mesh.give_back()
    return measured


def render_codec_table(rows: Sequence[CodecComparison]) -> Iterator[str]:
    """Yield the lines of a table."""
    bandwidths = "".join(f"{f'ms at {bits / 1e6:.0f} Mbit/s':>20}" for bits in BANDWIDTHS)
    head = f"{'codec':<18}{'ratio':>8}{'loss':>10}{'spread':>10}{'gap':>9}{bandwidths}{'pays below':>16}"
    yield head + f"{'ms here':>10}{'expected':>10}"
    for row in rows:
        times = "".join(f"{seconds * 1e3:>20.1f}" for seconds in row.step_seconds)
        pays = f"{row.break_even / 1e6:.0f} Mbit/s" if row.break_even else "-"
        yield (
            f"{row.codec:<18}{row.ratio:>8.1f}{statistics.fmean(row.losses):>10.4f}{row.spread:>10.4f}"
            f"{row.gap:>+9.2%}{times}{pays:>16}"
            f"{row.measured_seconds * 1e3:>10.1f}{row.expected_seconds * 1e3:>10.1f}"
        )
