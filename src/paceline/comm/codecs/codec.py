"""What goes over the wire in place of float values: a codec turns rows of values into rows of bytes and back.

Invariant: encoding is a pure function of the values, the same on every rank and device. A value that is not
finite stays not finite in its row, so that an overflow is seen on the other side.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Rows of values to rows of bytes, and back. What it loses is kept by who uses it."""

    def num_bytes(self, num_values: int) -> int:
        """Bytes of one coded row: the closed form that the ledger must show."""

    def encode(self, x: Tensor) -> Tensor:
        """Code each row alone: float [rows, num_values] to uint8 [rows, num_bytes]."""

    def decode(self, payload: Tensor, num_values: int, dtype: torch.dtype) -> Tensor:
        """The values of each row: uint8 [rows, num_bytes] to `dtype` [rows, num_values]."""
