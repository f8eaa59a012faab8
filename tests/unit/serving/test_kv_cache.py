"""The cache: cached logits are those of whole forwards, for models that know nothing of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.models import positions
from paceline.serving.engine import GenerationRequest, PromptChunk
from paceline.serving.kv_cache import KVCache, SlotSettings
from paceline.serving.sampling import SamplingOptions
from paceline.serving.slot_forward import CachedForward, WholeForward, build_engine, model_call, try_cache
from tests.request_mixes import VOCAB, cached_forward, small_gpt

CONTEXT, WIDTH = 48, 32


class PlainTransformer(nn.Module):
    """A causal model of PyTorch's modules, with learned positions.

    Args:
        body: maps hidden states [B, T, W] and a causal mask [T, T] to hidden states.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.body, self.head = body, nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places.weight[positions(tokens, 1)]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(x, mask))


class Encoder(nn.Module):
    """nn.TransformerEncoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layers(x, mask=mask)


class MultiHead(nn.Module):
    """nn.MultiheadAttention with a residual branch, called as one does who ignores the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.transpose(0, 1)  # positions first
        return (x + self.attention(x, x, x, attn_mask=mask)[0]).transpose(0, 1)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=CONTEXT, n_embd=WIDTH, n_layer=2, n_head=2, initializer_range=0.2
        )
    )


MODELS: list[Callable[[], nn.Module]] = [
    small_gpt,
    lambda: small_gpt("learned"),
    lambda: PlainTransformer(Encoder()),
    lambda: PlainTransformer(MultiHead()),
    llama,
    gpt2,
]
NAMES = ["gpt-rotary", "gpt-learned", "encoder", "multi-head", "llama", "gpt2"]


def forwards(model: nn.Module, settings: SlotSettings) -> tuple[CachedForward, WholeForward]:
    model.eval()
    whole = WholeForward(model_call(model), model, settings, VOCAB, "", torch.device("cpu"))
    return cached_forward(model, settings), whole


@pytest.mark.capability("W4")
@pytest.mark.parametrize("attention", ["masked", "by_slot"])
@pytest.mark.parametrize("build", MODELS, ids=NAMES)
def test_cached_logits_are_those_of_whole_forwards(build: Callable[[], nn.Module], attention: Any) -> None:
    torch.manual_seed(0)
    cached, whole = forwards(build(), SlotSettings(3, 7, CONTEXT, attention))
    texts = [[(5 * i + 3 * slot) % VOCAB for i in range(CONTEXT)] for slot in range(3)]
    lengths = [2, 20, CONTEXT - 4]  # the last chunk of the last would pass the end of the context
    expected = [whole.logits(text) for text in texts]
    rows: list[list[Any]] = [[], [], []]
    for slot, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        chunks = [PromptChunk(slot, text[:length], start) for start in range(0, length, 7)]
        rows[slot] = [row for chunk in chunks for row in cached.prefill([chunk]) or ()][-1:]
    for step in range(4):
        tokens = [text[length + step] for text, length in zip(texts, lengths, strict=True)]
        for slot, row in enumerate(cached.decode(range(3), tokens) or ()):
            rows[slot].append(row.copy())
    for row, length, logits in zip(rows, lengths, expected, strict=True):
        assert logits is not None
        wanted = logits[0, length - 1 : length + 4].float()
        got = torch.stack([torch.from_numpy(values) for values in row])
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


class OffByOne(KVCache):
    """Twin that numbers the token after a prompt as if it were one further on."""

    def _set_length(self, slot: int, length: int) -> None:
        super()._set_length(slot, length + 1 if length else 0)


class LeftPadded(CachedForward):
    """Twin that pads short chunks on the left, and attends to the padding."""

    def prefill(self, chunks: Sequence[PromptChunk]) -> Any:
        """Run the prompt with zeros before it."""
        slot, prompt, _ = chunks[0]
        padding = -len(prompt) % self.chunk
        padded = [*[0] * padding, *prompt]
        for first in range(0, len(padded), self.chunk):
            rows = super().prefill([PromptChunk(slot, padded, first)])
        return rows


@pytest.mark.parametrize("twin", ["off by one", "left padding", "none"])
def test_the_trial_finds_a_broken_cache(twin: str) -> None:
    model, settings = small_gpt(), SlotSettings(4, 8, 64)
    cached, whole = forwards(model, settings)
    if twin == "off by one":
        cached.cache = OffByOne(settings, torch.device("cpu"))
    elif twin == "left padding":
        cached = LeftPadded(model_call(model), model, settings, VOCAB, "", torch.device("cpu"))
    text = [(7 * i) % VOCAB for i in range(17)]
    logits = whole.logits(text)
    assert logits is not None
    error = try_cache(cached, text, logits[0]).error
    assert bool(error) == (twin != "none")
    assert ("logits differ" in error) == (twin != "none")


class Bidirectional(nn.Module):
    """Attention without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Averages(nn.Module):
    """Means over all earlier positions instead of attention."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


@pytest.mark.parametrize(
    ("body", "reason"),
    [(Bidirectional, "not causal"), (Averages, "called it 0 times")],
)
def test_a_model_without_a_cache_is_right_and_logged_once(
    body: type[nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = PlainTransformer(body()).eval()
    with caplog.at_level(logging.WARNING, logger="paceline"):
        engine = build_engine(model, context=CONTEXT, slots=2, chunk=8)
        tickets = [
            engine.submit(GenerationRequest(prompt, 6, SamplingOptions(temperature=0.0)))
            for prompt in ((1, 2, 3), tuple(range(20)))
        ]
        engine.run()
    assert [reason in record.message for record in caplog.records] == [True]
    for ticket in tickets:
        text = list(ticket.request.prompt)
        for _ in range(6):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert ticket.text == text


def test_weights_that_are_not_finite_are_named() -> None:
    model = small_gpt()
    model.blocks[1].feed_forward.expand.weight.data[3, 4] = float("nan")
    with pytest.raises(TaskError, match=r"blocks\.1\.feed_forward\.expand\.weight"):
        build_engine(model, context=64)


def test_the_memory_of_the_slots_is_allocated_before_the_first_request() -> None:
    engine = build_engine(small_gpt(), context=64, slots=4, chunk=8)
    cache = engine.forward.cache
    known = cache.num_bytes
    assert known == 2 * 2 * 4 * 64 * 32 * 4  # keys and values, layers, slots, positions, width, bytes
    pointers = [x.data_ptr() for layer in cache._layers for x in layer[:2]]
    for _ in range(6):
        engine.submit(GenerationRequest((1, 2, 3), 20))
    engine.run()
    assert [x.data_ptr() for layer in cache._layers for x in layer[:2]] == pointers


def test_rows_are_added_until_all_slots_have_the_same_bits() -> None:
    engine = build_engine(small_gpt(), context=64, slots=5, chunk=8)
    assert engine.forward.num_slots == 5
    assert engine.forward.settings.rows % 4 == 0 or engine.forward.settings.rows == 5
