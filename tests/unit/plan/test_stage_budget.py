"""A pipeline that is cut by time under a budget: the fastest of all cuts that keep it, or a refusal."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline import Task
from paceline.errors import StrategyError
from paceline.models import GPTConfig
from paceline.plan import MemoryPlan, check_budget, plan_memory
from paceline.recipe import Recipe
from paceline.tuning import stage_choice
from paceline.tuning.stage_choice import StageChoice, resolve_measured_stages
from tests.unit.plan.gpt_jobs import gpt, recipe

WORDS = "replicas=1 pipeline=2 schedule=1f1b"  # the first stage keeps twice as many micro-batches


def small(layers: int) -> Task:
    return gpt(GPTConfig(vocab=17, context=32, layers=layers, heads=4, width=64))


def plan_measured(asked: Recipe, task: Task) -> MemoryPlan:
    """Plan two processes with stages of measured lengths."""
    return plan_memory(resolve_measured_stages(asked, task, 2), task, 2)


def peaks_of_cuts(task: Task, links: int, how: str = "none") -> dict[int, int]:
    asked = (
        recipe(f"{WORDS} stages={cut},{links - cut}", memory={"recompute": how}) for cut in range(1, links)
    )
    return {cut: plan_memory(one, task, 2).peak for cut, one in enumerate(asked, 1)}


@pytest.mark.capability("C6")
def test_the_fastest_cut_that_keeps_the_budget_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.1, 1.0, 1.0, 2.0, 0.1]  # embedding, blocks, output layer
    monkeypatch.setattr(stage_choice, "measure_stage_modules", lambda *args: seconds)
    task, keeping = small(3), recipe(WORDS + " stages=time")
    slowest = {cut: max(sum(seconds[:cut]), sum(seconds[cut:])) for cut in range(1, 5)}
    peaks = peaks_of_cuts(task, 5)
    fastest = min(slowest, key=slowest.__getitem__)
    for budget in (peaks[fastest], peaks[fastest] - 1):
        plan = plan_measured(keeping.replace(memory={"budget": budget, "recompute": "none"}), task)
        chosen = int(plan.recipe.strategy.stages.split(",")[0])
        assert plan.peak <= budget
        assert slowest[chosen] == min(slowest[cut] for cut in peaks if peaks[cut] <= budget)
        assert (chosen == fastest) == (budget >= peaks[fastest])
    memory = {"budget": min(peaks.values()) - 1, "recompute": "none"}
    with pytest.raises(StrategyError, match=r"no cut of 5 modules into 2 stages keeps memory\.budget"):
        plan_measured(keeping.replace(memory=memory), task)


@pytest.mark.capability("C6", "L2")
def test_where_no_cut_keeps_it_blocks_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_choice, "measure_stage_modules", lambda *args: [0.1, 1.0, 1.0, 0.1])
    task = small(2)
    lean, plain = (min(peaks_of_cuts(task, 4, how).values()) for how in ("blocks", "none"))
    assert lean < plain
    asked = recipe(WORDS + " stages=time", memory={"budget": lean})
    with pytest.raises(StrategyError, match="stages=time has not been measured"):
        check_budget(asked, task, 2)
    found = check_budget(resolve_measured_stages(asked, task, 2), task, 2)
    assert found.refusal is None and found.plan.peak <= lean
    assert found.choice is not None and found.choice.recompute != "none"


@pytest.mark.soak
@pytest.mark.capability("C6")
def test_a_budget_caps_what_the_chunks_of_a_stage_hold_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage holds the embedding and a block of the middle, the last one the output layer."""
    seconds = [0.1, 1.0, 1.0, 1.0, 1.0, 0.1]
    monkeypatch.setattr(stage_choice, "measure_stage_modules", lambda *args: seconds)
    task, words = small(4), "replicas=1 pipeline=2 schedule=interleaved:2"
    cuts = [(a, b, c, 6 - a - b - c) for a in range(1, 4) for b in range(1, 4) for c in range(1, 4)]
    cuts = [cut for cut in cuts if cut[-1] > 0]
    slowest = {cut: max(sum(seconds[i] for i in place) for place in places_of(cut)) for cut in cuts}
    stages = {cut: ",".join(map(str, cut)) for cut in cuts}
    memory = {"recompute": "none"}
    peaks = {
        cut: plan_memory(recipe(f"{words} stages={stages[cut]}", memory=memory), task, 2).peak for cut in cuts
    }
    free = plan_measured(recipe(words + " stages=time", memory=memory), task)
    budget = free.peak - 1
    keeping = [cut for cut in cuts if peaks[cut] <= budget]
    assert keeping  # another cut needs less
    plan = plan_measured(recipe(words + " stages=time", memory=memory | {"budget": budget}), task)
    chosen = tuple(map(int, plan.recipe.strategy.stages.split(",")))
    assert plan.peak <= budget and free.peak > budget
    assert slowest[chosen] == min(slowest[cut] for cut in keeping)
    with pytest.raises(StrategyError, match="into 2 stages of 2 chunks keeps"):
        tight = memory | {"budget": min(peaks.values()) - 1}
        plan_measured(recipe(words + " stages=time", memory=tight), task)


def places_of(cut: tuple[int, ...]) -> list[range]:
    ends = [sum(cut[:k]) for k in range(len(cut) + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


@pytest.mark.capability("C6", clause="the imbalance is reported")
def test_the_imbalance_is_the_slowest_stage_over_the_mean() -> None:
    choice = StageChoice("2,1", link_seconds=(1e-3, 1e-3, 6e-3), stage_seconds=(2e-3, 6e-3))
    assert choice.imbalance == choice.record()["imbalance"] == pytest.approx(1.5)
    assert "the slowest takes 6 of 8 ms per micro-batch, 1.50 times the mean" in str(choice)
    assert StageChoice("1,1", (1e-3, 1e-3), (1e-3, 1e-3)).imbalance == 1.0
