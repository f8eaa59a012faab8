"""Modules of random programs: blocks of tokens or points with everything that a layout can get wrong.

Only PyTorch: the plain loop and Paceline train the same classes. A block is described by words, of which the
first is its kind: "mlp prelu dropout gate-scalar". All parameters are float64 once the model is built.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = 4
_P = 0.3


class Mlp(nn.Module):
    """Residual block of a column and its row.

    Args:
        words: an activation; what is between column and row; a gate; a norm before.
    """

    def __init__(self, width: int, hidden: int, words: Sequence[str]) -> None:
        super().__init__()
        self.words = frozenset(words)
        self.norm = _norm(words, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias="no-bias" not in words)
        self.drop = nn.Dropout(_P)
        if "prelu" in words:
            self.prelu = nn.PReLU(init=0.3)
        if "gate-scalar" in words:
            self.gate = nn.Parameter(torch.zeros(()))
        if "gate-vector" in words:
            self.gate = nn.Parameter(torch.full((1,), 0.4))
        if "gate-features" in words:
            self.gate = nn.Parameter(torch.randn(hidden))
        if "gate-inputs" in words:
            self.gate_layer = nn.Sequential(nn.Linear(width, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        words, y = self.words, self.norm(x)
        h = self._activated(self.up(y))
        if words & {"gate-scalar", "gate-vector", "gate-features"}:
            h = h * (1 + self.gate)
        if "gate-inputs" in words:
            h = h * self.gate_layer(y)
        if words & {"dropout", "dropout-twice"}:
            h = self.drop(h)
        if "functional-dropout" in words:
            h = F.dropout(h, _P, self.training)
        if "noise" in words and self.training:
            h = h + 0.2 * torch.randn_like(h)
        out = self.down(h)
        return x + (self.drop(out) if words & {"dropout-after", "dropout-twice"} else out)

    def _activated(self, h: Tensor) -> Tensor:
        if "prelu" in self.words:
            return self.prelu(h)
        if "rrelu" in self.words:
            return F.rrelu(h, 0.1, 0.9, self.training)
        return F.gelu(h) if "gelu" in self.words else torch.tanh(h)


class Attention(nn.Module):
    """Causal attention, with norms of queries and keys, a learned temperature, and grouped queries.

    Keys have no bias: its gradient is zero up to rounding.
    """

    def __init__(self, head_width: int, words: Sequence[str]) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.words = HEADS, head_width, frozenset(words)
        self.num_kv_heads = HEADS // 2 if "grouped" in words else HEADS
        width, kv_width = HEADS * head_width, self.num_kv_heads * head_width
        self.norm = _norm(words, width)
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, kv_width), nn.Linear(width, width)
        self.q_norm = self.k_norm = nn.Identity()
        if "qk-rms" in words:
            self.q_norm, self.k_norm = nn.RMSNorm(head_width, eps=1e-2), nn.RMSNorm(head_width, eps=1e-2)
        if "qk-layer" in words:
            self.q_norm, self.k_norm = nn.LayerNorm(head_width, eps=1e-2), nn.LayerNorm(head_width, eps=1e-2)
        if "qk-shared" in words:
            self.q_norm = self.k_norm = nn.RMSNorm(head_width, eps=1e-2)
        if "temperature" in words:
            self.temperature = nn.Parameter(torch.zeros(()))
        self.drop = nn.Dropout(_P if "dropout-after" in words else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        q, k, v = (
            layer(y).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if "temperature" in self.words:
            q = q * self.temperature.exp()
        groups = self.num_heads // self.num_kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1)))


class Norm(nn.Module):
    """Norm over features, or BatchNorm over samples and positions."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        kinds: Mapping[str, Callable[[int], nn.Module]] = {
            "layer": nn.LayerNorm,
            "rms": nn.RMSNorm,
            "batch": nn.BatchNorm1d,
        }
        self.norm = kinds[kind](width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, x.shape[-1])).view_as(x)


class Scale(nn.Module):
    """A parameter of no dimensions, and one that the forward never uses."""

    def __init__(self, *, has_unused: bool) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.2))
        if has_unused:
            self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Frozen(nn.Module):
    """A trunk that is not trained; in evaluation mode, with dropout and BatchNorm, if the task says so."""

    def __init__(self, width: int, *, evaluates: bool) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(width, width), nn.Dropout(0.5 if evaluates else 0.0)
        self.norm = Norm("batch" if evaluates else "layer", width)
        self.requires_grad_(False)
        if evaluates:
            self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.drop(torch.tanh(self.layer(x))))


