"""`memory.budget`: the recomputation that keeps it in the least extra time.

1. Each block of the model is measured: a forward of a copy, on inputs of the shapes that it has in the model.
   Blocks that are alike are measured once, so that their times are equal.
2. Two plans, one without recomputation and one of all blocks, give the memory as a function of the chosen
   blocks: at each moment of a step, the memory without recomputation minus the activations that the
   recomputed blocks do not keep then. While a block itself runs, its own choice counts.
3. Block by block, each choice is extended by both possibilities. Choices that cannot fit any more, or take
   longer than one that fits, are dropped. With many blocks only the choices that need least memory among
   those of about equal time are kept.

Segments of blocks are the last resort. Invariant: the result is planned once more as it will run, and fits in
that plan; if it does not, because blocks share memory, the search is repeated with a smaller budget.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.data.task_data import prepare_data
from paceline.models.dropout import set_micro_batch_key
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.recompute import outermost_blocks, recomputed_blocks
from paceline.parallel.sharded_model import allocate_copy, sample_input
from paceline.plan.activation_memory import LayerCall, MicroBatchFootprint, TensorShape
from paceline.plan.memory_plan import MemoryPlan
from paceline.plan.memory_planner import (
    MemoryPlanner,
    combine_plans,
    make_planners,
    plan_memory,
    resolve_layout,
)
from paceline.plan.step_peak import MemoryInstant
from paceline.recipe.recipe import Recipe
from paceline.report.number_format import format_bytes
from paceline.task import Task

_REPEATS = 5


def measure_block_seconds(
    blocks: Mapping[int, nn.Module],
    entries: Iterable[LayerCall],
    precision: MixedPrecision,
    device: torch.device,
) -> dict[int, float]:
    """Return the seconds that each block's forward passes take in one micro-batch.

    Args:
        blocks: blocks by number; not changed; can be on the meta device.
        entries: calls of layers in a micro-batch; calls of other layers are ignored.
    """
    known: dict[Hashable, float] = {}
    seconds_by_block = dict.fromkeys(blocks, 0.0)
    # The run must draw the random numbers that it would draw without a measurement.
    with torch.random.fork_rng():
        for entry in (call for call in entries if call.layer in blocks):
            block = blocks[entry.layer]
            kind = _kind_of_call(block, entry)
            if kind not in known:
                known[kind] = _measure_forward(block, entry, precision, device)
            seconds_by_block[entry.layer] += known[kind]
    return seconds_by_block


def _kind_of_call(block: nn.Module, entry: LayerCall) -> Hashable:
    """Return a key that is equal for calls that take the same time."""
    modules = tuple((name, str(type(m)), m.extra_repr()) for name, m in block.named_modules())
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
    return modules, shapes, tuple(map(str, tree_leaves(entry.arguments)))


def _measure_forward(
    block: nn.Module, entry: LayerCall, precision: MixedPrecision, device: torch.device
) -> float:
    """Return the least seconds of a forward pass of a copy in a few runs after a warm-up."""
    twin, times = allocate_copy(block).to(device), []
    for _ in range(_REPEATS + 1):
        set_micro_batch_key(twin, 0)
        args, kwargs = tree_map(
            lambda value: _filled_input(value, device), entry.arguments, is_leaf=_is_shape
        )
        began = time.perf_counter()
        with precision.autocast():
            twin(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    # The shortest: other processes and clock changes can only make a forward slower.
    return min(times[1:])


def _filled_input(value: Any, device: torch.device) -> Any:
    return sample_input(value.sizes, value.dtype).to(device) if isinstance(value, TensorShape) else value


def _is_shape(value: Any) -> bool:
    return isinstance(value, TensorShape)


SavedByCall = Sequence[Sequence[tuple[int, int]]]
"""By chunk and call of a layer: its block (-1: none), and the bytes saved by recomputation until backward."""


@dataclass(frozen=True)
class MomentBytes:
    """The bytes at one moment as a function of the recomputed blocks.

    Args:
        num_bytes: bytes without recomputation.
        saved: bytes that recomputation of each block saves.
        only: (block, whether it is recomputed): the moment exists only for this choice; None: always.
    """

    num_bytes: int
    saved: tuple[int, ...]
    only: tuple[int, bool] | None = None


def peak_of_choice(sums: Sequence[MomentBytes], again: Sequence[bool]) -> int:
    """Return the peak of a job in bytes.

    Args:
        again: whether each block is recomputed.
    """
    existing = [moment for moment in sums if moment.only is None or again[moment.only[0]] == moment.only[1]]
    return max(
        moment.num_bytes - sum(s for s, a in zip(moment.saved, again, strict=True) if a)
        for moment in existing
    )


def moments_by_stage(
    plain: MemoryPlanner, lean: MemoryPlanner, num_blocks: int
) -> dict[int, list[MomentBytes]]:
    """Return the moments of the ranks of each pipeline stage.

    Args:
        plain, lean: planners of one recipe, without recomputation and with that of every block.
        num_blocks: blocks of the model.
    """
    largest_by_stage: dict[int, dict[tuple[tuple[int, ...], tuple[int, bool] | None], int]] = {}
    for (rank, work, walks), (_, less, lean_walks) in zip(plain.walks(), lean.walks(), strict=True):
        pairs = zip(work.footprints, less.footprints, strict=True)
        saved = [_saved_by_call(a, b, num_blocks) for a, b in pairs]
        largest = largest_by_stage.setdefault(rank.coordinates["pipeline"], {})
        for recomputes, variant_walks in ((False, walks), (True, lean_walks)):
            for moment in (
                _moment_bytes(instant, saved, num_blocks, recomputes)
                for walk in variant_walks
                for instant in walk.instants()
            ):
                key = moment.saved, moment.only
                largest[key] = max(moment.num_bytes, largest.get(key, 0))
    return {
        stage: [
            MomentBytes(size, saved, only)
            for (saved, only), size in largest.items()
            if only != _SAME_AS_PLAIN
        ]
        for stage, largest in largest_by_stage.items()
    }


_SAME_AS_PLAIN = (-1, True)
"""Mark of moments between blocks in the lean plan, which the plain plan already has."""


def _saved_by_call(
    plain: MicroBatchFootprint, lean: MicroBatchFootprint, num_blocks: int
) -> list[tuple[int, int]]:
    """Return for each call of a layer its block and the bytes that recomputation saves; (-1, 0): no block."""
    calls = [entry.layer if entry.layer < num_blocks else -1 for entry in plain.entries]
    plain_bytes, lean_bytes = (iter(_kept_by_call(footprint, calls)) for footprint in (plain, lean))
    return [(-1, 0) if block < 0 else (block, next(plain_bytes) - next(lean_bytes)) for block in calls]


def _kept_by_call(footprint: MicroBatchFootprint, calls: Sequence[int]) -> list[int]:
    """Return for each call of a block the bytes allocated until the next call."""
    lives = [entry.live for entry, block in zip(footprint.entries, calls, strict=True) if block >= 0]
    return [after - before for before, after in pairwise([*lives, footprint.kept])]


def _moment_bytes(
    instant: MemoryInstant, saved: SavedByCall, num_blocks: int, recomputes: bool
) -> MomentBytes:
    call, inside = divmod(instant.position, 2)
    saved_by_block = [0] * num_blocks
    for block, size in _kept_by_other_calls(instant, saved, call):
        if block >= 0:
            saved_by_block[block] += size
    running_block = saved[instant.chunk][call][0] if inside else -1
    only = (running_block, recomputes) if running_block >= 0 else (_SAME_AS_PLAIN if recomputes else None)
    return MomentBytes(
        instant.memory.total + (sum(saved_by_block) if recomputes else 0), tuple(saved_by_block), only
    )


def _kept_by_other_calls(instant: MemoryInstant, saved: SavedByCall, call: int) -> Iterator[tuple[int, int]]:
    """Yield (block, bytes) of all calls whose activations are kept, except the one that runs."""
    yield from saved[instant.chunk][:call]
    for number, calls in zip(instant.in_flight, saved, strict=True):
        yield from ((block, number * size) for block, size in calls)


_MOST_CHOICES = 4096
"""Number of choices that are always kept: as many as 12 blocks have."""
_CHOICES_PER_TIME = 16
_NUM_TIMES = 500


class _PartialChoices(NamedTuple):
    """A set of C choices for the first blocks.

    Args:
        seconds: extra time, float64 [C].
        again: recomputed blocks, bool [C, L].
        use: bytes at each moment, float64 [C, M]; -inf if the moment does not exist.
    """

    seconds: Tensor
    again: Tensor
    use: Tensor

    def where(self, rows: Tensor) -> _PartialChoices:
        return _PartialChoices(*(t[rows] for t in self))


def fewest_seconds(seconds: Sequence[float], sums: Sequence[MomentBytes], budget: int) -> list[int] | None:
    """Return the blocks to recompute, ascending, with the least extra time; None: no choice fits.

    Args:
        seconds: extra time of each block.
        sums: moments of the job.
        budget: bytes.
    Exactness: up to 12 blocks the least time of all choices, and least memory among those;
        tests/unit/plan/test_recompute_choice.py.
    """
    kept_bytes, recomputed_bytes = (
        _bytes_by_block(sums, len(seconds), recomputes) for recomputes in (False, True)
    )
    least, remaining = _suffix_sums(torch.minimum(kept_bytes, recomputed_bytes)), _suffix_sums(kept_bytes)
    base_bytes = torch.tensor([[moment.num_bytes for moment in sums]], dtype=torch.float64)
    choices = _PartialChoices(
        torch.zeros(1, dtype=torch.float64), torch.zeros(1, len(seconds), dtype=torch.bool), base_bytes
    )
    best: tuple[float, float, list[int]] | None = None
    for block in range(len(seconds) + 1):
        whole = choices.use + remaining[block]
        fits = (whole <= budget).all(1)
        candidate = _best_choice(choices.where(fits), whole[fits])
        best = candidate if best is None or (candidate is not None and candidate[:2] < best[:2]) else best
        may_fit = ~fits & (choices.use + least[block] <= budget).all(1)
        may_win = torch.ones_like(fits) if best is None else choices.seconds <= best[0]
        choices = choices.where(may_fit & may_win)
        if block < len(seconds):
            choices = _extended(
                _thinned(choices, remaining[block]), block, seconds[block], kept_bytes, recomputed_bytes
            )
    return None if best is None else best[2]


def _bytes_by_block(sums: Sequence[MomentBytes], num_blocks: int, recomputes: bool) -> Tensor:
    """Return the bytes that each block adds at each moment, recomputed or not, [L + 1, M]."""
    table = torch.zeros(num_blocks + 1, len(sums), dtype=torch.float64)
    for index, moment in enumerate(sums):
        if recomputes:
            table[:-1, index] = -torch.tensor(moment.saved, dtype=torch.float64)
        if moment.only is not None and moment.only[1] != recomputes:
            table[moment.only[0], index] = -torch.inf
    return table


def _suffix_sums(uses: Tensor) -> Tensor:
    return uses.flip(0).cumsum(0).flip(0)


def _best_choice(choices: _PartialChoices, use: Tensor) -> tuple[float, float, list[int]] | None:
    """Return (seconds, bytes, blocks) of the smallest choice in this order; None: there are no choices."""
    if not len(choices.seconds):
        return None
    peaks = use.max(1).values
    keys = list(zip(choices.seconds.tolist(), peaks.tolist(), strict=True))
    first = min(range(len(keys)), key=keys.__getitem__)
    return *keys[first], choices.again[first].nonzero().flatten().tolist()


def _extended(
    choices: _PartialChoices, block: int, seconds: float, kept_bytes: Tensor, recomputed_bytes: Tensor
) -> _PartialChoices:
    marked = choices.again.clone()
    marked[:, block] = True
    return _PartialChoices(
        torch.cat([choices.seconds + seconds, choices.seconds]),
        torch.cat([marked, choices.again]),
        torch.cat([choices.use + recomputed_bytes[block], choices.use + kept_bytes[block]]),
    )


def _thinned(choices: _PartialChoices, remaining: Tensor) -> _PartialChoices:
    """Keep the choices that need least memory among those of about equal time."""
    if len(choices.seconds) <= _MOST_CHOICES:
        return choices
    by_bytes = choices.where((choices.use + remaining).max(1).values.argsort(stable=True))
    times = (by_bytes.seconds * (_NUM_TIMES / by_bytes.seconds.max())).round()
    order = times.argsort(stable=True)
    _, sizes = times[order].unique_consecutive(return_counts=True)
    within = torch.cat([torch.arange(int(n)) for n in sizes])
    return by_bytes.where(order[within < _CHOICES_PER_TIME])


_TRIALS = 8


@dataclass(frozen=True)
class RecomputeChoice:
    """A choice of recomputation.

    Args:
        plan: plan of the job with it.
        without: peak bytes without recomputation.
        seconds: seconds of the forwards of each block in a micro-batch; empty: none was measured.
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
        """Return the extra seconds of a micro-batch; segments run two more forward passes."""
        word = self.recompute
        if word in ("blocks", "segments"):
            return (2 if word == "segments" else 1) * sum(self.seconds.values())
        return sum(self.seconds[int(n)] for n in word.split(",")) if word != "none" else 0.0

    def record(self) -> dict[str, Any]:
        """Return the record for the run folder."""
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
            return f"recompute: none ({_describe_need(self.without, self.budget)})"
        word = self.recompute
        named = f"blocks {word} of {len(self.seconds)}" if word[0].isdecimal() else word
        return (
            f"recompute: {named} ({_describe_need(self.without, self.budget)}, or"
            f" {format_bytes(self.plan.peak)} with recomputation; {1e3 * self.more_seconds:.3g} ms more per"
            f' micro-batch; set memory.recompute = "{word}" to fix it)'
        )


