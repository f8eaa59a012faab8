"""Training state: everything that a run needs to continue, by logical name; what does not fit is named."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.models import MLP
from paceline.optim import UserOptimizer
from paceline.parallel.sharded_model import unsharded_model
from paceline.state.slot import TensorSlot, trained_parameters
from paceline.state.train_state import LossScale, TrainState

X = torch.linspace(-1.0, 1.0, 24).view(4, 6)


class Sample(nn.Module):
    """A tied weight, a frozen layer, statistics, a layer that is never used, and a scratch buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm, self.unused = nn.BatchNorm1d(6), nn.Linear(2, 2)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.frozen(torch.tanh(self.second(torch.tanh(self.first(x))))))


class Counting(UserOptimizer):
    """Its rate falls with the number of updates; it remembers a tensor and a number."""

    def update(self, params, grads, step):
        for p, g in zip(params, grads, strict=True):
            own = self.state[p]
            own["sum"] = own.get("sum", torch.zeros_like(p)) + g
            own["seen"] = own.get("seen", 0) + 1
            p -= self.group["lr"] / (1 + step) * own["sum"] / own["seen"]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda m: torch.optim.Adam(trainable(m), lr=0.05),
    "amsgrad": lambda m: torch.optim.Adam(trainable(m), lr=0.05, amsgrad=True),
    "adamw fused": lambda m: torch.optim.AdamW(trainable(m), lr=0.05, fused=True),
    "sgd": lambda m: torch.optim.SGD(trainable(m), lr=0.05),
    "sgd momentum": lambda m: torch.optim.SGD(trainable(m), lr=0.05, momentum=0.9),
    "rmsprop": lambda m: torch.optim.RMSprop(trainable(m), lr=0.05, momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(trainable(m), lr=0.05),
    "nadam": lambda m: torch.optim.NAdam(trainable(m), lr=0.05),
    "rprop": lambda m: torch.optim.Rprop(trainable(m), lr=0.05),
    "two groups": lambda m: torch.optim.Adam(
        [{"params": [m.norm.weight], "lr": 0.5}, {"params": [m.first.weight, m.first.bias]}], lr=0.05
    ),
    "user": lambda m: Counting(trainable(m), lr=0.05),
}


def make_state(optimizer: str = "adam", seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = Sample()
    return TrainState(unsharded_model(model), OPTIMIZERS[optimizer](model), LossScale(1024.0, 4))


def train(state: TrainState, steps: int) -> TrainState:
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.model(X).square().sum().backward()
        state.optimizer.step()
        state.step, state.num_updates = state.step + 1, state.num_updates + 1
        state.scale.update(overflow=state.step == 3)
    return state


def snapshot(state: TrainState) -> tuple[dict[str, Tensor], dict]:
    return {name: t.clone() for name, t in state.tensors().items()}, copy.deepcopy(state.scalars())


def assert_equal_states(a: TrainState, b: TrainState) -> None:
    assert a.scalars() == b.scalars()
    assert a.tensors().keys() == b.tensors().keys()
    for name, value in a.tensors().items():
        assert torch.equal(value, b.tensors()[name]), name


@pytest.mark.capability("N1")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_is_saved_and_loaded_goes_on_to_the_same_bits(optimizer: str) -> None:
    straight = train(make_state(optimizer), 5)
    tensors, scalars = snapshot(straight)
    resumed = make_state(optimizer, seed=99)
    resumed.load(tensors, scalars)
    assert_equal_states(straight, resumed)
    assert_equal_states(train(straight, 4), train(resumed, 4))
    assert resumed.step == 9
    assert resumed.scale == straight.scale


@pytest.mark.capability("N1")
def test_what_was_loaded_is_a_copy() -> None:
    tensors, scalars = snapshot(train(make_state(), 2))
    kept = {name: t.clone() for name, t in tensors.items()}
    resumed = make_state()
    resumed.load(tensors, scalars)
    train(resumed, 2)
    assert all(torch.equal(t, kept[name]) for name, t in tensors.items())


@pytest.mark.capability("N1")
def test_loading_an_early_state_forgets_what_the_optimizer_learned_since() -> None:
    """A checkpoint of step 0 has no moments; those of a later step must not survive it."""
    state = make_state("sgd momentum")
    tensors, scalars = snapshot(state)
    train(state, 3).load(tensors, scalars)
    assert_equal_states(train(state, 3), train(make_state("sgd momentum"), 3))


def test_names_tied_weights_once_and_no_scratch() -> None:
    names = train(make_state(), 1).tensors().keys()
    assert {n for n in names if "first" in n or "second" in n} == {
        f"{prefix}{suffix}"
        for prefix in (
            "model/first.weight",
            "model/first.bias",
            "optimizer/first.weight/",
            "optimizer/first.bias/",
        )
        for suffix in (("exp_avg", "exp_avg_sq", "step") if prefix.endswith("/") else ("",))
    }
    assert {"model/frozen.weight", "model/norm.running_var", "model/norm.num_batches_tracked"} <= names
    assert not [n for n in names if "scratch" in n or "optimizer/frozen" in n or "optimizer/unused" in n]


def test_tensors_are_those_of_the_model_and_not_copies() -> None:
    state = make_state()
    state.tensors()["model/norm.weight"].zero_()
    assert state.model.norm.weight.tolist() == [0.0] * 6


def test_empty_parameters_are_not_taken_for_tied_ones() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(0)), "b": nn.Parameter(torch.zeros(0))})
    state = TrainState(unsharded_model(model), torch.optim.SGD(model.parameters(), lr=0.1))
    assert set(state.tensors()) == {"model/a", "model/b"}


