"""Every partitioned run trains what one process trains, or is refused before its first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Task
from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import build
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

_WIDTH = 8
_MLP_PLAN = {"*.up": "column", "*.down": "row"}


class Block(nn.Module):
    """A residual block of a column and its row, with something between them and something around them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "gate of inputs":
            self.gate_layer = nn.Sequential(nn.Linear(_WIDTH, 1))
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        # After the row the width is that of a rank's features between the two: 16 / 2 = 8.
        self.drop = nn.Dropout(0.4, inplace=kind == "dropout in place")
        self.act = nn.PReLU(init=0.3) if kind == "prelu" else nn.Tanh()
        if kind == "scalar gate":
            self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * 1.0 if self.kind == "dropout in place" else self.act(self.up(x))
        if "dropout" in self.kind:
            h = self.drop(h)
        if self.kind == "functional dropout":
            h = F.dropout(h, 0.4, self.training)
        if self.kind == "noise":
            h = h + 0.3 * torch.randn_like(h)
        if self.kind == "rrelu":
            h = F.rrelu(h, 0.1, 0.9, self.training)
        if self.kind == "scalar gate":
            h = h * (1 + self.gate)
        if self.kind == "gate of inputs":
            h = h * self.gate_layer(x).sigmoid()
        y = self.down(h)
        if "dropout" in self.kind:
            y = self.drop(y)
        return x + y


class Attention(nn.Module):
    """Attention with norms of queries and keys, as in Qwen3 and OLMo2."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(_WIDTH, _WIDTH)
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, 4).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return x + self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Classifier(nn.Module):
    """Embedding, a block, and an output layer over a vocabulary."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(12, _WIDTH)
        if kind == "transformer layer":
            self.block: nn.Module = nn.TransformerEncoderLayer(_WIDTH, 2, 2 * _WIDTH, batch_first=True)
            self.block.self_attn.dropout = 0.0
        elif kind == "norms of queries and keys":
            self.block = Attention()
        else:
            self.block = Block(kind)
        self.head = nn.Linear(_WIDTH, 12)
        if kind == "learned scale":
            self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Any:
        logits = self.head(self.block(self.embed(tokens)))
        if self.kind == "learned scale":
            return logits * self.scale.exp()
        if self.kind == "logits changed in place":
            logits.div_(0.7)
            logits[..., 0] = -1.0
            logits.clamp_(-0.5, 0.5).masked_fill_(tokens.unsqueeze(-1) == 3, -2.0)
        return logits


def task_of(kind: str) -> Task:
    torch.manual_seed(1)
    model = Classifier(kind).double()
    samples = list(torch.randint(12, (40, 6), generator=torch.Generator().manual_seed(2)))

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        logits = model(batch[:, :-1])
        total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        if kind == "norm of weights":
            total = total + 0.05 * sum(p.norm() for p in model.parameters())
        return Loss(total, batch[:, 1:].numel())

    plan = {"*.linear1": "column", "*.linear2": "row"} if kind == "transformer layer" else _MLP_PLAN
    if kind == "norms of queries and keys":
        plan = {"block": "heads"}
    if kind in ("learned scale", "logits changed in place"):
        plan = {**plan, "head": "vocabulary"}
    return Task(model, samples, loss, tensor=plan)


def recipe_of(strategy: str, checks: bool) -> Recipe:
    return Recipe(
        task="own",
        steps=4,
        batch={"size": 8, "shards": 2, "shuffle": False},
        optimizer={"name": "sgd", "lr": 0.2},
        strategy=Strategy.parse(strategy),
        debug={"check": checks},
    )


def trained(
    cluster: Cluster, kind: str, strategy: str, checks: bool, build_task: Callable[[str], Task]
) -> dict[str, Tensor] | str:
    """The weights after four steps, or the refusal."""
    try:
        session = build_test_session(cluster, recipe_of(strategy, checks), lambda: build_task(kind))
    except TaskError as error:
        return str(error)
    for _ in session.rounds():
        pass
    weights = {name: p.detach().clone() for name, p in session.complete().named_parameters()}
    session.close()
    return weights


def train_all(
    cluster: Cluster,
    kinds: list[str],
    strategy: str,
    checks: bool = True,
    build_task: Callable[[str], Task] = task_of,
) -> list[dict[str, Tensor] | str]:
    if not checks:
        build.check_tensor_plan = lambda *_: None
    return [trained(cluster, kind, strategy, checks, build_task) for kind in kinds]


