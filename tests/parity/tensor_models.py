"""Models of others, small and built from a config, as tasks: they bring no plan of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Task
from paceline.models import KeyedDropout


def next_token(model: nn.Module, tokens: Tensor) -> Loss:
    """The usual loss, by hand."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    targets = tokens[:, 1:].flatten()
    return Loss(F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel())


def samples(vocabulary: int, count: int = 40, length: int = 13) -> list[Tensor]:
    drawn = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(7))
    return list(drawn)


def gpt2(heads: int = 3, vocabulary: int = 101, dropout: float = 0.1, tied: bool = True) -> Task:
    """Its queries, keys and values are one `Conv1D`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes: dict[str, Any] = {"n_embd": 8 * heads, "n_head": heads, "n_layer": 2, "n_positions": 16}
    config = GPT2Config(
        vocab_size=vocabulary,
        **sizes,
        attn_pdrop=0.0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        tie_word_embeddings=tied,
    )
    model = keyed(GPT2LMHeadModel(config))
    return Task(model, samples(vocabulary), next_token)


def llama(heads: int = 6, shared: int = 3, vocabulary: int = 101) -> Task:
    """Grouped queries; three layers in its feed-forward; untied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=8 * heads,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=16,
        attention_bias=True,
    )
    return Task(LlamaForCausalLM(config), samples(vocabulary), next_token)


def keyed(model: nn.Module) -> nn.Module:
    """With every dropout keyed, so that no mask depends on what was drawn before."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, KeyedDropout(child.p))
    return model
