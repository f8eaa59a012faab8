"""Generate text from a causal language model as it is placed on the ranks; no rank needs the whole model.

Each token costs a forward over the whole context; keys and values are not cached. Invariant: every rank
returns the same text, whatever the layout, because one rank samples with the caller's generator and sends
the token to all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.work import LoadedBatch, MicroBatch
from paceline.errors import StrategyError
from paceline.models.text_generation import sample_token
from paceline.session.session import Session


def generate(
    session: Session,
    prompt: Tensor,
    num_tokens: int,
    *,
    context: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Tensor:
    """Continue a prompt, with averaged weights if there are any, else those of the first replica; collective.

    Args:
        prompt, num_tokens, context, temperature, top_p: see `paceline.models.generate`; equal on all ranks.
        generator: on the CPU, in the same state on all ranks.
    Returns:
        The prompt and the new tokens, int64 [P + num_tokens]; equal on all ranks.
    Raises:
        StrategyError: the strategy splits sequences over ranks (context).
    Wire: one all_reduce of 8 bytes a token, in addition to the forward of the layout.
    """
    if session.strategy.context > 1:
        raise StrategyError(
            "generate does not support context, in which every rank has some positions of a sequence",
            next_step="generate from the exported model, or use a strategy without context",
        )
    tokens_T = prompt.to(session.runner.sharded_model.device)
    with session.averaged():
        for _ in range(num_tokens):
            logits_V = _last_logits(session, tokens_T[None, -context:])
            token = torch.zeros(1, dtype=torch.int64)
            if (
                logits_V is not None
                and session.mesh.data.rank == session.strategy.storage_ranks
                and session.mesh.coordinate("tensor") == 0
            ):
                token = sample_token(logits_V, temperature, top_p, generator)
            # All other ranks add 0, so the sum is the token of the one rank that samples.
            agreed = session.net.all_reduce(token.to(tokens_T.device), session.mesh.world)
            tokens_T = torch.cat((tokens_T, agreed.wait()))
    return tokens_T


def _last_logits(session: Session, tokens_1T: Tensor) -> Tensor | None:
    """Return the logits of the last position, float32 [V] on the CPU; None if another rank has them."""
    logits: list[Tensor] = []

    def forward(model: nn.Module, batch: Any) -> None:
        logits.append(model(batch)[0, -1].float().cpu().reshape(-1))  # gathers a vocabulary that is split

    micro_batch = MicroBatch(step=session.state.step, shard=0, indices=np.arange(1), key=0)
    session.runner.forward_only([LoadedBatch(micro_batch, tokens_1T)], forward)
    return logits[0] if logits else None
