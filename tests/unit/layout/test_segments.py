"""Of a chain of blocks few inputs are kept, and what lies between two blocks is left alone."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.recompute import recompute_blocks
from tests.peak import peak_bytes
from tests.unit.layout.stacks import WIDTH, Stack, gradients, pair


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
