"""Optimizers by name against the formulas in float64, groups, decay, frozen parameters and fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.optim import build_optimizer, fused_is_supported
from paceline.recipe import OptimizerRecipe

NUM_STEPS = 100


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(2)
    while True:
        yield torch.randn(8, 6, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3].sin()).square().mean()


def build(model: nn.Module, **fields: object) -> torch.optim.Optimizer:
    return build_optimizer(model, OptimizerRecipe(**fields), fused_allowed=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, penalty: float = 0.0) -> dict[str, Tensor]:
    for _, x in zip(range(NUM_STEPS), batches(), strict=False):
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in model.parameters() if p.dim() >= 2)
        (loss_of(model, x) + 0.5 * penalty * squares).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


Rule = Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]


def train_by_formula(rule: Rule) -> dict[str, Tensor]:
    """The oracle: `rule(value, grad, memory, t)` gives the new value, t = 1, 2, ..."""
    model, memory = make_model(), {name: {} for name, _ in make_model().named_parameters()}
    for t, x in zip(range(1, NUM_STEPS + 1), batches(), strict=False):
        names, parameters = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss_of(model, x), parameters)
        with torch.no_grad():
            for name, parameter, grad in zip(names, parameters, grads, strict=True):
                parameter.copy_(rule(parameter.clone(), grad, memory[name], t))
    return {name: p.detach() for name, p in model.named_parameters()}


def largest_gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def sgd(value: Tensor, grad: Tensor, memory: dict[str, Tensor], t: int) -> Tensor:
    memory["v"] = 0.9 * memory.get("v", 0.0) + grad
    return value - 0.05 * memory["v"]


def adam_step(grad: Tensor, memory: dict[str, Tensor], t: int) -> Tensor:
    memory["m"] = 0.9 * memory.get("m", 0.0) + 0.1 * grad
    memory["v"] = 0.999 * memory.get("v", 0.0) + 0.001 * grad.square()
    return memory["m"] / (1 - 0.9**t) / ((memory["v"] / (1 - 0.999**t)).sqrt() + 1e-8)


def adam(value: Tensor, grad: Tensor, memory: dict[str, Tensor], t: int) -> Tensor:
    return value - 0.01 * adam_step(grad, memory, t)


def adamw(value: Tensor, grad: Tensor, memory: dict[str, Tensor], t: int) -> Tensor:
    decay = 0.1 if value.dim() >= 2 else 0.0
    return value - 0.01 * (adam_step(grad, memory, t) + decay * value)


def rmsprop(value: Tensor, grad: Tensor, memory: dict[str, Tensor], t: int) -> Tensor:
    memory["v"] = 0.99 * memory.get("v", 0.0) + 0.01 * grad.square()
    return value - 0.01 * grad / (memory["v"].sqrt() + 1e-8)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        pytest.param(
            sgd, {"name": "sgd", "lr": 0.05, "momentum": 0.9}, marks=pytest.mark.capability("J1"), id="sgd"
        ),
        pytest.param(adam, {"name": "adam", "lr": 0.01}, marks=pytest.mark.capability("J2"), id="adam"),
        pytest.param(
            adamw,
            {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
            marks=pytest.mark.capability("J2", "J9"),
            id="adamw",
        ),
        pytest.param(
            rmsprop, {"name": "rmsprop", "lr": 0.01}, marks=pytest.mark.capability("J3"), id="rmsprop"
        ),
    ],
)
def test_a_hundred_updates_equal_the_formula(rule: Rule, fields: dict[str, object], fused: bool) -> None:
    model = make_model()
    found = train(model, build(model, fused=fused, **fields))
    assert largest_gap(found, train_by_formula(rule)) <= 1e-7


@pytest.mark.capability("J1", "J2", "J3")
@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        (torch.optim.SGD, "sgd", {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, "adam", {"betas": (0.8, 0.95), "eps": 1e-6}),
        (torch.optim.AdamW, "adamw", {"betas": (0.8, 0.95), "weight_decay": 0.0}),
        (torch.optim.RMSprop, "rmsprop", {"alpha": 0.9, "momentum": 0.5, "eps": 1e-6}),
    ],
)
def test_every_option_reaches_torch(
    kind: type[torch.optim.Optimizer], name: str, options: dict[str, object]
) -> None:
    model, twin = make_model(), make_model()
    found = train(model, build(model, name=name, lr=0.01, **options))
    plain = train(twin, build(twin, name=name, lr=0.01))
    peer = make_model()
    assert largest_gap(found, train(peer, kind(peer.parameters(), lr=0.01, **options))) <= 1e-7
    assert largest_gap(found, plain) > 1e-3


PEERS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "sgd with decay": ("SGD", {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9}),
    "adadelta": (
        "Adadelta",
        {"name": "adadelta", "rho": 0.8, "eps": 1e-5, "l2": 0.1},
        {"rho": 0.8, "eps": 1e-5},
    ),
    "adagrad": ("Adagrad", {"name": "adagrad", "eps": 1e-6, "l2": 0.1}, {"eps": 1e-6}),
    "adamax": ("Adamax", {"name": "adamax", "betas": (0.8, 0.9), "l2": 0.1}, {"betas": (0.8, 0.9)}),
    "asgd": ("ASGD", {"name": "asgd", "lambd": 0.01, "alpha": 0.5, "l2": 0.1}, {"lambd": 0.01, "alpha": 0.5}),
    "nadam": ("NAdam", {"name": "nadam", "momentum_decay": 0.1, "l2": 0.1}, {"momentum_decay": 0.1}),
    "nadam, decoupled": ("NAdam", {"name": "nadam", "weight_decay": 0.1}, {"decoupled_weight_decay": True}),
    "radam": ("RAdam", {"name": "radam", "betas": (0.8, 0.9), "l2": 0.1}, {"betas": (0.8, 0.9)}),
    "radam, decoupled": ("RAdam", {"name": "radam", "weight_decay": 0.1}, {"decoupled_weight_decay": True}),
    "rprop": (
        "Rprop",
        {"name": "rprop", "etas": (0.4, 1.5), "step_sizes": (1e-4, 1.0)},
        {"etas": (0.4, 1.5), "step_sizes": (1e-4, 1.0)},
    ),
    "adafactor": (
        "Adafactor",
        {"name": "adafactor", "beta2_decay": -0.5, "d": 2.0, "weight_decay": 0.1},
        {"beta2_decay": -0.5, "d": 2.0},
    ),
}


@pytest.mark.parametrize("case", PEERS)
def test_an_optimizer_by_name_has_the_bits_of_torch(case: str) -> None:
    """With all options of the recipe, and with PyTorch's defaults where it sets none."""
    kind, fields, options = PEERS[case]
    decay = {"weight_decay": 0.1} if {"l2", "weight_decay"} & fields.keys() else {}
    everywhere = {"decay_on": "all"} if decay else {}
    make = getattr(torch.optim, kind)
    for ours, theirs in ((fields | everywhere, options | decay), ({"name": fields["name"]}, {})):
        model, peer = make_model(), make_model()
        found = train(model, build(model, fused=False, **ours))
        expected = train(peer, make(peer.parameters(), **theirs))
        assert all(torch.equal(found[name], expected[name]) for name in found), case


