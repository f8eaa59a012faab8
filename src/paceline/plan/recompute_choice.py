"""`memory.budget` chooses what to compute again: what keeps it in the least extra time.

Candidates are the blocks of a model, each by itself, and as a last resort segments of them. Invariant: what
is chosen is planned once more as it will run, and keeps the budget in that plan; if it does not, by bytes
that two blocks have in common, a little less memory is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.data import settled
from paceline.layout import Precision
from paceline.layout.recompute import outermost_blocks, recomputed_blocks
from paceline.plan.block_times import block_seconds
from paceline.plan.fewest_seconds import fewest_seconds
from paceline.plan.memory import laid_out, plan_memory, plan_of, planners_of
from paceline.plan.parts import MemoryPlan
from paceline.plan.planner import Planner
from paceline.plan.savings import Sum, sums_by_stage
from paceline.recipe import Recipe
from paceline.report.facts import spell_bytes
from paceline.task import Task

_TRIALS = 8


@dataclass(frozen=True)
class RecomputeChoice:
    """What is computed again, and why.

    Args:
        plan: of the job with that.
        without: its peak bytes without recomputation.
        seconds: by block, of its forwards of a micro-batch; nothing if none had to be measured.
    """

    plan: MemoryPlan
    without: int
    seconds: Mapping[int, float]

    @property
    def recompute(self) -> str:
        return self.plan.recipe.memory.recompute

    @property
    def budget(self) -> int:
        return self.plan.recipe.memory.budget or 0

    @property
    def fits(self) -> bool:
        return self.plan.peak <= self.budget

    @property
    def more_seconds(self) -> float:
        """What a micro-batch takes longer: segments run twice more, but for their last blocks."""
        word = self.recompute
        if word in ("blocks", "segments"):
            return (2 if word == "segments" else 1) * sum(self.seconds.values())
        return sum(self.seconds[int(n)] for n in word.split(",")) if word != "none" else 0.0

    def record(self) -> dict[str, Any]:
        """As it stands in the run folder."""
        return {
            "recompute": self.recompute,
            "peak_bytes": self.plan.peak,
            "budget_bytes": self.budget,
            "without_bytes": self.without,
            "block_seconds": [self.seconds[number] for number in sorted(self.seconds)],
            "seconds": self.more_seconds,
        }

    def __str__(self) -> str:
        if self.recompute == "none":
            return f"recompute: none, as {_needs(self.without, self.budget)}"
        word = self.recompute
        named = f"blocks {word} of {len(self.seconds)}" if word[0].isdecimal() else word
        return (
            f"recompute: {named}, as {_needs(self.without, self.budget)};"
            f" with that it needs {spell_bytes(self.plan.peak)}, and a micro-batch takes"
            f' {1e3 * self.more_seconds:.3g} ms more; memory.recompute = "{word}" names it'
        )


def _needs(peak: int, budget: int) -> str:
    return f"the largest rank needs {spell_bytes(peak)}, and memory.budget is {spell_bytes(budget)}"


def choose_recompute(
    recipe: Recipe, task: Task, processes: int, *, nodes: int = 1, device: torch.device | None = None
) -> RecomputeChoice:
    """What keeps `memory.budget` in the least time; what needs least, if nothing does.

    Args:
        recipe: `memory.chooses`.
        device: on which blocks are measured; the processor if None.
    Raises:
        StrategyError, TaskError: see `plan_memory`.
    """
    task, recipe = settled(task, recipe), laid_out(recipe, task, processes)
    plain = planners_of(_with(recipe, "none"), task, processes, nodes)
    without = plan_of(_with(recipe, "none"), plain)
    blocks = outermost_blocks(task.model, task.blocks)
    budget = recipe.memory.budget or 0
    may = blocks and plain[0].recomputes and not recipe.batch.sync_batchnorm
    if without.peak <= budget or not may:
        return RecomputeChoice(without, without.peak, {})
    numbered = ",".join(map(str, blocks))
    lean = planners_of(_with(recipe, numbered), task, processes, nodes)
    seconds = _measured(plain, task, recipe, device or torch.device("cpu"))
    stages = _stages(plain, lean, len(recomputed_blocks(task.model, task.blocks)))
    found = [without]
    for word in _words(stages, seconds, budget, recipe, numbered, found):
        found.append(plan_memory(_with(recipe, word), task, processes, nodes=nodes))
        if found[-1].peak <= budget:
            break
    best = min(found, key=lambda plan: (plan.peak > budget, plan.peak))
    return RecomputeChoice(best, without.peak, seconds)


def _with(recipe: Recipe, word: str) -> Recipe:
    return recipe.replace(memory=recipe.memory.replace(recompute=word))


def _words(
    stages: Sequence[Sequence[Sum]],
    seconds: Mapping[int, float],
    budget: int,
    recipe: Recipe,
    numbered: str,
    found: Sequence[MemoryPlan],
) -> Iterator[str]:
    """What to try, one after another, until a plan keeps the budget; `found` has those that did not."""
    aim, tried = budget, {""}
    for _ in range(_TRIALS):
        word = _chosen(stages, seconds, aim)
        if word is None:
            break
        if word not in tried:
            tried.add(word)
            yield word
            aim -= found[-1].peak - budget
        else:
            aim -= max(1, budget // 1000)
    yield numbered
    if not recipe.runtime.compile:
        yield "segments"


def _chosen(stages: Sequence[Sequence[Sum]], seconds: Mapping[int, float], budget: int) -> str | None:
    """Numbers of blocks; each stage has its own."""
    found: list[int] = []
    for sums in stages:
        binding = [one for one in sums if one.num_bytes - sum(min(0, s) for s in one.saved) > budget]
        own = sorted({k for one in binding for k in range(len(one.saved)) if one.saved[k] or _is_of(one, k)})
        if not binding:
            continue
        part = fewest_seconds(
            [seconds.get(k, 0.0) for k in own], [_among(one, own) for one in binding], budget
        )
        if part is None:
            return None
        found += [own[k] for k in part]
    return ",".join(map(str, sorted(found)))


def _is_of(one: Sum, block: int) -> bool:
    return one.only is not None and one.only[0] == block


def _among(one: Sum, own: Sequence[int]) -> Sum:
    """A sum that knows the blocks of its stage alone."""
    only = None if one.only is None else (own.index(one.only[0]), one.only[1])
    return Sum(one.num_bytes, tuple(one.saved[k] for k in own), only)


def _stages(plain: Iterable[Planner], lean: Iterable[Planner], num_blocks: int) -> list[list[Sum]]:
    """By stage, the moments of all its ranks in all number formats."""
    found: dict[int, list[Sum]] = {}
    for one, other in zip(plain, lean, strict=True):
        for stage, sums in sums_by_stage(one, other, num_blocks).items():
            found.setdefault(stage, []).extend(sums)
    return [found[stage] for stage in sorted(found)]


def _measured(plain: Sequence[Planner], task: Task, recipe: Recipe, device: torch.device) -> dict[int, float]:
    compute = recipe.precision.compute
    precision = Precision("fp32" if compute == "auto" else compute, device.type)
    entries = [entry for chunk in plain[0].chunks() for entry in chunk.entries]
    return block_seconds(outermost_blocks(task.model, task.blocks), entries, precision, device)
