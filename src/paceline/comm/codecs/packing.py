"""Codes of a few bits in bytes, without a gap.

n codes of 1, 2 or 4 bits are cut into 8 / bits equal runs, which lie above each other in the bytes: each
operation then reads and writes memory in order. Other widths are a sum of such planes and of whole bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PLANES = (8, 4, 2, 1)


def planes_of(bits: int) -> list[int]:
    """The widths of the planes of a code, low bits first; pure."""
    found = []
    for plane in _PLANES:
        while bits >= plane:
            found.append(plane)
            bits -= plane
    return found


def packed_bytes(num_values: int, bits: int) -> int:
    """Bytes of packed codes: each plane of p bits has ceil(n p / 8)."""
    return sum(-(-num_values * plane // 8) for plane in planes_of(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integers [n] in [0, 2**bits) as uint8 [packed_bytes]; int8 codes count modulo 2**bits."""
    parts, shift = [], 0
    for plane in planes_of(bits):
        low = codes >> shift if shift else codes
        parts.append(
            _pack_plane(low.view(torch.uint8) if low.dtype == torch.int8 else low.to(torch.uint8), plane)
        )
        shift += plane
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(payload: Tensor, num_values: int, bits: int) -> Tensor:
    """The inverse: uint8 [n], or int32 where codes have more than 8 bits; may be a view."""
    out: Tensor | None = None
    start = shift = 0
    for plane in planes_of(bits):
        width = packed_bytes(num_values, plane)
        part = _unpack_plane(payload[start : start + width], num_values, plane)
        wide = part if bits <= 8 else part.to(torch.int32)
        out = wide if out is None else out | (wide << shift)
        start, shift = start + width, shift + plane
    assert out is not None
    return out


def _pack_plane(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    width = packed_bytes(codes.numel(), bits)
    codes = codes & ((1 << bits) - 1)  # what is negative has ones above
    out = codes[:width].clone()
    for run in range(1, 8 // bits):
        part = codes[run * width : (run + 1) * width]
        out[: part.numel()] |= part << (bits * run)
    return out


def _unpack_plane(payload: Tensor, num_values: int, bits: int) -> Tensor:
    if bits == 8:
        return payload
    width, out = payload.numel(), payload.new_empty(num_values)
    for run in range(8 // bits):
        part = out[run * width : (run + 1) * width]
        if part.numel():
            torch.bitwise_right_shift(payload[: part.numel()], bits * run, out=part)
    return out.bitwise_and_((1 << bits) - 1)
