"""Weights depend on (seed, parameter name) only."""

import math

import torch
from torch import nn

from paceline.models import GPT, MLP, GPTConfig, fan_in_rule, initialize_by_name, initialize_gpt

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


def test_a_tied_weight_is_set_once_and_stays_tied() -> None:
    model = GPT(SMALL)
    initialize_gpt(model, 1)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
