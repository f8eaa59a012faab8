"""Seconds that each block of a model takes to be computed again, measured on this machine.

A copy of a block runs forward on inputs of the shapes that it has in the model. Blocks that are alike are
measured once, so that their times are equal.

What the memory of a job is, as a function of the blocks that are computed again.

It is the largest of some sums, one for each moment of a step: what there would be without recomputation, less
what each block that is computed again does not keep then. Two plans give them all, one without and one with
every block computed again. While a block itself is at work, it is as in the plan that does with it the same.

Which blocks to compute again so that the memory keeps a budget in the least extra time. Pure.

Block by block there are two ways on from each choice so far. What cannot keep the budget any more, or takes
longer than a choice that keeps it, is left out; so the answer for few blocks is that of trying everything.
For many blocks only the choices that need least memory among those of about a time are gone on with.

`memory.budget` chooses what to compute again: what keeps it in the least extra time.

Candidates are the blocks of a model, each by itself, and as a last resort segments of them. Invariant: what
is chosen is planned once more as it will run, and keeps the budget in that plan; if it does not, by bytes
that two blocks have in common, a little less memory is asked for.
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
    """By block, the forwards of one micro-batch.

    Args:
        blocks: by number; they are not changed, and may have no memory.
        entries: calls of layers in a micro-batch; those of others are passed by.
    """
    known: dict[Hashable, float] = {}
    found = dict.fromkeys(blocks, 0.0)
    with torch.random.fork_rng():  # a run draws as if nothing had been measured
        for entry in (one for one in entries if one.layer in blocks):
            block = blocks[entry.layer]
            kind = _kind_of_call(block, entry)
            if kind not in known:
                known[kind] = _measure_forward(block, entry, precision, device)
            found[entry.layer] += known[kind]
    return found


def _kind_of_call(block: nn.Module, entry: LayerCall) -> Hashable:
    """What two blocks have in common that take the same time."""
    modules = tuple((name, str(type(m)), m.extra_repr()) for name, m in block.named_modules())
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
    return modules, shapes, tuple(map(str, tree_leaves(entry.arguments)))


def _measure_forward(
    block: nn.Module, entry: LayerCall, precision: MixedPrecision, device: torch.device
) -> float:
    """The shortest of some forwards of a copy, after one that is not counted."""
    twin, times = allocate_copy(block).to(device), []
    for _ in range(_REPEATS + 1):
        set_micro_batch_key(twin, 0)
        args, kwargs = tree_map(lambda one: _filled_input(one, device), entry.arguments, is_leaf=_is_shape)
        began = time.perf_counter()
        with precision.autocast():
            twin(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _filled_input(value: Any, device: torch.device) -> Any:
    return sample_input(value.sizes, value.dtype).to(device) if isinstance(value, TensorShape) else value


def _is_shape(value: Any) -> bool:
    return isinstance(value, TensorShape)


SavedByCall = Sequence[Sequence[tuple[int, int]]]
"""By chunk and call of a layer, its block (-1: none), and the bytes that it keeps less until its backward."""


@dataclass(frozen=True)
class MomentBytes:
    """Bytes at one moment.

    Args:
        num_bytes: if nothing is computed again.
        saved: by block, less if it is.
        only: (block, whether it is computed again); the moment is there only then. None: always.
    """

    num_bytes: int
    saved: tuple[int, ...]
    only: tuple[int, bool] | None = None


def peak_of_choice(sums: Sequence[MomentBytes], again: Sequence[bool]) -> int:
    """The memory of a job.

    Args:
        again: by block, whether it is computed again.
    """
    there = [one for one in sums if one.only is None or again[one.only[0]] == one.only[1]]
    return max(one.num_bytes - sum(s for s, a in zip(one.saved, again, strict=True) if a) for one in there)


def moments_by_stage(
    plain: MemoryPlanner, lean: MemoryPlanner, num_blocks: int
) -> dict[int, list[MomentBytes]]:
    """By stage of a pipeline, the moments of its ranks.

    Args:
        plain, lean: of one recipe, without recomputation and with that of every block.
        num_blocks: of the model.
    """
    found: dict[int, dict[tuple[tuple[int, ...], tuple[int, bool] | None], int]] = {}
    for (place, work, walks), (_, less, others) in zip(plain.walks(), lean.walks(), strict=True):
        pairs = zip(work.footprints, less.footprints, strict=True)
        saved = [_saved_by_call(a, b, num_blocks) for a, b in pairs]
        most = found.setdefault(place.coordinates["pipeline"], {})
        for again, ways in ((False, walks), (True, others)):
            for one in (_moment_bytes(i, saved, num_blocks, again) for way in ways for i in way.instants()):
                key = one.saved, one.only
                most[key] = max(one.num_bytes, most.get(key, 0))
    return {
        stage: [
            MomentBytes(size, saved, only) for (saved, only), size in most.items() if only != _SAME_AS_PLAIN
        ]
        for stage, most in found.items()
    }


_SAME_AS_PLAIN = (-1, True)
"""Between blocks a job is as in the plan without recomputation."""


def _saved_by_call(
    plain: MicroBatchFootprint, lean: MicroBatchFootprint, num_blocks: int
) -> list[tuple[int, int]]:
    """By call of a layer, its block, and what it keeps less; (-1, 0) if it is none."""
    calls = [entry.layer if entry.layer < num_blocks else -1 for entry in plain.entries]
    kept, less = (iter(_kept_by_call(one, calls)) for one in (plain, lean))
    return [(-1, 0) if block < 0 else (block, next(kept) - next(less)) for block in calls]


def _kept_by_call(footprint: MicroBatchFootprint, calls: Sequence[int]) -> list[int]:
    """By call of a block, bytes that have come from its begin to that of the next."""
    lives = [entry.live for entry, block in zip(footprint.entries, calls, strict=True) if block >= 0]
    return [after - before for before, after in pairwise([*lives, footprint.kept])]


def _moment_bytes(instant: MemoryInstant, saved: SavedByCall, num_blocks: int, again: bool) -> MomentBytes:
    call, inside = divmod(instant.position, 2)
    less = [0] * num_blocks
    for block, size in _kept_by_other_calls(instant, saved, call):
        if block >= 0:
            less[block] += size
    own = saved[instant.chunk][call][0] if inside else -1
    only = (own, again) if own >= 0 else (_SAME_AS_PLAIN if again else None)
    return MomentBytes(instant.memory.total + (sum(less) if again else 0), tuple(less), only)


def _kept_by_other_calls(instant: MemoryInstant, saved: SavedByCall, call: int) -> Iterator[tuple[int, int]]:
    """Of every call whose activations are there, other than of the one that is at work."""
    yield from saved[instant.chunk][:call]
    for number, calls in zip(instant.in_flight, saved, strict=True):
        yield from ((block, number * size) for block, size in calls)


_MOST_CHOICES = 4096
"""Choices that are gone on with, whatever they are: as many as there are of 12 blocks."""
_CHOICES_PER_TIME = 16
_NUM_TIMES = 500


class _PartialChoices(NamedTuple):
    """C choices for the first blocks.

    Args:
        seconds: more than without recomputation, float64 [C].
        again: which blocks, bool [C, L].
        use: bytes by moment, float64 [C, M]; -inf where that moment is not there.
    """

    seconds: Tensor
    again: Tensor
    use: Tensor

    def where(self, rows: Tensor) -> _PartialChoices:
        return _PartialChoices(*(t[rows] for t in self))


def fewest_seconds(seconds: Sequence[float], sums: Sequence[MomentBytes], budget: int) -> list[int] | None:
    """Numbers of blocks, ascending; None: no choice keeps the budget.

    Args:
        seconds: of each block, to compute it again.
        sums: the memory; see `most_bytes`.
        budget: bytes.
    Exactness: up to 12 blocks the least time of all choices, and of those least memory;
        tests/unit/plan/test_recompute_choice.py.
    """
    kept, again = (_bytes_by_block(sums, len(seconds), way) for way in (False, True))
    least, rest = _suffix_sums(torch.minimum(kept, again)), _suffix_sums(kept)
    begun = torch.tensor([[one.num_bytes for one in sums]], dtype=torch.float64)
    choices = _PartialChoices(
        torch.zeros(1, dtype=torch.float64), torch.zeros(1, len(seconds), dtype=torch.bool), begun
    )
    best: tuple[float, float, list[int]] | None = None
    for block in range(len(seconds) + 1):
        whole = choices.use + rest[block]
        fits = (whole <= budget).all(1)
        found = _best_choice(choices.where(fits), whole[fits])
        best = found if best is None or (found is not None and found[:2] < best[:2]) else best
        may_fit = ~fits & (choices.use + least[block] <= budget).all(1)
        may_win = torch.ones_like(fits) if best is None else choices.seconds <= best[0]
        choices = choices.where(may_fit & may_win)
        if block < len(seconds):
            choices = _extended(_thinned(choices, rest[block]), block, seconds[block], kept, again)
    return None if best is None else best[2]


def _bytes_by_block(sums: Sequence[MomentBytes], num_blocks: int, again: bool) -> Tensor:
    """By block, and by moment, what it adds there if it is computed again, or not, [L + 1, M]."""
    found = torch.zeros(num_blocks + 1, len(sums), dtype=torch.float64)
    for moment, one in enumerate(sums):
        if again:
            found[:-1, moment] = -torch.tensor(one.saved, dtype=torch.float64)
        if one.only is not None and one.only[1] != again:
            found[one.only[0], moment] = -torch.inf
    return found


def _suffix_sums(uses: Tensor) -> Tensor:
    return uses.flip(0).cumsum(0).flip(0)


def _best_choice(choices: _PartialChoices, use: Tensor) -> tuple[float, float, list[int]] | None:
    """Seconds, bytes and blocks of the first in this order; None: there are no choices."""
    if not len(choices.seconds):
        return None
    peaks = use.max(1).values
    keys = list(zip(choices.seconds.tolist(), peaks.tolist(), strict=True))
    first = min(range(len(keys)), key=keys.__getitem__)
    return *keys[first], choices.again[first].nonzero().flatten().tolist()


def _extended(
    choices: _PartialChoices, block: int, seconds: float, kept: Tensor, again: Tensor
) -> _PartialChoices:
    marked = choices.again.clone()
    marked[:, block] = True
    return _PartialChoices(
        torch.cat([choices.seconds + seconds, choices.seconds]),
        torch.cat([marked, choices.again]),
        torch.cat([choices.use + again[block], choices.use + kept[block]]),
    )


def _thinned(choices: _PartialChoices, rest: Tensor) -> _PartialChoices:
    """Of those of about a time, the ones that need least as they are."""
    if len(choices.seconds) <= _MOST_CHOICES:
        return choices
    by_bytes = choices.where((choices.use + rest).max(1).values.argsort(stable=True))
    times = (by_bytes.seconds * (_NUM_TIMES / by_bytes.seconds.max())).round()
    order = times.argsort(stable=True)
    _, sizes = times[order].unique_consecutive(return_counts=True)
    within = torch.cat([torch.arange(int(n)) for n in sizes])
    return by_bytes.where(order[within < _CHOICES_PER_TIME])


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
            return f"recompute: none, as {_describe_need(self.without, self.budget)}"
        word = self.recompute
        named = f"blocks {word} of {len(self.seconds)}" if word[0].isdecimal() else word
        return (
            f"recompute: {named}, as {_describe_need(self.without, self.budget)};"
            f" with that it needs {format_bytes(self.plan.peak)}, and a micro-batch takes"
            f' {1e3 * self.more_seconds:.3g} ms more; memory.recompute = "{word}" names it'
        )


def _describe_need(peak: int, budget: int) -> str:
    return f"the largest rank needs {format_bytes(peak)}, and memory.budget is {format_bytes(budget)}"


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
    found = [without]
    for word in _candidate_words(stages, seconds, budget, recipe, numbered, found):
        found.append(plan_memory(_with_recompute(recipe, word), task, processes, nodes=nodes))
        if found[-1].peak <= budget:
            break
    best = min(found, key=lambda plan: (plan.peak > budget, plan.peak))
    return RecomputeChoice(best, without.peak, seconds)


def _with_recompute(recipe: Recipe, word: str) -> Recipe:
    return recipe.replace(memory=recipe.memory.replace(recompute=word))


def _candidate_words(
    stages: Sequence[Sequence[MomentBytes]],
    seconds: Mapping[int, float],
    budget: int,
    recipe: Recipe,
    numbered: str,
    found: Sequence[MemoryPlan],
) -> Iterator[str]:
    """What to try, one after another, until a plan keeps the budget; `found` has those that did not."""
    aim, tried = budget, {""}
    for _ in range(_TRIALS):
        word = _choose_blocks(stages, seconds, aim)
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


def _choose_blocks(
    stages: Sequence[Sequence[MomentBytes]], seconds: Mapping[int, float], budget: int
) -> str | None:
    """Numbers of blocks; each stage has its own."""
    found: list[int] = []
    for sums in stages:
        binding = [one for one in sums if one.num_bytes - sum(min(0, s) for s in one.saved) > budget]
        own = sorted(
            {
                k
                for one in binding
                for k in range(len(one.saved))
                if one.saved[k] or _is_moment_of_block(one, k)
            }
        )
        if not binding:
            continue
        part = fewest_seconds(
            [seconds.get(k, 0.0) for k in own], [_restricted_to_stage(one, own) for one in binding], budget
        )
        if part is None:
            return None
        found += [own[k] for k in part]
    return ",".join(map(str, sorted(found)))


def _is_moment_of_block(one: MomentBytes, block: int) -> bool:
    return one.only is not None and one.only[0] == block


def _restricted_to_stage(one: MomentBytes, own: Sequence[int]) -> MomentBytes:
    """A sum that knows the blocks of its stage alone."""
    only = None if one.only is None else (own.index(one.only[0]), one.only[1])
    return MomentBytes(one.num_bytes, tuple(one.saved[k] for k in own), only)


def _moments_of_stages(
    plain: Iterable[MemoryPlanner], lean: Iterable[MemoryPlanner], num_blocks: int
) -> list[list[MomentBytes]]:
    """By stage, the moments of all its ranks in all number formats."""
    found: dict[int, list[MomentBytes]] = {}
    for one, other in zip(plain, lean, strict=True):
        for stage, sums in moments_by_stage(one, other, num_blocks).items():
            found.setdefault(stage, []).extend(sums)
    return [found[stage] for stage in sorted(found)]


def _measure_blocks(
    plain: Sequence[MemoryPlanner], task: Task, recipe: Recipe, device: torch.device
) -> dict[int, float]:
    compute = recipe.precision.compute
    precision = MixedPrecision("fp32" if compute == "auto" else compute, device.type)
    entries = [entry for chunk in plain[0].chunks() for entry in chunk.entries]
    return measure_block_seconds(outermost_blocks(task.model, task.blocks), entries, precision, device)
