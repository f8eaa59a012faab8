"""Weights depend on (seed, parameter name) only."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.errors import TaskError
from paceline.models import (
    GPT,
    MLP,
    GPTConfig,
    InitializeByName,
    fan_in_rule,
    initialize_by_name,
    initialize_gpt,
    without_memory,
)

SMALL = GPTConfig(vocab=64, context=16, layers=2, heads=2, width=32)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_constructor_and_the_global_stream_do_not_matter() -> None:
    found = []
    for stream in (1, 2):
        torch.manual_seed(stream)
        model = GPT(SMALL)
        initialize_gpt(model, 7)
        found.append(weights(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_another_seed_gives_other_weights() -> None:
    model = MLP(4, (8,), 2)
    initialize_by_name(model, 1, fan_in_rule)
    first = weights(model)
    initialize_by_name(model, 2, fan_in_rule)
    assert not torch.equal(first["layers.0.weight"], model.layers[0].weight)


def test_a_further_layer_changes_no_other() -> None:
    short, deep = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    initialize_by_name(short, 3, fan_in_rule)
    initialize_by_name(deep, 3, fan_in_rule)
    assert torch.equal(short[0].weight, deep[0].weight)
    assert not torch.equal(deep[0].weight, deep[1].weight)  # the name is part of the key


def test_fan_in_rule_has_the_deviation_of_he_and_leaves_norms() -> None:
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64))
    initialize_by_name(model, 3, fan_in_rule)
    deviation = math.sqrt(2 / (16 * 9))
    assert abs(model[0].weight.std().item() / deviation - 1) < 0.05
    assert torch.all(model[0].bias == 0)
    assert torch.all(model[1].weight == 1)


def test_gpt_branches_are_scaled_by_depth() -> None:
    model = GPT(GPTConfig(width=128, layers=8, heads=4))
    initialize_gpt(model, 1)
    assert abs(model.embed.weight.std().item() / 0.02 - 1) < 0.05
    assert abs(model.blocks[3].feed_forward.project.weight.std().item() / (0.02 / 4) - 1) < 0.05


def normal_rule(model: nn.Module) -> Callable[[str, torch.Tensor, torch.Generator], object]:
    def rule(name: str, values: torch.Tensor, generator: torch.Generator) -> None:
        values.normal_(generator=generator)

    return rule


def light(*shape: int) -> nn.Module:
    """One parameter without memory."""
    model = nn.Module()
    with without_memory():
        model.p = nn.Parameter(torch.zeros(shape))
    assert model.p.is_meta
    return model


SHAPES = [(128, 40), (5000,), (1200, 1000), (7, 300_000), (3, 700_000), (2**20 + 5,), (1025, 4, 256)]


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_those_of_the_whole(shape: tuple[int, ...]) -> None:
    """Also above 2**20 values, which are made by blocks of rows, and in parts that begin inside one."""
    initialize = InitializeByName(normal_rule)
    whole = nn.Module()
    whole.p = nn.Parameter(torch.zeros(shape))
    initialize(whole, 5)
    rows = shape[0]
    for start, stop in ((0, rows), (0, 1), (rows // 3, rows // 2 + 1), (rows - 1, rows), (1, rows - 1)):
        spans = (slice(start, stop), *(slice(n // 3, n) for n in shape[1:]))
        for model in (light(*shape), whole):
            part = initialize.part(model, 5, "p", spans)
            assert torch.equal(part, whole.p.detach()[spans])
            assert part.untyped_storage().nbytes() == part.numel() * 4  # and it keeps no other memory
    lines = whole.p.detach().flatten(1) if len(shape) > 1 else whole.p.detach().view(-1, 1)
    assert abs(lines.mean().item()) < 0.05 and abs(lines.std().item() - 1) < 0.05
    assert len(set(lines[:, 0].tolist())) > 0.99 * rows, "no block repeats another"


def test_a_scalar_is_a_part_of_itself() -> None:
    model = nn.Module()
    model.p = nn.Parameter(torch.tensor(0.0))
    initialize = InitializeByName(normal_rule)
    part = initialize.part(model, 5, "p", ())
    initialize(model, 5)
    assert torch.equal(part, model.p.detach()) and part != 0


def test_all_at_once_gives_memory_to_what_has_none() -> None:
    with without_memory():
        model = GPT(GPTConfig(vocab=256, context=16, layers=2, heads=2, width=64))
    assert model.embed.weight.is_meta
    initialize_gpt(model, 3)
    assert not any(p.is_meta for p in model.parameters())
    right = GPT(model.config)
    initialize_gpt(right, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), right.parameters(), strict=True))
    assert model.head.weight is model.embed.weight


def test_what_a_rule_leaves_unset_has_no_value_to_fall_back_on() -> None:
    """With memory the constructor's stays; without it nothing is there, which is an error and not noise."""
    forgetful = InitializeByName(lambda model: lambda name, values, generator: None)
    model = light(100, 100)
    with pytest.raises(TaskError, match="does not set 'p', and the model was built on the meta device"):
        forgetful.part(model, 1, "p", (slice(0, 10), slice(0, 100)))
    with pytest.raises(TaskError, match="does not set 'p', and the model was built on the meta device"):
        forgetful(model, 1)
    half = InitializeByName(lambda model: lambda name, values, generator: values[:, :50].zero_())
    with pytest.raises(TaskError, match="does not set 'p'"):
        half.part(model, 1, "p", (slice(0, 10), slice(0, 50)))
    eager = nn.Linear(100, 100)
    kept = eager.weight.detach().clone()
    forgetful(eager, 1)
    assert torch.equal(eager.weight, kept)


def test_without_memory_large_parameters_have_a_shape_only() -> None:
    with without_memory():
        model = nn.ModuleDict(
            {
                "large": nn.Linear(64, 65),
                "even": nn.Linear(64, 64),
                "norm": nn.BatchNorm1d(5000),
                "frozen": nn.Embedding(100, 50),
            }
        )
        model["frozen"].weight.requires_grad_(False)
        model["frozen"].bias = nn.Parameter(torch.zeros(5000), requires_grad=False)
    found = {name: p.is_meta for name, p in model.named_parameters()}
    assert found == {
        "large.weight": True,
        "large.bias": False,
        "even.weight": False,  # 4,096 values
        "even.bias": False,
        "norm.weight": True,
        "norm.bias": True,
        "frozen.weight": True,
        "frozen.bias": True,
    }
    assert model["large"].weight.shape == (65, 64)
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert not model["frozen"].weight.requires_grad and not model["frozen"].bias.requires_grad
    assert not nn.Linear(200, 200).weight.is_meta  # outside all is as usual


def test_without_memory_tied_weights_stay_tied() -> None:
    with without_memory():
        model = GPT(GPTConfig(vocab=256, context=16, layers=2, heads=2, width=64))
    assert model.head.weight is model.embed.weight and model.embed.weight.is_meta
    assert "head.weight" not in dict(model.named_parameters())


def test_an_error_inside_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match="no"), without_memory():
        raise ValueError("no")
    assert not nn.Linear(200, 200).weight.is_meta
