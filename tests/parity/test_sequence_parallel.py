"""Norms and dropouts on a part of the positions: every step is that of the oracle, twins are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn

from paceline import Task
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.models import GPT, GPT_TENSOR_PLAN, GPTConfig, KeyedDropout, tensor_plan_of
from paceline.models.gpt import gpt_chain
from paceline.parallel import gradient_reduction
from paceline.parallel.tensor import plan_tensor_cuts, resolve_tensor_plan
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import compare_with_oracle
from tests.marks import soak_param
from tests.parity import tensor_models
from tests.parity.test_tensor import DATA, calls_of_a_step, recipe, wrong_with
from tests.parity.test_tensor import GPT as SIZES

PARTS = {"blocks.*": "sequence"}
UNEVEN = {**SIZES, **DATA, "context": 15}
CALLS = {"reduce_scatter": 2 * 2 * 2, "all_gather": 2 * 2 * 2 + 2 + 1, "all_reduce": 3 + 4}
"""A sum is a scattered sum and a gather; one gather behind the blocks, and one of the gradients before them.
The embedding, the logits and the losses as ever. Once a step the gradients of four norms are summed."""


def by_position(**changes: Any) -> Recipe:
    return recipe("replicas=1 tensor=2", tensor=PARTS, options=UNEVEN).replace(**changes)


def checked(
    cluster: Cluster, settings: Recipe, build: Callable[[], Task] | None = None, steps: int = 2
) -> str:
    task = build() if build else make_task(settings)
    return wrong_with(compare_with_oracle(settings, task, cluster, CPU, steps))


FURTHER = ("computed again", "halves")
CASES: dict[str, tuple[dict[str, Any], Callable[[], Task] | None]] = {
    "as it is": ({}, None),
    "computed again": ({"memory": {"recompute": "blocks"}}, None),
    "halves": ({"precision": {"compute": "bf16"}}, None),
    "GPT-2": ({"tensor": {"h.*": "sequence"}}, lambda: tensor_models.gpt2(3)),
    "Llama": ({"tensor": {"model.layers.*": "sequence"}}, lambda: tensor_models.llama(6, 3)),
}


@pytest.mark.capability("E2", "J10", "Z1", "Z2")
@pytest.mark.parametrize(
    "names", [tuple(name for name in CASES if name not in FURTHER), soak_param(FURTHER)], ids=["some", "more"]
)
def test_blocks_cut_by_positions_are_those_of_one_process(names: Sequence[str]) -> None:
    """Fifteen positions on two ranks, with dropout."""
    pytest.importorskip("transformers")

    def found(cluster: Cluster) -> tuple[dict[str, str], dict[str, int]]:
        wrong = {name: checked(cluster, by_position(**CASES[name][0]), CASES[name][1]) for name in names}
        return wrong, calls_of_a_step(cluster, plan=PARTS)

    for wrong, calls in run_ranks(found, 2):
        assert not any(wrong.values()), wrong
        assert calls == CALLS


def norms_not_summed() -> Any:
    """Gradients of norms are those of the own positions."""
    return patch.object(gradient_reduction, "_pre_reduction_groups", lambda context, alike: [])


@pytest.mark.capability("E2", "Z2")
def test_what_goes_wrong_by_position_is_found() -> None:
    """The mutation twins: gradients of norms that are not summed, masks that are equal on shards."""

    def found(cluster: Cluster) -> list[bool]:
        with norms_not_summed():
            norms = checked(cluster, by_position(), steps=1)
        with patch.object(KeyedDropout, "take_positions", lambda self, positions: None):
            masks = checked(cluster, by_position(), steps=1)
        return [norms != "", masks != ""]

    assert run_ranks(found, 2) == [[True, True]] * 2


def test_what_may_look_at_several_positions_is_refused() -> None:
    model = GPT(GPTConfig(heads=2, width=8, layers=1))
    plan = {**GPT_TENSOR_PLAN, **PARTS, "attention": "whole"}
    with pytest.raises(TaskError, match=r"'blocks\.0\.attention\.qkv' .* may look at several of them"):
        plan_tensor_cuts(resolve_tensor_plan(plan, model), 2)


STAGES = "replicas=1 tensor=2 pipeline=2 schedule=1f1b"


def in_halves(model: nn.Module) -> list[nn.Module]:
    """A chain that runs each block as two modules."""
    assert isinstance(model, GPT)
    first, *blocks, last = gpt_chain(model)
    halves = [half for block in blocks for half in (Attended(block), Fed(block))]
    return [first, *halves, last]


class Attended(nn.Module):
    """The first half of a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = block.attention_norm, block.attention
        self.dropout = block.attention_dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.attention(self.norm(x)))


class Fed(nn.Module):
    """The second half."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm, self.feed, self.dropout = (
            block.feed_forward_norm,
            block.feed_forward,
            block.feed_forward_dropout,
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.feed(self.norm(x)))


@pytest.mark.soak
@pytest.mark.capability("E2", "J10", "J11", "Z1", "Z2")
def test_stages_of_blocks_that_are_cut_by_positions() -> None:
    """Against one process, with clip; the twin: gradients of norms that are not summed. And a chain that runs
    blocks in parts, which would never cut them, is refused."""
    of = by_position(strategy=STAGES)

    def found(cluster: Cluster) -> tuple[list[str], str, str]:
        right = [checked(cluster, of), checked(cluster, of.replace(memory={"recompute": "blocks"}))]
        with norms_not_summed():
            wrong = checked(cluster, of, steps=1)
        with pytest.raises(StrategyError) as caught:
            build_test_session(cluster, of, lambda: replace(make_task(of), stages=in_halves))
        return right, wrong, str(caught.value)

    for right, wrong, refused in run_ranks(found, 4):
        assert right == ["", ""]
        assert wrong != ""
        assert "'blocks.0' by positions, but the pipeline runs it in parts" in refused


def test_a_plan_that_ships_leaves_out_what_a_model_has_not() -> None:
    pytest.importorskip("transformers")
    assert "lm_head" in tensor_plan_of(tensor_models.gpt2(2).model)
    assert "lm_head" not in tensor_plan_of(tensor_models.gpt2(2).model.transformer)
    assert not tensor_plan_of(GPT(GPTConfig(heads=2, width=8, layers=1)))
