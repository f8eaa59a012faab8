"""The codec protocol: a codec turns rows of float values into rows of bytes and back.

Invariant: encoding is a pure function of the values and of the keys, the same on every rank and device. A row
with a value that is not finite decodes to one that is not finite, so that an overflow is seen on the other
side. Memory comes from the caller's workspace, so a codec has no state, and a steady step allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.comm.workspace import Workspace

# A multiple of every block, so that chunks never share a scale.
_CHUNK_VALUES = 1 << 16


class CodecKeys(NamedTuple):
    """Keys of the random numbers of one encoding, as functions of (seed, step, buffer).

    Args:
        shared: equal on every rank, so also where the values are decoded.
        own: of the rank that encodes, so that roundings of different ranks are independent.
    """

    shared: int = 0
    own: int = 0


class Codec(Protocol):
    """An encoding of rows of values. The caller keeps its quantisation error.

    Attributes:
        needs_error_feedback: the decoded values are biased, so the quantisation error has to be added to
            later values.
        ragged: rows of equally many values may have fewer bytes than `num_bytes` says.
        block: number of values that share a scale or a byte: a row may be encoded in chunks of multiples of
            it, each alone, to as many bytes in all; 0: a row has to be encoded as a whole.
    """

    needs_error_feedback: bool
    ragged: bool
    block: int

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes of one encoded row: the closed form that the ledger must show; the maximum if rows
        are ragged.
        """

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """Encode each row alone: float [rows, num_values] to uint8 [rows, num_bytes]; `x` is not changed.

        The result may lie in the workspace: it is valid until the next call with that.
        """

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """Decode each row: uint8 [rows, num_bytes] into `out`, float [rows, num_values]."""


def chunk_bounds(num_values: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of chunks of a row that fit into the cache and into memory of fixed size."""
    for begin in range(0, num_values, _CHUNK_VALUES):
        yield begin, min(begin + _CHUNK_VALUES, num_values)


def values_of(payload: Tensor, dtype: torch.dtype, workspace: Workspace) -> Tensor:
    """View bytes [rows, m] as values of a dtype, [rows, m / itemsize]; copied where they are not aligned."""
    rows, width = payload.shape
    # PyTorch refuses to view bytes at an odd address as wider values.
    if (payload.storage_offset() | payload.stride(0)) % dtype.itemsize or payload.stride(1) != 1:
        payload = workspace.like("aligned", payload).copy_(payload)
    return payload.view(dtype) if width else payload.new_empty(rows, 0, dtype=dtype)


def bytes_of(x: Tensor) -> Tensor:
    """View values [rows, m] as bytes [rows, m itemsize]."""
    rows = x.shape[0]
    return (
        x.contiguous().view(-1).view(torch.uint8).view(rows, -1)
        if x.numel()
        else x.new_empty(rows, 0, dtype=torch.uint8)
    )
