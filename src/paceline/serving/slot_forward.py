"""Forwards of a model on the slots of an engine: with a cache, or of whole texts.

`build_engine` runs a short text with and without the cache, and takes `WholeForward` for a model whose logits
differ. Where several ranks share a model, all of them call the same functions in the same order, and agree on
every result that decides what runs next.

Shapes: S rows, of which the first are the slots, P tokens of a chunk, T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from inspect import signature
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.parallel.forward_errors import FORWARD_ERRORS
from paceline.parallel.state_hash import state_sha256
from paceline.parallel.tensor.vocab_parallel import VocabParallelLogits
from paceline.serving.engine import MAX_CHUNKS_AT_ONCE, Engine, PromptChunk
from paceline.serving.kv_cache import AttentionForm, KVCache, SlotSettings
from paceline.serving.recorded_forward import ForwardRecorder, RecordedForward
from paceline.serving.sampling import LogitRow, SampledToken

log = logging.getLogger("paceline")

ModelCall = Callable[[Tensor, Tensor], "Tensor | None"]
"""Function of tokens and positions, int64 [B, T] both, that returns logits [B, T, V]; None on ranks that do
not have them.
"""


SampleExchange = Callable[[Sequence[SampledToken] | None, int, int], Callable[[], Sequence[SampledToken]]]
"""Function that begins to send the samples of one rank to the others; see `SlotForward.share`."""


def keep_samples(
    samples: Sequence[SampledToken] | None, num_samples: int, num_logprobs: int
) -> Callable[[], Sequence[SampledToken]]:
    """Return the samples: there are no other ranks."""
    assert samples is not None
    return lambda: samples


class CacheTrial(NamedTuple):
    """Result of `try_cache`.

    Args:
        error: why the model cannot run with a cache; empty if it can.
        has_equal_rows: equal texts have the same bits in all slots.
        has_equal_chunks: a chunk has the same bits alone and beside others.
    """

    error: str
    has_equal_rows: bool = True
    has_equal_chunks: bool = True


class _ModelForward:
    """Parts of a `SlotForward` that do not depend on the cache.

    Args:
        call: of the model.
        model: the modules, of which only the configuration is read.
        settings: sizes of the forwards.
        vocab: number of logits.
        fingerprint: see `SlotForward`.
        device: of the model.
        gather: returns a text of every rank that runs the model, in the same order on all of them.
        without_gradients: context manager of every forward.
        records: forwards with a cache may be recorded and replayed: no rank communicates in them.
        share: see `SlotForward`.
    """

    def __init__(
        self,
        call: ModelCall,
        model: nn.Module,
        settings: SlotSettings,
        vocab: int,
        fingerprint: str,
        device: torch.device,
        gather: Callable[[str], list[str]] = lambda text: [text],
        without_gradients: Callable[[], AbstractContextManager[Any]] = torch.inference_mode,
        records: bool = False,
        share: SampleExchange = keep_samples,
    ) -> None:
        self._gather, self.without_gradients, self._records = gather, without_gradients, records
        self._share = share
        self._model = model
        self._call, self.settings, self.vocab, self.fingerprint = call, settings, vocab, fingerprint
        self.num_slots, self.chunk, self.context = settings.slots, settings.chunk, settings.context
        self._device = device
        self._places_1L = torch.arange(settings.context, device=device)[None]

    def share(
        self, samples: Sequence[SampledToken] | None, num_samples: int, num_logprobs: int
    ) -> Callable[[], Sequence[SampledToken]]:
        """Begin to send the samples of the rank that has some."""
        return self._share(samples, num_samples, num_logprobs)

    def twin(self) -> Self:
        """Return a forward of the same model with slots of its own."""
        return type(self)(
            *(self._call, self._model, self.settings, self.vocab, self.fingerprint, self._device),
            *(self._gather, self.without_gradients, self._records, self._share),
        )

    def agree_all(self, trial: CacheTrial) -> CacheTrial:
        """Return the first error of any rank, and whether rows and chunks are equal on all of them."""
        trials = [CacheTrial(*json.loads(text)) for text in self._gather(json.dumps(trial))]
        errors = [trial.error for trial in trials if trial.error]
        return CacheTrial(
            errors[0] if errors else "",
            all(trial.has_equal_rows for trial in trials),
            all(trial.has_equal_chunks for trial in trials),
        )


class CachedForward(_ModelForward):
    """Forward of a model with a cache."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cache = KVCache(self.settings, self._device, self._model)
        self._tokens_S1 = torch.zeros(self.settings.rows, 1, dtype=torch.int64)
        # Several chunks run together if that changes no bit of them (`try_cache`).
        self.joins_chunks = False
        # By shape, of chunks and of a token of every slot; None: not to be recorded.
        self._recorded: dict[tuple[int, ...], RecordedForward | None] = {}

    def twin(self) -> Self:
        """Return a forward of the same model with slots of its own."""
        twin = super().twin()
        twin.joins_chunks = self.joins_chunks
        return twin

    def _run(self, tokens: Tensor, places: Tensor) -> Tensor | None:
        """Return the logits of the model; a trial records forwards, and all later ones replay them."""
        tokens = tokens.to(self._device)
        shape = tuple(tokens.shape)
        recorded = self._recorded.get(shape)
        if recorded is not None:
            return recorded(tokens, places)
        if not self._records or shape in self._recorded or not self.cache.is_trial:
            with self.cache.within_model():
                return self._call(tokens, places)
        recorder = ForwardRecorder([tokens, places])
        with recorder.recording(), self.cache.within_model(recorder):
            logits = self._call(tokens, places)
        assert logits is not None
        self._recorded[shape] = recorder.finish(logits)
        if recorder.refusal:
            log.info("generation runs the model's Python code in every step: %s", recorder.refusal)
        return logits

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        with self.without_gradients():
            self.cache.clear(slot)

    def prefill(self, chunks: Sequence[PromptChunk]) -> Sequence[LogitRow | None] | None:
        """Run chunks of prompts."""
        if len(chunks) > 1 and not self.joins_chunks:
            found = [self.prefill([chunk]) for chunk in chunks]
            return [row for rows in found if rows is not None for row in rows] or None
        logits_CPV = self.chunk_logits(chunks)
        if logits_CPV is None:
            return None
        ends = [len(prompt) - self._first(start) - 1 for _, prompt, start in chunks]
        return [
            _row(logits_PV[end]) if end < self.chunk else None
            for logits_PV, end in zip(logits_CPV, ends, strict=False)
        ]

    def _first(self, start: int) -> int:
        """Return where a chunk begins: earlier if it would pass the end of the context."""
        return min(start, self.context - self.chunk)

    def chunk_logits(self, chunks: Sequence[PromptChunk]) -> Tensor | None:
        """Return the logits of chunks that run together, [C, P, V]; several are padded to their most."""
        num_rows = 1 if len(chunks) == 1 else MAX_CHUNKS_AT_ONCE
        tokens_CP = torch.zeros(num_rows, self.chunk, dtype=torch.int64)
        places, sizes = [], []
        for row, (slot, prompt, start) in enumerate(chunks):
            first = self._first(start)
            tokens = prompt[first : first + self.chunk]
            tokens_CP[row, : len(tokens)] = torch.tensor(tokens)
            places.append(self._places_1L[:, first : first + self.chunk])
            sizes.append((slot, first, len(tokens)))
        places += [self._places_1L[:, : self.chunk]] * (num_rows - len(chunks))
        with self.without_gradients():
            places_CP = torch.cat(places)
            with self.cache.prefilling(sizes, places_CP):
                return self._run(tokens_CP, places_CP)

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> Sequence[LogitRow] | None:
        """Run one token of every slot."""
        with self.without_gradients():
            self._tokens_S1.zero_()
            self._tokens_S1[list(slots), 0] = torch.tensor(tokens)
            with self.cache.decoding(slots) as places_S1:
                logits_S1V = self._run(self._tokens_S1, places_S1)
            if logits_S1V is None:
                return None
            rows_SV = logits_S1V[:, -1].float().cpu().numpy()
            return [rows_SV[slot] for slot in slots]


