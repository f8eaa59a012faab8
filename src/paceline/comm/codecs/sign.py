"""The sign codec: one bit a value, and the mean magnitude of its block."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.codecs.bit_packing import pack, packed_bytes, unpack
from paceline.comm.codecs.codec_kernels import CodecKernels, load_kernels
from paceline.comm.codecs.codec_protocol import Codec, CodecKeys, bytes_of, chunk_bounds, values_of
from paceline.comm.codecs.int8_int4_int2 import pad_to_blocks, scale_blocks
from paceline.comm.workspace import Workspace

_BLOCK = 1024
_SCALE_BYTES = 4


class SignCodec:
    """A codec to sign(x) mean|block|, with a float32 scale for every block of 1,024; zero counts as positive.

    The quantisation error is at most (1 - ||x||_1^2 / (n ||x||_2^2)) of the square of a block, so with error
    feedback it converges, where signs alone may not; there is no majority vote. Magnitudes are added in one
    order, halves of a block to each other, so that every processor computes the same mean.

    Args:
        kernels: compiled functions for rows of float32, in one pass; None: PyTorch is used, with the same
            bytes.
    Source: Karimireddy et al. 2019, Error Feedback Fixes SignSGD, arXiv:1901.09847, Algorithm 1.
    """

    needs_error_feedback, ragged, block = True, False, _BLOCK

    def __init__(self, kernels: CodecKernels | None = None) -> None:
        self._kernels = kernels

    def num_bytes(self, num_values: int) -> int:
        """Return ceil(n / 8) + 4 ceil(n / 1024)."""
        return packed_bytes(num_values, 1) + _SCALE_BYTES * -(-num_values // _BLOCK)

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """Write the signs of each row, then the mean magnitudes of its blocks."""
        rows, num_values = x.shape
        out = workspace.take("sign", (rows, self.num_bytes(num_values)), torch.uint8, x.device)
        scales = workspace.take("scales", (rows, -(-num_values // _BLOCK)), torch.float32, x.device)
        for row, payload, row_scales in zip(x, out, scales, strict=True):
            if self._kernels is not None and self._kernels.take(row):
                self._kernels.sign_encode(row, payload, row_scales)
            else:
                _encode_row(row, payload, row_scales, workspace)
        scales.div_(_BLOCK)
        # The last block may be short: its mean is over the values that it has.
        if num_values % _BLOCK:
            scales[:, -1] *= _BLOCK / (num_values % _BLOCK)
        out[:, packed_bytes(num_values, 1) :] = bytes_of(scales)
        return out

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """Multiply the signs of each row by the scales of its blocks."""
        num_values = out.shape[1]
        scales = values_of(payload[:, packed_bytes(num_values, 1) :], torch.float32, workspace)
        scales = workspace.copy("scales.wide", scales, out.dtype)
        for row, values, row_scales in zip(payload, out, scales, strict=True):
            if self._kernels is not None and self._kernels.take(values, row_scales):
                self._kernels.sign_decode(row, row_scales, values)
            else:
                _decode_row(row, values, row_scales, workspace)


def _encode_row(x: Tensor, out: Tensor, sums: Tensor, workspace: Workspace) -> None:
    for begin, end in chunk_bounds(x.numel()):
        _sum_block_magnitudes(x[begin:end], sums[begin // _BLOCK : -(-end // _BLOCK)], workspace)
        positive = workspace.take("sign.positive", (end - begin,), torch.bool, x.device)
        torch.ge(x[begin:end], 0, out=positive)
        pack(positive.view(torch.uint8), 1, out[begin // 8 : -(-end // 8)], workspace)


def _sum_block_magnitudes(x: Tensor, sums: Tensor, workspace: Workspace) -> None:
    """Write the sum of the magnitudes of every block into `sums`."""
    blocks = pad_to_blocks(x, _BLOCK, workspace)
    sizes = torch.abs(blocks, out=workspace.like("sign.sizes", blocks))
    width = _BLOCK
    # Halves are added pairwise, the order of the kernel, so both give the same bits.
    while width > 1:
        width //= 2
        sizes[:, :width].add_(sizes[:, width : 2 * width])
    sums.copy_(sizes[:, 0])


def _decode_row(payload: Tensor, out: Tensor, scales: Tensor, workspace: Workspace) -> None:
    for begin, end in chunk_bounds(out.numel()):
        signs = unpack(payload[begin // 8 : -(-end // 8)], end - begin, 1, workspace).view(torch.int8)
        signs.mul_(2).sub_(1)
        scale_blocks(signs, scales[begin // _BLOCK : -(-end // _BLOCK)], _BLOCK, out[begin:end])


def sign(argument: None) -> Codec:
    """Build the codec of the word `sign`."""
    return SignCodec(load_kernels())
