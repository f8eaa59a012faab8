"""Codes of a few bits, packed into bytes without gaps.

n codes of 1, 2 or 4 bits are cut into 8 / bits equal runs, which lie above each other in the bytes: each
operation then reads and writes memory in order. Other widths are a sum of such planes and of whole bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.workspace import Workspace

_PLANE_BITS = (8, 4, 2, 1)


def plane_bits(bits: int) -> list[int]:
    """Return the widths of the planes of a code, low bits first; pure."""
    planes = []
    for plane in _PLANE_BITS:
        while bits >= plane:
            planes.append(plane)
            bits -= plane
    return planes


def packed_bytes(num_values: int, bits: int) -> int:
    """Return the bytes of packed codes: each plane of p bits has ceil(n p / 8)."""
    return sum(-(-num_values * plane // 8) for plane in plane_bits(bits))


def pack(codes: Tensor, bits: int, out: Tensor, workspace: Workspace) -> None:
    """Pack integers [n] in [0, 2**bits) into uint8 [packed_bytes]; int8 codes are taken modulo 2**bits."""
    start = shift = 0
    for plane in plane_bits(bits):
        width = packed_bytes(codes.numel(), plane)
        low = codes
        if shift:
            low = torch.bitwise_right_shift(codes, shift, out=workspace.like("pack.shifted", codes))
        _pack_plane(_low_byte(low, workspace), plane, out[start : start + width], workspace)
        start, shift = start + width, shift + plane


def unpack(payload: Tensor, num_values: int, bits: int, workspace: Workspace) -> Tensor:
    """Unpack to uint8 [n], or to int32 if codes have more than 8 bits; in the workspace, or a view."""
    if bits == 8:
        return payload[:num_values]
    dtype = torch.uint8 if bits < 8 else torch.int32
    out = workspace.take("unpack.codes", (num_values,), dtype, payload.device)
    start = shift = 0
    for plane in plane_bits(bits):
        width = packed_bytes(num_values, plane)
        plane_payload = payload[start : start + width]
        if plane == bits:
            _unpack_plane(plane_payload, plane, out)
        else:
            codes = workspace.take("unpack.plane", (num_values,), torch.uint8, payload.device)
            _unpack_plane(plane_payload, plane, codes)
            wide = workspace.take("unpack.wide", (num_values,), dtype, payload.device).copy_(codes)
            wide.bitwise_left_shift_(shift)
            (out.bitwise_or_ if shift else out.copy_)(wide)
        start, shift = start + width, shift + plane
    return out


def _low_byte(codes: Tensor, workspace: Workspace) -> Tensor:
    """Return codes as uint8, modulo 256; a view if they have one byte."""
    if codes.dtype.itemsize == 1:
        return codes.view(torch.uint8)
    return workspace.take("pack.low", codes.shape, torch.uint8, codes.device).copy_(codes)


def _pack_plane(codes: Tensor, bits: int, out: Tensor, workspace: Workspace) -> None:
    if bits == 8:
        out.copy_(codes)
        return
    width, mask = out.numel(), (1 << bits) - 1
    # Negative codes have ones above their lowest bits; the mask removes them.
    torch.bitwise_and(codes[:width], mask, out=out)
    # Run k of the codes is in bits k * bits and up of every byte.
    for run in range(1, 8 // bits):
        codes_of_run = codes[run * width : (run + 1) * width]
        shifted = torch.bitwise_and(codes_of_run, mask, out=workspace.like("pack.run", codes_of_run))
        out[: codes_of_run.numel()].bitwise_or_(shifted.bitwise_left_shift_(bits * run))


def _unpack_plane(payload: Tensor, bits: int, out: Tensor) -> None:
    if bits == 8:
        out.copy_(payload)
        return
    width = payload.numel()
    for run in range(8 // bits):
        codes_of_run = out[run * width : (run + 1) * width]
        if codes_of_run.numel():
            torch.bitwise_right_shift(payload[: codes_of_run.numel()], bits * run, out=codes_of_run)
    # The shift leaves bits of later runs above; one mask clears them for all runs.
    out.bitwise_and_((1 << bits) - 1)
