"""Codecs of two bytes a value: bfloat16, and float16 with a scale that prevents overflow."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.codecs.codec_kernels import CodecKernels, load_kernels
from paceline.comm.codecs.codec_protocol import Codec, CodecKeys, bytes_of, chunk_bounds, values_of
from paceline.comm.workspace import Workspace

_BF16_MAX = torch.finfo(torch.bfloat16).max
# The largest value of a row is scaled to less than 2**15; float16 ends at 65504.
_FP16_MAX_EXPONENT = 15
_SCALE_BYTES = 4
# Smaller scales would be subnormal in float32, which some processors flush to zero.
_MIN_SCALE_EXPONENT = -126


class Bf16Codec:
    """A codec to bfloat16, rounded to nearest; finite values stay finite.

    The error of a value is at most 2**-8 of it, and 2**-134 where it is below the smallest normal float32.
    Args:
        kernels: compiled functions for rows of float32, in one pass; None: PyTorch is used, with the same
            bytes.
    Source: Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training, arXiv:1905.12322.
    """

    needs_error_feedback, ragged, block = True, False, 1

    def __init__(self, kernels: CodecKernels | None = None) -> None:
        self._kernels = kernels

    def num_bytes(self, num_values: int) -> int:
        """Return 2 n."""
        return 2 * num_values

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """Round each row with the kernels, or with PyTorch where it has values that are not finite."""
        out = workspace.take("bf16", x.shape, torch.bfloat16, x.device)
        for row, rounded in zip(x, out, strict=True):
            if (
                self._kernels is None
                or not self._kernels.take(row)
                or not self._kernels.bf16_encode(row, rounded)
            ):
                _round_to_bf16(row, rounded)
        return bytes_of(out)

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        out.copy_(values_of(payload, torch.bfloat16, workspace))


def _round_to_bf16(x: Tensor, out: Tensor) -> None:
    """Round values [n] to bfloat16 `out`; finite values that would become infinite are clamped."""
    if bool((row_max_abs(x.unsqueeze(0)) > _BF16_MAX).any()):
        x = torch.where(x.isfinite(), x.clamp(-_BF16_MAX, _BF16_MAX), x)
    out.copy_(x)


class Fp16Codec:
    """A codec to float16 of x / s, where the power of two s brings the largest value of a row below 2**15.

    The error of a value is at most 2**-11 of it, or 2**-40 of the largest of its row.
    Args:
        kernels: compiled functions for rows of float32, in two passes; None: PyTorch is used, with the same
            bytes.
    Source: Micikevicius et al. 2018, Mixed Precision Training, arXiv:1710.03740, section 3.2 (scaling).
    """

    # The whole row shares one scale, so it cannot be encoded in chunks.
    needs_error_feedback, ragged, block = True, False, 0

    def __init__(self, kernels: CodecKernels | None = None) -> None:
        self._kernels = kernels

    def num_bytes(self, num_values: int) -> int:
        """Return 2 n + 4."""
        return 2 * num_values + 4

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """Write the scale of each row, then its values in float16."""
        tops = row_max_abs(x, self._kernels).to(torch.float32)
        exponents = torch.frexp(tops).exponent.to(torch.int32) - _FP16_MAX_EXPONENT
        scales = torch.ldexp(
            torch.ones(len(x), 1, device=x.device), exponents.clamp_min_(_MIN_SCALE_EXPONENT)
        )
        out = workspace.take("fp16", (len(x), self.num_bytes(x.shape[1])), torch.uint8, x.device)
        out[:, :_SCALE_BYTES] = bytes_of(scales)
        if self._kernels is not None and self._kernels.take(x):
            for row, payload, scale in zip(x, out, scales, strict=True):
                self._kernels.fp16_encode(row, scale, payload[_SCALE_BYTES:])
            return out
        halves, scales = out[:, _SCALE_BYTES:].view(torch.float16), scales.to(x.dtype)
        for begin, end in chunk_bounds(x.shape[1]):
            chunk = x[:, begin:end]
            scaled = torch.div(chunk, scales, out=workspace.like("fp16.scaled", chunk))
            halves[:, begin:end] = scaled
        return out

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        scales = values_of(payload[:, :_SCALE_BYTES], torch.float32, workspace).to(out.dtype, copy=True)
        halves = values_of(payload[:, _SCALE_BYTES:], torch.float16, workspace)
        for begin, end in chunk_bounds(out.shape[1]):
            out[:, begin:end].copy_(halves[:, begin:end]).mul_(scales)


def row_max_abs(x: Tensor, kernels: CodecKernels | None = None) -> Tensor:
    """Return the largest magnitude of each row, [rows, 1]; zero for an empty row, NaN for one that has a
    NaN.
    """
    maxima = x.new_zeros(len(x), 1)
    if not x.shape[1]:
        return maxima
    if kernels is not None and kernels.take(x):
        kernels.top(x, maxima)
        return maxima
    maxima = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_()).abs_()
    # Every NaN becomes the same NaN, so that the encoded bytes are the same on every device.
    return torch.where(maxima.isnan(), torch.nan, maxima)


def bf16(argument: None) -> Codec:
    """Build the codec of the word `bf16`."""
    return Bf16Codec(load_kernels())


def fp16(argument: None) -> Codec:
    """Build the codec of the word `fp16`."""
    return Fp16Codec(load_kernels())
