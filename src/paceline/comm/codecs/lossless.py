"""The lossless codec: a byte shuffle, then a general compressor.

Neighbouring gradients have similar signs and exponents and unpredictable mantissas, so the bytes of the
values are put into planes by weight. Each plane is compressed alone, or left as it is if that is smaller. All
memory is reused.
"""

from __future__ import annotations

import struct
from math import ceil
from typing import Any

import torch
from torch import Tensor

from paceline.comm.codecs.codec_protocol import Codec, CodecKeys
from paceline.comm.workspace import Workspace
from paceline.errors import CommunicationError, MissingExtraError

# Bytes of a plane; negative: the plane is not compressed.
_PLANE_HEADER = struct.Struct("<q")
_ZSTD_LEVEL = 1
# A plane that shrinks less is sent as it is: it would cost time to decompress.
_MAX_RATIO = 0.98
# If the beginning of a plane does not shrink, the rest is not tried.
_PROBE_BYTES = 1 << 14


class LosslessCodec:
    """A codec of a byte shuffle and Zstandard, over values or over the bytes of another codec.

    A row is sent as its planes, each with its size before it. Rows are padded to the longest of a call.

    Args:
        inner: codec that encodes the values first; None: they are taken as they are, in their own dtype.
    Source: Masui et al. 2015, A compression scheme for radio data (bitshuffle); RFC 8878, Zstandard
        Compression.
    """

    ragged, block = True, 0

    def __init__(self, inner: Codec | None = None) -> None:
        self._inner = inner
        self.needs_error_feedback = inner is not None and inner.needs_error_feedback
        self._compressor, self._decompressor = _open_zstandard()

    def num_bytes(self, num_values: int) -> int:
        """Return at most 4 n + 32 (of float32; 8 n + 64 of float64); c + 8 for c bytes of another codec."""
        if self._inner is not None:
            return self._inner.num_bytes(num_values) + _PLANE_HEADER.size
        return 4 * (num_values + _PLANE_HEADER.size)

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """Compress each row plane by plane, and pad the rows to the longest."""
        if self._inner is None:
            raw, width = workspace.copy("lossless.values", x).view(torch.uint8), x.element_size()
        else:
            raw, width = self._inner.encode(x, keys, workspace), 1
        raw = raw.view(len(x), -1)
        room = raw.shape[1] + width * _PLANE_HEADER.size
        out = workspace.take("lossless", (len(raw), room), torch.uint8)
        sizes = [self._pack(row, width, into, workspace) for row, into in zip(raw, out, strict=True)]
        longest = max(sizes, default=0)
        for into, size in zip(out, sizes, strict=True):
            # Padding is sent too, so it must not be undefined memory.
            into[size:longest].zero_()
        return out[:, :longest].to(x.device)

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """Decompress each row, and decode it with the inner codec if there is one.

        Raises:
            CommunicationError: a plane has other bytes than its values need.
        """
        if out.numel() == 0:
            return
        rows, num_values = out.shape
        width = out.element_size() if self._inner is None else 1
        size = num_values * width if self._inner is None else self._inner.num_bytes(num_values)
        raw = workspace.take("lossless.raw", (rows, size), torch.uint8)
        for row, row_out in zip(workspace.copy("lossless.read", payload.cpu()), raw, strict=True):
            self._unpack(row.numpy().data, width, row_out, workspace)
        if self._inner is not None:
            self._inner.decode(raw.to(out.device), out, keys, workspace)
        else:
            out.copy_(raw.view(out.dtype))

    def _pack(self, raw: Tensor, width: int, out: Tensor, workspace: Workspace) -> int:
        """Write the planes of a row's bytes into `out`, and return their size in bytes."""
        plane = workspace.take("lossless.plane", (raw.numel() // width,), torch.uint8)
        room, end = out.numpy().data, 0
        for column in raw.view(-1, width).T:
            end += self._pack_plane(plane.copy_(column).numpy().data, room[end:])
        return end

    def _pack_plane(self, plane: memoryview, out: memoryview) -> int:
        body = out[_PLANE_HEADER.size :]
        size = self._compress(plane[:_PROBE_BYTES], body) and self._compress(plane, body)
        # The compressor may have written part of a plane here before it gave up.
        if not size:
            body[: len(plane)] = plane
        _PLANE_HEADER.pack_into(out, 0, size or -len(plane))
        return _PLANE_HEADER.size + (size or len(plane))

    def _compress(self, plane: memoryview, out: memoryview) -> int:
        """Compress into `out` and return the size in bytes; 0 if the plane shrinks too little."""
        max_bytes = ceil(_MAX_RATIO * len(plane))
        size: int = (
            self._compressor.stream_reader(plane, size=len(plane)).readinto(out[:max_bytes])
            if max_bytes
            else 0
        )
        return size if size < max_bytes else 0

    def _unpack(self, row: memoryview, width: int, out: Tensor, workspace: Workspace) -> None:
        """Write the bytes of a row's values into `out`."""
        plane, offset = workspace.take("lossless.plane", (out.numel() // width,), torch.uint8), 0
        for column in out.view(-1, width).T:
            (size,) = _PLANE_HEADER.unpack_from(row, offset)
            packed = row[offset + _PLANE_HEADER.size :][: abs(size)]
            offset += _PLANE_HEADER.size + len(packed)
            self._unpack_plane(packed, plane.numpy().data, is_packed=size > 0)
            column.copy_(plane)

    def _unpack_plane(self, packed: memoryview, out: memoryview, *, is_packed: bool) -> None:
        size = len(packed)
        if is_packed:
            size = self._decompressor.stream_reader(packed).readinto(out)
        elif size == len(out):
            out[:] = packed
        if size != len(out):
            raise CommunicationError(
                f"an encoded plane has {size} bytes, but its values need {len(out)}",
                next_step="every rank must sum the same buffers in the same order",
            )


def _open_zstandard() -> tuple[Any, Any]:
    """Return a compressor and a decompressor; each keeps its own memory."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError(
            "codec=lossless needs zstandard, which is not installed.",
            next_step="pip install 'paceline[lossless]'",
        ) from error
    # The fastest level: on most links a higher one takes longer than it saves.
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL), zstandard.ZstdDecompressor()


def lossless(argument: None) -> Codec:
    """Build the codec of the word `lossless`."""
    return LosslessCodec()


def compress_coded_bytes(earlier: Codec, lossless: Codec) -> Codec:
    """Build the codec of `int8+lossless`: the compressed bytes of another codec."""
    return LosslessCodec(earlier)
