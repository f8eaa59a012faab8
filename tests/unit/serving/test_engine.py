"""The engine: a text is the same alone and beside others, and each way to break that is found."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from paceline.errors import QueueFullError, RequestError
from paceline.serving import sampling
from paceline.serving.engine import Engine, GenerationRequest
from paceline.serving.kv_cache import KVCache, SlotSettings
from paceline.serving.sampling import SamplingOptions
from paceline.serving.slot_forward import build_engine, try_cache
from paceline.session.reproducibility import needs_equal_rows
from tests.request_mixes import VOCAB, RecordingEngine, cached_forward, count_wrong_texts, small_gpt

GREEDY = SamplingOptions(temperature=0.0)


def recording_engine(
    settings: SlotSettings, cache: type[KVCache] = KVCache, positions: str = "rotary"
) -> RecordingEngine:
    return RecordingEngine(cached_forward(small_gpt(positions), settings, cache))


@pytest.mark.capability("W1", "W4")
@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        (SlotSettings(8, 8, 64, "masked"), "rotary"),
        (SlotSettings(3, 16, 64, "masked", rows=4), "learned"),
        (SlotSettings(4, 7, 60, "by_slot"), "rotary"),
    ],
    ids=["masked", "masked-learned", "by_slot"],
)
def test_a_text_is_the_same_beside_others(settings: SlotSettings, positions: str) -> None:
    assert count_wrong_texts(recording_engine(settings, positions=positions), num_mixes=20) == 0


@pytest.mark.parametrize("attention", ["masked", "by_slot"])
def test_the_bits_of_a_slot_do_not_depend_on_the_thread(attention: Any) -> None:
    torch.set_num_threads(2)  # the fixture of all unit tests sets it back
    model, settings = small_gpt(), SlotSettings(4, 8, 64, attention)
    text = [(7 * i) % VOCAB for i in range(17)]
    with torch.no_grad():
        logits_TV = model(torch.tensor([text]))[0]
    trial = try_cache(cached_forward(model, settings), text, logits_TV)
    assert trial == ("", True, True)
    if attention == "masked" and not needs_equal_rows():  # there tests have kernels with equal rows
        fused = cached_forward(model, settings, FusedKernel)
        assert not try_cache(fused, text, logits_TV).has_equal_rows


class OldTextVisible(KVCache):
    """Twin whose mask still shows what the slot's last text has left."""

    def clear(self, slot: int) -> None:
        """Forget the length only."""
        self._lengths[slot] = 0

    def _set_length(self, slot: int, length: int) -> None:
        self._lengths[slot] = length
        self._lengths_S[slot] = length
        self._mask_S11L[slot, ..., :length] = 0.0


class AsLongAsTheLongest(KVCache):
    """Twin that attends over the longest text, as a usual batch does."""

    def _attend_masked(self, query: Any, layer: Any, scale: float | None) -> Any:
        stop = int(self._lengths_S.max()) + 1
        keys, values = layer.keys[:, :, :stop], layer.values[:, :, :stop]
        return F.scaled_dot_product_attention(query, keys, values, self._mask_S11L[..., :stop], scale=scale)


class FusedKernel(KVCache):
    """Twin that attends under the mask with PyTorch's kernel."""

    def _attend_masked(self, query: Any, layer: Any, scale: float | None) -> Any:
        return F.scaled_dot_product_attention(query, layer.keys, layer.values, self._mask_S11L, scale=scale)


@pytest.mark.parametrize("cache", [OldTextVisible, AsLongAsTheLongest])
def test_twins_of_the_cache_are_found(cache: type[KVCache]) -> None:
    assert count_wrong_texts(recording_engine(SlotSettings(4, 8, 64, "masked"), cache), num_mixes=2) > 0


def test_draws_from_a_stream_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = random.Random(0)
    monkeypatch.setattr(sampling, "draw_uniform", lambda *key: stream.random())
    assert count_wrong_texts(recording_engine(SlotSettings(4, 8, 64, "masked")), num_mixes=1) > 0


