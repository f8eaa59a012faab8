"""A cache of keys and values for any model whose attention is `scaled_dot_product_attention`.

`KVCache` is a function mode around a forward, as in `parallel.context`: it stores the keys and values that
attention receives, in the order of the calls, and supplies positions. The model is not changed. A prompt runs
in chunks of one size, each alone; a token of every slot runs as one batch whose shape never changes.

Invariant: what a slot computes depends on its own text alone. Attention sees either the whole cache under a
mask ("masked"), or the slot's own positions, slot by slot ("by_slot"); never as many positions as the longest
neighbour has, since the length decides in which order a kernel adds. `build_engine` runs a short text cached
and uncached, and takes `WholeForward` for a model whose logits differ.

Shapes: S rows, of which the first are the slots, P tokens of a chunk, L positions of the cache, H heads of
keys, G queries for each of them, D width of a head.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paceline.errors import TaskError
from paceline.models.positions import positions
from paceline.parallel.context.context_attention import MULTI_HEAD_BODY
from paceline.parallel.forward_errors import FORWARD_ERRORS
from paceline.parallel.state_hash import state_sha256
from paceline.serving.engine import Engine
from paceline.serving.sampling import LogitRow, SampledToken

log = logging.getLogger("paceline")

AttentionForm = Literal["masked", "by_slot"]

ModelCall = Callable[[Tensor, Tensor], "Tensor | None"]
"""Function of tokens and positions, int64 [B, T] both, that returns logits [B, T, V]; None on ranks that do
not have them.
"""


@dataclass(frozen=True)
class SlotSettings:
    """Sizes of every forward; the bits of a text depend on them.

    Args:
        slots: texts at a time.
        chunk: tokens of a prompt that run at a time; at most `context`.
        context: longest text, in tokens.
        attention: over the whole cache under a mask, or slot by slot at its own length.
        rows: sequences of a forward of one token each, at least `slots` (0: as many). Matrix products may
            compute the last rows in another order than the first (MKL: those past a multiple of 4), so
            `build_engine` adds rows without a slot until all slots compute the same bits.
    Raises:
        TaskError: a number is not positive, or the form of attention is unknown.
    """

    slots: int = 8
    chunk: int = 64
    context: int = 1024
    attention: AttentionForm = "masked"
    rows: int = 0

    def __post_init__(self) -> None:
        wrong = [name for name in ("slots", "chunk", "context") if getattr(self, name) < 1]
        if wrong or self.attention not in ("masked", "by_slot"):
            raise TaskError(
                f"settings of generation are {asdict(self)}",
                next_step=f"give a positive {wrong[0]}"
                if wrong
                else 'choose attention "masked" or "by_slot"',
            )
        # A chunk is never longer than the cache.
        object.__setattr__(self, "chunk", min(self.chunk, self.context))
        object.__setattr__(self, "rows", max(self.rows, self.slots))


class NotCacheableError(TaskError):
    """The model cannot run with a cache."""


def _refuse(reason: str) -> NotCacheableError:
    return NotCacheableError(
        f"the cache of keys and values does not support this attention: {reason}",
        next_step="use causal attention with is_causal=True and no other mask, or generate without a cache",
    )


class _LayerCache(NamedTuple):
    """Keys and values of one call of attention, [S, H, L, D]."""

    keys: Tensor
    values: Tensor


class KVCache(TorchFunctionMode):
    """Keys and values of all slots on one rank, and the mode in which a model uses them.

    Memory is allocated by the first chunk, for all slots and the whole context, and never again.
    """

    def __init__(self, settings: SlotSettings, device: torch.device) -> None:
        super().__init__()
        self.settings, self._device = settings, device
        self._layers: list[_LayerCache] = []
        self._lengths = [0] * settings.rows
        self._lengths_S = torch.zeros(settings.rows, dtype=torch.int64, device=device)
        self._rows_S = torch.arange(settings.rows, device=device)
        self._decodes: Sequence[int] = ()
        self._chunk: tuple[int, int] | None = None  # slot and start
        self._num_calls = 0
        self._causal: dict[tuple[int, torch.dtype], Tensor] = {}
        # 0 where a slot has a position, -inf elsewhere: updated where texts grow, never made anew.
        self._mask_S11L = torch.empty(0)

    @property
    def num_layers(self) -> int:
        """Number of calls of attention in a forward."""
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of all slots."""
        return sum(x.numel() * x.element_size() for layer in self._layers for x in layer)

    @property
    def places(self) -> Tensor:
        """Positions of the next token of every slot, int64 [S, 1]."""
        return self._lengths_S.view(-1, 1)

    def clear(self, slot: int) -> None:
        """Empty a slot: no position is visible, and its keys and values are zero."""
        self._set_length(slot, 0)
        for layer in self._layers:
            # A masked position counts 0 times its value, which would be NaN for a value that is not finite.
            layer.keys[slot].zero_()
            layer.values[slot].zero_()

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the text of a slot to another one."""
        self._set_length(target, self._lengths[source])
        for layer in self._layers:
            layer.keys[target], layer.values[target] = layer.keys[source], layer.values[source]

    def _set_length(self, slot: int, length: int) -> None:
        self._lengths[slot] = length
        self._lengths_S[slot] = length
        if self._layers:
            self._mask_S11L[slot, ..., :length] = 0.0
            self._mask_S11L[slot, ..., length:] = -torch.inf

    @contextmanager
    def prefilling(self, slot: int, start: int, num_tokens: int) -> Iterator[None]:
        """Return the context manager of a forward of one chunk, whose first tokens are the slot's next ones.

        Args:
            start: position of the first token of the chunk.
            num_tokens: tokens that are not padding.
        """
        self._chunk = slot, start
        with self._forward():
            yield
        self._set_length(slot, start + num_tokens)

    @contextmanager
    def decoding(self, slots: Sequence[int]) -> Iterator[None]:
        """Return the context manager of a forward of one token of every slot; `slots` are those with a text.

        The other slots compute a token after their text, which their next chunk overwrites.
        """
        self._chunk, self._decodes = None, slots
        if self._layers:
            self._mask_S11L[self._rows_S, 0, 0, self._lengths_S] = 0.0
        with self._forward():
            yield
        for slot in slots:
            self._lengths[slot] += 1
        self._lengths_S.copy_(torch.tensor(self._lengths))

    @contextmanager
    def _forward(self) -> Iterator[None]:
        self._num_calls = 0
        with self:
            yield
        if self._num_calls != len(self._layers) or not self._layers:
            raise _refuse(f"a forward called it {self._num_calls} times, an earlier one {len(self._layers)}")

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch, or what replaces it in this mode."""
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is positions:
            return self._positions(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            # PyTorch would run its body outside of the mode. Weights are not computed, so None is returned
            # for them.
            with self:
                return MULTI_HEAD_BODY(*args, **{**(kwargs or {}), "need_weights": False})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _positions(self, x: Tensor, dim: int) -> Tensor | slice:
        if self._chunk is not None:
            start = self._chunk[1]
            return slice(start, start + self.settings.chunk)
        # One position a row; size 1 in the dimensions before that of positions, so that table rows broadcast.
        return self._lengths_S.view(-1, *[1] * (dim % x.dim()))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Store keys and values, [B, H, T, D], and attend to those of the slot's whole text."""
        if query.dim() == 3:
            x = (part.unsqueeze(1) for part in (query, key, value))
            return self._attend(*x, attn_mask, dropout_p, is_causal, scale, enable_gqa).squeeze(1)
        self._require_causal(query, key, attn_mask, dropout_p, is_causal)
        num_sequences, num_heads, num_tokens, width = query.shape
        groups = num_heads // key.shape[1]
        layer = self._next_layer(key, value)
        # Queries that share keys are rows of one product, so keys are not repeated.
        grouped = query.reshape(num_sequences, -1, groups * num_tokens, width)
        if self._chunk is None:
            attended = self._attend_token(grouped, key, value, layer, scale)
        else:
            attended = self._attend_chunk(grouped, key, value, layer, scale)
        return attended.reshape(num_sequences, num_heads, num_tokens, -1)

    def _require_causal(
        self, query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
    ) -> None:
        """Raise NotCacheableError unless this is causal attention of one chunk, or of one token a row."""
        num_tokens = query.shape[-2]
        expected = (self.settings.rows, 1) if self._chunk is None else (1, self.settings.chunk)
        reason = ""
        if query.dim() != 4 or (query.shape[0], num_tokens) != expected:
            reason = f"queries have the shape {tuple(query.shape)}"
        elif key.shape[-2] != num_tokens or key.shape[0] != query.shape[0]:
            reason = f"{num_tokens} queries attend to {key.shape[-2]} keys"
        elif query.shape[1] % key.shape[1]:
            reason = f"{query.shape[1]} query heads do not divide into {key.shape[1]} key heads"
        elif dropout_p > 0:
            reason = f"dropout_p is {dropout_p:g}"
        elif attn_mask is not None and not _is_causal_mask(attn_mask, num_tokens):
            reason = f"a mask of shape {tuple(attn_mask.shape)} is not the causal one"
        elif attn_mask is None and not is_causal and num_tokens > 1:
            reason = "it is not causal"
        if reason:
            raise _refuse(reason)

    def _next_layer(self, key: Tensor, value: Tensor) -> _LayerCache:
        """Return the cache of the next call of attention; the first chunk allocates it."""
        index = self._num_calls
        self._num_calls += 1
        if index == len(self._layers):
            rows, length = self.settings.rows, self.settings.context
            sizes = (rows, key.shape[1], length)
            self._layers.append(
                _LayerCache(key.new_zeros(*sizes, key.shape[-1]), value.new_zeros(*sizes, value.shape[-1]))
            )
            if index == 0:
                self._mask_S11L = key.new_full((rows, 1, 1, length), -torch.inf)
        return self._layers[index]

    def _attend_chunk(
        self, query: Tensor, key: Tensor, value: Tensor, layer: _LayerCache, scale: float | None
    ) -> Tensor:
        """Attend from a chunk, [1, H, G P, D], to its own and all earlier positions of its slot."""
        assert self._chunk is not None
        (slot, start), size = self._chunk, self.settings.chunk
        stop = start + size
        layer.keys[slot, :, start:stop] = key[0]
        layer.values[slot, :, start:stop] = value[0]
        mask = self._causal_mask(query.shape[-2] // size, query.dtype)
        return F.scaled_dot_product_attention(
            query,
            layer.keys[slot : slot + 1, :, :stop],
            layer.values[slot : slot + 1, :, :stop],
            # The last `stop` columns: query i of the chunk sees the positions up to start + i.
            mask[:, mask.shape[1] - stop :],
            scale=scale,
        )

    def _causal_mask(self, groups: int, dtype: torch.dtype) -> Tensor:
        """Return the mask of a chunk at the end of the cache, [G P, L]."""
        known = self._causal.get((groups, dtype))
        if known is None:
            size, length = self.settings.chunk, self.settings.context
            hidden = torch.ones(size, length, dtype=torch.bool, device=self._device).triu(length - size + 1)
            known = torch.zeros(size, length, dtype=dtype, device=self._device)
            known = known.masked_fill_(hidden, -torch.inf).repeat(groups, 1)
            self._causal[groups, dtype] = known
        return known

    def _attend_token(
        self, query: Tensor, key: Tensor, value: Tensor, layer: _LayerCache, scale: float | None
    ) -> Tensor:
        """Attend from one token of every slot, [S, H, G, D], to the positions of the slot."""
        layer.keys[self._rows_S, :, self._lengths_S] = key[:, :, 0]
        layer.values[self._rows_S, :, self._lengths_S] = value[:, :, 0]
        if self.settings.attention == "masked":
            return self._attend_masked(query, layer, scale)
        attended = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for slot in self._decodes:
            stop = self._lengths[slot] + 1
            attended[slot] = F.scaled_dot_product_attention(
                query[slot : slot + 1],
                layer.keys[slot : slot + 1, :, :stop],
                layer.values[slot : slot + 1, :, :stop],
                scale=scale,
            )[0]
        return attended

    def _attend_masked(self, query: Tensor, layer: _LayerCache, scale: float | None) -> Tensor:
        """Attend to the whole cache under the mask, as two batched products.

        Not PyTorch's fused kernel, in which the alignment of a buffer depends on the thread, and so do the
        bits of a slot.
        """
        num_rows, num_heads, length, width = layer.keys.shape
        query = (query * (width**-0.5 if scale is None else scale)).reshape(num_rows * num_heads, -1, width)
        scores = torch.bmm(query, layer.keys.view(-1, length, width).transpose(1, 2))
        scores.view(num_rows, num_heads, -1, length).add_(self._mask_S11L)
        return torch.bmm(scores.softmax(-1), layer.values.view(num_rows * num_heads, length, -1))


def _is_causal_mask(mask: Tensor, num_tokens: int) -> bool:
    """Return whether a mask, bool or added, hides exactly the later positions."""
    if mask.shape[-2:] != (num_tokens, num_tokens):
        return False
    seen = mask if mask.dtype == torch.bool else mask == 0
    hides = True if mask.dtype == torch.bool else bool(((mask == 0) | (mask < -1e4)).all())
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=mask.device).tril()
    return hides and bool((seen == causal).all())


class _ForwardOnOneProcess:
    """Parts of a `SlotForward` that do not depend on the cache.

    Args:
        call: the model.
        settings: sizes of the forwards.
        vocab: number of logits.
        fingerprint: see `SlotForward`.
        device: of the model.
    """

    def __init__(
        self, call: ModelCall, settings: SlotSettings, vocab: int, fingerprint: str, device: torch.device
    ) -> None:
        self._call, self.settings, self.vocab, self.fingerprint = call, settings, vocab, fingerprint
        self.num_slots, self.chunk, self.context = settings.slots, settings.chunk, settings.context
        self._device = device
        self._places_1L = torch.arange(settings.context, device=device)[None]

    def share(self, samples: Sequence[SampledToken] | None, num_samples: int) -> Sequence[SampledToken]:
        """Return the samples: there is one rank."""
        assert samples is not None and len(samples) == num_samples
        return samples


class CachedForward(_ForwardOnOneProcess):
    """Forward of a model with a cache."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cache = KVCache(self.settings, self._device)
        self._tokens_S1 = torch.zeros(self.settings.rows, 1, dtype=torch.int64)
        self._tokens_1P = torch.zeros(1, self.chunk, dtype=torch.int64)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        with torch.inference_mode():
            self.cache.clear(slot)

    def prefill(self, slot: int, prompt: Sequence[int], start: int) -> LogitRow | None:
        """Run one chunk of a prompt."""
        # The last chunk may not pass the end of the context: it then begins earlier.
        first = min(start, self.context - self.chunk)
        tokens = prompt[first : first + self.chunk]
        with torch.inference_mode():
            self._tokens_1P.zero_()
            self._tokens_1P[0, : len(tokens)] = torch.tensor(tokens)
            with self.cache.prefilling(slot, first, len(tokens)):
                logits_1PV = self._call(
                    self._tokens_1P.to(self._device), self._places_1L[:, first : first + self.chunk]
                )
            is_last = start + self.chunk >= len(prompt)
            return _row(logits_1PV[0, len(tokens) - 1]) if is_last and logits_1PV is not None else None

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> Sequence[LogitRow] | None:
        """Run one token of every slot."""
        with torch.inference_mode():
            self._tokens_S1.zero_()
            self._tokens_S1[list(slots), 0] = torch.tensor(tokens)
            places_S1 = self.cache.places
            with self.cache.decoding(slots):
                logits_S1V = self._call(self._tokens_S1.to(self._device), places_S1)
            if logits_S1V is None:
                return None
            rows_SV = logits_S1V[:, -1].float().cpu().numpy()
            return [rows_SV[slot] for slot in slots]


class WholeForward(_ForwardOnOneProcess):
    """Forward of a whole text for every token, for models that cannot have a cache; one text at a time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._texts: list[list[int]] = [[] for _ in range(self.num_slots)]

    def clear(self, slot: int) -> None:
        """Forget a text."""
        self._texts[slot] = []

    def prefill(self, slot: int, prompt: Sequence[int], start: int) -> LogitRow | None:
        """Run the prompt if this chunk is its last."""
        self._texts[slot] = list(prompt[: start + self.chunk])
        return self._run(slot) if start + self.chunk >= len(prompt) else None

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> Sequence[LogitRow] | None:
        """Run each text with its new token."""
        for slot, token in zip(slots, tokens, strict=True):
            self._texts[slot].append(token)
        rows = [self._run(slot) for slot in slots]
        return None if None in rows else rows

    def _run(self, slot: int) -> LogitRow | None:
        logits_1TV = self.logits(self._texts[slot])
        return None if logits_1TV is None else _row(logits_1TV[0, -1])

    def logits(self, text: Sequence[int]) -> Tensor | None:
        """Return the logits at all positions of a text, [1, T, V]."""
        tokens_1T = torch.tensor([text], device=self._device)
        with torch.inference_mode():
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
    attention: AttentionForm = "masked",
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
    whole = WholeForward(call, settings, vocab, settings_fingerprint(weights, settings), device)
    text = _trial_text(model, settings, vocab)
    expected = whole.logits(text)
    if expected is None or not bool(torch.isfinite(expected).all()):
        raise TaskError(
            f"the model's logits are not finite{_describe_bad_weights(model)}",
            next_step="load the weights of an earlier checkpoint",
        )
    for num_rows in _row_counts(slots):
        settings = replace(settings, rows=num_rows)
        cached = CachedForward(call, settings, vocab, settings_fingerprint(weights, settings), device)
        trial = try_cache(cached, text, expected[0])
        if trial.error or trial.has_equal_rows:
            break
    if trial.error:
        log.warning("generation without a cache, one whole forward for each token: %s", trial.error)
    elif not trial.has_equal_rows:
        log.warning(
            "generation: the bits of a text depend on its slot, as a kernel computes rows differently"
        )
    return Engine(whole if trial.error else cached, max_queued=max_queued)


def _row_counts(slots: int) -> list[int]:
    """Return the numbers of rows to try: as many as slots, then up to multiples of 4, 8 and 16."""
    return list(dict.fromkeys([slots, *(-(-slots // n) * n for n in (4, 8, 16))]))


def model_call(model: nn.Module) -> ModelCall:
    """Return a function that calls a model with tokens, and with positions if it takes them."""
    names = signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in names else {}
    takes_positions = "position_ids" in names

    def call(tokens_BT: Tensor, places_BT: Tensor) -> Tensor:
        named = {**options, "position_ids": places_BT} if takes_positions else options
        output: Any = model(tokens_BT, **named)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits

    return call


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


def _trial_text(model: nn.Module, settings: SlotSettings, vocab: int) -> list[int]:
    """Return tokens of two chunks and three more, if the context has room."""
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    num_known = min([vocab, *tables])
    length = min(settings.context, settings.chunk + settings.chunk // 2 + 4)
    return [(7919 * place + 13) % num_known for place in range(length)]


class CacheTrial(NamedTuple):
    """Result of `try_cache`.

    Args:
        error: why the model cannot run with a cache; empty if it can.
        has_equal_rows: equal texts have the same bits in all slots.
    """

    error: str
    has_equal_rows: bool = True


def try_cache(cached: CachedForward, text: Sequence[int], expected_TV: Tensor) -> CacheTrial:
    """Run a text in all slots, the last three tokens one by one; all slots are empty afterwards.

    Args:
        expected_TV: logits of a forward of the whole text.
    """
    num_prompt, slots = max(1, len(text) - 3), range(cached.num_slots)
    try:
        for start in range(0, num_prompt, cached.chunk):
            last = cached.prefill(0, text[:num_prompt], start)
        with torch.inference_mode():
            for slot in slots[1:]:
                cached.cache.copy_slot(0, slot)
        steps = [cached.decode(slots, [token] * len(slots)) for token in text[num_prompt:]]
    except (*FORWARD_ERRORS, NotCacheableError) as error:
        return CacheTrial(f"{type(error).__name__}: {error}")
    finally:
        for slot in slots:
            cached.clear(slot)
    rows = [last, *(step[0] for step in steps if step is not None)]
    expected = expected_TV[num_prompt - 1 :].float().cpu()
    got = torch.stack([torch.from_numpy(row) for row in rows if row is not None])
    tolerance = _TOLERANCES.get(expected_TV.dtype, _LOW_PRECISION_TOLERANCE)
    difference = float((got - expected).abs().max() / expected.abs().max())
    if not difference <= tolerance:
        return CacheTrial(f"logits differ by {difference:.1e} of the largest, more than {tolerance:.1e}")
    unequal = (not (row == step[0]).all() for step in steps if step is not None for row in step)
    return CacheTrial("", not any(unequal))


def _describe_bad_weights(model: nn.Module) -> str:
    """Return which weight is not finite."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    bad = (name for name, x in tensors if x.is_floating_point() and not bool(torch.isfinite(x).all()))
    name = next(bad, "")
    return f": '{name}' has values that are not finite" if name else ""
