"""A stack of blocks, its gradients, and what autograd keeps for them."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.models import KeyedDropout, set_micro_batch_key
from paceline.parallel.recompute import recompute_blocks

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


DROPOUTS = {
    "none": nn.Identity,
    "torch": lambda: nn.Dropout(0.3),
    "keyed": lambda: KeyedDropout(0.3),
}


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
