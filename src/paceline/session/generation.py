"""Text from a causal language model as it lies on the ranks: nobody needs the whole of it.

Each token costs a forward over the whole context. Invariant: every rank has the same text, whatever the
layout; chance is a generator of the caller's, on every rank alike.
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
    """Continue a prompt; collective. By averaged weights if there are, by the first of replicas that differ.

    Args:
        prompt, num_tokens, context, temperature, top_p: see `paceline.models.generate`; equal on all ranks.
        generator: on the CPU, in the same state on all ranks.
    Returns:
        The prompt and what follows, int64 [P + num_tokens]; equal on all ranks.
    Raises:
        StrategyError: ranks have some positions of a sequence only.
    Wire: one all_reduce of 8 bytes a token, beside what the layout sends in a forward.
    """
    if session.strategy.context > 1:
        raise StrategyError(
            "ranks of a context have some positions of a sequence, and a text grows by one",
            next_step="generate from the exported model, or under a strategy without context",
        )
    tokens_T = prompt.to(session.runner.sharded_model.device)
    with session.averaged():
        for _ in range(num_tokens):
            logits_V = _last_logits(session, tokens_T[None, -context:])
            token = torch.zeros(1, dtype=torch.int64)
            if logits_V is not None and session.mesh.data.rank == 0 and session.mesh.place("tensor") == 0:
                token = sample_token(logits_V, temperature, top_p, generator)
            agreed = session.net.all_reduce(token.to(tokens_T.device), session.mesh.world)
            tokens_T = torch.cat((tokens_T, agreed.wait()))
    return tokens_T


def _last_logits(session: Session, tokens_1T: Tensor) -> Tensor | None:
    """Of the last position, float32 [V] on the processor; None: another rank has them."""
    found: list[Tensor] = []

    def ask(model: nn.Module, batch: Any) -> None:
        found.append(model(batch)[0, -1].float().cpu().reshape(-1))  # whole, if ranks have parts of it

    alone = MicroBatch(step=session.state.step, shard=0, indices=np.arange(1), key=0)
    session.runner.forward_only([LoadedBatch(alone, tokens_1T)], ask)
    return found[0] if found else None