def _describe_need(peak: int, budget: int) -> str:
    return f"memory.budget is {format_bytes(budget)}, and the largest rank needs {format_bytes(peak)}"


def choose_recompute(
    recipe: Recipe, task: Task, processes: int, *, nodes: int = 1, device: torch.device | None = None
) -> RecomputeChoice:
    """Choose the recomputation that keeps `memory.budget` in the least time; if none does, the smallest.

    Args:
        recipe: with `memory.recompute = "auto"` and a budget.
        device: device on which blocks are measured; None: the CPU.
    Raises:
        StrategyError, TaskError: as in `plan_memory`.
    """
    task, recipe = prepare_data(task, recipe), resolve_layout(recipe, processes, nodes)
    plain = make_planners(_with_recompute(recipe, "none"), task, processes, nodes)
    without = combine_plans(_with_recompute(recipe, "none"), plain)
    blocks = outermost_blocks(task.model, task.blocks)
    budget = recipe.memory.budget or 0
    if without.peak <= budget or not blocks or recipe.batch.sync_batchnorm:
        return RecomputeChoice(without, without.peak, {})
    numbered = ",".join(map(str, blocks))
    lean = make_planners(_with_recompute(recipe, numbered), task, processes, nodes)
    seconds = _measure_blocks(plain, task, recipe, device or torch.device("cpu"))
    stages = _moments_of_stages(plain, lean, len(recomputed_blocks(task.model, task.blocks)))
    plans = [without]
    for word in _candidate_words(stages, seconds, budget, recipe, numbered, plans):
        plans.append(plan_memory(_with_recompute(recipe, word), task, processes, nodes=nodes))
        if plans[-1].peak <= budget:
            break
    best = min(plans, key=lambda plan: (plan.peak > budget, plan.peak))
    return RecomputeChoice(best, without.peak, seconds)


