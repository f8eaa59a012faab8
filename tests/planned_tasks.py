"""Small tasks whose memory is planned, and measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise

import torch
from torch import nn

from paceline import Loss, Task
from paceline.models import GPT, GPTConfig, gpt_chain, initialize_gpt, without_memory
from paceline.tasks.byte_gpt import next_token_loss, next_token_sequence

SAMPLES = 32


def small_gpt(heads: int = 4) -> Task:
    """A GPT whose activations weigh about as much as its parameters."""
    with without_memory():
        model = GPT(GPTConfig(vocab=257, context=32, layers=4, heads=heads, width=128))
    return Task(
        model,
        list(torch.arange(SAMPLES * 33).remainder(257).view(SAMPLES, 33)),
        next_token_loss,
        sequence=next_token_sequence,
        stages=gpt_chain,
        initialize=initialize_gpt,
        tensor={"blocks.*.feed_forward.expand": "column", "blocks.*.feed_forward.project": "row"},
    )


def wide_chain() -> Task:
    """Layers of different widths, built whole; parameters weigh more than activations."""
    torch.manual_seed(1)  # tensor ranks see the same samples
    return Task(
        _linear_layers(64, 512, 512, 128, 640, 64),
        list(torch.rand(SAMPLES, 64)),
        lambda model, x: Loss((model(x) - x).square().sum(), len(x)),
        tensor={"0": "column", "2": "row", "4": "column", "6": "row"},
    )


def long_chain() -> Task:
    """Layers whose activations weigh more than their parameters, and are all as large."""
    samples = list(torch.ones(SAMPLES, 64, 4))
    model = _linear_layers(4, *[128] * 7)
    return Task(model, samples, lambda model, x: Loss(model(x).square().sum(), len(x)))


def _linear_layers(*widths: int) -> nn.Sequential:
    pairs = ((nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths))
    return nn.Sequential(*chain.from_iterable(pairs))


def one_head() -> Task:
    """The GPT with a head that no ranks can divide, so that keys and values go around a ring."""
    return small_gpt(heads=1)


TASKS: dict[str, Callable[[], Task]] = {
    "gpt": small_gpt,
    "ring": one_head,
    "chain": wide_chain,
    "long": long_chain,
}