class Draw(nn.Module):
    """A draw from one distribution in training."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return DRAWS[self.kind](x) if self.training else x


class Embed(nn.Module):
    """The first module: tokens or points to features."""

    def __init__(self, size: int, width: int, *, takes_tokens: bool) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Embedding(size, width) if takes_tokens else nn.Linear(size, width)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layer(x)
        return features


class Head(nn.Module):
    """The last module: logits, scaled and changed in place."""

    def __init__(self, width: int, size: int, words: Sequence[str]) -> None:
        super().__init__()
        self.words = frozenset(words)
        self.norm = _norm(words, width)
        self.layer = nn.Linear(width, size, bias="no-bias" not in words)
        if self.words & {"scale", "temperature"}:
            self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        words, logits = self.words, self.layer(self.norm(x))
        if "scale" in words:
            logits = logits * self.scale.exp()
        if "temperature" in words:
            logits = logits / (1 + self.scale)
        if "div_" in words:
            logits.div_(0.7)
        if "set" in words:
            logits[..., 0] = -1.0
        if "clamp_" in words:
            logits.clamp_(-0.6, 0.6)
        if "masked_fill_" in words:
            logits.masked_fill_(x[..., :1] > 0.5, -2.0)
        return logits


def _norm(words: Sequence[str], width: int) -> nn.Module:
    return (
        nn.LayerNorm(width)
        if "pre-layer" in words
        else nn.RMSNorm(width)
        if "pre-rms" in words
        else nn.Identity()
    )


def _noise(values: Tensor, x: Tensor) -> Tensor:
    """Add values of any shape that broadcasts, without large ones."""
    return x + 0.1 * values.to(x.dtype).clamp(-3, 3)


def _per_token(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], 1)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


DRAWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, _P, True),
    "rand-per-sample": lambda x: x * (1 + torch.rand(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype)),
    "rand": lambda x: _noise(torch.rand(_per_token(x)), x),
    "rand_like": lambda x: _noise(torch.rand_like(x), x),
    "randn": lambda x: _noise(torch.randn(x.shape), x),
    "randint": lambda x: _noise(torch.randint(1, 3, _per_token(x)), x),
    "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "multinomial": lambda x: _noise(torch.ones(x.shape[-1]).multinomial(x.shape[-1]), x),
    "poisson": lambda x: _noise(torch.poisson(torch.ones(_per_token(x))), x),
    "normal": lambda x: _noise(torch.normal(0.0, 1.0, _per_token(x)), x),
    "Normal.sample": lambda x: _noise(torch.distributions.Normal(0.0, 0.5).sample(x.shape), x),
    "Gamma.sample": lambda x: _noise(torch.distributions.Gamma(2.0, 2.0).sample(x.shape), x),
    "Dirichlet.sample": lambda x: _noise(torch.distributions.Dirichlet(torch.ones(x.shape[-1])).sample(), x),
    "Normal.rsample": lambda x: torch.distributions.Normal(x, 0.1).rsample(),
    "gumbel_softmax": lambda x: x + F.gumbel_softmax(x, dim=-1),
    "exponential_": lambda x: _noise(torch.empty_like(x).exponential_(), x),
    "geometric_": lambda x: _noise(torch.empty_like(x).geometric_(0.5), x),
    "log_normal_": lambda x: _noise(torch.empty_like(x).log_normal_(), x),
    "cauchy_": lambda x: _noise(torch.empty_like(x).cauchy_(), x),
    "uniform_": lambda x: _noise(torch.empty_like(x).uniform_(), x),
    "random_": lambda x: _noise(torch.empty_like(x).random_(3), x),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.9, True),
    "torch.dropout": lambda x: torch.dropout(x, _P, True),
    "native_dropout": lambda x: torch.native_dropout(x, _P, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, _P, True),
    "feature_dropout": lambda x: torch.feature_dropout(_flat(x), _P, True).view_as(x),
    "python": lambda x: x * (1 + random.random()),
    "numpy": lambda x: x * (1 + np.random.rand()),
    "layer-drop": lambda x: x if torch.rand(()) < 0.5 else 0.5 * x,
}


def build_block(text: str, width: int) -> nn.Module:
    """Build a block of features [..., width] from its words."""
    kind, *words = text.split()
    if kind == "mlp":
        return Mlp(width, 2 * width + 2, words)
    if kind == "attention":
        return Attention(width // HEADS, words)
    if kind == "norm":
        return Norm(words[0], width)
    if kind == "draw":
        return Draw(words[0])
    if kind == "scale":
        return Scale(has_unused="unused" in words)
    if kind == "frozen":
        return Frozen(width, evaluates="evaluates" in words)
    if kind == "dropout":
        return nn.Dropout(_P)
    assert kind == "linear", text
    return nn.Linear(width, width)