@pytest.mark.parametrize("attention", ["masked", "by_slot"])
def test_a_freed_slot_has_nothing_of_its_text(attention: Any) -> None:
    engine = recording_engine(SlotSettings(2, 8, 64, attention))
    cache = engine.forward.cache
    secret = engine.submit(GenerationRequest(tuple(range(1, 40)), 5, GREEDY))
    engine.step()
    assert secret.slot == 0 and cache._layers[0].keys[0].abs().sum() > 0
    engine.cancel(secret)
    for layer in cache._layers:
        assert not layer.keys[0].any() and not layer.values[0].any()
    assert (cache._mask_S11L[0] == -torch.inf).all()
    # The next text in the slot has the logits that it has in a new engine.
    request = GenerationRequest((7, 8, 9), 6, GREEDY)
    for next_engine in (engine, recording_engine(SlotSettings(2, 8, 64, attention))):
        next_engine.submit(request)
        next_engine.run()
        next_engine.logits = {k: v for k, v in next_engine.logits.items() if k[0] == request.prompt}
        engine.logits = engine.logits | {
            text: rows | engine.logits[text] for text, rows in next_engine.logits.items()
        }
    assert len(engine.logits) == 6 and engine.violations == 0


def test_a_cancelled_request_frees_its_slot_for_the_next_step() -> None:
    engine = build_engine(small_gpt(), context=64, slots=1, chunk=8, max_queued=2)
    first, second = (engine.submit(GenerationRequest((1, token), 9, GREEDY)) for token in (2, 3))
    with pytest.raises(QueueFullError, match="2 requests wait"):
        engine.submit(GenerationRequest((1, 2), 9, GREEDY))
    assert {event.request_id for event in engine.step()} == {first.request_id}
    engine.cancel(first)
    assert {event.request_id for event in engine.step()} == {second.request_id}
    engine.cancel(second)
    engine.cancel(second)
    assert engine.is_idle and engine.step() == [] and second.finish_reason == "cancelled"


def test_a_text_ends_with_a_stop_token_at_max_tokens_or_at_the_context() -> None:
    engine = build_engine(small_gpt(), context=64, slots=2, chunk=8)
    free = engine.submit(GenerationRequest((5, 6, 7), None, GREEDY))
    engine.run()
    assert len(free.text) == 64 and free.finish_reason == "length"
    stop = free.tokens[3]
    ticket = engine.submit(GenerationRequest((5, 6, 7), 30, GREEDY, frozenset({stop})))
    events = []
    while not engine.is_idle:
        events += engine.step()
    assert ticket.finish_reason == "stop" == events[-1].finish_reason
    assert ticket.tokens == [event.token for event in events] == free.tokens[: free.tokens.index(stop) + 1]


def test_logits_that_are_not_finite_end_one_text_alone() -> None:
    good = GenerationRequest((1, 2, 3), 6, GREEDY)
    engine = recording_engine(SlotSettings(2, 8, 64))
    expected, bad = engine.submit(good), engine.submit(GenerationRequest((9,), 6, GREEDY))
    engine.step()
    with torch.inference_mode():
        engine.forward.cache._layers[1].values[bad.slot] = float("nan")
    events = engine.step()
    assert [(event.token, event.finish_reason) for event in events if event.request_id == bad.request_id] == [
        (-1, "error")
    ]
    engine.run()
    again = engine.submit(good)
    engine.run()
    assert bad.finish_reason == "error" and len(bad.tokens) == 2
    assert again.tokens == expected.tokens and len(again.tokens) == 6 and engine.violations == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest(()), "prompt is empty"),
        (GenerationRequest((1,) * 64), "has 64 tokens, and the model's context is 64"),
        (GenerationRequest((1, 61)), "token 61, and the model's vocabulary has 61"),
        (GenerationRequest((1,), 0), "max_tokens is 0"),
        (
            GenerationRequest((1,), 10**9),
            "max_tokens is 1000000000; the prompt has 1 token of a context of 64",
        ),
    ],
)
def test_requests_that_do_not_fit_are_refused(request_: GenerationRequest, message: str) -> None:
    engine = Engine(cached_forward(small_gpt(), SlotSettings(2, 8, 64)))
    with pytest.raises(RequestError, match=message) as error:
        engine.submit(request_)
    assert error.value.parameter in ("prompt", "max_tokens") and error.value.next_step
    assert engine.is_idle


def test_the_fingerprint_depends_on_weights_and_settings() -> None:
    engines = [
        build_engine(small_gpt(), context=64, slots=4, chunk=8),
        build_engine(small_gpt(), context=64, slots=4, chunk=8),
        build_engine(small_gpt(), context=64, slots=4, chunk=16),
        build_engine(small_gpt(), context=64, slots=4, chunk=8, attention="masked"),
    ]
    model = small_gpt()
    model.norm.weight.data[0] += 1e-6
    engines.append(build_engine(model, context=64, slots=4, chunk=8))
    prints = [engine.fingerprint for engine in engines]
    assert prints[0] == prints[1] and len({*prints}) == 4
