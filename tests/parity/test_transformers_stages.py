"""Pipelines of Transformers models by the stages that ship, held against one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.models import stage_plans
from paceline.parallel.pipeline import module_chain
from paceline.parallel.pipeline.model_chain import check_chain
from paceline.recipe import Recipe
from paceline.testing import RanksFailed, run_ranks
from paceline.testing.parity import CPU, build_test_session, whole_trajectory
from paceline.verification import compare_with_oracle
from tests.marks import soak_param
from tests.parity import tensor_models
from tests.recipes import recipe_of

pytest.importorskip("transformers")

recipe = partial(
    recipe_of,
    steps=3,
    batch={"size": 7, "shards": 3},
    optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
)

MODELS: dict[str, Callable[[], Task]] = {
    "GPT-2, tied": tensor_models.gpt2,
    "GPT-2, untied": lambda: tensor_models.gpt2(tied=False),
    "Llama": tensor_models.llama,
    "Qwen3, tied, two masks": tensor_models.qwen,
    "BERT classifier": lambda: tensor_models.bert(classifies=True),
    "BERT masked LM, tied": lambda: tensor_models.bert(classifies=False),
}


def in_double(build: Callable[[], Task]) -> Task:
    task = build()
    return replace(task, model=task.model.double())


def trained(strategy: str, builds: Sequence[Callable[[], Task]], cluster: Cluster) -> list[Any]:
    runs = []
    for build in builds:
        session = build_test_session(cluster, recipe(strategy), build)
        runs.append(whole_trajectory([stats.loss for stats in session.rounds()], session))
        session.close()
    return runs


def relative_error(one: Any, other: Any) -> float:
    """Return the largest error of losses and parameters, each relative to its largest value."""
    pairs = [(one.parameters[name], other.parameters[name]) for name in one.parameters]
    pairs.append((torch.tensor(one.losses), torch.tensor(other.losses)))
    assert one.parameters.keys() == other.parameters.keys()
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) for a, b in pairs if a.numel())


SOME = ("GPT-2, tied", "Qwen3, tied, two masks", "BERT classifier")


@pytest.mark.capability("D1", "Z1")
@pytest.mark.parametrize("names", [SOME, soak_param(tuple(MODELS))], ids=["some", "all"])
def test_a_run_on_two_stages_is_that_of_one_process(names: Sequence[str]) -> None:
    """Masks, rotary tables, and random draws too; some micro-batches have no padding."""
    single = [MODELS["BERT classifier"]]
    builds = [*single, *(partial(in_double, MODELS[name]) for name in names)]
    (one,) = run_ranks(partial(trained, "replicas=1", builds), 1)
    for both in run_ranks(partial(trained, "replicas=1 pipeline=2", builds), 2):
        errors = [relative_error(a, b) for a, b in zip(one, both, strict=True)]
        assert max(errors[: len(single)]) < 1e-6
        assert max(errors[len(single) :]) < 1e-12


def verified(builds: Sequence[Callable[[], Task]], of: Recipe, cluster: Cluster) -> list[str]:
    reports = [compare_with_oracle(of, build(), cluster, CPU, 2) for build in builds]
    return [str(report.failure or report.diagnosis or "") for report in reports]


@pytest.mark.soak
@pytest.mark.capability("D1", "Z1")
def test_they_verify_under_the_tensor_plans_and_schedules() -> None:
    builds = [tensor_models.gpt2, tensor_models.llama, tensor_models.qwen]
    for wrong in run_ranks(partial(verified, builds, recipe("replicas=1 tensor=2 pipeline=2")), 4):
        assert wrong == ["", "", ""]
    bert = [lambda: tensor_models.bert(classifies=False)]
    for words in ("schedule=zero-bubble", "schedule=interleaved:2"):
        of = recipe("replicas=1 pipeline=2 " + words)
        assert run_ranks(partial(verified, bert, of), 2) == [[""], [""]], words
    of = recipe("replicas=1 pipeline=2 stages=time")
    with pytest.raises(RanksFailed, match="reads values of its inputs"):
        run_ranks(partial(verified, bert, of), 2)


def gpt2_with(loss: Any, **changes: Any) -> Task:
    task = tensor_models.gpt2(dropout=0.0)
    for name, value in changes.items():
        setattr(task.model.config, name, value)
    return replace(task, loss=loss)


def call_with(**named: Any) -> Callable[[nn.Module, Tensor], Loss]:
    def loss(model: nn.Module, tokens: Tensor) -> Loss:
        given = {name: tokens if value is ... else value for name, value in named.items()}
        return Loss(model(tokens, **given)[0].sum(), len(tokens))

    return loss


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: gpt2_with(call_with(labels=...)), "passes labels to GPT2LMHeadModel"),
        (lambda: gpt2_with(call_with(logits_to_keep=1)), "passes logits_to_keep"),
        (lambda: gpt2_with(call_with(return_dict=False)), "passes return_dict"),
        (lambda: gpt2_with(call_with(), output_hidden_states=True), "hidden_states"),
        (
            lambda: replace(tensor_models.gpt2(), model=tensor_models.gpt2().model.transformer),
            "BertForMaskedLM",
        ),
    ],
)
def test_what_stages_cannot_do_is_refused_by_name(build: Callable[[], Task], words: str) -> None:
    task = build()
    with pytest.raises(TaskError, match=words):
        check_chain(task, task.model, module_chain(task, task.model))


def test_a_loss_need_not_turn_off_the_cache() -> None:
    task = gpt2_with(call_with())
    assert task.model.config.use_cache
    check_chain(task, task.model, module_chain(task, task.model))


def test_a_mask_that_does_not_arrive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    task, decode = tensor_models.bert(classifies=True), stage_plans._decode

    def blind(value: Any, others: Sequence[Tensor]) -> Any:
        return None if value == {"tensor": 0} else decode(value, others)

    monkeypatch.setattr(stage_plans, "_decode", blind)
    with pytest.raises(TaskError, match="another result"):
        check_chain(task, task.model, module_chain(task, task.model))


def test_blocks_that_return_tuples_are_called_alike() -> None:
    """As in older versions of Transformers."""
    task = tensor_models.llama()
    chain = module_chain(task, task.model)
    tokens = torch.stack(list(task.data[:2]))
    expected = task.model(tokens, use_cache=False).logits
    x = chain[0](tokens)
    for link in chain[1:-1]:
        assert isinstance(link, stage_plans.BlockLink)
        link.block.register_forward_hook(lambda module, inputs, output: (output, None))
        x = link(*x)
    assert torch.equal(chain[-1](*x).logits, expected)
