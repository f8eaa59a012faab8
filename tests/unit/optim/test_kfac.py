"""K-FAC in a plain loop: factors of convolutions, layers that fall back, singular factors, odd parameters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import NumericError, TaskError
from paceline.optim import ByGroup, KFac


def train(model: nn.Module, x: Tensor, steps: int = 1, **options: Any) -> KFac:
    optimizer = KFac(model, **options)
    for _ in range(steps):
        model.zero_grad()
        model(x).square().flatten(1).sum(1).mean().backward()
        optimizer.step()
    return optimizer


def factors_of(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The factors by layer; PyTorch declares the keys of its state to be parameters."""
    state: Any = optimizer.state
    found: dict[str, dict[str, Tensor]] = state["kfac"]
    return found


def conv_factors(conv: Any, x: Tensor, outputs: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Sample by sample and location by location, from the definition of a convolution."""
    a, g = [], []
    strides, dilations = (torch.tensor(pair) for pair in (conv.stride, conv.dilation))
    padded = nn.functional.pad(x, [side for n in reversed(conv.padding) for side in (n, n)])
    for sample, place in product(range(len(x)), product(*map(range, outputs.shape[2:]))):
        corner = torch.tensor(place) * strides
        patch = [
            padded[(sample, channel, *(corner + torch.tensor(offset) * dilations).tolist())]
            for channel in range(x.shape[1])
            for offset in product(*map(range, conv.kernel_size))
        ]
        row = torch.stack([*patch, torch.ones((), dtype=x.dtype)])
        a.append(torch.outer(row, row))
        out = grads[(sample, slice(None), *place)]
        g.append(torch.outer(out, out))
    return torch.stack(a).sum(0) / len(x), torch.stack(g).mean(0)


@pytest.mark.capability("J6")
@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (4, 2, 5, 7)),
        (nn.Conv1d(2, 3, 3, stride=2, padding=2), (4, 2, 9)),
    ],
)
def test_factors_of_convolutions_follow_from_patches(conv: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    conv, x = conv.double(), torch.randn(shape, dtype=torch.float64)
    outputs = conv(x)
    a, g = conv_factors(conv, x, outputs, 2 * outputs)
    optimizer = train(nn.Sequential(conv), x)
    found = factors_of(optimizer)["0"]
    assert torch.allclose(found["a"], a, rtol=1e-12, atol=1e-12)
    assert torch.allclose(found["g"], g, rtol=1e-12, atol=1e-12)


class Odd(nn.Module):
    """Layers of every kind that is no plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.again, self.direct, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.grouped, self.frozen = nn.Conv1d(4, 4, 1, groups=2), nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)
        self.empty, self.wave = nn.Linear(0, 4), nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.again(self.norm(self.plain(x))))
        x = self.second(self.first(nn.functional.linear(x, self.direct.weight, self.direct.bias)))
        x = self.frozen(self.grouped(x[..., None])[..., 0]) + self.empty(x[:, :0])
        return x + self.wave(x + 0j).abs()


@pytest.mark.capability("J6")
def test_other_layers_fall_back_and_the_reasons_are_known() -> None:
    torch.manual_seed(0)
    model = Odd()
    logged: list[str] = []
    optimizer = KFac(model, lr=0.01)
    optimizer._log = logged.append
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads, first = dict[str, Tensor](), dict[str, Tensor]()
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(8, 4)).square().sum(1).mean().backward()
        grads = grads or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        first = first or {name: p.detach().clone() for name, p in model.named_parameters()}
    assert [*factors_of(optimizer)] == ["plain"]
    reasons = optimizer.fallbacks
    assert reasons["norm.weight"] == "no linear or convolution layer"
    assert reasons["first.weight"] == "shared by several layers" and "second.weight" not in reasons
    assert reasons["grouped.weight"] == "a convolution in groups"
    assert reasons["frozen.bias"] == "its weight is not trained"
    assert reasons["empty.weight"] == "empty" and reasons["wave.weight"] == "complex"
    assert reasons["again.weight"] == "runs several times in a forward"
    assert optimizer.not_run == {"direct"}
    assert any("again.weight, again.bias: the layer runs several" in line for line in logged)
    assert any("direct.weight, direct.bias: its forward has not run" in line for line in logged)
    assert "K-FAC for 4 layers (plain, again, direct, unused)" in KFac(Odd()).describe()
    # These move by SGD, and what has had no gradient stays.
    for name in ("norm.weight", "again.weight", "direct.bias", "first.weight", "wave.weight"):
        assert torch.allclose(first[name], before[name] - 0.01 * grads[name], atol=1e-6), name
    assert torch.equal(first["unused.weight"], before["unused.weight"])
    assert not torch.allclose(first["plain.weight"], before["plain.weight"] - 0.01 * grads["plain.weight"])


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 1), lambda: nn.Linear(4, 1).double()])
def test_a_singular_factor_without_damping_is_an_error(make: Callable[[], nn.Module]) -> None:
    """Three samples span three of five directions."""
    x = torch.randn(3, 4, dtype=next(make().parameters()).dtype)
    with pytest.raises(NumericError, match=r"factor A \[5, 5\] of '0' is singular") as error:
        train(nn.Sequential(make()), x, damping=0.0)
    assert "optimizer.damping" in str(error.value)
    optimizer = train(nn.Sequential(make()), x, steps=3, damping=1e-3)
    assert all(torch.isfinite(p).all() for group in optimizer.param_groups for p in group["params"])


def test_zero_gradients_and_a_rate_of_zero_move_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Hardtanh(1e9, 2e9))
    before = model[0].weight.detach().clone()
    train(model, torch.randn(8, 4), steps=2)
    assert torch.equal(model[0].weight, before)
    model = nn.Sequential(nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    optimizer = train(model, torch.randn(8, 4), steps=2, lr=0.0)
    assert torch.equal(model[0].weight, before) and "a_inverse" in factors_of(optimizer)["0"]


def test_options_out_of_range_are_named() -> None:
    for options in (
        {"damping": -1.0},
        {"factor_interval": 0},
        {"inverse_interval": 0},
        {"factor_decay": 1.0},
    ):
        with pytest.raises(TaskError, match="KFac got damping"):
            KFac(nn.Linear(2, 2), **options)


def test_a_group_of_its_own_is_what_it_is_alone() -> None:
    """In `ByGroup`, the layers of other optimizers have no factors."""
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    first, second = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2))
    second.load_state_dict(first.state_dict())
    alone = KFac(first, first[0].parameters(), lr=0.1)
    both = ByGroup(
        KFac(second, second[0].parameters(), lr=0.1), torch.optim.SGD(second[2].parameters(), lr=0.1)
    )
    for model, optimizer in ((first, alone), (second, both)):
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    assert [*factors_of(both)] == ["0"]
    assert torch.equal(first[0].weight, second[0].weight) and not torch.equal(
        first[2].weight, second[2].weight
    )
