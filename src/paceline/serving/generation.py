"""Generate text from a model as it is placed on the ranks of a session; no rank needs the whole model.

Replicas with equal weights share out the requests. The ranks of one replica run the same engine in lockstep:
tensor ranks with the keys and values of their heads, stages with those of their layers, and ZeRO-3 gathers
weights block by block in every forward. One rank samples and sends the tokens to the others. Invariant: the
texts are those of one process, the bits of their logits too unless a layout adds otherwise (tensor).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from paceline.serving.load_model import model_limits
from paceline.serving.sampling import SampledToken
from paceline.serving.slot_forward import (
    CachedForward,
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

log = logging.getLogger("paceline")


def generate(
    session: Session,
    requests: Sequence[GenerationRequest],
    *,
    context: int | None = None,
    slots: int | None = None,
    chunk: int | None = None,
    attention: AttentionForm | None = None,
) -> list[list[int]]:
    """Continue prompts, with averaged weights if there are any, else those of the first replica; collective.

    A short text is run with and without a cache at the first call, and again only for other settings, other
    ranks, or other weights of a model that had no cache.

    Args:
        requests: equal on all ranks.
        context: longest text, in tokens; None: that of the recipe, or of the model.
        slots, chunk, attention: see `SlotSettings`; slots are those of each replica. None: those of the
            recipe. Others may give other bits, which is logged.
    Returns:
        New tokens of each request; equal on all ranks.
    Raises:
        StrategyError: the strategy splits sequences over ranks (context).
        RecipeError: a setting is out of range.
        RequestError: a request does not fit; see `Engine.check`.
        TaskError: no context is given, and the model does not say its own.
    Wire: one broadcast of 16 bytes for each token, in addition to the forwards of the layout.
    """
    strategy = session.strategy
    if strategy.context > 1:
        raise StrategyError(
            "generate does not support context, in which every rank has some positions of a sequence",
            next_step="generate from the exported model, or use a strategy without context",
        )
    options = {"context": context, "slots": slots, "chunk": chunk, "attention": attention}
    settings = _settings(session, {name: value for name, value in options.items() if value is not None})
    # Replicas that differ between two rounds, and servers, run every forward together.
    shares_out = strategy.has_steps_of_one_process and not strategy.servers
    team = session.mesh.inside if shares_out else session.mesh.world
    num_teams, index = (session.mesh.replica.size, session.mesh.replica.rank) if shares_out else (1, 0)
    with session.averaged():
        (engine,) = build_engines(session, team, settings)
        for request in requests:
            engine.check(request)
        tickets = {i: engine.submit(requests[i]) for i in range(index, len(requests), num_teams)}
        engine.run()
    texts = json.dumps({i: ticket.tokens for i, ticket in tickets.items()})
    tokens: dict[str, list[int]] = {}
    for text in all_gather_texts(texts, session.mesh.world, session.net):
        tokens |= json.loads(text)
    return [tokens[str(i)] for i in range(len(requests))]


def _settings(session: Session, options: Mapping[str, Any]) -> SlotSettings:
    """Return the settings of the recipe, with options in place of its keys."""
    recipe = session.recipe.serve
    chosen = recipe.replace(**options)
    changes = chosen.changes_from(recipe.replace(context=chosen.context))
    if changes and session.is_first:
        log.warning("generate: not the settings of the recipe, so texts may have other bits: %s", changes)
    # A context that was given is taken as it is: not every model says its own.
    known = chosen.context or model_limits(session.runner.sharded_model.model)[0]
    return SlotSettings.from_recipe(chosen, known)


class _Trial(NamedTuple):
    """Result of the trial of a session.

    Args:
        vocab: number of logits.
        source: rank of the team that has the logits.
        num_rows: of a forward with a cache; 0: the model has none.
        joins_chunks: several chunks of prompts may run together.
        step: of the session.
    """

    vocab: int
    source: int
    num_rows: int = 0
    joins_chunks: bool = False
    step: int = -1


def build_engines(
    session: Session, team: RankGroup, settings: SlotSettings, weights: str = "", number: int = 1
) -> list[Engine]:
    """Return engines of the ranks that run every forward together, each with its slots; collective.

    The trial says how the model computes, which does not change with its weights. Only a model without a
    cache is tried again after a step: weights of zero make a trial fail.

    Args:
        team: the ranks.
        weights: hash of the weights, for the fingerprint; empty: nobody reads it.
        number: of engines.
    """
    model, device = session.runner.sharded_model.model, session.runner.sharded_model.device
    call = _placed_call(session, samples=_is_sampler(session, team))

    def gather(text: str) -> list[str]:
        return all_gather_texts(text, team, session.net) if team.size > 1 else [text]

    key, step = (settings, team.ranks, id(session.parts)), session.state.step
    known: _Trial | None = session.generation_trials.get(key)
    if known is None:
        zero_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
        logits = call(zero_11, zero_11)
        sizes = gather("" if logits is None else str(logits.shape[-1]))
        source = next(rank for rank, size in enumerate(sizes) if size)
        known = _Trial(int(sizes[source]), source)
    share = SampleBroadcast(team, session.net, known.source) if team.size > 1 else keep_samples
    fingerprint = settings_fingerprint(weights, settings)
    # Not inference_mode: ZeRO-3 frees and fills the memory of parameters around every block.
    whole = WholeForward(
        *(call, model, settings, known.vocab, fingerprint, device, gather, torch.no_grad), share=share
    )
    forward: WholeForward | CachedForward = whole
    if known.num_rows:
        forward = whole.with_cache(known.num_rows, weights)
        forward.joins_chunks = known.joins_chunks
    elif known.step != step:
        text = trial_text(model, settings, known.vocab)
        expected = whole.logits(text)
        forward = choose_forward(whole, text, None if expected is None else expected[0], weights)
        session.generation_trials[key] = known._replace(step=step)
        if isinstance(forward, CachedForward):
            session.generation_trials[key] = known._replace(
                num_rows=forward.settings.rows, joins_chunks=forward.joins_chunks, step=step
            )
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
