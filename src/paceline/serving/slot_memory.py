"""The memory of slots, known before a model is served: keys and values are allocated once and never grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from paceline.errors import TaskError
from paceline.report.number_format import format_bytes
from paceline.serving.kv_cache import SlotSettings, model_call


@dataclass(frozen=True)
class SlotMemory:
    """The bytes of a served model.

    Args:
        weights: parameters and buffers; of a mapped file, pages that other processes share.
        cache: keys and values of all slots over the whole context.
        masks: of attention, for all slots and for a chunk.
        logits: of one token of every slot, and of a chunk.
    """

    weights: int
    cache: int
    masks: int
    logits: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())

    def lines(self, settings: SlotSettings) -> list[str]:
        """Return the table for a terminal."""
        slot = format_bytes(self.cache // settings.slots)
        what = {
            "weights": "",
            "cache": f"  {settings.slots} slots of {slot}: {settings.context} tokens of keys and values",
            "masks": "",
            "logits": "",
            "total": "",
        }
        values = {**asdict(self), "total": self.total}
        return [f"{name:<8}{format_bytes(values[name]):>12}{note}" for name, note in what.items()]


class _AttentionShapes(TorchFunctionMode):
    """The sizes of keys and values of each call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_per_token = 0
        self.groups = self.itemsize = 1

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            for part in (key, value):
                self.bytes_per_token += part.shape[-3] * part.shape[-1] * part.element_size()
            self.groups, self.itemsize = query.shape[-3] // key.shape[-3], key.element_size()
        return func(*args, **(kwargs or {}))


def plan_slots(model: nn.Module, settings: SlotSettings) -> SlotMemory:
    """Return the memory of a model and its slots; one chunk runs on tensors without storage.

    Args:
        model: as for `build_engine`; its tensors are moved to the device `meta`.
        settings: of the engine.
    Raises:
        TaskError: the model does not call `scaled_dot_product_attention`, so it has no cache.
    """
    weights = sum(tensor.nbytes for tensor in {id(t): t for t in _tensors(model)}.values())
    tokens = torch.zeros(1, settings.chunk, dtype=torch.int64, device="meta")
    shapes = _AttentionShapes()
    with torch.inference_mode(), shapes:
        logits = model_call(model.to("meta").eval())(tokens, tokens)
    if not shapes.bytes_per_token or logits is None:
        raise TaskError(
            f"{type(model).__name__} does not call scaled_dot_product_attention, so it has no cache",
            next_step="its slots need no memory but that of a forward",
        )
    slots, context, chunk = settings.slots, settings.context, settings.chunk
    return SlotMemory(
        weights=weights,
        cache=slots * context * shapes.bytes_per_token,
        masks=(slots + shapes.groups * chunk) * context * shapes.itemsize,
        logits=(slots + chunk) * logits.shape[-1] * logits.element_size(),
    )


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
