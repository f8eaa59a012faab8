"""Fewer bytes, and every bit comes back: bytes of equal weight together, then a general compressor.

Neighbouring gradients have signs and exponents alike and mantissas that nothing predicts, so the bytes of a
value are put apart, and each plane is compressed alone or left as it is, whichever is smaller.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.comm.codecs.codec import Codec, Keys
from paceline.comm.workspace import Workspace
from paceline.errors import MissingExtraError

_PLANE = struct.Struct("<q")  # bytes of a plane; negative: it is as it was
_LEVEL = 1
_WORTH = 0.98  # a plane that shrinks less travels as it is
_PROBE_BYTES = 1 << 14  # a plane whose beginning does not shrink is not tried


class Lossless:
    """A byte shuffle and zstandard, over values or over what another codec made of them.

    A row travels as its planes, each with its size before it. Rows are padded to the longest of a call.

    Args:
        inner: codes the values first; None: they are taken as they are, in their own type.
    Source: Masui et al. 2015, A compression scheme for radio data (bitshuffle); RFC 8878,
    Zstandard Compression.
    """

    ragged = True

    def __init__(self, inner: Codec | None = None) -> None:
        self._inner = inner
        self.loses = inner is not None and inner.loses
        self._compressor, self._decompress = _zstandard()

    def num_bytes(self, num_values: int) -> int:
        """At most 4 n + 32 (of float32; 8 n + 64 of float64); c + 8 for c bytes of another codec."""
        if self._inner is not None:
            return self._inner.num_bytes(num_values) + _PLANE.size
        return 4 * (num_values + _PLANE.size)

    def encode(self, x: Tensor, keys: Keys, workspace: Workspace) -> Tensor:
        """See `Codec`."""
        if self._inner is None:
            raw, width = x.contiguous().view(torch.uint8), x.element_size()
        else:
            raw, width = self._inner.encode(x, keys, workspace), 1
        coded = [self._row(row, width) for row in raw.view(len(x), -1)]
        out = torch.zeros(len(coded), max(map(len, coded), default=0), dtype=torch.uint8)
        for row, found in zip(out, coded, strict=True):
            row[: len(found)] = torch.frombuffer(bytearray(found), dtype=torch.uint8)
        return out.to(x.device)

    def decode(self, payload: Tensor, out: Tensor, keys: Keys, workspace: Workspace) -> None:
        """See `Codec`."""
        if out.numel() == 0:
            return
        width = out.element_size() if self._inner is None else 1
        rows = [self._unpacked(bytes(memoryview(row.numpy())), width) for row in payload.cpu().contiguous()]
        raw = torch.stack(rows).to(out.device)
        if self._inner is not None:
            self._inner.decode(raw, out, keys, workspace)
        else:
            out.copy_(raw.view(out.dtype))

    def _row(self, raw: Tensor, width: int) -> bytes:
        planes = raw.view(-1, width).T.contiguous().cpu()
        return b"".join(self._plane(bytes(memoryview(plane.numpy()))) for plane in planes)

    def _plane(self, plane: bytes) -> bytes:
        if _is_worth(len(self._compressor(plane[:_PROBE_BYTES])), min(len(plane), _PROBE_BYTES)):
            found = self._compressor(plane)
            if _is_worth(len(found), len(plane)):
                return _PLANE.pack(len(found)) + found
        return _PLANE.pack(-len(plane)) + plane

    def _unpacked(self, row: bytes, width: int) -> Tensor:
        """The bytes of a row's values."""
        place, planes = 0, []
        for _ in range(width):
            (size,) = _PLANE.unpack_from(row, place)
            part = row[place + _PLANE.size : place + _PLANE.size + abs(size)]
            place += _PLANE.size + len(part)
            planes.append(bytearray(self._decompress(part) if size > 0 else part))
        return torch.stack([torch.frombuffer(plane, dtype=torch.uint8) for plane in planes], 1).view(-1)


def _is_worth(found: int, before: int) -> bool:
    return found < _WORTH * before


def _zstandard() -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError(
            "codec=lossless needs zstandard, which is not installed.",
            next_step="pip install 'paceline[lossless]'",
        ) from error
    compressor: Any = zstandard.ZstdCompressor(level=_LEVEL)
    decompressor: Any = zstandard.ZstdDecompressor()
    return compressor.compress, decompressor.decompress


def lossless(argument: str) -> Codec:
    """The word `lossless`."""
    return Lossless()


def packed(earlier: Codec, lossless: Codec) -> Codec:
    """`int8+lossless`: the bytes of another codec."""
    return Lossless(earlier)
