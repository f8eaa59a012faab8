"""Sources whose batches are made at once: without a Python call for each sample, and without random numbers.

Invariant: such a batch has the bits, types and containers that PyTorch's default collate function makes of
the samples. Only exact types are known: a subclass may draw random numbers, or change what a sample is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from paceline.data.text import TextWindows

BatchOf = Callable[[list[int]], Any]


def batches_at_once(source: Any, collate: Callable[[list[Any]], Any]) -> BatchOf | None:
    """How to make a batch without its samples; None if they have to be read one by one.

    Args:
        source: map-style data (`Source`).
        collate: what batches are made with.
    Returns:
        A function of sample indices; its failures do not name the sample, so read one by one after them.
    """
    kind = _KINDS.get(type(source)) if collate is default_collate else None
    return kind(source) if kind else None


def _of_tensors(source: TensorDataset) -> BatchOf | None:
    return partial(_rows, source) if all(_is_plain(t) for t in source.tensors) else None


def _of_subset(source: Subset[Any]) -> BatchOf | None:
    inner = batches_at_once(source.dataset, default_collate)
    return inner and partial(_chosen, inner, source)


def _of_windows(source: TextWindows) -> BatchOf:
    return source.batch


def _rows(source: TensorDataset, indices: list[int]) -> list[Tensor]:
    rows = torch.tensor(indices)
    return [t.index_select(0, rows) for t in source.tensors]


def _chosen(inner: BatchOf, source: Subset[Any], indices: list[int]) -> Any:
    return inner([int(source.indices[index]) for index in indices])


def _is_plain(t: Tensor) -> bool:
    return type(t) is Tensor and t.device.type == "cpu" and t.layout == torch.strided and not t.requires_grad


_KINDS: Mapping[type, Callable[[Any], BatchOf | None]] = {
    TensorDataset: _of_tensors,
    Subset: _of_subset,
    TextWindows: _of_windows,
}
