"""PipeDream: how long stages wait in a pipeline that runs empty where the run pauses, and nowhere else.

Stages sleep (`benchmarks.sleeping`), so what is idle is what the pipeline loses: the fill, the last backward,
messages, updates, and the tally of a pause. A run pauses twenty times, so a round is a twentieth of it. The
steady state is a round less its fill and its last backward, which are planned; the tally stays in it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.loops import paceline_side
from benchmarks.pair import DEADLINE_SECONDS
from benchmarks.report import Options, Report, Table, present
from benchmarks.sleeping import Clock, sleeping_chain
from paceline.job.cluster import Cluster
from paceline.recipe import Strategy
from paceline.testing import run_ranks

_PAUSES = 20  # of a run
_BOUND = 3.0  # percent of the time


@dataclass(frozen=True)
class Case:
    """A pipeline.

    Args:
        micro_batches: of a step.
        forward: seconds of a stage for each; a backward takes two of it.
        steps: of a round.
    """

    rule: str
    stages: int
    micro_batches: int
    forward: float
    steps: int

    @property
    def planned_idle(self) -> float:
        """The share in which a stage waits for what others do first and last: `p - 1` of `n + p - 1`."""
        return self._waiting / (self.steps * self.micro_batches + self._waiting)

    @property
    def planned_idle_seconds(self) -> float:
        """The same of a round."""
        return 3 * self.forward * self._waiting

    @property
    def _waiting(self) -> int:
        """Micro-batches of others for which a stage waits in a round."""
        entering = self.micro_batches if self.rule == "pipedream" else 1  # a step goes through as one
        return (self.stages - 1) * entering


def cases(options: Options) -> list[Case]:
    """What is measured."""
    if options.quick:
        return [Case("pipedream", 2, 1, 0.004, 20)]
    return [
        Case(rule, stages, micro_batches, 0.03, 120 // micro_batches)
        for stages in (2, 4)
        for rule, micro_batches in (("pipedream", 1), ("pipedream:2bw", 4))
    ]


def measure_rounds(case: Case, rounds: int, cluster: Cluster) -> tuple[list[float], list[float]]:
    """Seconds of each round on this rank, and those of them in which its layers worked."""
    torch.set_num_threads(1)
    clock = Clock()
    subject = sleeping_chain([case.forward] * case.stages, case.micro_batches, clock)
    strategy = Strategy.parse(f"replicas=1 pipeline={case.stages} sync={case.rule}")
    optimizer = subject.recipe.optimizer.replace(clip_norm=None)  # a stage has no norm of all
    subject = subject.changed(strategy=strategy, steps=_PAUSES * case.steps, optimizer=optimizer)
    side = paceline_side(case.rule, subject, cluster, 1)
    side.step()
    seconds, worked = [], []
    for _ in range(rounds):
        dist.barrier()
        began, before = time.perf_counter(), clock.slept_seconds
        side.step()
        seconds.append(time.perf_counter() - began)
        worked.append(clock.slept_seconds - before)
    return seconds, worked


def idle_of(case: Case, rounds: int) -> list[tuple[float, float]]:
    """The idle share of each round, and of its steady state, from 0 to 1."""
    ranks = run_ranks(partial(measure_rounds, case, rounds), case.stages, deadline=DEADLINE_SECONDS)
    slowest = [max(of_round) for of_round in zip(*(seconds for seconds, _ in ranks), strict=True)]
    worked = [statistics.fmean(of_round) for of_round in zip(*(own for _, own in ranks), strict=True)]
    planned = case.planned_idle_seconds
    return [
        (1 - own / taken, 1 - own / (taken - planned)) for own, taken in zip(worked, slowest, strict=True)
    ]


def measure(options: Options) -> Report:
    """All cases."""
    rows, data = [], {}
    for case in cases(options):
        idle = idle_of(case, 2)
        worst = 100 * max(steady for _, steady in idle)
        rows.append(
            (
                case.rule,
                f"{case.stages}",
                f"{case.steps} of {case.micro_batches}",
                f"{100 * case.planned_idle:.1f} %",
                *(" ".join(f"{100 * share:.1f} %" for share in shares) for shares in zip(*idle, strict=True)),
                f"{_BOUND:g} % {'met' if worst < _BOUND else 'missed'}",
            )
        )
        data[f"{case.rule}, {case.stages} stages"] = idle
    columns = (
        "rule",
        "stages",
        "steps, micro-batches",
        "planned idle",
        "measured by round",
        "steady state",
        "bound",
    )
    forward = cases(options)[0].forward
    table = Table(f"stages that sleep {forward * 1e3:g} ms forward, rounds of a run", columns, rows)
    return Report("PipeDream, a rank of one thread for each stage: idle time.", [table], {"idle": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
