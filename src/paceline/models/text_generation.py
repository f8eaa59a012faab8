"""Sample tokens from a causal language model, one after another.

Each token costs a forward over the whole context: there is no cache of keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.models.training_mode import evaluating


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    num_tokens: int,
    *,
    context: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Tensor:
    """Continue a prompt.

    Args:
        model: maps tokens, int64 [1, T], to logits [1, T, V]; it is in evaluation mode meanwhile.
        prompt: int64 [P] with P >= 1, on the model's device.
        num_tokens: how many to add.
        context: the longest sequence that the model takes; older tokens are forgotten.
        generator: on the CPU; the only source of randomness, so equal generators give equal text.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_p: sample among the likeliest tokens that together have this probability.
    Returns:
        The prompt and what follows, int64 [P + num_tokens].
    Source: Holtzman et al. 2020, arXiv:1904.09751 (top-p).
    """
    with evaluating(model):
        tokens_T = prompt
        for _ in range(num_tokens):
            logits_V = model(tokens_T[None, -context:])[0, -1].float().cpu()
            token = sample_token(logits_V, temperature, top_p, generator)
            tokens_T = torch.cat((tokens_T, token.to(tokens_T.device)))
        return tokens_T


def sample_token(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Choose one token, int64 [1], by its logits, float32 [V]."""
    if temperature == 0.0:
        return logits_V.argmax().view(1)
    chances_V, tokens_V = (logits_V / temperature).softmax(-1).sort(descending=True, stable=True)
    before_V = chances_V.cumsum(-1) - chances_V
    before_V[0] = -1.0  # the likeliest token always stays
    chances_V = chances_V.masked_fill(before_V >= top_p, 0.0)
    return tokens_V[torch.multinomial(chances_V, 1, generator=generator)]
