"""KeyedDropout: the mask is a function of (key, module name), so recomputation and clones agree."""

import copy
import math
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import TaskError
from paceline.models import MLP, KeyedDropout, name_dropouts, set_micro_batch_key
from paceline.parallel.rng_state import seed_micro_batch


def mask(module: KeyedDropout, shape: tuple[int, ...] = (64, 64)) -> torch.Tensor:
    return module(torch.ones(shape)) != 0


def named(name: str, micro_batch_key: int = 5, p: float = 0.5) -> KeyedDropout:
    module = KeyedDropout(p)
    module.name, module.micro_batch_key = name, micro_batch_key
    return module


@pytest.mark.capability("J10")
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_keep_rate_is_within_three_sigma_and_the_mean_is_kept(p: float) -> None:
    n = 200_000
    out = named("x", p=p)(torch.ones(n))
    kept = (out != 0).sum().item()
    assert abs(kept - n * (1 - p)) < 3 * math.sqrt(n * p * (1 - p))
    assert torch.all((out == 0) | torch.isclose(out, torch.tensor(1 / (1 - p))))


@pytest.mark.capability("J10")
def test_masks_differ_by_micro_batch_and_by_name_and_repeat_for_the_same() -> None:
    assert torch.equal(mask(named("a", 1)), mask(named("a", 1)))
    for other in (mask(named("a", 2)), mask(named("b", 1))):
        agreement = (mask(named("a", 1)) == other).float().mean().item()
        assert abs(agreement - 0.5) < 3 * math.sqrt(0.25 / other.numel())  # independent, not just unequal


def test_no_shared_generator_is_read_or_moved() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = mask(named("a"))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(mask(named("a")), first)


@pytest.mark.capability("J10")
def test_recomputation_gives_the_same_gradients_without_a_saved_random_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), KeyedDropout(0.5), nn.Linear(8, 1))
    x = torch.randn(16, 8)
    set_micro_batch_key(model, 9)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    total = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).sum()
    torch.manual_seed(77)
    again = torch.autograd.grad(total, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_stream_in_its_place_would_fail_that() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    x = torch.randn(16, 8)
    torch.manual_seed(1)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    torch.manual_seed(1)
    total = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).sum()
    torch.manual_seed(77)
    again = torch.autograd.grad(total, list(model.parameters()))
    assert not all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_clones_on_threads_draw_what_one_model_draws_in_turn() -> None:
    model = MLP(8, (32, 32), 4, dropout=0.5)
    x = torch.randn(16, 8)
    expected = []
    for micro_batch_key in (1, 2):
        set_micro_batch_key(model, micro_batch_key)
        expected.append(model(x))
    clones = [copy.deepcopy(model) for _ in range(2)]
    found: dict[int, torch.Tensor] = {}

    def run(lane: int) -> None:
        set_micro_batch_key(clones[lane], lane + 1)
        found[lane] = clones[lane](x)

    threads = [threading.Thread(target=run, args=(lane,)) for lane in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[0], found[1])


def test_names_are_those_of_the_whole_model() -> None:
    model = nn.ModuleDict({"left": MLP(2, (4,), 2, dropout=0.5), "right": MLP(2, (4,), 2, dropout=0.5)})
    set_micro_batch_key(model["left"], 1)  # named from there: "layers.2"
    assert [d.name for d in name_dropouts(model)] == ["left.layers.2", "right.layers.2"]
    set_micro_batch_key(model, 3)
    assert [d.name for d in name_dropouts(model)] == ["left.layers.2", "right.layers.2"]
    assert {d.micro_batch_key for d in name_dropouts(model)} == {3}


def test_identity_in_evaluation_and_for_zero() -> None:
    x = torch.randn(4, 4)
    assert KeyedDropout(0.5).eval()(x) is x
    assert KeyedDropout(0.0)(x) is x


def test_a_missing_key_and_an_impossible_rate_are_errors() -> None:
    with pytest.raises(TaskError, match="no micro-batch key"):
        KeyedDropout(0.5)(torch.ones(2))
    with pytest.raises(TaskError, match="probability"):
        KeyedDropout(1.0)


def test_a_module_that_begins_to_drop_inside_a_micro_batch_has_its_key() -> None:
    model = nn.Sequential(KeyedDropout(0.0))
    dropouts = name_dropouts(model)
    seed_micro_batch(7, None, dropouts)
    dropouts[0].p = 0.5
    expected = KeyedDropout(0.5)
    expected.name, expected.micro_batch_key = "0", 7
    assert torch.equal(mask(dropouts[0]), mask(expected))


def test_gradients_flow_through_what_is_kept() -> None:
    x = torch.ones(1000, requires_grad=True)
    out = named("a", p=0.25)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_a_compiled_model_draws_the_same_and_is_not_compiled_again_for_every_micro_batch() -> None:
    num_graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    model = MLP(8, (16,), 4, dropout=0.5)
    compiled = torch.compile(model, backend=count)
    x = torch.randn(6, 8)
    for micro_batch_key in range(12):
        set_micro_batch_key(model, micro_batch_key)
        assert torch.equal(compiled(x), model(x))
        if micro_batch_key == 0:
            num_graphs_at_first = num_graphs
    assert num_graphs == num_graphs_at_first > 0
