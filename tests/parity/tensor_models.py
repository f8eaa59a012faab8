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


def qwen(vocabulary: int = 67) -> Task:
    """Norms of queries and keys; one layer sees a window, so two layers get different masks; tied."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=16,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        tie_word_embeddings=True,
    )
    return Task(Qwen3ForCausalLM(config), samples(vocabulary), next_token)


def padded(vocabulary: int, count: int = 24, length: int = 11) -> list[dict[str, Tensor]]:
    """Texts of several lengths, padded with zeros; every third has no padding."""
    made = []
    for k, tokens in enumerate(samples(vocabulary, count, length)):
        mask = (torch.arange(length) < length - 2 * (k % 3)).long()
        made.append({"input_ids": tokens * mask, "attention_mask": mask, "label": tokens[0] % 3})
    return made


def bert(*, classifies: bool, dropout: float = 0.1) -> Task:
    """A classifier of three classes, or a masked LM with tied embeddings; both with padding masks."""
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    torch.manual_seed(9)
    config = BertConfig(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model: nn.Module = BertForSequenceClassification(config) if classifies else BertForMaskedLM(config)
    return Task(model, padded(61), _class_of_text if classifies else _masked_tokens)


def _class_of_text(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return Loss(F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits))


def _masked_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    hidden = torch.where(torch.arange(tokens.shape[1], device=tokens.device) % 4 == 1, 3, tokens)
    logits = model(input_ids=hidden, attention_mask=mask).logits
    targets = torch.where((hidden != tokens) & (mask == 1), tokens, -100).flatten()
    total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return Loss(total, int((targets != -100).sum()))
