"""Early exit: a sequence leaves a GPT after the first block whose prediction is confident enough.

After each block the norm and the output layer of the model predict the next tokens. A sequence whose mean
confidence reaches a threshold keeps that prediction, and the blocks after it run without it. Nothing here is
collective, so ranks with whole models may go to different depths; they add up only their results.

Source: Schuster et al. 2022, Confident Adaptive Language Modeling, arXiv:2207.07061, section 3.5 (softmax
confidence), with one exit for a sequence in place of one for a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import TaskError
from paceline.models.gpt import GPT, embed_tokens


@dataclass(frozen=True)
class EarlyExitResult:
    """The result of an evaluation with early exits.

    Args:
        loss: mean cross-entropy of the next tokens, in nats.
        accuracy: share of the tokens that are the likeliest ones.
        flops: mean of a sequence, with the predictions after each block; counted, not estimated.
        full_flops: mean of a sequence that goes through all blocks and is predicted once.
        exits: number of sequences by the number of blocks that they went through, from 0 on.
    """

    loss: float
    accuracy: float
    flops: float
    full_flops: float
    exits: tuple[int, ...]


@torch.no_grad()
def evaluate_early_exit(
    model: GPT, batches: Iterable[Tensor], confidence: float, *, least_blocks: int = 1
) -> EarlyExitResult:
    """Evaluate a GPT with early exits.

    Args:
        model: whole on this process; its mode is restored.
        batches: tokens, int64 [B, T + 1] with T <= context.
        confidence: mean over positions of the largest probability at which a sequence exits; above 1: none
            exits early, and nothing is predicted before the last block.
        least_blocks: blocks that every sequence goes through.
    Raises:
        TaskError: there is no batch, or fewer blocks than `least_blocks`.
    """
    if not 1 <= least_blocks <= len(model.blocks):
        raise TaskError(
            f"least_blocks = {least_blocks} of a GPT with {len(model.blocks)} blocks",
            next_step=f"choose 1 to {len(model.blocks)}",
        )
    trained, totals, exits = (
        model.training,
        torch.zeros(2, dtype=torch.float64),
        [0] * (len(model.blocks) + 1),
    )
    flops = full_flops = num_sequences = num_tokens = 0
    model.eval()
    try:
        # Fused attention has no count of its operations on every device.
        with sdpa_kernel(SDPBackend.MATH):
            for tokens_BT in batches:
                inputs_BT, next_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
                with FlopCounterMode(display=False) as counter:
                    logits_BTV, depths = _run(model, inputs_BT, confidence, least_blocks)
                flops += counter.get_total_flops()
                with FlopCounterMode(display=False) as counter:
                    model(inputs_BT[:1])
                full_flops += counter.get_total_flops() * len(tokens_BT)
                loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), next_BT.flatten(), reduction="sum")
                totals += torch.tensor(
                    [float(loss), float((logits_BTV.argmax(-1) == next_BT).sum())], dtype=torch.float64
                )
                num_sequences, num_tokens = num_sequences + len(tokens_BT), num_tokens + next_BT.numel()
                for depth in depths:
                    exits[depth] += 1
    finally:
        model.train(trained)
    if not num_sequences:
        raise TaskError("there is no batch to evaluate on", next_step="pass at least one batch of tokens")
    loss_sum, num_right = totals.tolist()
    return EarlyExitResult(
        loss_sum / num_tokens,
        num_right / num_tokens,
        flops / num_sequences,
        full_flops / num_sequences,
        tuple(exits),
    )


def _run(model: GPT, inputs_BT: Tensor, confidence: float, least_blocks: int) -> tuple[Tensor, list[int]]:
    """Return the logits of each sequence at its exit, [B, T, V], and the number of its blocks."""
    x_BTW = embed_tokens(inputs_BT, model.embed, model.positions, model.dropout)
    staying, depths = torch.arange(len(inputs_BT), device=inputs_BT.device), [0] * len(inputs_BT)
    logits_BTV = x_BTW.new_empty(*inputs_BT.shape, model.config.vocab)
    for number, block in enumerate(model.blocks, 1):
        x_BTW = block(x_BTW)
        is_last = number == len(model.blocks)
        if not is_last and (number < least_blocks or confidence > 1):
            continue
        predicted_BTV = model.head(model.norm(x_BTW))
        sure_B = predicted_BTV.float().softmax(-1).amax(-1).mean(-1) >= confidence
        exits_B = torch.ones_like(sure_B) if is_last else sure_B
        logits_BTV[staying[exits_B]] = predicted_BTV[exits_B]
        for index in staying[exits_B].tolist():
            depths[index] = number
        staying, x_BTW = staying[~exits_B], x_BTW[~exits_B]
        if not len(staying):
            break
    return logits_BTV, depths