class WholeForward(_ModelForward):
    """Forward of a whole text for every token, for models that cannot have a cache; one text at a time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._texts: list[list[int]] = [[] for _ in range(self.num_slots)]

    def with_cache(self, num_rows: int, weights: str) -> CachedForward:
        """Return a forward of the same model with a cache of so many rows."""
        settings = replace(self.settings, rows=num_rows)
        fingerprint = settings_fingerprint(weights, settings)
        return CachedForward(
            *(self._call, self._model, settings, self.vocab, fingerprint),
            *(self._device, self._gather, self.without_gradients, self._records, self._share),
        )

    def clear(self, slot: int) -> None:
        """Forget a text."""
        self._texts[slot] = []

    def prefill(self, chunks: Sequence[PromptChunk]) -> Sequence[LogitRow | None] | None:
        """Run the prompts whose last chunk is here."""
        rows: list[LogitRow | None] = []
        for slot, prompt, start in chunks:
            self._texts[slot] = list(prompt[: start + self.chunk])
            is_last = start + self.chunk >= len(prompt)
            rows.append(self._run(slot) if is_last else None)
        return rows if any(row is not None for row in rows) else None

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> Sequence[LogitRow] | None:
        """Run each text with its new token."""
        for slot, token in zip(slots, tokens, strict=True):
            self._texts[slot].append(token)
        rows = [self._run(slot) for slot in slots]
        # All of them, or none on a rank without logits.
        return [row for row in rows if row is not None] or None

    def _run(self, slot: int) -> LogitRow | None:
        logits_1TV = self.logits(self._texts[slot])
        return None if logits_1TV is None else _row(logits_1TV[0, -1])

    def logits(self, text: Sequence[int]) -> Tensor | None:
        """Return the logits at all positions of a text, [1, T, V]."""
        tokens_1T = torch.tensor([text], device=self._device)
        with self.without_gradients():
            return self._call(tokens_1T, self._places_1L[:, : len(text)])


def _row(logits_V: Tensor) -> LogitRow:
    return logits_V.float().cpu().numpy()


_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 0.05


def build_engine(
    model: nn.Module,
    *,
    context: int,
    slots: int = 8,
    chunk: int = 64,
    attention: AttentionForm = "by_slot",
    max_queued: int = 1024,
) -> Engine:
    """Return an engine for a causal language model in this process; puts the model into evaluation mode.

    A short text is run with and without the cache. If the logits differ, or the model does not call
    `scaled_dot_product_attention`, every token is a forward of its whole text; this is logged once. Models of
    transformers need `attn_implementation="sdpa"`.

    Args:
        model: maps tokens, int64 [B, T], to logits [B, T, V], or to an object with `logits`. It takes its
            positions from `paceline.models.positions`, or as the argument `position_ids`.
        context: longest text that the model takes, in tokens.
        slots, chunk, attention: see `SlotSettings`.
        max_queued: most requests that wait for a slot.
    Raises:
        TaskError: the logits are not finite, or a setting is wrong.
    """
    model.eval()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    call, settings = model_call(model), SlotSettings(slots, chunk, context, attention)
    vocab, weights = _count_logits(call, device), state_sha256(model.state_dict())
    fingerprint = settings_fingerprint(weights, settings)
    whole = WholeForward(call, model, settings, vocab, fingerprint, device, records=True)
    text = trial_text(model, settings, vocab)
    expected = whole.logits(text)
    if expected is None or not bool(torch.isfinite(expected).all()):
        raise TaskError(
            f"the model's logits are not finite{_describe_bad_weights(model)}",
            next_step="load the weights of an earlier checkpoint",
        )
    return Engine(choose_forward(whole, text, expected[0], weights), max_queued=max_queued)


def choose_forward(
    whole: WholeForward, text: Sequence[int], expected_TV: Tensor | None, weights: str
) -> CachedForward | WholeForward:
    """Return a forward with a cache if the model allows it, else `whole`; collective over its ranks.

    Args:
        text: for a trial.
        expected_TV: its logits; None on ranks that do not have them.
        weights: hash of the weights, for the fingerprint.
    """
    for num_rows in _row_counts(whole.num_slots):
        cached = whole.with_cache(num_rows, weights)
        error, has_equal_rows, cached.joins_chunks = cached.agree_all(try_cache(cached, text, expected_TV))
        if error:
            log.warning("generation without a cache, one whole forward for each token: %s", error)
            return whole
        if has_equal_rows:
            return cached
    log.warning("generation: the bits of a text depend on its slot, as a kernel computes rows differently")
    return cached


def _row_counts(slots: int) -> list[int]:
    """Return the numbers of rows to try: as many as slots, then up to multiples of 4, 8 and 16."""
    return list(dict.fromkeys([slots, *(-(-slots // n) * n for n in (4, 8, 16))]))


def model_call(model: nn.Module) -> ModelCall:
    """Return a function that calls a model with tokens, and with positions if it takes them."""
    options = forward_options(model)

    def call(tokens_BT: Tensor, places_BT: Tensor) -> Tensor:
        return whole_logits(model(tokens_BT, **options(places_BT)))

    return call


def forward_options(model: nn.Module) -> Callable[[Tensor], dict[str, Any]]:
    """Return a function of positions that returns what a model is called with besides tokens."""
    names = signature(model.forward).parameters
    fixed = {"use_cache": False} if "use_cache" in names else {}
    if "position_ids" not in names:
        return lambda places_BT: fixed
    return lambda places_BT: {**fixed, "position_ids": places_BT}


def whole_logits(output: Any) -> Tensor:
    """Return the logits of a model's output; gathers a vocabulary that is split over ranks."""
    logits = getattr(output, "logits", output)
    return logits.whole() if isinstance(logits, VocabParallelLogits) else logits