def _with_recompute(recipe: Recipe, word: str) -> Recipe:
    return recipe.replace(memory=recipe.memory.replace(recompute=word))


def _candidate_words(
    stages: Sequence[Sequence[MomentBytes]],
    seconds: Mapping[int, float],
    budget: int,
    recipe: Recipe,
    numbered: str,
    plans: Sequence[MemoryPlan],
) -> Iterator[str]:
    """Yield candidates until a plan fits; `plans` has the plans of those that did not."""
    aim, tried_words = budget, {""}
    for _ in range(_TRIALS):
        word = _choose_blocks(stages, seconds, aim)
        if word is None:
            break
        if word not in tried_words:
            tried_words.add(word)
            yield word
            aim -= plans[-1].peak - budget
        else:
            # The search has returned the same blocks: it needs a smaller budget to return others.
            aim -= max(1, budget // 1000)
    yield numbered
    # A compiled model cannot run in segments.
    if not recipe.runtime.compile:
        yield "segments"


def _choose_blocks(
    stages: Sequence[Sequence[MomentBytes]], seconds: Mapping[int, float], budget: int
) -> str | None:
    """Choose the blocks of each stage separately; None: a stage does not fit."""
    chosen: list[int] = []
    for sums in stages:
        binding = [
            moment for moment in sums if moment.num_bytes - sum(min(0, s) for s in moment.saved) > budget
        ]
        stage_blocks = sorted(
            {
                k
                for moment in binding
                for k in range(len(moment.saved))
                if moment.saved[k] or _is_moment_of_block(moment, k)
            }
        )
        if not binding:
            continue
        stage_choice = fewest_seconds(
            [seconds.get(k, 0.0) for k in stage_blocks],
            [_restricted_to_stage(moment, stage_blocks) for moment in binding],
            budget,
        )
        if stage_choice is None:
            return None
        chosen += [stage_blocks[k] for k in stage_choice]
    return ",".join(map(str, sorted(chosen)))


def _is_moment_of_block(moment: MomentBytes, block: int) -> bool:
    return moment.only is not None and moment.only[0] == block


def _restricted_to_stage(moment: MomentBytes, stage_blocks: Sequence[int]) -> MomentBytes:
    """Return a moment with the blocks of its stage only."""
    only = None if moment.only is None else (stage_blocks.index(moment.only[0]), moment.only[1])
    return MomentBytes(moment.num_bytes, tuple(moment.saved[k] for k in stage_blocks), only)


def _moments_of_stages(
    plain: Iterable[MemoryPlanner], lean: Iterable[MemoryPlanner], num_blocks: int
) -> list[list[MomentBytes]]:
    """Return the moments of each stage, of all its ranks in all number formats."""
    moments: dict[int, list[MomentBytes]] = {}
    for plain_planner, lean_planner in zip(plain, lean, strict=True):
        for stage, sums in moments_by_stage(plain_planner, lean_planner, num_blocks).items():
            moments.setdefault(stage, []).extend(sums)
    return [moments[stage] for stage in sorted(moments)]


def _measure_blocks(
    plain: Sequence[MemoryPlanner], task: Task, recipe: Recipe, device: torch.device
) -> dict[int, float]:
    compute = recipe.precision.compute
    precision = MixedPrecision("fp32" if compute == "auto" else compute, device.type)
    entries = [entry for chunk in plain[0].chunks() for entry in chunk.entries]
    return measure_block_seconds(outermost_blocks(task.model, task.blocks), entries, precision, device)
