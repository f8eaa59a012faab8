"""The header of a frame: what a message is, and which tensors follow it. Another process has written it."""

from __future__ import annotations

import json
from typing import Any

import torch

MOST_HEADER_BYTES = 1 << 24
_MOST_AXES = 64
_MOST_PLACES = 2**48  # along one axis


def parse_header(header: bytes) -> tuple[str, dict[str, Any], list[tuple[torch.dtype, list[int]]]]:
    """Kind, fields, and type and shape of every tensor.

    Raises:
        ValueError: it is no header.
    """
    try:
        kind, fields, shapes = json.loads(header)
        described = [(getattr(torch, name), shape) for name, shape in shapes]
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the header is none: {error}") from error
    if type(kind) is not str or type(fields) is not dict or not all(_is_tensor(*one) for one in described):
        raise ValueError("the header is none")
    return kind, fields, described


def _is_tensor(dtype: Any, shape: Any) -> bool:
    right = type(dtype) is torch.dtype and type(shape) is list and len(shape) <= _MOST_AXES
    return right and all(type(size) is int and 0 <= size < _MOST_PLACES for size in shape)