@pytest.mark.parametrize("name", ["sgd", "adagrad", "nadam", "radam", "adafactor"])
def test_weight_decay_is_that_of_matrices_unless_all_are_asked_for(name: str) -> None:
    key = "l2" if name == "adagrad" else "weight_decay"
    rates = [group["weight_decay"] for group in build(make_model(), **{"name": name, key: 0.1}).param_groups]
    assert rates == [0.1, 0.0]


def test_muon_updates_hidden_matrices_and_adamw_the_rest() -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        head = nn.Linear(6, 9, bias=False)
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Conv1d(6, 6, 1), nn.Linear(6, 4), head)
        head.weight = model[0].weight  # tied to an embedding, so it is one
        return model

    def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(4)
        for _ in range(4):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            for optimizer in optimizers:
                optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    ours, model = make(), make()
    fields = {"name": "muon", "lr": 0.01, "weight_decay": 0.1, "adamw_on": ["3.*"], "momentum": 0.9}
    found = step(ours, build(ours, **fields, betas=(0.8, 0.9), adjust_lr_fn="original"))
    hidden = [model[1].weight]
    adamw = torch.optim.AdamW(
        [
            {"params": [model[0].weight, model[2].weight, model[3].weight], "weight_decay": 0.1},
            {"params": [model[1].bias, model[2].bias, model[3].bias], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.8, 0.9),
    )
    muon = torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, momentum=0.9)
    expected = step(model, muon, adamw)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    default = build(ours, name="muon").param_groups[0]
    assert (default["momentum"], default["nesterov"], default["adjust_lr_fn"]) == (
        0.95,
        True,
        "match_rms_adamw",
    )
    with pytest.raises(TaskError, match=r"'haed' in optimizer\.adamw_on matches no parameter"):
        build(ours, name="muon", adamw_on=["haed"])


