"""MLP and ConvNet: shapes, switches and batch statistics."""

import pytest
import torch
from torch import nn

from paceline.models import MLP, ConvNet, set_micro_batch_key


def test_mlp_is_linear_layers_with_activations_between() -> None:
    model = MLP(64, (128, 32), 10)
    assert [p.shape for p in model.parameters() if p.dim() == 2] == [(128, 64), (32, 128), (10, 32)]
    first, _, _, second, _, _, last = model.layers
    x = torch.randn(5, 64)
    assert torch.equal(model(x), last(second(first(x).relu()).relu()))


@pytest.mark.parametrize(("activation", "kind"), [("relu", nn.ReLU), ("tanh", nn.Tanh)])
def test_mlp_activation(activation: str, kind: type[nn.Module]) -> None:
    assert sum(isinstance(m, kind) for m in MLP(2, (3, 3), 1, activation=activation).modules()) == 2


def test_mlp_without_hidden_layers_is_linear() -> None:
    assert [type(m) for m in MLP(3, (), 2).layers] == [nn.Linear]


def test_convnet_has_batch_statistics_and_dropout_in_training_only() -> None:
    model = ConvNet(4, dropout=0.5)
    set_micro_batch_key(model, 1)
    x = torch.rand(6, 64)
    assert model(x).shape == (6, 10)
    assert model.features[1].num_batches_tracked == 1
    model.eval()
    assert torch.allclose(model(x)[:2], model(x[:2]), atol=1e-5)  # samples do not meet in evaluation
    assert model.features[1].num_batches_tracked == 1
    model.train()
    assert not torch.allclose(model(x)[:2], model(x[:2]), atol=1e-5)
