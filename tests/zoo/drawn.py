"""Small models, batches, optimizers and strategies, drawn by a number; in float64, so that nothing hides."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kind import CLASSES, WIDTH, Made
from tests.zoo.plain import Plan
from tests.zoo.runs import SAME_BITS, Way


@dataclass(frozen=True)
class Drawn:
    """One case.

    Args:
        width: of the layers inside.
        links: words for what lies between the first and the last layer.
    """

    number: int
    width: int
    links: tuple[str, ...]
    num_samples: int
    plan: Plan
    way: Way


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Centre(nn.Module):
    """A buffer that moves, and is used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.25)
        return out


def frozen(width: int) -> nn.Module:
    """A layer that is not trained."""
    return nn.Linear(width, width).requires_grad_(False)


TRAINED = ("linear", "no bias", "norm", "scale")  # a stage, or a chunk of one, has parameters
LINKS: Mapping[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "no bias": lambda width: nn.Linear(width, width, bias=False),
    "norm": nn.LayerNorm,
    "tanh": lambda width: nn.Tanh(),
    "gelu": lambda width: nn.GELU(),
    "scale": lambda width: Scale(),
    "centre": Centre,
    "frozen": frozen,
}
STRATEGIES: Mapping[int, tuple[str, ...]] = {  # by number of processes
    1: (
        *("replicas=1", "replicas=1 lanes=2", "replicas=1 lanes=3", "replicas=1 pipeline=2 lanes=2"),
        "replicas=1 pipeline=2 lanes=2 schedule=1f1b",
    ),
    2: (
        *("replicas=2", "replicas=2 route=native", "replicas=2 route=ring", "replicas=2 lanes=2"),
        *("replicas=2 codec=lossless", "replicas=2 route=tree codec=lossless"),
        *("replicas=1 shard=2 zero=1", "replicas=1 shard=2 zero=2", "replicas=1 shard=2 zero=3"),
        *("replicas=1 shard=2 zero=2 route=native", "replicas=1 shard=2 zero=3 route=native"),
        *("replicas=1 shard=2 zero=3 route=ring", "replicas=1 pipeline=2"),
        *("replicas=1 pipeline=2 schedule=1f1b", "replicas=1 pipeline=2 schedule=interleaved:2"),
        *("replicas=1 pipeline=2 schedule=zero-bubble", "sync=local:1", "servers=1 sync=backup:0"),
    ),
    3: (
        *("replicas=3", "replicas=3 route=native", "replicas=3 route=tree", "replicas=3 route=grid"),
        *("replicas=3 route=recursive-doubling", "replicas=3 route=ring codec=lossless"),
        *("replicas=1 shard=3 zero=1", "replicas=1 shard=3 zero=2", "replicas=1 shard=3 zero=3"),
        *("replicas=1 shard=3 zero=2 route=ring", "replicas=1 shard=3 zero=3 route=native"),
        *("replicas=1 pipeline=3", "replicas=1 pipeline=3 schedule=zero-bubble"),
        *("sync=local:1", "servers=1 sync=backup:0"),
    ),
    4: (
        *("replicas=2 shard=2 zero=2", "replicas=2 shard=2 zero=3", "replicas=2 shard=2 zero=3 route=native"),
        *("replicas=2 pipeline=2", "replicas=2 pipeline=2 schedule=interleaved:2"),
        *("replicas=2 pipeline=2 schedule=zero-bubble", "replicas=1 shard=2 zero=1 pipeline=2"),
        *("replicas=1 shard=2 zero=2 pipeline=2", "replicas=1 shard=2 zero=3 pipeline=2 schedule=1f1b"),
        *("replicas=4 route=hierarchical", "replicas=4 route=recursive-doubling"),
    ),
}
UNORDERED = (
    "local",
    "servers",
    "lossless",
    "route=ring",
    "route=tree",
    "route=grid",
    "recursive",
    "hierarch",
)
"""Words of what is not to the bit that of one process, or is refused there."""


def draw(number: int, processes: int) -> Drawn:
    """A case on so many processes; the same for the same numbers."""
    r = random.Random(f"{number}/{processes}")
    strategy = r.choice(STRATEGIES[processes])
    alone = "local" in strategy
    same_bits = not any(word in strategy for word in UNORDERED) and r.random() < 0.4
    shards = r.randint(6, 9)
    size = r.randint(shards, 20)
    whole_epochs, tail = r.randint(1, 2), r.choice([0, r.randint(1, size - 1)])
    if alone or same_bits:
        tail = 0  # a replica without samples: items 6 and 12 of the issue
    plan = Plan(
        optimizer="sgd" if alone else r.choice(["sgd", "adamw"]),
        lr=r.choice([0.01, 0.05]),
        momentum=0.0 if alone else r.choice([0.0, 0.9]),
        clip_norm=None if alone else r.choice([None, 0.1, 10.0]),
        shards=shards,
        seed=number,
        size=size,
        steps=r.randint(3, 6),
    )
    way = Way(strategy, processes, SAME_BITS if same_bits else {}, chain="pipeline" in strategy, alone=alone)
    fewest = 2 if "interleaved" in strategy else 1  # two chunks on each of two stages
    links = tuple(r.choice(list(LINKS)) for _ in range(r.randint(fewest, 6)))
    least = (
        2 if "interleaved" in strategy else "pipeline=3" in strategy
    )  # beside the first and the last layer
    lacking = least - sum(word in TRAINED for word in links)
    links += tuple(r.choice(TRAINED) for _ in range(lacking))
    width = r.randint(3 if "norm" in links else 1, 7)  # the norm of two values is their sign
    return Drawn(number, width, links, whole_epochs * size + tail, plan, way)


def make(drawn: Drawn) -> Made:
    """Its model, samples and loss, with the same bits every time."""
    with torch.random.fork_rng():
        torch.manual_seed(drawn.number)
        links = [LINKS[word](drawn.width) for word in drawn.links]
        model = nn.Sequential(nn.Linear(WIDTH, drawn.width), *links, nn.Linear(drawn.width, CLASSES))
        samples = [
            (torch.randn(WIDTH).double(), torch.randint(CLASSES, ())) for _ in range(drawn.num_samples)
        ]
    return Made(model.double(), samples, loss)


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, float]:
    """Cross-entropy, summed over samples of some classes only, so that ranks count differently."""
    x, y = batch
    counted = (y != 0).double()
    losses = F.cross_entropy(model(x), y, reduction="none")
    return (losses * (counted + 0.5)).sum(), float((counted + 0.5).sum())


def without(drawn: Drawn, place: int) -> Drawn:
    """A smaller case: one link is left out."""
    return replace(drawn, links=drawn.links[:place] + drawn.links[place + 1 :])
