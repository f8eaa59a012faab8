"""The task `byte-gpt`: a small GPT on text, measured in bits per byte against simple baselines.

The baselines are a unigram model, a trigram model and `lzma`. Invariant: each codes all bytes of the same
held-out text; the models count in the training text only, and `lzma` gets the held-out text only.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.text_corpus import TextWindows, open_corpus
from paceline.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from paceline.errors import TaskError
from paceline.models.chunked_cross_entropy import chunked_cross_entropy
from paceline.models.gpt import GPT, GPT_TENSOR_PLAN, GPTConfig, gpt_chain, initialize_gpt
from paceline.models.initialize import without_memory
from paceline.models.text_generation import generate
from paceline.recipe.validation import RecipeTable
from paceline.state.keys import key
from paceline.task import Loss, PositionSlicer, Task
from paceline.tasks.task_options import Strings, read_options

ByteArray = NDArray[np.uint8]
FloatArray = NDArray[np.float64]

_NUM_BYTES = 256


@dataclass(frozen=True)
class TextBaselines:
    """The bits per byte of the held-out text under each baseline."""

    unigram: float
    trigram: float
    lzma: float


def measure_baselines(train: ByteArray, held_out: ByteArray) -> TextBaselines:
    """Fit on one text, uint8 [N] with N >= 3, and code another, uint8 [M]; neither is modified."""
    unigram = _unigram(train)
    return TextBaselines(
        unigram=_mean_bits(unigram[held_out]),
        trigram=_mean_bits(trigram_probabilities(train, held_out)),
        lzma=8.0 * len(lzma.compress(held_out.tobytes())) / len(held_out),
    )


def trigram_probabilities(train: ByteArray, held_out: ByteArray) -> FloatArray:
    """Give the probability of each held-out byte after the two before it, float64 [M].

    Orders are interpolated: p(c | ab) = (n(abc) + t(ab) p(c | b)) / (n(ab) + t(ab)), where n counts and t is
    how many different bytes followed; p(c | b) is built from p(c) in the same way.

    Source: Witten & Bell 1991, The zero-frequency problem, IEEE Trans. Inf. Theory 37(4), method C.
    """
    unigram = _unigram(train)[held_out]
    bigram = _interpolate(_grams(train, 2), _grams(held_out, 2), unigram[1:])
    trigram = _interpolate(_grams(train, 3), _grams(held_out, 3), bigram[1:])
    return np.concatenate((unigram[:1], bigram[:1], trigram))


def _unigram(train: ByteArray) -> FloatArray:
    """Give p(c), float64 [256], with one added to every count so that none is zero."""
    counts = np.bincount(train, minlength=_NUM_BYTES) + 1.0
    return counts / counts.sum()


def _interpolate(train_grams: NDArray[np.int32], grams: NDArray[np.int32], lower: FloatArray) -> FloatArray:
    """Mix the counts of an order with the probabilities `lower` of the order below it, both [M]."""
    seen, counts = np.unique(train_grams, return_counts=True)
    num_contexts = int(max(train_grams.max(), grams.max(initial=0))) // _NUM_BYTES + 1
    context_counts = np.bincount(seen // _NUM_BYTES, weights=counts, minlength=num_contexts)
    context_types = np.bincount(seen // _NUM_BYTES, minlength=num_contexts)
    positions = np.searchsorted(seen, grams).clip(max=len(seen) - 1)
    own_counts = np.where(seen[positions] == grams, counts[positions], 0)
    context = grams // _NUM_BYTES
    types = np.maximum(context_types[context], 1)  # a context never seen: all weight on the lower order
    return (own_counts + types * lower) / (context_counts[context] + types)


def _grams(text: ByteArray, order: int) -> NDArray[np.int32]:
    """Write each run of `order` bytes as one integer, the latest byte in the lowest place."""
    wide = text.astype(np.int32)
    grams = wide[: len(wide) - order + 1]
    for offset in range(1, order):
        grams = grams * _NUM_BYTES + wide[offset : len(wide) - order + 1 + offset]
    return grams


def _mean_bits(chances: FloatArray) -> float:
    return float(-np.log2(chances).mean())


_FIT_BYTES = 2**24  # of the training text, for the baselines: seconds of sorting
_FIT_TOKENS = 2**21  # the same, where tokens must be decoded first


class ByteGptOptions(RecipeTable):
    """Options of the task `byte-gpt`: the text, the model and the sample.

    Args:
        text: files, folders, patterns, or "stdlib"; relative to the recipe.
        tokenizer: path or URL of a `tokenizer.json`, or of the folder of a model that has one; None trains on
            bytes.
        held_out: fraction of the text, by file, that is never trained on.
        train_tokens, held_out_tokens: at most so many are used of either part; 0 means all.
        layer_drop: probability of skipping a block in a micro-batch of the training.
        loss_chunk: positions whose logits are in memory at a time; 0: all, in one call of PyTorch.
        prompt: what the sample continues; empty: the start of a file.
    """

    text: Strings = ("stdlib",)
    tokenizer: str | None = None
    held_out: float = Field(default=0.05, gt=0.0, lt=1.0)
    train_tokens: int = Field(default=0, ge=0)
    held_out_tokens: int = Field(default=2**18, ge=0)
    context: int = Field(default=256, ge=1)
    layers: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    width: int = Field(default=256, ge=1)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    layer_drop: float = Field(default=0.0, ge=0.0, lt=1.0)
    positions: Literal["rotary", "learned"] = "rotary"
    loss_chunk: int = Field(default=0, ge=0)
    prompt: str = ""
    sample_tokens: int = Field(default=200, ge=0)
    temperature: float = Field(default=0.8, ge=0.0)
    top_p: float = Field(default=0.95, gt=0.0, le=1.0)


def build(*, seed: int, base_dir: Path, cache_dir: Path, **options: Any) -> Task:
    """Build the task; see `ByteGptOptions`. The held-out files are the same for every seed."""
    chosen = read_options(ByteGptOptions, options)
    model, tokenizer = build_model(chosen, base_dir)
    corpus = open_corpus(chosen.text, tokenizer, cache_dir, held_out=chosen.held_out, base_dir=base_dir)
    train = TextWindows(_first(corpus.train, chosen.train_tokens), chosen.context)
    held_out = TextWindows(_first(corpus.held_out, chosen.held_out_tokens), chosen.context)
    return Task(
        model=model,
        data=train,
        held_out=held_out,
        loss=partial(chunked_next_token_loss, chosen.loss_chunk) if chosen.loss_chunk else next_token_loss,
        stages=gpt_chain,
        tensor=GPT_TENSOR_PLAN,
        sequence=next_token_sequence,
        initialize=initialize_gpt,
        report=_build_report(chosen, tokenizer, train, held_out, corpus.split, seed),
        num_tokens_per_sample=chosen.context,
        predict=next_tokens,
        vocabulary=tokenizer.vocabulary,
    )


def held_out_windows(*, base_dir: Path, cache_dir: Path, **options: Any) -> TextWindows:
    """Return the held-out windows of a text, on which weights of other text are evaluated.

    `paceline evaluate RUN --data paceline.tasks.byte_gpt:held_out_windows --option 'text=["notes"]'` needs
    the `context` and the `tokenizer` of the run; see `ByteGptOptions`.
    """
    chosen = read_options(ByteGptOptions, options)
    tokenizer = _find_tokenizer(chosen, base_dir)
    corpus = open_corpus(chosen.text, tokenizer, cache_dir, held_out=chosen.held_out, base_dir=base_dir)
    return TextWindows(_first(corpus.held_out, chosen.held_out_tokens), chosen.context)


def build_model(chosen: ByteGptOptions, base_dir: Path) -> tuple[GPT, Tokenizer]:
    """Build the model, without memory for its large parameters, and the tokenizer; no text is read."""
    tokenizer = _find_tokenizer(chosen, base_dir)
    with without_memory():
        return GPT(_model_config(chosen, tokenizer.vocab_size)), tokenizer


def _find_tokenizer(chosen: ByteGptOptions, base_dir: Path) -> Tokenizer:
    place = chosen.tokenizer
    if place is None:
        return ByteTokenizer()
    return load_tokenizer(place if "://" in place else base_dir / place)


TokenPair = tuple[Tensor, Tensor]


def next_token_loss(model: nn.Module, batch: Tensor | TokenPair) -> Loss:
    """Sum the cross-entropies of all next tokens, in nats.

    Args:
        batch: tokens, int64 [B, context + 1]; or some of them and the one after each, int64 [B, T] both.
    """
    tokens_BT, next_BT = batch if isinstance(batch, tuple) else inputs_and_targets(batch)
    logits = model(tokens_BT).flatten(0, 1).float()
    return Loss(F.cross_entropy(logits, next_BT.flatten(), reduction="sum"), next_BT.numel())


def chunked_next_token_loss(chunk: int, model: nn.Module, batch: Tensor | TokenPair) -> Loss:
    """Sum the cross-entropies of all next tokens, with the logits of `chunk` positions in memory at a time.

    Args:
        chunk: positions, over all sequences of the batch.
        batch: as for `next_token_loss`.
    Raises:
        TaskError: the output layer is on another rank, or split over ranks.
    """
    if not isinstance(model, GPT) or len(model.head.weight) != model.config.vocab:
        raise TaskError(
            f"options.loss_chunk = {chunk} needs the whole output layer on a rank, but stages or tensor ranks"
            " have parts of the model",
            next_step="leave out pipeline and tensor, or options.loss_chunk",
        )
    tokens_BT, next_BT = batch if isinstance(batch, tuple) else inputs_and_targets(batch)
    hidden = model.hidden(tokens_BT).flatten(0, 1)
    total, _ = chunked_cross_entropy(hidden, model.head.weight, next_BT.flatten(), chunk_rows=chunk)
    return Loss(total, next_BT.numel())


def next_tokens(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """Return the likeliest next token at each position of windows [B, context + 1], int64 [B, context]."""
    predictions: Tensor = model(inputs_and_targets(tokens_BT)[0]).argmax(-1)
    return predictions


def inputs_and_targets(tokens_BT: Tensor) -> TokenPair:
    """Tokens but the last, and the one after each."""
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def next_token_sequence(tokens_BT: Tensor, part: PositionSlicer) -> TokenPair:
    """Return a slice of positions of a batch with their next tokens; a `Task.sequence`."""
    tokens, following = inputs_and_targets(tokens_BT)
    return part(tokens, 1), part(following, 1)


def bits_per_byte(nats_per_token: float, num_tokens: int, num_bytes: int) -> float:
    """Convert a mean loss: the unit that does not depend on the tokenizer."""
    return nats_per_token * num_tokens / num_bytes / math.log(2)


def text_bytes(tokens: NDArray[Any], tokenizer: Tokenizer) -> ByteArray:
    """Spell tokens as the bytes that they stand for, uint8 [N]; the end of a file is one byte 0."""
    if isinstance(tokenizer, ByteTokenizer):
        return tokens.astype(np.uint8, copy=False)
    end_of_file = tokenizer.decode([tokenizer.separator])
    text = tokenizer.decode(tokens.tolist()).replace(end_of_file, "\0")
    return np.frombuffer(text.encode(), dtype=np.uint8)


def sample_text(model: nn.Module, chosen: ByteGptOptions, tokenizer: Tokenizer, seed: int) -> str:
    """Continue the prompt; equal weights and seeds give equal text."""
    prompt = tokenizer.encode(chosen.prompt).tolist() or [tokenizer.separator]
    tokens = generate(
        model,
        torch.tensor(prompt, device=next(model.parameters()).device),
        chosen.sample_tokens,
        context=chosen.context,
        generator=torch.Generator().manual_seed(key(seed, "sample")),
        temperature=chosen.temperature,
        top_p=chosen.top_p,
    )
    text = tokenizer.decode(tokens.tolist()).strip("\0")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)  # it may go to a terminal


def _build_report(
    chosen: ByteGptOptions,
    tokenizer: Tokenizer,
    train: TextWindows,
    held_out: TextWindows,
    split: str,
    seed: int,
) -> Callable[[nn.Module, Mapping[str, float]], list[str]]:
    def report(model: nn.Module, evaluation: Mapping[str, float]) -> list[str]:
        num_tokens = int(evaluation.get("count", held_out.num_targets))
        scored = text_bytes(held_out.tokens[1 : num_tokens + 1], tokenizer)
        fit_tokens = _FIT_BYTES if isinstance(tokenizer, ByteTokenizer) else _FIT_TOKENS
        fitted = text_bytes(train.tokens[:fit_tokens], tokenizer)
        baselines = measure_baselines(fitted, scored)
        model_bits = bits_per_byte(evaluation["loss"], num_tokens, len(scored))
        lines = [
            f"held-out text: {len(scored):,} bytes ({split})",
            f"bits per byte: model {model_bits:.3f} | unigram {baselines.unigram:.3f} | "
            f"trigram {baselines.trigram:.3f} | lzma {baselines.lzma:.3f}",
        ]
        if chosen.sample_tokens:
            lines += ["sample:", *sample_text(model, chosen, tokenizer, seed).split("\n")]
        return lines

    return report


def _model_config(chosen: ByteGptOptions, vocab_size: int) -> GPTConfig:
    return GPTConfig(
        vocab=vocab_size,
        context=chosen.context,
        layers=chosen.layers,
        heads=chosen.heads,
        width=chosen.width,
        dropout=chosen.dropout,
        layer_drop=chosen.layer_drop,
        positions=chosen.positions,
    )


def _first(tokens: NDArray[Any], num_tokens: int) -> NDArray[Any]:
    return tokens[:num_tokens] if num_tokens else tokens
