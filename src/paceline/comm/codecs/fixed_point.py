"""The fixed-point codec: plain b-bit quantisation with steps of one size."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.codecs.bf16_fp16 import row_max_abs
from paceline.comm.codecs.bit_packing import pack, packed_bytes, unpack
from paceline.comm.codecs.codec_kernels import CodecKernels, load_kernels
from paceline.comm.codecs.codec_protocol import Codec, CodecKeys, bytes_of, chunk_bounds, values_of
from paceline.comm.workspace import Workspace

_SCALE_BYTES = 4


class FixedPointCodec:
    """A codec to round(x / D) D with D = 2**-b, where x is a value divided by the largest magnitude of its
    row.

    There are 2**(b+1) + 1 codes, so each takes b + 2 bits. The error of a value is at most 2**-(b+1) of the
    largest of its row: of gradients with a wide range most values become zero, where `int8` has a scale for
    each block.

    Args:
        bits: b, 1 to 14.
        kernels: compiled functions for rows of float32, in one pass; None: PyTorch is used, with the same
            bytes.
    Source: Gupta et al. 2015, Deep Learning with Limited Numerical Precision, arXiv:1502.02551, section 3
    (fixed point, nearest), on values scaled to [-1, 1].
    """

    needs_error_feedback, ragged, block = True, False, 0

    def __init__(self, bits: int, kernels: CodecKernels | None = None) -> None:
        self._top, self._width, self._kernels = 1 << bits, bits + 2, kernels

    def num_bytes(self, num_values: int) -> int:
        """Return (b + 2) n / 8, by planes of whole bytes, plus 4."""
        return packed_bytes(num_values, self._width) + _SCALE_BYTES

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """Write the codes of each row, then its largest magnitude."""
        rows, num_values = x.shape
        out = workspace.take("fixed", (rows, self.num_bytes(num_values)), torch.uint8, x.device)
        tops = row_max_abs(x, self._kernels).to(torch.float32)
        out[:, packed_bytes(num_values, self._width) :] = bytes_of(tops)
        # A row of zeros has no largest value; the smallest normal number keeps it zero and divides safely.
        for row, payload, top in zip(x, out, tops.clamp_min(torch.finfo(torch.float32).tiny), strict=True):
            if self._kernels is not None and self._kernels.take(row):
                self._kernels.fixed_encode(row, self._width, top, payload)
            else:
                self._encode_row(row, top.to(x.dtype), payload, workspace)
        return out

    def _encode_row(self, x: Tensor, top: Tensor, out: Tensor, workspace: Workspace) -> None:
        for begin, end in chunk_bounds(x.numel()):
            chunk = x[begin:end]
            steps = torch.div(chunk, top, out=workspace.like("fixed.steps", chunk))
            steps.mul_(self._top).round_().add_(self._top)
            # The codes need no NaN: the largest magnitude of the row says that it was not finite.
            steps.nan_to_num_(0.0, 0.0, 0.0)
            codes = workspace.take("fixed.codes", steps.shape, torch.int32, x.device).copy_(steps)
            span = slice(packed_bytes(begin, self._width), packed_bytes(end, self._width))
            pack(codes, self._width, out[span], workspace)

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        num_values = out.shape[1]
        tops = values_of(payload[:, packed_bytes(num_values, self._width) :], torch.float32, workspace)
        for row, values, top in zip(payload, out, tops.to(out.dtype), strict=True):
            if self._kernels is not None and self._kernels.take(values, top):
                self._kernels.fixed_decode(row, self._width, top, values)
            else:
                self._decode_row(row, top, values, workspace)

    def _decode_row(self, payload: Tensor, top: Tensor, out: Tensor, workspace: Workspace) -> None:
        for begin, end in chunk_bounds(out.numel()):
            coded = payload[packed_bytes(begin, self._width) :]
            codes = unpack(coded, end - begin, self._width, workspace)
            out[begin:end].copy_(codes).sub_(self._top).div_(self._top).mul_(top)


def fixed_point(argument: int) -> Codec:
    """Build the codec of the word `fixed:B`."""
    return FixedPointCodec(argument, load_kernels())
