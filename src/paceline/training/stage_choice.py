"""`stages=time`: a pipeline is cut where the slowest of its stages is fastest, by what its links take here.

With `memory.budget` it is the fastest cut whose every stage keeps that. Invariant: all ranks cut by the same
numbers; the cut goes into the recipe of the run folder in place of the word, so a run that goes on has the
stages with which it began.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from paceline.cluster import Cluster
from paceline.comm import Net
from paceline.comm.text import gather_texts
from paceline.errors import StrategyError, TaskError
from paceline.layout.pipeline import chain_of, cut_evenly
from paceline.mesh import Mesh
from paceline.recipe import Recipe, Strategy, num_micro_batches
from paceline.report.facts import spell_bytes
from paceline.task import Task
from paceline.training.link_times import measure_links
from paceline.training.schedules import proven_table

_NANOSECONDS = 1e9


def choose_stages(
    recipe: Recipe,
    strategy: Strategy,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    warn: Callable[[str], None],
    note: Callable[[str, Mapping[str, Any]], None],
) -> tuple[Recipe, Strategy]:
    """Both with numbers of links in place of `stages=time`; collective.

    Args:
        recipe: with the number format of forward and backward.
        strategy: the recipe's, with its replicas filled in.
        warn: is told what was chosen and why.
        note: the same, for the run folder.
    Raises:
        TaskError: the model is no chain.
        StrategyError: it has fewer links with parameters than stages, or no cut keeps `memory.budget`.
    Wire: one ragged all_gather of some bytes for each link.
    """
    if strategy.stages != "time":
        return recipe, strategy
    choice = cut_here(recipe.replace(strategy=strategy), task, cluster, cluster.world_size, device)
    warn(str(choice))
    note("stages", choice.record())
    mended = recipe.strategy.replace(stages=choice.stages)
    return recipe.replace(strategy=mended), strategy.replace(stages=choice.stages)


class StageChoice(NamedTuple):
    """A cut by measured time.

    Args:
        stages: numbers of links.
        link_seconds, stage_seconds: of forward and backward of a micro-batch.
        stage_bytes: planned peaks, where there is a budget.
        fastest: numbers of links that would be faster, and need more than the budget; or nothing.
    """

    stages: str
    link_seconds: Sequence[float]
    stage_seconds: Sequence[float]
    stage_bytes: Sequence[int] = ()
    fastest: str = ""

    @property
    def imbalance(self) -> float:
        """The slowest stage over the mean."""
        return max(self.stage_seconds) * len(self.stage_seconds) / sum(self.stage_seconds)

    def record(self) -> dict[str, Any]:
        """As it stands in the run folder."""
        return {**self._asdict(), "imbalance": self.imbalance}

    def __str__(self) -> str:
        slowest, whole = 1e3 * max(self.stage_seconds), 1e3 * sum(self.stage_seconds)
        return (
            f"stages: {self.stages} modules, the slowest {slowest:.3g} ms of {whole:.3g} ms a micro-batch,"
            f" {self.imbalance:.2f} times the mean{self._within};"
            f" stages={self.stages} in the strategy names them"
        )

    @property
    def _within(self) -> str:
        if not self.fastest:
            return ""
        most = spell_bytes(max(self.stage_bytes))
        return f" ({self.fastest} is faster and does not keep memory.budget; this needs {most})"


def cut_here(
    recipe: Recipe, task: Task, cluster: Cluster, processes: int, device: torch.device
) -> StageChoice:
    """Measure on the ranks of a cluster, and cut for a job of so many processes; collective.

    Args:
        recipe: its strategy has its replicas filled in.
    """
    shards = num_micro_batches(recipe, processes)
    with torch.random.fork_rng():  # a run draws as if nothing had been measured
        seconds = measure_links(recipe, task, cluster, shards, device)
    sizes = [sum(p.numel() for p in link.parameters()) for link in chain_of(task, task.model)]
    chunks = proven_table(recipe, shards).chunks
    fastest = cut_by_time(seconds, sizes, recipe.strategy.pipeline * chunks)
    if recipe.memory.budget is None:
        return _choice(fastest, seconds)
    places, stage_bytes = _within_budget(recipe, task, cluster, processes, seconds, sizes, chunks)
    other = "" if places == fastest else _spelled(fastest)
    return _choice(places, seconds)._replace(stage_bytes=stage_bytes, fastest=other)


def _choice(places: Sequence[range], seconds: Sequence[float]) -> StageChoice:
    return StageChoice(_spelled(places), seconds, [sum(seconds[i] for i in place) for place in places])


def _spelled(places: Sequence[range]) -> str:
    return ",".join(str(len(place)) for place in places)


def _within_budget(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    processes: int,
    seconds: Sequence[float],
    sizes: Sequence[int],
    chunks: int,
) -> tuple[list[range], list[int]]:
    """The cut of the first rank, on all ranks."""
    from paceline.plan.stage_budget import cut_within_budget  # which knows how a session is built

    group = Mesh.build(cluster, {"replica": cluster.world_size}).world
    mine: dict[str, Any] = {}
    if group.rank == 0:
        try:
            cut = cut_within_budget(recipe, task, processes, in_nanoseconds(seconds), sizes, chunks)
            mine = {"ends": [place.stop for place in cut.places], "bytes": cut.stage_bytes}
        except (StrategyError, TaskError) as error:
            mine = {"what": error.what, "where": error.where, "next_step": error.next_step}
    texts = gather_texts(json.dumps(mine), group, Net(recipe.runtime.deadline_seconds))
    found = json.loads(texts[0])
    if "what" in found:
        raise StrategyError(**found)
    return [range(a, b) for a, b in pairwise((0, *found["ends"]))], found["bytes"]


def in_nanoseconds(seconds: Sequence[float]) -> list[int]:
    return [round(one * _NANOSECONDS) for one in seconds]


def cut_by_time(seconds: Sequence[float], sizes: Sequence[int], num_parts: int) -> list[range]:
    """Contiguous parts, each with parameters: the slowest as fast as possible; pure.

    Args:
        seconds: of each link.
        sizes: numbers of its parameters.
    Source: the exact dynamic program of `cut_evenly`, over times in place of numbers of parameters.
    """
    return cut_evenly(in_nanoseconds(seconds), num_parts, sizes)
