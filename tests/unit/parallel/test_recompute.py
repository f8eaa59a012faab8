"""Recomputation: the same bits with less memory, with dropout of either kind, under the same names."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.models import KeyedDropout, set_micro_batch_key
from paceline.parallel.recompute import recompute_blocks
from tests.peak import peak_bytes

NUM_BLOCKS, WIDTH = 6, 32


class Block(nn.Module):
    """Residual, with an activation that is four times as wide as the input."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + scale * self.down(self.dropout(torch.relu(self.up(x))))


class Stack(nn.Module):
    def __init__(self, dropout: Callable[[], nn.Module], num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout()) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


DROPOUTS = {"none": nn.Identity, "torch": lambda: nn.Dropout(0.3), "keyed": lambda: KeyedDropout(0.3)}


def pair(kind: str, how: str = "blocks") -> tuple[Stack, Stack]:
    torch.manual_seed(5)
    plain = Stack(DROPOUTS[kind])
    lean = copy.deepcopy(plain)
    assert recompute_blocks(lean, None, how) == NUM_BLOCKS
    return plain, lean


def gradients(model: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """Gradients of one micro-batch, and how many bytes autograd kept between forward and backward."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    torch.manual_seed(11)
    set_micro_batch_key(model, 11)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(x).square().sum()
    torch.rand(7)  # somebody draws numbers between forward and backward
    grads = torch.autograd.grad(loss, list(model.parameters()))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return list(grads), sum(size for place, size in kept.items() if place not in weights)


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


@pytest.mark.capability("L1")
def test_peak_memory_grows_with_the_root_of_the_number_of_blocks() -> None:
    """From 9 to 36 blocks: 27 more inputs where every block keeps its own, 2 (6 - 3) in segments."""
    x = torch.randn(2048, WIDTH, requires_grad=True)

    def more(how: str) -> float:
        found = []
        for num_blocks in (9, 36):
            model = Stack(nn.Identity, num_blocks)
            recompute_blocks(model, None, how)
            for p in (x, *model.parameters()):
                p.grad = torch.zeros_like(p)
            found.append(peak_bytes(lambda model=model: model(x).square().sum().backward()))
        return (found[1] - found[0]) / (x.numel() * x.element_size())

    assert more("segments") <= 2 * (6 - 3) + 2
    assert 26 <= more("blocks") <= 30


BETWEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an addition": lambda x, first: x + first,
    "a write": lambda x, first: x.add_(1.0),
    "a cut in the graph": lambda x, first: x + x.detach() + first,
    "a pair": lambda x, first: torch.stack([x, first]).unbind()[0],
}


class Busy(Stack):
    """Something happens to x between the blocks, one of which is used twice and one on a branch."""

    between: Callable[[Tensor, Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](first))
        branch = self.blocks[3](x, scale=torch.tensor(0.5))
        x = self.blocks[2](self.between(self.blocks[4](x), first))
        return self.head(self.blocks[5](x) + branch)


@pytest.mark.capability("L1")
@pytest.mark.parametrize("kind", BETWEEN)
def test_what_happens_between_two_blocks_is_not_repeated_and_not_forgotten(kind: str) -> None:
    torch.manual_seed(5)
    plain = Busy(lambda: nn.Dropout(0.2))
    plain.between = BETWEEN[kind]
    lean = copy.deepcopy(plain)
    recompute_blocks(lean, None, "segments")
    x = torch.randn(16, WIDTH)
    for expected, found in zip(gradients(plain, x)[0], gradients(lean, x)[0], strict=True):
        assert torch.equal(expected, found)


def test_an_argument_that_was_written_to_before_backward_is_an_error() -> None:
    _, lean = pair("none", "segments")
    x = torch.randn(4, WIDTH)
    loss = lean(x).sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="changed in place before backward"):
        loss.backward()


def test_two_losses_go_back_through_one_forward() -> None:
    """What was found for the first backward is gone, and is found again."""
    plain, lean = pair("torch", "segments")
    x = torch.randn(16, WIDTH)
    found = []
    for model in (plain, lean):
        torch.manual_seed(11)
        out = model(x)
        first = torch.autograd.grad(out.sum(), list(model.parameters()), retain_graph=True)
        found.append([*first, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
