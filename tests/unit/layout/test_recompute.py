"""Recomputation: the same bits with less memory, with dropout of either kind, under the same names."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.parallel.recompute import recompute_blocks
from tests.unit.layout.stacks import DROPOUTS, NUM_BLOCKS, WIDTH, Stack, gradients, pair


@pytest.mark.capability("L1")
@pytest.mark.parametrize("how", ["blocks", "segments"])
@pytest.mark.parametrize("kind", DROPOUTS)
def test_gradients_have_the_same_bits(kind: str, how: str) -> None:
    plain, lean = pair(kind, how)
    x = torch.randn(16, WIDTH)
    for expected, found in zip(gradients(plain, x)[0], gradients(lean, x)[0], strict=True):
        assert torch.equal(expected, found)


@pytest.mark.capability("L1")
def test_the_comparison_sees_a_mask_that_was_drawn_anew() -> None:
    plain, _ = pair("torch")
    lean = copy.deepcopy(plain)
    for block in lean.blocks:
        block.forward = _forgetful(block.forward)
    x = torch.randn(16, WIDTH)
    pairs = zip(gradients(plain, x)[0], gradients(lean, x)[0], strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


class Codebook(nn.Module):
    """Reads a buffer, then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.ones(WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        found = torch.tanh(self.linear(x) * self.centre.clone() * self.mask)
        with torch.no_grad():
            self.centre.lerp_(found.mean(0), 0.5)
        return found * scale


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return torch.relu(self.norm(self.linear(x))) * scale


def changing() -> Stack:
    model = Stack(nn.Identity)
    torch.manual_seed(3)
    model.blocks = nn.ModuleList([Normed(), Codebook(), Normed(), Codebook()])
    return model


def after_two_steps(model: nn.Module) -> list[Tensor]:
    """Gradients and buffers; the second graph is walked twice."""
    torch.manual_seed(4)
    for twice in (False, True):
        loss = model(torch.randn(16, WIDTH)).square().sum()
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
    return [*(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.capability("L1")
@pytest.mark.parametrize("how", ["blocks", "segments"])
def test_buffers_that_a_block_changes_are_changed_once_and_read_as_they_were(how: str) -> None:
    plain = changing()
    lean = copy.deepcopy(plain)
    assert recompute_blocks(lean, None, how) == 4
    right, found = after_two_steps(plain), after_two_steps(lean)
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))


def test_the_comparison_sees_buffers_that_change_again_in_backward() -> None:
    plain = changing()
    lean = copy.deepcopy(plain)
    for block in lean.blocks:
        block.forward = _forgetful(block.forward)
    pairs = [torch.equal(a, b) for a, b in zip(after_two_steps(plain), after_two_steps(lean), strict=True)]
    assert not all(pairs[: len(list(plain.parameters()))]), "gradients"
    assert not all(pairs[-len(list(plain.buffers())) :]), "buffers"


def _forgetful(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Tensor, **kwargs: float) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )

    return run


@pytest.mark.capability("L1")
def test_only_the_inputs_of_the_blocks_are_kept() -> None:
    plain, lean = pair("keyed")
    x = torch.randn(64, WIDTH)
    _, all_bytes = gradients(plain, x)
    _, few_bytes = gradients(lean, x)
    one_input = x.numel() * x.element_size()
    assert all_bytes > NUM_BLOCKS * 8 * one_input  # in each block: the wide layer twice, at four widths
    assert few_bytes <= (NUM_BLOCKS + 3) * one_input  # besides: the input of the head and its result


@pytest.mark.capability("L1")
@pytest.mark.parametrize(("how", "calls"), [("blocks", [2] * 6), ("segments", [3, 3, 2, 3, 3, 2])])
def test_a_block_runs_again_in_training_and_once_in_evaluation(how: str, calls: list[int]) -> None:
    """Of a segment of three the first two run to find the input of the third, and all for their backward."""
    _, lean = pair("none", how)
    gradients(lean, torch.randn(4, WIDTH))
    assert [block.calls for block in lean.blocks] == calls
    with torch.no_grad():
        lean(torch.randn(4, WIDTH))
    assert [block.calls for block in lean.blocks] == [n + 1 for n in calls]


def test_names_of_parameters_stay() -> None:
    plain, lean = pair("none")
    assert list(plain.state_dict()) == list(lean.state_dict())


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    _, lean = pair("none")
    clone = copy.deepcopy(lean)
    with torch.no_grad():
        for p in lean.blocks.parameters():
            p.zero_()
    x = torch.randn(4, WIDTH)
    assert not torch.equal(clone(x), clone.head(x))  # with the zeroed weights, blocks would be the identity


def test_a_block_that_is_used_twice_is_recomputed_as_one() -> None:
    model = Stack(nn.Identity)
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    assert recompute_blocks(model, None) == 1
    gradients(model, torch.randn(4, WIDTH))
    assert model.blocks[0].calls == 6


def test_the_task_may_name_the_blocks() -> None:
    plain, _ = pair("none")
    lean = copy.deepcopy(plain)
    assert recompute_blocks(lean, lambda model: [model.blocks[1], model.blocks[4]]) == 2
    gradients(lean, torch.randn(4, WIDTH))
    assert [block.calls for block in lean.blocks] == [1, 2, 1, 1, 2, 1]


def test_a_model_without_blocks_is_refused_with_the_ways_out() -> None:
    with pytest.raises(TaskError, match=r"no nn\.ModuleList") as caught:
        recompute_blocks(nn.Linear(2, 2), None)
    assert "Task(blocks=...)" in caught.value.next_step
