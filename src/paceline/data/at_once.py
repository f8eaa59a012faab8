"""Batches that are made at once: without a Python call for each sample, and without random numbers.

Invariant: such a batch has the bits, types and containers that PyTorch's default collate function makes of
the samples. So only exact types are known, since a subclass may draw random numbers or change what a sample
is; and each batch is looked at anew, since what a source holds may be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from paceline.data.text import TextWindows

_TYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


def collates_by_default(collate: Callable[[list[Any]], Any]) -> bool:
    """Whether batches are made by PyTorch's default, and nobody has told that how to treat tensors."""
    known = default_collate_fn_map
    return collate is default_collate and known.get(Tensor) is collate_tensor_fn and tuple not in known


def batch_at_once(source: Any, indices: Sequence[int]) -> Any | None:
    """A batch as the default collate function makes it; None if the samples have to be read one by one.

    Args:
        source: map-style data (`Source`).
        indices: of the samples. If one is not there, the answer is None: reading it will say so.
    """
    read = _KINDS.get(type(source))
    return read(source, indices) if read and indices else None


def _rows(source: TensorDataset, indices: Sequence[int]) -> list[Tensor] | None:
    if not (_are_inside(indices, len(source)) and all(map(_is_plain, source.tensors))):
        return None
    rows = torch.from_numpy(np.array(indices, dtype=np.int64))  # for a third of what torch.tensor takes
    return [t.index_select(0, rows) for t in source.tensors]


def _chosen(source: Subset[Any], indices: Sequence[int]) -> Any | None:
    chosen: Any = source.indices
    known = type(chosen) in (list, tuple, range) or (type(chosen) is np.ndarray and chosen.ndim == 1)
    if not known or not _are_inside(indices, len(chosen)):
        return None
    inner = [chosen[index] for index in indices]
    if not all(type(index) is int or isinstance(index, np.integer) for index in inner):
        return None
    return batch_at_once(source.dataset, [int(index) for index in inner])


def _windows(source: TextWindows, indices: Sequence[int]) -> Tensor | None:
    return source.batch(indices) if _are_inside(indices, len(source)) else None


def _are_inside(indices: Sequence[int], length: int) -> bool:
    return min(indices) >= 0 and max(indices) < length


def _is_plain(t: Tensor) -> bool:
    if type(t) is not Tensor or t.layout != torch.strided or t.is_nested or t.requires_grad:
        return False
    return t.device.type == "cpu" and t.dtype in _TYPES


_KINDS: Mapping[type, Callable[[Any, Sequence[int]], Any | None]] = {
    TensorDataset: _rows,
    Subset: _chosen,
    TextWindows: _windows,
}
