"""A decoder-only transformer (GPT) that can be read in one sitting.

Pre-norm blocks, causal attention by `scaled_dot_product_attention`, learned or rotary positions, and an
output layer that shares its weights with the embedding. A block maps hidden states to hidden states
and needs nothing else, so that blocks can be recomputed, split or put on another stage.

Shapes: B sequences, T positions, W width, H heads, D width of a head (W = H D), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import TaskError, format_count
from paceline.models.dropout import KeyedDropout, LayerDrop
from paceline.models.initialize import InitializeByName, InitRule
from paceline.models.positions import positions


@dataclass(frozen=True)
class GPTConfig:
    """The configuration of a GPT.

    Args:
        vocab: number of different tokens.
        context: longest sequence, in tokens.
        layers: number of blocks.
        heads: attention heads of a block.
        width: features of a position.
        dropout: probability of dropping a value of the embedding and of each branch; attention
            weights are not dropped, since the fused kernel would draw from a stream.
        layer_drop: probability of skipping a block in a micro-batch of the training.
        positions: "rotary" turns queries and keys; "learned" adds a vector per position.
        bias: whether linear layers and norms have biases.
    """

    vocab: int = 256
    context: int = 256
    layers: int = 4
    heads: int = 4
    width: int = 256
    dropout: float = 0.0
    positions: Literal["rotary", "learned"] = "rotary"
    bias: bool = False
    layer_drop: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.positions == "rotary" and (self.width // self.heads) % 2):
            raise TaskError(
                f"width {self.width} cannot be cut into {format_count(self.heads, 'head')} with"
                f" {self.positions} positions",
                next_step="choose width = heads x an even number",
            )


class RotaryEmbedding(nn.Module):
    """Rotary positions: each pair of features is rotated by an angle that grows with the position.

    Source: Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.2.2; pairs are (i, i + D/2).
    """

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, context: int, head_width: int) -> None:
        super().__init__()
        pace_D = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        angle_TD = torch.outer(torch.arange(context, dtype=torch.float64), pace_D).repeat(1, 2)
        sign_D = torch.cat((-torch.ones(head_width // 2), torch.ones(head_width // 2)))
        self.register_buffer("cos_TD", angle_TD.cos().float(), persistent=False)
        self.register_buffer("sin_TD", (angle_TD.sin() * sign_D).float(), persistent=False)

    def forward(self, x_BHTD: Tensor) -> Tensor:
        seen = positions(x_BHTD, -2)
        cos_TD, sin_TD = (table[seen].to(x_BHTD.dtype) for table in (self.cos_TD, self.sin_TD))
        return x_BHTD * cos_TD + x_BHTD.roll(x_BHTD.size(-1) // 2, dims=-1) * sin_TD


class CausalSelfAttention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.project = nn.Linear(config.width, config.width, bias=config.bias)
        rotary = config.positions == "rotary"
        self.rotary = (
            RotaryEmbedding(config.context, config.width // config.heads) if rotary else nn.Identity()
        )

    def forward(self, x_BTW: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            part_BTW.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part_BTW in self.qkv(x_BTW).chunk(3, dim=-1)
        )
        mixed_BHTD = F.scaled_dot_product_attention(
            self.rotary(q_BHTD), self.rotary(k_BHTD), v_BHTD, is_causal=True
        )
        return self.project(mixed_BHTD.transpose(1, 2).flatten(-2))


class GPTFeedForward(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.project = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(x_BTW)))


class GPTBlock(nn.Module):
    """Attention and feed-forward, each as a branch off the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = CausalSelfAttention(config)
        self.attention_dropout = KeyedDropout(config.dropout)
        self.feed_forward_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.feed_forward = GPTFeedForward(config)
        self.feed_forward_dropout = KeyedDropout(config.dropout)
        self.layer_drop = LayerDrop(config.layer_drop) if config.layer_drop else None

    def forward(self, x_BTW: Tensor) -> Tensor:
        if self.layer_drop is not None and self.layer_drop.skips():
            return x_BTW
        x_BTW = x_BTW + self.attention_dropout(self.attention(self.attention_norm(x_BTW)))
        return x_BTW + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x_BTW)))


class GPT(nn.Module):
    """A GPT language model: predicts every next token of a sequence from those before it.

    Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners (pre-norm GPT);
    Press & Wolf 2017, arXiv:1608.05859 (tied output layer).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.context, config.width) if learned else None
        self.dropout = KeyedDropout(config.dropout)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Map tokens, int64 [B, T] with T <= context, to logits of the next ones, [B, T, V]."""
        return self.head(self.hidden(tokens_BT))

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Map tokens, int64 [B, T], to the hidden states [B, T, W] that the output layer takes."""
        x_BTW = embed_tokens(tokens_BT, self.embed, self.positions, self.dropout)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        hidden_BTW: Tensor = self.norm(x_BTW)
        return hidden_BTW


def embed_tokens(
    tokens_BT: Tensor, embed: nn.Embedding, learned: nn.Embedding | None, dropout: nn.Module
) -> Tensor:
    """Return token embeddings [B, T, W], with learned positions if the model has them."""
    x_BTW = embed(tokens_BT)
    if learned is not None:
        x_BTW = x_BTW + learned.weight[positions(tokens_BT, 1)]
    return dropout(x_BTW)


class GPTEmbedding(nn.Module):
    """The embedding of a GPT, as the first module of its chain; shares the modules of the GPT."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.embed, self.positions, self.dropout = gpt.embed, gpt.positions, gpt.dropout

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Map tokens, int64 [B, T], to hidden states [B, T, W]."""
        return embed_tokens(tokens_BT, self.embed, self.positions, self.dropout)


def gpt_chain(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose composition is a GPT: embedding, blocks, norm with output layer."""
    if not isinstance(model, GPT):
        raise TaskError(f"{type(model).__name__} is not a GPT", next_step="pass a chain for this model")
    return [GPTEmbedding(model), *model.blocks, nn.Sequential(model.norm, model.head)]


GPT_TENSOR_PLAN: Mapping[str, str] = {
    "embed": "vocabulary",
    "blocks.*.attention": "heads",
    "blocks.*.feed_forward.expand": "column",
    "blocks.*.feed_forward.project": "row",
    "head": "vocabulary",
}
"""The tensor plan of a GPT (`tensor=N`)."""


def gpt_rule(model: nn.Module) -> InitRule:
    """Return the initialisation of a GPT: normal, deviation 0.02, residual branches / sqrt(2 layers).

    Source: Radford et al. 2019, section 2.3.
    """
    num_branches = 2 * sum(isinstance(module, GPTBlock) for module in model.modules())

    def rule(name: str, values: Tensor, generator: torch.Generator) -> None:
        if name.endswith("bias"):
            values.zero_()
        elif values.dim() >= 2:
            scale = math.sqrt(num_branches) if name.endswith("project.weight") else 1.0
            values.normal_(0.0, 0.02 / scale, generator=generator)

    return rule


initialize_gpt = InitializeByName(gpt_rule)
"""The initialisation of a GPT by parameter names."""
