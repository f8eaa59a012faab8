"""Two bytes a value: bfloat16, and float16 under a scale that keeps it from overflowing."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.codecs.codec_kernels import CodecKernels, load_kernels
from paceline.comm.codecs.codec_protocol import Codec, CodecKeys, bytes_of, chunk_bounds, values_of
from paceline.comm.workspace import Workspace

_BF16_MAX = torch.finfo(torch.bfloat16).max
_FP16_MAX_EXPONENT = 15  # the largest value of a row is scaled to less than 2**15; float16 ends at 65504
_SCALE_BYTES = 4
_MIN_SCALE_EXPONENT = -126  # of a scale that is a normal float32


class Bf16Codec:
    """The upper half of a float32, rounded to nearest; what is finite stays finite.

    The error of a value is at most 2**-8 of it, and 2**-134 where it is below the smallest normal float32.
    Args:
        kernels: code rows of float32 in one pass; None: PyTorch does, to the same bytes.
    Source: Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training, arXiv:1905.12322.
    """

    needs_error_feedback, ragged, block = True, False, 1

    def __init__(self, kernels: CodecKernels | None = None) -> None:
        self._kernels = kernels

    def num_bytes(self, num_values: int) -> int:
        """2 n."""
        return 2 * num_values

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """See `Codec`."""
        out = workspace.take("bf16", x.shape, torch.bfloat16, x.device)
        for row, found in zip(x, out, strict=True):
            if (
                self._kernels is None
                or not self._kernels.take(row)
                or not self._kernels.bf16_encode(row, found)
            ):
                _round_to_bf16(row, found)
        return bytes_of(out)

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """See `Codec`."""
        out.copy_(values_of(payload, torch.bfloat16, workspace))


def _round_to_bf16(x: Tensor, out: Tensor) -> None:
    """Values [n] as bfloat16 `out`; none that is finite becomes infinite."""
    if bool((row_max_abs(x.unsqueeze(0)) > _BF16_MAX).any()):
        x = torch.where(x.isfinite(), x.clamp(-_BF16_MAX, _BF16_MAX), x)
    out.copy_(x)


class Fp16Codec:
    """float16 of x / s, where s is the power of two that brings the largest value of a row below 2**15.

    The error of a value is at most 2**-11 of it, or 2**-40 of the largest of its row.
    Args:
        kernels: code rows of float32 in two passes; None: PyTorch does, to the same bytes.
    Source: Micikevicius et al. 2018, Mixed Precision Training, arXiv:1710.03740, section 3.2 (scaling).
    """

    needs_error_feedback, ragged, block = True, False, 0  # a row has one scale

    def __init__(self, kernels: CodecKernels | None = None) -> None:
        self._kernels = kernels

    def num_bytes(self, num_values: int) -> int:
        """2 n + 4."""
        return 2 * num_values + 4

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """See `Codec`."""
        tops = row_max_abs(x, self._kernels).to(torch.float32)
        exponents = torch.frexp(tops).exponent.to(torch.int32) - _FP16_MAX_EXPONENT
        scales = torch.ldexp(
            torch.ones(len(x), 1, device=x.device), exponents.clamp_min_(_MIN_SCALE_EXPONENT)
        )
        out = workspace.take("fp16", (len(x), self.num_bytes(x.shape[1])), torch.uint8, x.device)
        out[:, :_SCALE_BYTES] = bytes_of(scales)
        if self._kernels is not None and self._kernels.take(x):
            for row, found, scale in zip(x, out, scales, strict=True):
                self._kernels.fp16_encode(row, scale, found[_SCALE_BYTES:])
            return out
        halves, scales = out[:, _SCALE_BYTES:].view(torch.float16), scales.to(x.dtype)
        for begin, end in chunk_bounds(x.shape[1]):
            part = x[:, begin:end]
            scaled = torch.div(part, scales, out=workspace.like("fp16.scaled", part))
            halves[:, begin:end] = scaled
        return out

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """See `Codec`."""
        scales = values_of(payload[:, :_SCALE_BYTES], torch.float32, workspace).to(out.dtype, copy=True)
        halves = values_of(payload[:, _SCALE_BYTES:], torch.float16, workspace)
        for begin, end in chunk_bounds(out.shape[1]):
            out[:, begin:end].copy_(halves[:, begin:end]).mul_(scales)


def row_max_abs(x: Tensor, kernels: CodecKernels | None = None) -> Tensor:
    """The largest magnitude of each row, [rows, 1]; zero of an empty one, and NaN of one that has a NaN."""
    found = x.new_zeros(len(x), 1)
    if not x.shape[1]:
        return found
    if kernels is not None and kernels.take(x):
        kernels.top(x, found)
        return found
    found = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_()).abs_()
    return torch.where(found.isnan(), torch.nan, found)


def bf16(argument: str) -> Codec:
    """The word `bf16`."""
    return Bf16Codec(load_kernels())


def fp16(argument: str) -> Codec:
    """The word `fp16`."""
    return Fp16Codec(load_kernels())
