"""What goes over the wire in place of float values: a codec turns rows of values into rows of bytes and back.

Invariant: encoding is a pure function of the values and of the keys, the same on every rank and device. A
value that is not finite stays not finite in its row, so that an overflow is seen on the other side. Memory
comes from the caller's workspace, so a codec has no state, and a steady step allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.comm.workspace import Workspace

_CHUNK_VALUES = 1 << 16  # a multiple of every block


class CodecKeys(NamedTuple):
    """What the random numbers of one coding are functions of: (seed, step, buffer), as integers.

    Args:
        shared: equal on every rank, so also where the values are decoded.
        own: of the rank that encodes, so that roundings of different ranks are independent.
    """

    shared: int = 0
    own: int = 0


class Codec(Protocol):
    """Rows of values to rows of bytes, and back. What it loses is kept by who uses it.

    Attributes:
        needs_error_feedback: what is decoded is not right on average, so what is lost has to be sent later (error feedback).
        ragged: rows of equally many values may have fewer bytes than `num_bytes` says.
        block: how many values share a scale, or what else: a row may be coded in stretches of multiples of
            it, each alone, to as many bytes in all; 0: a row is coded as a whole.
    """

    needs_error_feedback: bool
    ragged: bool
    block: int

    def num_bytes(self, num_values: int) -> int:
        """Bytes of one coded row: the closed form that the ledger must show; the most where rows are
        ragged.
        """

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """Code each row alone: float [rows, num_values] to uint8 [rows, num_bytes]; `x` is not changed.

        The result may lie in the workspace: it is good until the next call with it.
        """

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """Write the values of each row: uint8 [rows, num_bytes] into `out`, float [rows, num_values]."""


def chunk_bounds(num_values: int) -> Iterator[tuple[int, int]]:
    """Where a row is cut so that the work on a stretch stays in the cache, and in memory that is there
    already.
    """
    for begin in range(0, num_values, _CHUNK_VALUES):
        yield begin, min(begin + _CHUNK_VALUES, num_values)


def values_of(payload: Tensor, dtype: torch.dtype, workspace: Workspace) -> Tensor:
    """Bytes [rows, m] as values of a type, [rows, m / itemsize]; a view where they are aligned."""
    rows, width = payload.shape
    if (payload.storage_offset() | payload.stride(0)) % dtype.itemsize or payload.stride(1) != 1:
        payload = workspace.like("aligned", payload).copy_(payload)
    return payload.view(dtype) if width else payload.new_empty(rows, 0, dtype=dtype)


def bytes_of(x: Tensor) -> Tensor:
    """Values [rows, m] as bytes [rows, m itemsize]."""
    rows = x.shape[0]
    return (
        x.contiguous().view(-1).view(torch.uint8).view(rows, -1)
        if x.numel()
        else x.new_empty(rows, 0, dtype=torch.uint8)
    )
