"""Generate text from a model as it is placed on the ranks of a session; no rank needs the whole model.

Replicas with equal weights share out the requests. The ranks of one replica run the same engine in lockstep:
tensor ranks with the keys and values of their heads, stages with those of their layers, and ZeRO-3 gathers
weights block by block in every forward. One rank samples and sends the tokens to the others. Invariant: the
texts are those of one process, the bits of their logits too unless a layout adds otherwise (tensor).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.data.work import LoadedBatch, MicroBatch
from paceline.errors import StrategyError
from paceline.job.mesh import RankGroup
from paceline.serving.engine import Engine, GenerationRequest
from paceline.serving.kv_cache import AttentionForm, SlotSettings
from paceline.serving.sampling import SampledToken
from paceline.serving.slot_forward import (
    ModelCall,
    WholeForward,
    choose_forward,
    forward_options,
    keep_samples,
    settings_fingerprint,
    trial_text,
    whole_logits,
)
from paceline.session.session import Session


def generate(
    session: Session,
    requests: Sequence[GenerationRequest],
    *,
    context: int,
    slots: int = 8,
    chunk: int = 64,
    attention: AttentionForm = "by_slot",
) -> list[list[int]]:
    """Continue prompts, with averaged weights if there are any, else those of the first replica; collective.

    Args:
        requests: equal on all ranks.
        context: longest text that the model takes, in tokens.
        slots, chunk, attention: see `SlotSettings`; slots are those of each replica.
    Returns:
        New tokens of each request; equal on all ranks.
    Raises:
        StrategyError: the strategy splits sequences over ranks (context).
        RequestError: a request does not fit; see `Engine.check`.
    Wire: one broadcast of 16 bytes for each token, in addition to the forwards of the layout.
    """
    strategy = session.strategy
    if strategy.context > 1:
        raise StrategyError(
            "generate does not support context, in which every rank has some positions of a sequence",
            next_step="generate from the exported model, or use a strategy without context",
        )
    # Replicas that differ between two rounds, and servers, run every forward together.
    shares_out = strategy.has_steps_of_one_process and not strategy.servers
    team = session.mesh.inside if shares_out else session.mesh.world
    num_teams, index = (session.mesh.replica.size, session.mesh.replica.rank) if shares_out else (1, 0)
    with session.averaged():
        (engine,) = build_engines(session, team, SlotSettings(slots, chunk, context, attention))
        for request in requests:
            engine.check(request)
        tickets = {i: engine.submit(requests[i]) for i in range(index, len(requests), num_teams)}
        engine.run()
    texts = json.dumps({i: ticket.tokens for i, ticket in tickets.items()})
    tokens: dict[str, list[int]] = {}
    for text in all_gather_texts(texts, session.mesh.world, session.net):
        tokens |= json.loads(text)
    return [tokens[str(i)] for i in range(len(requests))]


def build_engines(
    session: Session, team: RankGroup, settings: SlotSettings, weights: str = "", number: int = 1
) -> list[Engine]:
    """Return engines of the ranks that run every forward together, each with its slots; collective.

    Args:
        team: the ranks.
        weights: hash of the weights, for the fingerprint; empty: nobody reads it.
        number: of engines.
    """
    model, device = session.runner.sharded_model.model, session.runner.sharded_model.device
    call = _placed_call(session, samples=_is_sampler(session, team))

    def gather(text: str) -> list[str]:
        return all_gather_texts(text, team, session.net) if team.size > 1 else [text]

    zero_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
    logits = call(zero_11, zero_11)
    sizes = gather("" if logits is None else str(logits.shape[-1]))
    source = next(rank for rank, size in enumerate(sizes) if size)
    vocab, fingerprint = int(sizes[source]), settings_fingerprint(weights, settings)
    share = SampleBroadcast(team, session.net, source) if team.size > 1 else keep_samples
    # Not inference_mode: ZeRO-3 frees and fills the memory of parameters around every block.
    whole = WholeForward(call, model, settings, vocab, fingerprint, device, gather, torch.no_grad, share)
    text = trial_text(model, settings, vocab)
    expected = whole.logits(text)
    forward = choose_forward(whole, text, None if expected is None else expected[0], weights)
    forwards = [forward, *(forward.twin() for _ in range(number - 1))]
    return [Engine(forward, max_queued=2**31) for forward in forwards]


class SampleBroadcast:
    """Broadcast of samples from the rank that samples to the other ranks of its team.

    Args:
        team: ranks that run every forward together.
        net: of this rank.
        source: rank in the team that samples.
    Wire: a broadcast of 16 bytes for each token, and 16 more for each of its `top_logprobs`.
    """

    def __init__(self, team: RankGroup, net: Net, source: int) -> None:
        self._team, self._net, self._source = team, net, source

    def __call__(
        self, samples: Sequence[SampledToken] | None, num_samples: int, num_logprobs: int
    ) -> Callable[[], Sequence[SampledToken]]:
        """Begin the broadcast; see `SlotForward.share`."""
        width = 2 + 2 * num_logprobs
        # Float64 holds tokens exactly; NaN stands for what was not requested.
        rows = torch.full((num_samples, width), torch.nan, dtype=torch.float64)
        for row, sampled in zip(rows, samples or (), strict=samples is not None):
            logprob = torch.nan if sampled.logprob is None else sampled.logprob
            numbers = [sampled.token, logprob, *(x for pair in sampled.top_logprobs for x in pair)]
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        broadcast = self._net.broadcast(rows, self._team, self._source)

        def receive() -> Sequence[SampledToken]:
            received = broadcast.wait().tolist()
            return [_sampled(row) for row in received] if samples is None else samples

        return receive


def _sampled(row: Sequence[float]) -> SampledToken:
    """Return the sample that a row of a broadcast stands for."""
    token, logprob, *rest = row
    pairs = zip(rest[::2], rest[1::2], strict=True)
    top = tuple((int(other), value) for other, value in pairs if not math.isnan(other))
    return SampledToken(int(token), None if math.isnan(logprob) else logprob, top)


def _is_sampler(session: Session, team: RankGroup) -> bool:
    """Return whether this rank is the one of its team that samples, if it has logits."""
    mesh = session.mesh
    if team is mesh.world:
        return mesh.data.rank == session.strategy.storage_ranks and mesh.coordinate("tensor") == 0
    return mesh.coordinate("shard") == 0 and mesh.coordinate("tensor") == 0


def _placed_call(session: Session, *, samples: bool) -> ModelCall:
    """Return the forward of the session's model, in the order of its layout."""
    options = forward_options(session.runner.sharded_model.model)

    def call(tokens_BT: Tensor, places_BT: Tensor) -> Tensor | None:
        logits: list[Tensor] = []

        def forward(model: nn.Module, batch: Any) -> None:
            logits.append(whole_logits(model(batch, **options(places_BT))))

        micro_batch = MicroBatch(step=session.state.step, shard=0, indices=np.arange(len(tokens_BT)), key=0)
        session.runner.forward_only([LoadedBatch(micro_batch, tokens_BT)], forward)
        return logits[0] if logits and samples else None

    return call
