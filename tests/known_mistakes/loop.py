"""A bare data-parallel loop, right in every line, in pieces: a mistake is a subclass that changes one.

Only torch is imported. Samples are short sequences with a mask, so that ranks and micro-batches count
different numbers of tokens: much of what is wrong shows only then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

NUM_SAMPLES, SIZE, STEPS, TOKENS, WIDTH, CLASSES = 22, 11, 4, 3, 6, 3
Batch = Sequence[Tensor]


@dataclass(frozen=True)
class Setup:
    """What a loop trains, and how.

    Args:
        model: "mlp", "batch-norm", "dropout" or "tied".
        micro_batches: of a rank and step.
        decay: of weights, decoupled (AdamW).
        falls: the rate falls to zero on a straight line.
        shuffle: a new order every epoch.
        scale: of the loss before backward.
    """

    model: str = "mlp"
    micro_batches: int = 1
    optimizer: str = "sgd"
    lr: float = 0.2
    clip_norm: float | None = None
    decay: float = 0.0
    falls: bool = False
    shuffle: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class End:
    """Mean losses that the loop reported, and parameters and buffers at the end."""

    losses: list[float]
    tensors: dict[str, Tensor]

    def distance(self, other: End) -> float:
        """The largest absolute difference of losses and tensors."""
        gaps = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        for name, t in self.tensors.items():
            gaps.append(float((t.double() - other.tensors[name].double()).abs().max()))
        return max(gaps)


class Tied(nn.Module):
    """The last matrix is the first, the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH) / 3)
        self.head = nn.Linear(WIDTH, CLASSES)

    def first(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).tanh()

    def last(self, x: Tensor) -> Tensor:
        return self.head(x @ self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Swap(nn.Module):
    """Channels to where BatchNorm wants them, and back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def build(setup: Setup) -> nn.Module:
    """The model, with the weights of the present generator."""
    between: dict[str, list[nn.Module]] = {
        "mlp": [],
        "batch-norm": [Swap(), nn.BatchNorm1d(8), Swap()],
        "dropout": [nn.Dropout(0.3)],
    }
    if setup.model == "tied":
        return Tied()
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), *between[setup.model], nn.Linear(8, CLASSES))


def samples() -> list[Batch]:
    """Values, classes and which tokens count; later samples have more of them."""
    g = torch.Generator().manual_seed(1)
    found = []
    for i in range(NUM_SAMPLES):
        x = torch.randn(TOKENS, WIDTH, generator=g)
        y = torch.randint(CLASSES, (TOKENS,), generator=g)
        found.append((x, y, torch.arange(TOKENS) <= i % SIZE // 4))
    return found


def loss_of(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum over counted tokens, and how many there are."""
    x, y, counts = batch
    losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    return (losses * counts.flatten()).sum(), counts.sum()


def key(*parts: int | str) -> int:
    """A seed that follows from what it is for."""
    spelled = "\x1f".join([f"{type(part).__name__}:{part}" for part in parts])
    return int.from_bytes(hashlib.blake2b(spelled.encode(), digest_size=8).digest(), "little") >> 1


class Loop:
    """One rank of the loop; a process group is there.

    Args:
        order: of the samples of an epoch, by epoch.
    """

    def __init__(self, setup: Setup, order: Sequence[Sequence[int]]) -> None:
        self.setup, self.order, self.data = setup, order, samples()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = self.start()
        self.optimizer = self.make_optimizer()
        self.losses: list[float] = []

    def start(self) -> nn.Module:
        torch.manual_seed(7)
        return build(self.setup)

    def make_optimizer(self) -> torch.optim.Optimizer:
        if self.setup.optimizer == "adamw":
            return torch.optim.AdamW(self.model.parameters(), self.setup.lr, weight_decay=self.setup.decay)
        return torch.optim.SGD(self.model.parameters(), self.setup.lr, momentum=0.9)

    def train(self) -> End:
        for step in range(STEPS):
            self.step(step)
        return End(self.losses, {n: t.detach().clone() for n, t in self.model.state_dict().items()})

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.set_rate(step)
        total, count = self.compute(step)
        count = self.synchronise(count)
        self.clip()
        self.optimizer.step()
        self.report(total, count)

    def set_rate(self, step: int) -> None:
        factor = 1 - self.updates_so_far(step) / STEPS if self.setup.falls else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.setup.lr * factor

    def updates_so_far(self, step: int) -> int:
        return step

    def epoch(self, step: int) -> Sequence[int]:
        return self.order[step * SIZE // NUM_SAMPLES]

    def share(self, step: int) -> list[list[int]]:
        """The samples of each micro-batch of this rank."""
        first = step * SIZE % NUM_SAMPLES
        batch = self.epoch(step)[first : first + SIZE]
        parts = self.world * self.setup.micro_batches
        cut = [batch[SIZE * k // parts : SIZE * (k + 1) // parts] for k in range(parts)]
        return cut[self.rank * self.setup.micro_batches :][: self.setup.micro_batches]

    def compute(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of all micro-batches: sums of the loss and of the tokens."""
        total, count = torch.zeros(()), torch.zeros(())
        before, changes = self.buffers(), []
        for k, indices in enumerate(self.share(step)):
            torch.manual_seed(self.seed(step, self.rank * self.setup.micro_batches + k))
            value, tokens = loss_of(self.model, default_collate([self.data[i] for i in indices]))
            self.backward(value, tokens)
            total, count = total + value.detach(), count + tokens
            changes.append([after - b for after, b in zip(self.buffers(), before, strict=True)])
            self.set_buffers(before)
        self.set_buffers(self.agreed_buffers(before, changes))
        return total, count

    def seed(self, step: int, shard: int) -> int:
        return key(0, "unit", step, shard)

    def backward(self, value: Tensor, tokens: Tensor) -> None:
        (value * self.setup.scale).backward()

    def buffers(self) -> list[Tensor]:
        return [b.detach().double() for b in self.model.buffers()]

    def set_buffers(self, values: list[Tensor]) -> None:
        for b, value in zip(self.model.buffers(), values, strict=True):
            b.copy_(value)

    def agreed_buffers(self, before: list[Tensor], changes: list[list[Tensor]]) -> list[Tensor]:
        """Those before, moved by the mean change over all micro-batches of all ranks."""
        moves = [torch.stack(column).sum(0) for column in zip(*changes, strict=True)]
        for move in moves:
            dist.all_reduce(move)
            move /= self.world * self.setup.micro_batches
        return [b + move for b, move in zip(before, moves, strict=True)]

    def synchronise(self, count: Tensor) -> Tensor:
        """Sum gradients over ranks, and divide once, by the tokens of all."""
        count = count.clone()
        dist.all_reduce(count)
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= count * self.setup.scale
        return count

    def clip(self) -> None:
        if self.setup.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.clip_norm)

    def report(self, total: Tensor, count: Tensor) -> None:
        dist.all_reduce(total)
        self.losses.append(float(total / count))
