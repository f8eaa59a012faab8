"""A few bits a value, with a scale for every block: int8, int4 and int2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.comm.codecs.codec import Codec, Keys, bytes_of, stretches, values_of
from paceline.comm.codecs.packing import pack, packed_bytes, unpack
from paceline.comm.codecs.philox import uniform
from paceline.comm.kernels import Kernels, load_kernels
from paceline.comm.workspace import Workspace

BLOCK = 256
Draw = Callable[[range], Tensor]
"""Random numbers for some blocks of a row, [blocks, 256]."""

_TINY = torch.finfo(torch.float32).tiny  # the smallest scale; a block below it becomes zeros
_SCALE_BYTES = 4


class Scaled:
    """round(x / s) in b bits, s = max|block| / (2**(b-1) - 1), with a float32 scale for every block of 256.

    The error of a value is at most s / 2 (nearest) or s (stochastic, right on average), or half of the
    smallest normal float32. At most 2**b - 1 codes.

    Args:
        bits: 2, 4 or 8.
        kernels: code rows of float32 in one pass; None: PyTorch does, to the same bytes.
        stochastic: round up with a probability that is the fraction; what is decoded is then right on
            average, and nothing is kept for later.
    Source: Alistarh et al. 2017, QSGD, arXiv:1610.02132, section 3.1 (stochastic); Dettmers 2016, 8-Bit
    Approximations for Parallelism in Deep Learning, arXiv:1511.04561, section 2 (linear quantisation).
    """

    ragged, block = False, BLOCK

    def __init__(self, bits: int, *, stochastic: bool = False, kernels: Kernels | None = None) -> None:
        self.bits, self._stochastic, self._kernels = bits, stochastic, kernels
        self._most = 2 ** (bits - 1) - 1
        self.loses = not stochastic

    @property
    def relative_error(self) -> float:
        """The largest error of a value, relative to the largest of its block."""
        return 1 / self._most / (1 if self._stochastic else 2)

    def num_bytes(self, num_values: int) -> int:
        """ceil(n b / 8) + 4 ceil(n / 256)."""
        return packed_bytes(num_values, self.bits) + _SCALE_BYTES * -(-num_values // BLOCK)

    def encode(self, x: Tensor, keys: Keys, workspace: Workspace) -> Tensor:
        """See `Codec`."""
        rows, num_values = x.shape
        out = workspace.take("scaled", (rows, self.num_bytes(num_values)), torch.uint8, x.device)
        scales = workspace.take("scales", (rows, -(-num_values // BLOCK)), torch.float32, x.device)
        for number, (row, found, own) in enumerate(zip(x, out, scales, strict=True)):
            if self._kernels is None or not self._kernels.take(row):
                draw = partial(uniform, keys.own, number, device=x.device, workspace=workspace)
                self._encode_row(row, found, own, draw if self._stochastic else None, workspace)
            elif self._stochastic:
                self._kernels.scaled_draw(row, self.bits, found, own, keys.own, number)
            else:
                self._kernels.scaled_encode(row, self.bits, found, own)
        out[:, packed_bytes(num_values, self.bits) :] = bytes_of(scales)
        return out

    def _encode_row(
        self, x: Tensor, out: Tensor, scales: Tensor, draw: Draw | None, workspace: Workspace
    ) -> None:
        for begin, end in stretches(x.numel()):
            blocks = in_blocks(x[begin:end], BLOCK, workspace)
            numbers = range(begin // BLOCK, -(-end // BLOCK))
            noise = None if draw is None else draw(numbers)
            codes = self._codes(blocks, scales[numbers.start : numbers.stop], noise, workspace)
            place = slice(packed_bytes(begin, self.bits), packed_bytes(end, self.bits))
            pack(codes.view(-1)[: end - begin], self.bits, out[place], workspace)

    def _codes(self, blocks: Tensor, scales: Tensor, noise: Tensor | None, workspace: Workspace) -> Tensor:
        """Codes of some blocks, int8 [blocks, 256]; fills in their scales."""
        steps = torch.abs(blocks, out=workspace.like("scaled.steps", blocks))
        torch.amax(steps, 1, out=scales)
        scales.div_(self._most).clamp_min_(_TINY)  # a NaN stays
        torch.div(blocks, scales.unsqueeze(1), out=steps)
        if noise is None:
            steps.round_()
        else:
            steps.add_(noise).floor_().clamp_max_(self._most)
        return workspace.take("scaled.codes", steps.shape, torch.int8, steps.device).copy_(steps)

    def decode(self, payload: Tensor, out: Tensor, keys: Keys, workspace: Workspace) -> None:
        """See `Codec`."""
        num_values = out.shape[1]
        scales = values_of(payload[:, packed_bytes(num_values, self.bits) :], torch.float32, workspace)
        scales = workspace.copy("scales.wide", scales, out.dtype)
        for row, found, own in zip(payload, out, scales, strict=True):
            if self._kernels is not None and self._kernels.take(found, own):
                self._kernels.scaled_decode(row, self.bits, own, found)
            else:
                self._decode_row(row, found, own, workspace)

    def _decode_row(self, payload: Tensor, out: Tensor, scales: Tensor, workspace: Workspace) -> None:
        sign = 1 << (self.bits - 1)  # the highest bit
        for begin, end in stretches(out.numel()):
            coded = payload[packed_bytes(begin, self.bits) :]
            codes = unpack(coded, end - begin, self.bits, workspace).view(torch.int8)
            if self.bits < 8:
                codes.bitwise_xor_(sign).sub_(sign)
            scale_blocks(codes, scales[begin // BLOCK : -(-end // BLOCK)], BLOCK, out[begin:end])


def in_blocks(x: Tensor, block: int, workspace: Workspace) -> Tensor:
    """[n] as float32 [ceil(n / block), block], the end filled with zeros; a view where that does."""
    num_values = x.numel()
    num_blocks = -(-num_values // block)
    if num_values == num_blocks * block and x.dtype == torch.float32 and x.is_contiguous():
        return x.view(num_blocks, block)
    out = workspace.take("blocks", (num_blocks * block,), torch.float32, x.device)
    out[:num_values] = x
    out[num_values:].zero_()
    return out.view(num_blocks, block)


def scale_blocks(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Each block of [n] times its scale, [ceil(n / block)] of the type of `out`, into `out` [n]."""
    out.copy_(codes)
    whole = codes.numel() // block * block
    if whole:
        out[:whole].view(-1, block).mul_(scales[: whole // block].unsqueeze(1))
    if whole < codes.numel():
        out[whole:].mul_(scales[-1:])


def int8(argument: str) -> Codec:
    """The word `int8`."""
    return Scaled(8, stochastic=argument == "stochastic", kernels=load_kernels())


def int4(argument: str) -> Codec:
    """The word `int4`."""
    return Scaled(4, stochastic=argument == "stochastic", kernels=load_kernels())


def int2(argument: str) -> Codec:
    """The word `int2`."""
    return Scaled(2, stochastic=argument == "stochastic", kernels=load_kernels())