def farthest(a: Any, b: Any) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


RIGHT = [
    *("dropout", "dropout in place", "transformer layer", "prelu", "scalar gate"),
    *("norms of queries and keys", "learned scale", "logits changed in place"),
]
REFUSED = {
    "functional dropout": "dropout draws values of shape (2, 5, 8), and in one process",
    "noise": "computes other values than whole",
    "rrelu": "rrelu draws values of shape (2, 5, 8), and in one process",
    "gate of inputs": "the gradient of 'embed.weight' is off by",
    "norm of weights": "the total of the loss is",
}


@pytest.mark.capability("C3")
def test_a_tensor_run_is_that_of_one_process() -> None:
    [plain] = run_ranks(train_all, 1, RIGHT, "replicas=1")
    for rank in run_ranks(train_all, 2, RIGHT, "replicas=1 tensor=2"):
        for kind, expected, actual in zip(RIGHT, plain, rank, strict=True):
            assert not isinstance(actual, str), (kind, actual)
            assert farthest(expected, actual) < 1e-12, kind


@pytest.mark.capability("C3")
def test_what_a_tensor_run_cannot_make_right_is_refused_by_name() -> None:
    for rank in run_ranks(train_all, 2, [*REFUSED], "replicas=1 tensor=2"):
        for (kind, quote), text in zip(REFUSED.items(), rank, strict=True):
            assert quote in text, (kind, text)


def test_without_the_check_the_same_programs_train_something_else() -> None:
    kinds = ["prelu", "scalar gate", "norms of queries and keys", *REFUSED]
    [plain] = run_ranks(train_all, 1, kinds, "replicas=1")
    wrong = run_ranks(train_all, 2, kinds, "replicas=1 tensor=2", False)[0]
    for kind, expected, actual in zip(kinds, plain, wrong, strict=True):
        assert not isinstance(actual, str) and farthest(expected, actual) > 1e-4, kind


class Noisy(nn.Module):
    """A causal model over positions, with something random in its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.out = nn.Embedding(12, _WIDTH), nn.Linear(_WIDTH, 12)
        self.attention = Attention()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.training:
            x = DRAWS[self.kind](x)
        return self.out(self.attention(x))


def sampled(x: Tensor) -> Tensor:
    return x + torch.distributions.Normal(0.0, 0.5).sample(x.shape[:2]).unsqueeze(-1).to(x.dtype)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3, True),
    "one number for each sample": lambda x: x * (1 + torch.rand(x.shape[0], 1, 1, dtype=x.dtype)),
    "rand": lambda x: x + torch.rand(*x.shape[:2], 1, dtype=x.dtype),
    "randint": lambda x: x * torch.randint(1, 3, (*x.shape[:2], 1)),
    "multinomial": lambda x: x + torch.ones(x.shape[1]).multinomial(x.shape[1]).view(1, -1, 1) / 9,
    "poisson": lambda x: x + torch.poisson(torch.ones(*x.shape[:2], 1, dtype=x.dtype)) / 9,
    "Normal.sample": sampled,
    "gumbel_softmax": lambda x: x + F.gumbel_softmax(x, dim=-1),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_() / 9,
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.9, True),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.3, True),
}
RIGHT_DRAWS = ("dropout", "one number for each sample")


def noisy_task(kind: str) -> Task:
    torch.manual_seed(1)
    model = Noisy(kind).double()
    samples = list(torch.randint(12, (40, 9), generator=torch.Generator().manual_seed(2)))

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Loss:
        tokens, targets = pair
        logits = model(tokens)
        return Loss(
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()
        )

    return Task(
        model,
        samples,
        loss,
        collate=lambda rows: (torch.stack(rows)[:, :-1], torch.stack(rows)[:, 1:]),
        sequence=lambda batch, part: (part(batch[0], 1), part(batch[1], 1)),
    )


@pytest.mark.capability("C5")
def test_draws_that_depend_on_the_split_of_a_sequence_are_refused_by_name() -> None:
    kinds = [*DRAWS]
    [plain] = run_ranks(train_all, 1, kinds, "replicas=1", True, noisy_task)
    for rank in run_ranks(train_all, 2, kinds, "replicas=1 context=2", True, noisy_task):
        for kind, expected, actual in zip(kinds, plain, rank, strict=True):
            if kind in RIGHT_DRAWS:
                assert not isinstance(actual, str) and farthest(expected, actual) < 1e-12, (kind, actual)
            else:
                assert "draws" in actual, (kind, actual)