@pytest.mark.capability("J8")
@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_l2_equals_a_penalty_in_the_loss(name: str) -> None:
    by_option, by_loss, without = make_model(), make_model(), make_model()
    found = train(by_option, build(by_option, name=name, lr=0.01, l2=0.1))
    expected = train(by_loss, build(by_loss, name=name, lr=0.01), penalty=0.1)
    assert largest_gap(found, expected) <= 1e-7
    assert largest_gap(found, train(without, build(without, name=name, lr=0.01))) > 1e-3


@pytest.mark.capability("J9")
def test_groups_are_by_dimension_not_by_name() -> None:
    model = nn.ParameterDict({"bias": torch.zeros(2, 2), "norm": torch.zeros(2, 2, 2), "w": torch.zeros(3)})
    optimizer = build(model, weight_decay=0.1)
    assert [(g["weight_decay"], g["param_names"]) for g in optimizer.param_groups] == [
        (0.1, ["bias", "norm"]),
        (0.0, ["w"]),
    ]
    everything = build(model, weight_decay=0.1, decay_on="all")
    assert [(g["weight_decay"], g["param_names"]) for g in everything.param_groups] == [
        (0.1, ["bias", "norm", "w"])
    ]


def test_frozen_parameters_are_in_no_group_and_a_frozen_model_is_an_error() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    names = [name for group in build(model).param_groups for name in group["param_names"]]
    assert names == ["3.weight", "2.weight", "2.bias", "3.bias"]
    with pytest.raises(TaskError, match="no parameter that requires a gradient"):
        build(model.requires_grad_(False))


def test_tied_weights_are_updated_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert sum(len(group["params"]) for group in build(model).param_groups) == 3


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_fused_is_used_when_asked_allowed_and_supported(name: str) -> None:
    model = make_model()
    assert build(model, name=name).param_groups[0]["fused"] is True
    assert build(model, name=name, fused=False).param_groups[0]["fused"] is False
    not_allowed = build_optimizer(model, OptimizerRecipe(name=name), fused_allowed=False)
    assert not_allowed.param_groups[0]["fused"] is False
    assert not fused_is_supported(name, make_model().to("meta").named_parameters())


@pytest.mark.capability("J1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "fields", [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}]
)
def test_sgd_is_the_formula_in_every_type(dtype: torch.dtype, fields: dict[str, float]) -> None:
    """The fused kernel of PyTorch is 0.1 off in half types from 16 values on."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = (
        torch.randn(65, generator=generator, dtype=torch.float64).to(dtype) / 4 for _ in range(5)
    )
    p = nn.Parameter(start.clone())
    recipe = OptimizerRecipe(name="sgd", lr=0.1, **fields)
    optimizer = build_optimizer(nn.ParameterList([p]), recipe, fused_allowed=True)
    right, memory = start.double(), torch.zeros(65, dtype=torch.float64)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        memory = fields["momentum"] * memory + grad.double()
        right -= 0.1 * (grad.double() + 0.9 * memory if fields.get("nesterov") else memory)
    assert (p.detach().double() - right).abs().max() <= 8 * torch.finfo(dtype).eps


@pytest.mark.capability("J1")
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop"])
def test_a_gradient_that_comes_late_is_trained_as_without_fused_kernels(name: str) -> None:
    """The second parameter has none in the first three steps, the third never has one."""
    ends = []
    for fused_allowed in (True, False):
        early, late, never = (nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(3))
        fields = {"momentum": 0.9} if name in ("sgd", "rmsprop") else {}
        model = nn.ParameterList([early, late, never])
        recipe = OptimizerRecipe(name=name, lr=0.1, **fields)
        optimizer = build_optimizer(model, recipe, fused_allowed=fused_allowed)
        for step in range(6):
            early.grad = torch.linspace(0, step + 1, 40)
            late.grad = torch.linspace(-1, 2, 40) if step >= 3 else None
            optimizer.step()
        assert torch.equal(never, torch.linspace(-1, 1, 40))
        ends.append((early, late))
    for fused, plain in zip(*ends, strict=True):
        assert torch.allclose(fused, plain, rtol=0, atol=1e-6)


@pytest.mark.capability("A2")
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_fused_kernels_are_left_alone_where_parameters_are_not_contiguous(name: str) -> None:
    """They pair values by their place in memory: a gradient of the usual order would go elsewhere."""
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    matrix = nn.Parameter(torch.zeros(4, 3).t())
    assert not fused_is_supported(name, conv.named_parameters())
    assert not fused_is_supported(name, [("matrix", matrix)])
    assert fused_is_supported(name, nn.Conv2d(3, 4, 3).named_parameters())