def settings_fingerprint(weights_sha256: str, settings: SlotSettings) -> str:
    """Return a hash of weights, settings and what else the bits of logits depend on."""
    facts = {
        "weights": weights_sha256,
        **asdict(settings),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _count_logits(call: ModelCall, device: torch.device) -> int:
    zero_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        logits_11V = call(zero_11, zero_11)
    assert logits_11V is not None
    return logits_11V.shape[-1]


def trial_text(model: nn.Module, settings: SlotSettings, vocab: int) -> list[int]:
    """Return tokens of two chunks and three more, if the context has room."""
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    num_known = min([vocab, *tables])
    length = min(settings.context, settings.chunk + settings.chunk // 2 + 4)
    return [(7919 * place + 13) % num_known for place in range(length)]


def try_cache(cached: CachedForward, text: Sequence[int], expected_TV: Tensor | None) -> CacheTrial:
    """Run a text in all slots, the last three tokens one by one; all slots are empty afterwards.

    Args:
        expected_TV: logits of a forward of the whole text.
    """
    num_prompt, slots, cache = max(1, len(text) - 3), range(cached.num_slots), cached.cache
    cache.is_trial = True
    try:
        chunks = [PromptChunk(0, text[:num_prompt], i) for i in range(0, num_prompt, cached.chunk)]
        has_equal_chunks = _has_equal_chunks(cached, chunks[0])
        for chunk in chunks:
            rows = cached.prefill([chunk])
        with cached.without_gradients():
            for slot in slots[1:]:
                cache.copy_slot(0, slot)
        steps = [cached.decode(slots, [token] * len(slots)) for token in text[num_prompt:]]
    except FORWARD_ERRORS as error:
        return CacheTrial(cache.refusal or f"{type(error).__name__}: {error}")
    finally:
        cache.is_trial = False
        for slot in slots:
            cached.clear(slot)
    if cache.refusal or expected_TV is None or rows is None:
        return CacheTrial(cache.refusal)
    logits = [step for step in steps if step is not None]
    got = torch.stack([torch.from_numpy(row) for row in (rows[0], *(step[0] for step in logits))])
    expected = expected_TV[num_prompt - 1 :].float().cpu()
    tolerance = _TOLERANCES.get(expected_TV.dtype, _LOW_PRECISION_TOLERANCE)
    difference = float((got - expected).abs().max() / expected.abs().max())
    if not difference <= tolerance:
        return CacheTrial(f"logits differ by {difference:.1e} of the largest, more than {tolerance:.1e}")
    has_equal_rows = all((row == step[0]).all() for step in logits for row in step)
    return CacheTrial("", has_equal_rows, has_equal_chunks)


def _has_equal_chunks(cached: CachedForward, chunk: PromptChunk) -> bool:
    """Run a chunk alone, and as all of those that run together; return whether the logits are equal."""
    alone, together = cached.chunk_logits([chunk]), cached.chunk_logits([chunk] * MAX_CHUNKS_AT_ONCE)
    return alone is None or together is None or bool((alone == together).all())


def _describe_bad_weights(model: nn.Module) -> str:
    """Return which weight is not finite."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    bad = (name for name, x in tensors if x.is_floating_point() and not bool(torch.isfinite(x).all()))
    name = next(bad, "")
    return f": '{name}' has values that are not finite" if name else ""
