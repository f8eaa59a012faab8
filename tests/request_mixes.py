"""Random mixes of requests, and what an engine computes for each text: alone, and beside others.

A text's logits must be a function of its tokens and the engine's settings. `RecordingEngine` keeps the bytes
of every row of logits by (prompt, text): two different ones for one text are a violation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import nn

from paceline.models import GPT, GPTConfig
from paceline.serving.engine import Engine, GenerationRequest, Ticket, TokenEvent
from paceline.serving.kv_cache import KVCache, SlotSettings
from paceline.serving.sampling import LogitRow, SamplingOptions
from paceline.serving.slot_forward import CachedForward, model_call

VOCAB = 61
Text = tuple[tuple[int, ...], tuple[int, ...]]


def small_gpt(positions: str = "rotary") -> GPT:
    """A GPT with weights so large that its texts are not all alike."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab=VOCAB, context=64, layers=2, heads=2, width=32, positions=positions))
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.3)
    return model.eval()


def cached_forward(
    model: nn.Module, settings: SlotSettings, cache: type[KVCache] = KVCache, vocab: int = VOCAB
) -> CachedForward:
    """Return the forward of a model with a given class of cache."""
    forward = CachedForward(model_call(model), model, settings, vocab, "", torch.device("cpu"))
    forward.cache = cache(settings, torch.device("cpu"), model)
    return forward


class RecordingEngine(Engine):
    """Engine that keeps the bytes of all logits by text."""

    def __init__(self, forward: CachedForward) -> None:
        super().__init__(forward)
        self.logits: dict[Text, set[bytes]] = {}

    def _sample(
        self, tickets: Sequence[Ticket], rows: Sequence[LogitRow] | None
    ) -> Callable[[], list[TokenEvent]]:
        for ticket, row in zip(tickets, rows or (), strict=True):
            text = ticket.request.prompt, tuple(ticket.text)
            self.logits.setdefault(text, set()).add(row.tobytes())
        return super()._sample(tickets, rows)

    @property
    def violations(self) -> int:
        """Number of texts that had different logits."""
        return sum(len(rows) > 1 for rows in self.logits.values())


def random_request(rng: random.Random) -> GenerationRequest:
    """A prompt of one to five chunks, greedy or sampled in some way."""
    sampling = SamplingOptions(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 10]),
        top_p=rng.choice([0.8, 1.0]),
        min_p=rng.choice([0.0, 0.02]),
        repeat_penalty=rng.choice([1.0, 1.3]),
        repeat_window=rng.choice([3, 64]),
        seed=rng.randrange(2**64),
    )
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40)))
    stops = frozenset(rng.sample(range(VOCAB), rng.choice([0, 3])))
    return GenerationRequest(prompt, rng.randint(1, 12), sampling, stops, rng.randrange(3))


def run_mix(engine: Engine, requests: Sequence[GenerationRequest], rng: random.Random) -> list[Ticket]:
    """Submit requests at random times, cancel some of them on the way, and step until all have ended."""
    waiting, tickets = list(requests), list[Ticket]()
    while waiting or not engine.is_idle:
        if waiting and rng.random() < 0.6:
            tickets.append(engine.submit(waiting.pop()))
        if tickets and rng.random() < 0.05:
            engine.cancel(rng.choice(tickets))
        engine.step()
    return tickets


def count_wrong_texts(engine: RecordingEngine, num_mixes: int, seed: int = 0) -> int:
    """Return how many texts of random mixes are not those generated alone, or had other logits."""
    rng = random.Random(seed)
    pool = [random_request(rng) for _ in range(max(12, num_mixes // 2))]
    alone = {}
    for request in pool:
        ticket = engine.submit(request)
        engine.run()
        alone[request] = ticket.tokens
    wrong = 0
    for _ in range(num_mixes):
        for ticket in run_mix(engine, rng.choices(pool, k=rng.randint(2, 9)), rng):
            expected = alone[ticket.request]
            if ticket.finish_reason == "cancelled":
                expected = expected[: len(ticket.tokens)]
            wrong += ticket.tokens != expected
    return wrong + engine.violations
