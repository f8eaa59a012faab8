"""Random programs: a model, a loss, an optimizer, data and a strategy, drawn by a number.

A program is described by words, so that its text is all that is needed to repeat it. `draw` is pure: a
program depends on its number and on the number of processes only. What a layout is likely to refuse is drawn
seldom under it, so that most programs train.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.recipe import Strategy
from paceline.recipe.support import support
from tests.parity.random_modules import DRAWS, HEADS, Embed, Head, build_block
from tests.parity.random_optimizers import BY_NAME, OF_TASK, PARTITIONED_APART

VOCABULARY, POINT_WIDTH, CLASSES, LENGTH = 11, 5, 3, 7
_SELDOM = 0.1
_AXES = ("replicas", "shard", "tensor", "pipeline", "context")
_SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zero-bubble")
_NORMS = ("", "pre-layer", "pre-rms")
_ROUTES = ("native", "ring", "tree", "recursive-doubling", "hierarchical")


@dataclass(frozen=True)
class Program:
    """What is trained, and how.

    Args:
        number: draws the program again, and seeds its weights and data.
        takes_tokens: samples are tokens and their targets, else points and classes.
        blocks: words of each block (`random_modules`).
        head: words of the last module; "tied" for the weight of the embedding.
        plan: tensor plan, by module.
        loss: word of the loss.
        optimizer: word of the optimizer (`random_optimizers`).
        shards: micro-batches of a step, over all ranks.
        frozen: names of modules whose parameters are not trained.
    """

    number: int
    processes: int
    strategy: str
    takes_tokens: bool
    width: int
    blocks: tuple[str, ...]
    head: tuple[str, ...]
    plan: tuple[tuple[str, str], ...]
    loss: str
    optimizer: str
    lr: float
    clip_norm: float | None
    size: int
    shards: int
    num_samples: int
    steps: int
    frozen: tuple[str, ...] = ()


class Parts(NamedTuple):
    """Model, samples and loss of a program, with the same bits every time they are built."""

    model: nn.Sequential
    samples: list[tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Any], Sums]


class Sums(NamedTuple):
    """Sums of the loss over a micro-batch.

    Args:
        total: scalar, with a graph.
        count: number of items.
        right, num_right_items: sum of a metric, and the items that it counts.
    """

    total: Tensor
    count: float
    right: Tensor
    num_right_items: float


def draw(number: int, processes: int) -> Program:
    """Return the program of a number on so many processes."""
    r = random.Random(f"{number}/{processes}")
    strategy = _draw_strategy(r, processes)
    takes_tokens = strategy.context > 1 or strategy.tensor == 4 or r.random() < 0.7
    blocks = _draw_blocks(r, strategy, takes_tokens)
    head = _draw_head(r, strategy, takes_tokens)
    sharers = (strategy.replicas or 1) * strategy.shard
    shards = sharers + r.randint(0, 4)
    size = shards + r.randint(0, 2 * shards)
    tail = r.choice([0, r.randint(1, size)])
    return Program(
        number=number,
        processes=processes,
        strategy=str(strategy),
        takes_tokens=takes_tokens,
        width=HEADS * r.randint(2, 3),
        blocks=blocks,
        head=head,
        plan=tuple(_draw_plan(r, blocks, head, takes_tokens)) if strategy.tensor > 1 else (),
        loss=_draw_loss(r, strategy, takes_tokens),
        optimizer=_draw_optimizer(r, strategy),
        lr=r.choice([0.1, 0.02, 0.02, 1e-5]),
        clip_norm=r.choice([None, None, 0.1, 10.0]),
        size=size,
        shards=shards,
        num_samples=r.randint(1, 2) * size + tail,
        steps=r.randint(3, 5),
        frozen=_draw_frozen(r, blocks),
    )


def _draw_strategy(r: random.Random, processes: int) -> Strategy:
    """Return a product of degrees with as many ranks, that `support` accepts."""
    while True:
        degrees = dict.fromkeys(_AXES, 1)
        for factor in _factors(r, processes):
            degrees[r.choice(_AXES)] *= factor
        terms = [f"{axis}={n}" for axis, n in degrees.items() if n > 1 or axis == "replicas"]
        if degrees["shard"] > 1:
            terms.append(f"zero={r.randint(1, 3)}")
        if degrees["pipeline"] > 1:
            terms.append(f"schedule={r.choice(_SCHEDULES)}")
        if r.random() < 0.25:
            terms.append(f"route={r.choice(_ROUTES)}")
        if r.random() < 0.1 and degrees["replicas"] > 1:
            terms.append("codec=lossless")
        strategy = Strategy.parse(" ".join(terms))
        if support(strategy, processes=processes, shards=processes).ok:
            return strategy


def _factors(r: random.Random, processes: int) -> tuple[int, ...]:
    return r.choice([(4,), (2, 2), (2, 2)]) if processes == 4 else (processes,)


def _draw_blocks(r: random.Random, strategy: Strategy, takes_tokens: bool) -> tuple[str, ...]:
    blocks = [_draw_block(r, strategy, takes_tokens) for _ in range(r.randint(1, 4))]
    if strategy.tensor > 1 and not any(_is_split(block) for block in blocks):
        blocks.append(_draw_mlp(r, strategy))
    chunks = strategy.pipeline * (2 if "interleaved" in strategy.schedule else 1)
    while sum(_is_trained(block) for block in blocks) < chunks - 2:
        blocks.append(r.choice(["linear", "norm layer", "scale"]))
    r.shuffle(blocks)
    return tuple(blocks)


def _is_split(block: str) -> bool:
    return block.startswith(("mlp", "attention"))


def _is_trained(block: str) -> bool:
    return not block.startswith(("draw", "dropout", "frozen"))


def _draw_block(r: random.Random, strategy: Strategy, takes_tokens: bool) -> str:
    splits_positions = strategy.context > 1
    kinds = ["mlp", "mlp", "linear", "norm", "scale", "frozen", "dropout"]
    kinds += ["attention"] * 3 if takes_tokens else []
    kinds += ["draw"] if not splits_positions or r.random() < _SELDOM else []
    kind = r.choice(kinds)
    if kind == "mlp":
        return _draw_mlp(r, strategy)
    if kind == "attention":
        return _draw_attention(r)
    if kind == "norm":
        # One point has no variance; positions of one sequence have.
        statistics = takes_tokens and (not splits_positions or r.random() < _SELDOM)
        return f"norm {r.choice(['layer', 'rms', 'batch'] if statistics else ['layer', 'rms'])}"
    if kind == "draw":
        return f"draw {r.choice([*DRAWS])}"
    if kind == "frozen":
        return r.choice(["frozen", "frozen evaluates"])
    return r.choice(["scale", "scale unused"]) if kind == "scale" else kind


def _draw_mlp(r: random.Random, strategy: Strategy) -> str:
    words = ["mlp", r.choice(["tanh", "gelu", "prelu"])]
    between, gates = (
        ["", "dropout", "dropout", "dropout-twice", "dropout-after"],
        ["", "", "gate-scalar", "gate-vector"],
    )
    is_partitioned = strategy.tensor > 1 or strategy.context > 1
    if not is_partitioned or r.random() < _SELDOM:
        between += ["functional-dropout", "noise"]
        words[1] = r.choice([words[1], "rrelu"])
    if strategy.tensor == 1 or r.random() < _SELDOM:
        gates += ["gate-features", "gate-inputs"]
    words += [r.choice(between), r.choice(gates), r.choice(["", "no-bias"])]
    words.append(r.choice(_NORMS))
    return " ".join(word for word in words if word)


def _draw_attention(r: random.Random) -> str:
    words = ["attention", r.choice(["", "qk-rms", "qk-layer", "qk-shared"]), r.choice(["", "temperature"])]
    words += [
        r.choice(["", "grouped"]),
        r.choice(["", "dropout-after"]),
        r.choice(["", "pre-layer", "pre-rms"]),
    ]
    return " ".join(word for word in words if word)


def _draw_head(r: random.Random, strategy: Strategy, takes_tokens: bool) -> tuple[str, ...]:
    words = [
        r.choice(["", "pre-layer", "pre-rms"]),
        r.choice(["", "no-bias"]),
        r.choice(["", "scale", "temperature"]),
    ]
    words += [word for word in ("div_", "set", "clamp_", "masked_fill_") if r.random() < 0.15]
    if takes_tokens and r.random() < 0.3:
        words.append("tied")
    return tuple(word for word in words if word)


def _draw_plan(
    r: random.Random, blocks: Sequence[str], head: Sequence[str], takes_tokens: bool
) -> Iterator[tuple[str, str]]:
    """Yield the words of a tensor plan; some blocks stay whole, but not all."""
    split = [i for i, block in enumerate(blocks, start=1) if _is_split(block)]
    kept = r.choice(split)
    for i in split:
        if i != kept and r.random() < 0.15:
            continue
        if blocks[i - 1].startswith("mlp"):
            yield f"{i}.up", "column"
            yield f"{i}.down", "row"
        else:
            yield f"{i}", "heads"
    by_tokens = r.random() < 0.6
    if by_tokens and (takes_tokens or r.random() < 0.5):
        yield f"{len(blocks) + 1}.layer", "vocabulary"
    if takes_tokens and (by_tokens if "tied" in head else r.random() < 0.4):
        yield "0.layer", "vocabulary"


def _draw_loss(r: random.Random, strategy: Strategy, takes_tokens: bool) -> str:
    losses = ["sums", "sums", "mean", "metric", "weighted", "smoothing", "z-loss"]
    if not takes_tokens:
        losses += ["squares"]
        losses += ["gradient-penalty"] * 3 if strategy.pipeline == 1 or r.random() < _SELDOM else []
    if max(strategy.tensor, strategy.pipeline, strategy.context, strategy.shard) == 1 or r.random() < _SELDOM:
        losses += ["norm-of-weights"]
    return r.choice(losses)


def _draw_optimizer(r: random.Random, strategy: Strategy) -> str:
    kinds = [*BY_NAME, *OF_TASK]
    if strategy.zero or strategy.tensor > 1:
        kinds = [k for k in kinds if k not in PARTITIONED_APART or r.random() < _SELDOM]
    return r.choice(kinds)


def _draw_frozen(r: random.Random, blocks: Sequence[str]) -> tuple[str, ...]:
    """Return at most one trained block, which the task freezes from the outside."""
    places = [str(i) for i, block in enumerate(blocks, start=1) if _is_trained(block)]
    return (r.choice(places),) if len(places) > 2 and r.random() < 0.15 else ()


def build_parts(program: Program) -> Parts:
    """Build model, samples and loss."""
    with torch.random.fork_rng():
        torch.manual_seed(program.number)
        inputs = VOCABULARY if program.takes_tokens else POINT_WIDTH
        outputs = VOCABULARY if program.takes_tokens else CLASSES
        blocks = [build_block(text, program.width) for text in program.blocks]
        embed = Embed(inputs, program.width, takes_tokens=program.takes_tokens)
        head = Head(program.width, outputs, program.head)
        model = nn.Sequential(embed, *blocks, head).double()
        if "tied" in program.head:
            head.layer.weight = embed.layer.weight
        for name in program.frozen:
            model.get_submodule(name).requires_grad_(False)
        samples = [_draw_sample(program.takes_tokens) for _ in range(program.num_samples)]
    return Parts(model, samples, LOSSES[program.loss])


def _draw_sample(takes_tokens: bool) -> tuple[Tensor, Tensor]:
    if not takes_tokens:
        return torch.randn(POINT_WIDTH, dtype=torch.float64), torch.randint(CLASSES, ())
    tokens = torch.randint(VOCABULARY, (LENGTH + 1,))
    # Some targets are ignored, so that micro-batches count differently.
    targets = tokens[1:].masked_fill(torch.rand(LENGTH) < 0.2, -100)
    return tokens[:-1], targets


def _rows(logits: Any, targets: Tensor) -> tuple[Any, Tensor]:
    """Return logits [N, classes] and targets [N]."""
    return (logits.flatten(0, 1), targets.flatten()) if targets.dim() > 1 else (logits, targets)


def _cross_entropy(model: nn.Module, batch: Sequence[Tensor]) -> Sums:
    x, targets = batch
    logits, targets = _rows(model(x), targets)
    total = F.cross_entropy(logits, targets, reduction="sum")
    counted = targets != -100
    right = ((logits.argmax(-1) == targets) & counted).sum()
    return Sums(total, float(counted.sum()), right, float(counted.sum()))


def _with_metric_of_some(model: nn.Module, batch: Sequence[Tensor]) -> Sums:
    sums = _cross_entropy(model, batch)
    return sums._replace(num_right_items=float((batch[1] > 1).sum()))


def _weighted(model: nn.Module, batch: Sequence[Tensor]) -> Sums:
    x, targets = batch
    logits, targets = _rows(model(x), targets)
    losses = F.cross_entropy(logits, targets, reduction="none")
    weights = (0.5 + targets % 2).double() * (targets != -100)
    count = float(weights.sum())
    return Sums((losses * weights).sum(), count, (losses.detach() > 1).sum(), count)


def _smoothed(model: nn.Module, batch: Sequence[Tensor]) -> Sums:
    x, targets = batch
    logits, targets = _rows(model(x), targets)
    count = float((targets != -100).sum())
    total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
    return Sums(total, count, (targets == 1).sum(), count)


def _with_z_loss(model: nn.Module, batch: Sequence[Tensor]) -> Sums:
    x, targets = batch
    logits, targets = _rows(model(x), targets)
    count = float((targets != -100).sum())
    z = torch.logsumexp(logits, -1).square().sum()
    return Sums(F.cross_entropy(logits, targets, reduction="sum") + 0.1 * z, count, z.detach(), count)


def _squares(model: nn.Module, batch: Sequence[Tensor]) -> Sums:
    x, targets = batch
    errors = model(x) - F.one_hot(targets, CLASSES).double()
    return Sums(errors.square().sum(), len(x), errors.detach().abs().sum(), len(x))


def _with_gradient_penalty(model: nn.Module, batch: Sequence[Tensor]) -> Sums:
    points, targets = batch[0].detach().requires_grad_(), batch[1]
    logits = model(points)
    total = F.cross_entropy(logits, targets, reduction="sum")
    (grad,) = torch.autograd.grad(logits.square().sum(), points, create_graph=True)
    return Sums(total + 0.1 * grad.square().sum(), len(points), grad.detach().abs().sum(), len(points))


def _with_norm_of_weights(model: nn.Module, batch: Sequence[Tensor]) -> Sums:
    sums = _cross_entropy(model, batch)
    norms = torch.stack([p.square().sum() for p in model.parameters() if p.requires_grad]).sum()
    return sums._replace(total=sums.total + 0.01 * sums.count * norms)


LOSSES: Mapping[str, Callable[[nn.Module, Any], Sums]] = {
    "sums": _cross_entropy,
    "mean": _cross_entropy,
    "metric": _with_metric_of_some,
    "weighted": _weighted,
    "smoothing": _smoothed,
    "z-loss": _with_z_loss,
    "squares": _squares,
    "gradient-penalty": _with_gradient_penalty,
    "norm-of-weights": _with_norm_of_weights,
}