def test_a_module_with_extra_state_is_saved_or_refused_by_name() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    model = Extra(2, 2)
    state = TrainState(unsharded_model(model), torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        state.load(*snapshot(state))
    except CheckpointError as error:
        assert "_extra_state" in str(error)
    else:
        assert model.calls == 3


@pytest.mark.capability("N1")
@pytest.mark.parametrize(
    "name, value",
    [
        pytest.param("model/frozen.weight", None, id="missing"),
        pytest.param("model/frozen.weight", torch.zeros(6, 5), id="other shape"),
        pytest.param("model/stranger", torch.zeros(1), id="unknown"),
        pytest.param("optimizer/first.bias/exp_avg", torch.zeros(5), id="optimizer, other shape"),
        pytest.param("optimizer/stranger/exp_avg", torch.zeros(6), id="optimizer, unknown parameter"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_changed(name: str, value: Tensor | None) -> None:
    tensors, scalars = snapshot(train(make_state(), 2))
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    state = make_state(seed=5)
    before = snapshot(state)
    with pytest.raises(CheckpointError, match=name.split("/")[1]) as caught:
        state.load(tensors, scalars)
    assert "resume with the recipe" in caught.value.next_step
    found = snapshot(state)
    assert found[1] == before[1]
    assert all(torch.equal(t, before[0][n]) for n, t in found[0].items())


@pytest.mark.capability("N1")
def test_moments_of_another_optimizer_are_refused() -> None:
    """Adam's moments mean nothing to SGD with momentum, which would silently start from zero."""
    tensors, scalars = snapshot(train(make_state("adam"), 2))
    with pytest.raises(CheckpointError, match=r"first|Adam"):
        make_state("sgd momentum").load(tensors, scalars)


@pytest.mark.gpu
@pytest.mark.capability("N1")
def test_a_fused_optimizer_goes_on_on_a_gpu() -> None:
    def make(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = MLP(6, [8], 2).cuda()
        return TrainState(unsharded_model(model), torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))

    def step(state: TrainState) -> None:
        state.optimizer.zero_grad()
        state.model(X.cuda()).square().sum().backward()
        state.optimizer.step()

    first, second = make(0), make(1)
    step(first)
    tensors, scalars = snapshot(first)
    second.load({name: t.cpu() for name, t in tensors.items()}, scalars)
    step(second)
    step(first)
    assert_equal_states(first, second)


def test_slots_are_the_trained_parameters_in_the_order_of_the_model() -> None:
    slots = trained_parameters(Sample())
    assert [s.name for s in slots] == [
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "unused.weight",
        "unused.bias",
    ]
    assert next(iter(slots)) == TensorSlot("first.weight", (6, 6), ((0, 6), (0, 6)), frozenset())


@pytest.mark.capability("K1")
def test_an_overflow_halves_and_starts_the_count_anew() -> None:
    scale = LossScale(1024.0, growth_steps=3)
    for overflow in (False, False, True, False, False):
        scale.update(overflow)
    assert (scale.value, scale.clean_steps) == (512.0, 2)
    scale.update(overflow=False)
    assert (scale.value, scale.clean_steps) == (1024.0, 0)


@pytest.mark.capability("K1")
def test_it_doubles_once_in_every_growth_period() -> None:
    scale = LossScale(1.0, growth_steps=5)
    values = []
    for _ in range(15):
        scale.update(overflow=False)
        values.append(scale.value)
    assert values == [1.0] * 4 + [2.0] * 5 + [4.0] * 5 + [8.0]


@pytest.mark.capability("K1")
def test_it_finds_the_largest_scale_that_does_not_overflow() -> None:
    scale = LossScale(2.0**20, growth_steps=10)
    values = []
    for _ in range(200):
        values.append(scale.value)
        scale.update(overflow=scale.value > 4096.0)
    assert set(values[10:]) == {4096.0, 8192.0}
    assert values[10:].count(8192.0) < 20


@pytest.mark.capability("K1")
def test_without_growth_steps_it_is_constant() -> None:
    scale = LossScale()
    for overflow in (True, False, True):
        scale.update(overflow)
    assert scale == LossScale(1.0, 0, 0)
    assert not scale.dynamic
