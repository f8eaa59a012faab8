"""A cache of keys and values for any model whose attention is `scaled_dot_product_attention`.

`KVCache` is a function mode around a forward, as in `parallel.context`: it stores the keys and values that
attention receives, in the order of the calls, and supplies positions. The model is not changed. A prompt runs
in chunks of one size; a token of every slot runs as one batch whose shape never changes.

Invariant: what a slot computes depends on its own text alone. Attention sees either the whole cache under a
mask ("masked"), or the slot's own positions in whole blocks, slot by slot ("by_slot"); never as many
positions as the longest neighbour has, since the length decides in which order a kernel adds. `build_engine`
runs a short text cached and uncached, and takes `WholeForward` for a model whose logits differ.

Shapes: S rows, of which the first are the slots, P tokens of a chunk, L positions of the cache, H heads of
keys, G queries for each of them, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paceline.errors import RequestError, TaskError
from paceline.models.positions import positions
from paceline.parallel.context.context_attention import MULTI_HEAD_BODY
from paceline.recipe.tables import ServeRecipe
from paceline.serving.recorded_forward import ForwardRecorder

AttentionForm = Literal["masked", "by_slot"]


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
    attention: AttentionForm = "by_slot"
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

    @classmethod
    def from_recipe(cls, recipe: ServeRecipe, context: int) -> SlotSettings:
        """Return the settings of a recipe.

        Args:
            context: of the model.
        Raises:
            RequestError: the recipe has a longer one.
        """
        if recipe.context is not None and recipe.context > context:
            raise RequestError(
                f"serve.context is {recipe.context}, and the model's context is {context}",
                parameter="context",
                next_step="leave it out, or give less",
            )
        return cls(recipe.slots, recipe.chunk, recipe.context or context, recipe.attention)


_BLOCK = 16
"""Positions by which the length grows that a slot attends to; the last ones are masked."""


class _SeenPositions(NamedTuple):
    """Views of one slot in one layer.

    Args:
        keys, values: of the positions that its next token sees, [H, D, N] and [H, N, D].
        attended: where the result of attention is written, [H, G, D].
    """

    keys: Tensor
    values: Tensor
    attended: Tensor


class _LayerCache(NamedTuple):
    """Cache of one call of attention.

    Args:
        keys, values: [S, H, L, D].
        attended: result of the last token of every slot, [S, H, G, D].
        seen: views by slot.
    """

    keys: Tensor
    values: Tensor
    attended: Tensor
    seen: dict[int, _SeenPositions]


class KVCache(TorchFunctionMode):
    """Keys and values of all slots on one rank, and the mode in which a model uses them.

    Memory is allocated by the first chunk, for all slots and the whole context, and never again.

    Args:
        settings: sizes of the forwards.
        device: of the model.
        model: a model of transformers with `attn_implementation="sdpa"` calls the cache as its attention
            function; all others run in the mode, in which every function goes through Python.
    """

    def __init__(self, settings: SlotSettings, device: torch.device, model: nn.Module | None = None) -> None:
        super().__init__()
        self.settings, self._device = settings, device
        uses_interface = getattr(getattr(model, "config", None), "_attn_implementation", None) == "sdpa"
        self._config: Any = model.config if model is not None and uses_interface else None
        self._layers: list[_LayerCache] = []
        self._lengths = [0] * settings.rows
        self._lengths_S = torch.zeros(settings.rows, dtype=torch.int64, device=device)
        self._rows_S = torch.arange(settings.rows, device=device)
        self._decodes: Sequence[int] = ()
        self._chunks: Sequence[tuple[int, int]] | None = None  # slot and start; None: a token of each slot
        self._places = self.places  # of the forward that runs
        self._num_calls = 0
        self._recorder: ForwardRecorder | None = None
        # During a trial, the first reason why the model cannot use the cache; its forward still completes, so
        # that no other rank waits for it.
        self.is_trial, self.refusal = False, ""
        self._causal: dict[tuple[int, torch.dtype], Tensor] = {}
        # 0 where a slot has a position, -inf elsewhere: updated where texts grow, never made anew.
        self._mask_S11L = torch.empty(0)
        self._num_blocks: dict[int, int] = {}
        self._seen_masks: dict[int, Tensor] = {}

    @property
    def num_layers(self) -> int:
        """Number of calls of attention in a forward."""
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of all slots."""
        return sum(x.nbytes for layer in self._layers for x in (layer.keys, layer.values))

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
            layer.attended[slot].zero_()

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
    def prefilling(self, chunks: Sequence[tuple[int, int, int]], places_CP: Tensor) -> Iterator[None]:
        """Return the context manager of a forward of chunks, in the order in which they are appended.

        Args:
            chunks: for each its slot, the position of its first token, and how many tokens are not padding.
            places_CP: positions, int64; rows past the last chunk are padding.
        """
        self._chunks, self._places = [(slot, start) for slot, start, _ in chunks], places_CP
        yield
        for slot, start, num_tokens in chunks:
            self._set_length(slot, start + num_tokens)

    @contextmanager
    def decoding(self, slots: Sequence[int]) -> Iterator[Tensor]:
        """Return the context manager of a forward of one token of every slot, which returns their positions.

        Args:
            slots: those with a text.

        The other slots compute a token after their text, which their next chunk overwrites.
        """
        self._chunks, self._decodes, self._places = None, slots, self.places
        if self._layers:
            self._mask_S11L[self._rows_S, 0, 0, self._lengths_S] = 0.0
        if self.settings.attention == "by_slot":
            for slot in slots:
                self._look_at(slot)
        yield self._places
        for slot in slots:
            self._lengths[slot] += 1
        self._lengths_S.copy_(torch.tensor(self._lengths))

    @contextmanager
    def within_model(self, recorder: ForwardRecorder | None = None) -> Iterator[None]:
        """Return the context manager in which the model calls this cache; inside of one of the above.

        Args:
            recorder: of this forward. It records a call of attention as one function.
        """
        self._num_calls, self._recorder = 0, recorder
        with self if self._config is None else self._attention_interface():
            yield
        if self._num_calls != len(self._layers) or not self._layers:
            self._refuse(f"a forward called it {self._num_calls} times, an earlier one {len(self._layers)}")

    @contextmanager
    def _attention_interface(self) -> Iterator[None]:
        """Return the context manager in which the model of transformers calls this cache."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name, before = f"paceline-cache-{id(self)}", self._config._attn_implementation
        ALL_ATTENTION_FUNCTIONS[name] = self._attend_in_transformers
        self._config._attn_implementation = name
        try:
            yield
        finally:
            self._config._attn_implementation = before
            del ALL_ATTENTION_FUNCTIONS[name]

    def _attend_in_transformers(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend as an attention function of transformers; returns [B, T, H, D]."""
        if sliding_window is not None and sliding_window < self.settings.context:
            self._refuse(f"a sliding window of {sliding_window} positions")
        biases = [name for name in ("position_bias", "softcap", "s_aux") if options.get(name) is not None]
        if biases:
            self._refuse(f"it has the option {biases[0]}")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attended = self._attend(query, key, value, attention_mask, dropout, is_causal, scaling)
        return attended.transpose(1, 2).contiguous(), None

    def _refuse(self, reason: str) -> None:
        """Note a reason during a trial.

        Raises:
            TaskError: afterwards, as a model that passed the trial behaves otherwise now.
        """
        if not self.is_trial:
            raise TaskError(
                f"the cache of keys and values does not support this attention: {reason}",
                next_step="use causal attention with is_causal=True and no other mask in every forward",
            )
        self.refusal = self.refusal or reason

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

    def _positions(self, x: Tensor, dim: int) -> Tensor:
        # Size 1 in the dimensions between that of sequences and that of positions, so that rows of a table
        # broadcast.
        num_rows, num_tokens = self._places.shape
        return self._places.view(num_rows, *[1] * (dim % x.dim() - 1), num_tokens)

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
            q, k, v = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            return self._attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).squeeze(1)
        reason = self._find_misfit(query, key, attn_mask, dropout_p, is_causal)
        if reason:
            self._refuse(reason)
            enable_gqa = enable_gqa or query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        index = self._num_calls
        self._num_calls += 1
        attend = partial(self._attend_layer, index, scale)
        if self._recorder is None:
            return attend(query, key, value)
        return self._recorder.call(attend, query, key, value)  # as one function

    def _attend_layer(
        self, index: int, scale: float | None, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend in one layer; called by the model, and again in each replay."""
        if index == len(self._layers):
            self._allocate(query, key, value)
        layer = self._layers[index]
        num_sequences, num_heads, num_tokens, width = query.shape
        # Queries that share keys are rows of one product, so keys are not repeated.
        grouped = query.reshape(num_sequences, key.shape[1], -1, width)
        attend = self._attend_token if self._chunks is None else self._attend_chunks
        attended = attend(grouped, key, value, layer, scale)
        return attended.reshape(num_sequences, num_heads, num_tokens, -1)

    def _find_misfit(
        self, query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
    ) -> str:
        """Return why this is not causal attention of chunks, or of one token a row; empty if it is."""
        num_tokens = query.shape[-2]
        reason = ""
        if query.dim() != 4 or (query.shape[0], num_tokens) != self._places.shape:
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
        return reason

    def _allocate(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Allocate the cache of one more call of attention, in the first chunk."""
        rows, length = self.settings.rows, self.settings.context
        sizes = (rows, key.shape[1], length)
        if not self._layers:
            self._mask_S11L = key.new_full((rows, 1, 1, length), -torch.inf)
        heads, width = key.shape[1], value.shape[-1]
        self._layers.append(
            _LayerCache(
                key.new_zeros(*sizes, key.shape[-1]),
                value.new_zeros(*sizes, width),
                value.new_zeros(rows, heads, query.shape[1] // heads, width),
                {},
            )
        )

    def _attend_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, layer: _LayerCache, scale: float | None
    ) -> Tensor:
        """Attend from chunks, [C, H, G P, D], each to its own and all earlier positions of its slot."""
        assert self._chunks is not None
        size = self.settings.chunk
        mask = self._causal_mask(query.shape[-2] // size, query.dtype)
        parts: list[Tensor] = []
        for row, (slot, start) in enumerate(self._chunks):
            stop = start + size
            layer.keys[slot, :, start:stop] = key[row]
            layer.values[slot, :, start:stop] = value[row]
            parts.append(
                F.scaled_dot_product_attention(
                    query[row : row + 1],
                    layer.keys[slot : slot + 1, :, :stop],
                    layer.values[slot : slot + 1, :, :stop],
                    # The last `stop` columns: query i of the chunk sees the positions up to start + i.
                    mask[:, mask.shape[1] - stop :],
                    scale=scale,
                )
            )
        parts += [torch.zeros_like(parts[0])] * (len(query) - len(parts))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

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
        queries = query.unbind()
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        for slot in self._decodes:
            seen, mask = layer.seen[slot], self._seen_masks[slot]
            scores = torch.baddbmm(mask, queries[slot], seen.keys, alpha=scale)
            torch.bmm(_softmax(scores), seen.values, out=seen.attended)
        # Rows without a text keep what was there, which nothing reads.
        return layer.attended

    def _look_at(self, slot: int) -> None:
        """Make views of the positions that the next token of a slot sees, where there are more of them."""
        num_blocks = self._lengths[slot] // _BLOCK + 1
        if self._num_blocks.get(slot) == num_blocks:
            return
        stop = min(num_blocks * _BLOCK, self.settings.context)
        for layer in self._layers:
            keys = layer.keys[slot, :, :stop].transpose(1, 2)
            layer.seen[slot] = _SeenPositions(keys, layer.values[slot, :, :stop], layer.attended[slot])
        if self._layers:
            self._num_blocks[slot], self._seen_masks[slot] = num_blocks, self._mask_S11L[slot, :, :, :stop]

    def _attend_masked(self, query: Tensor, layer: _LayerCache, scale: float | None) -> Tensor:
        """Attend to the whole cache under the mask, as two batched products.

        Not PyTorch's fused kernel, in which the alignment of a buffer depends on the thread, and so do the
        bits of a slot.
        """
        num_rows, num_heads, length, width = layer.keys.shape
        query = (query * (width**-0.5 if scale is None else scale)).reshape(num_rows * num_heads, -1, width)
        scores = torch.bmm(query, layer.keys.view(-1, length, width).transpose(1, 2))
        scores.view(num_rows, num_heads, -1, length).add_(self._mask_S11L)
        return torch.bmm(_softmax(scores), layer.values.view(num_rows * num_heads, length, -1))


def _softmax(scores: Tensor) -> Tensor:
    """Return probabilities along the last dimension, summed in fp32 at least."""
    if scores.dtype in (torch.float32, torch.float64):
        return scores.softmax(-1)
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)


def _is_causal_mask(mask: Tensor, num_tokens: int) -> bool:
    """Return whether a mask, bool or added, hides exactly the later positions."""
    if mask.shape[-2:] != (num_tokens, num_tokens):
        return False
    seen = mask if mask.dtype == torch.bool else mask == 0
    hides = True if mask.dtype == torch.bool else bool(((mask == 0) | (mask < -1e4)).all())
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=mask.device).tril()
    return hides and bool((seen == causal).all())
