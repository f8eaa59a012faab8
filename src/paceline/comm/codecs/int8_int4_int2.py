"""The codecs int8, int4 and int2: a few bits a value, with a scale for every block.

Stochastic rounding draws random numbers that are functions of a key and of their position, so that they can
be drawn in any order; the kernels draw the same (`kernels.c`). A position is a row, a block of 256 values in
it, and one of these: word w of counter (64 block + lane, row, 0, 0) is value 64 w + lane of the block.
Source: Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3, SC11, section 3.3 (Philox4x32-10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.comm.codecs.bit_packing import pack, packed_bytes, unpack
from paceline.comm.codecs.codec_kernels import CodecKernels, load_kernels
from paceline.comm.codecs.codec_protocol import Codec, CodecKeys, bytes_of, chunk_bounds, values_of
from paceline.comm.workspace import Workspace

NUM_LANES = 64
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
# Added to the two halves of the key after each round.
_PHILOX_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW_32_BITS = 0xFFFFFFFF


def philox_uniform(key: int, row: int, blocks: range, device: torch.device, workspace: Workspace) -> Tensor:
    """Return random numbers, float32 [blocks, 256] in [0, 1), multiples of 2**-24; in the workspace.

    Args:
        key: 64 bits.
        row: 32 bits.
        blocks: blocks of the row.
    """
    counters = range(blocks.start * NUM_LANES, blocks.stop * NUM_LANES)
    shape = len(blocks), NUM_LANES
    words = workspace.take("philox.words", (4, *shape), torch.int64, device)
    torch.arange(counters.start, counters.stop, device=device, out=words[0].view(-1)).bitwise_and_(
        _LOW_32_BITS
    )
    for word, value in zip(words[1:], (row, 0, 0), strict=True):
        word.fill_(value)
    spare = workspace.like("philox.spare", words)
    for number in range(_PHILOX_ROUNDS):
        _philox_round(
            words,
            [
                (key >> 32 * half) + number * step & _LOW_32_BITS
                for half, step in enumerate(_PHILOX_KEY_STEPS)
            ],
            spare,
        )
        words, spare = spare, words
    out = workspace.take("philox.uniform", (len(blocks), 4, NUM_LANES), torch.float32, device)
    out.copy_(words.bitwise_right_shift_(8).permute(1, 0, 2)).mul_(2.0**-24)
    return out.view(len(blocks), 4 * NUM_LANES)


def _philox_round(words: Tensor, halves: Sequence[int], out: Tensor) -> None:
    """Compute one round of four words [4, ...], each 32 bits of an int64, into `out`.

    Args:
        halves: the two halves of the key.
    """
    a, b, c, d = words
    sides = (c, _PHILOX_MULTIPLIERS[1], b, halves[0]), (a, _PHILOX_MULTIPLIERS[0], d, halves[1])
    for (x, factor, other, half), (high, low) in zip(sides, out.view(2, 2, *a.shape), strict=True):
        # int64 has no unsigned product: it wraps modulo 2**64, and the shift and masks below drop the sign.
        torch.mul(x, factor, out=low)
        torch.bitwise_right_shift(low, 32, out=high)
        high.bitwise_and_(_LOW_32_BITS).bitwise_xor_(other).bitwise_xor_(half)
        low.bitwise_and_(_LOW_32_BITS)


INT_BLOCK = 256
DrawNoise = Callable[[range], Tensor]
"""A function that draws random numbers for blocks of a row, [blocks, 256]."""

# A block whose scale would be below this becomes zeros, so no subnormal is divided by.
_MIN_SCALE = torch.finfo(torch.float32).tiny
_SCALE_BYTES = 4


class BlockIntCodec:
    """A codec to round(x / s) in b bits, s = max|block| / (2**(b-1) - 1), with a float32 scale for every
    block of 256.

    The error of a value is at most s / 2 (nearest) or s (stochastic, unbiased), or half of the smallest
    normal float32. There are at most 2**b - 1 codes.

    Args:
        bits: 2, 4 or 8.
        kernels: compiled functions for rows of float32, in one pass; None: PyTorch is used, with the same
            bytes.
        stochastic: round up with a probability equal to the fraction; decoded values are then unbiased, and
            there is no error feedback.
    Source: Alistarh et al. 2017, QSGD, arXiv:1610.02132, section 3.1 (stochastic); Dettmers 2016, 8-Bit
    Approximations for Parallelism in Deep Learning, arXiv:1511.04561, section 2 (linear quantisation).
    """

    ragged, block = False, INT_BLOCK

    def __init__(self, bits: int, *, stochastic: bool = False, kernels: CodecKernels | None = None) -> None:
        self.bits, self._stochastic, self._kernels = bits, stochastic, kernels
        self._max_code = 2 ** (bits - 1) - 1
        self.needs_error_feedback = not stochastic

    @property
    def relative_error(self) -> float:
        """The largest error of a value, relative to the largest magnitude of its block."""
        return 1 / self._max_code / (1 if self._stochastic else 2)

    def num_bytes(self, num_values: int) -> int:
        """Return ceil(n b / 8) + 4 ceil(n / 256)."""
        return packed_bytes(num_values, self.bits) + _SCALE_BYTES * -(-num_values // INT_BLOCK)

    def encode(self, x: Tensor, keys: CodecKeys, workspace: Workspace) -> Tensor:
        """Write the codes of each row, then the scales of its blocks."""
        rows, num_values = x.shape
        out = workspace.take("scaled", (rows, self.num_bytes(num_values)), torch.uint8, x.device)
        scales = workspace.take("scales", (rows, -(-num_values // INT_BLOCK)), torch.float32, x.device)
        for number, (row, payload, row_scales) in enumerate(zip(x, out, scales, strict=True)):
            if self._kernels is None or not self._kernels.take(row):
                draw = partial(philox_uniform, keys.own, number, device=x.device, workspace=workspace)
                self._encode_row(row, payload, row_scales, draw if self._stochastic else None, workspace)
            elif self._stochastic:
                self._kernels.scaled_draw(row, self.bits, payload, row_scales, keys.own, number)
            else:
                self._kernels.scaled_encode(row, self.bits, payload, row_scales)
        out[:, packed_bytes(num_values, self.bits) :] = bytes_of(scales)
        return out

    def _encode_row(
        self, x: Tensor, out: Tensor, scales: Tensor, draw: DrawNoise | None, workspace: Workspace
    ) -> None:
        for begin, end in chunk_bounds(x.numel()):
            blocks = pad_to_blocks(x[begin:end], INT_BLOCK, workspace)
            numbers = range(begin // INT_BLOCK, -(-end // INT_BLOCK))
            noise = None if draw is None else draw(numbers)
            codes = self._codes(blocks, scales[numbers.start : numbers.stop], noise, workspace)
            span = slice(packed_bytes(begin, self.bits), packed_bytes(end, self.bits))
            pack(codes.view(-1)[: end - begin], self.bits, out[span], workspace)

    def _codes(self, blocks: Tensor, scales: Tensor, noise: Tensor | None, workspace: Workspace) -> Tensor:
        """Return codes of some blocks, int8 [blocks, 256], and write their scales into `scales`."""
        steps = torch.abs(blocks, out=workspace.like("scaled.steps", blocks))
        torch.amax(steps, 1, out=scales)
        # A NaN passes through the clamp, so its block decodes to NaN on the other side.
        scales.div_(self._max_code).clamp_min_(_MIN_SCALE)
        torch.div(blocks, scales.unsqueeze(1), out=steps)
        if noise is None:
            steps.round_()
        else:
            steps.add_(noise).floor_().clamp_max_(self._max_code)
        return workspace.take("scaled.codes", steps.shape, torch.int8, steps.device).copy_(steps)

    def decode(self, payload: Tensor, out: Tensor, keys: CodecKeys, workspace: Workspace) -> None:
        """Multiply the codes of each row by the scales of its blocks."""
        num_values = out.shape[1]
        scales = values_of(payload[:, packed_bytes(num_values, self.bits) :], torch.float32, workspace)
        scales = workspace.copy("scales.wide", scales, out.dtype)
        for row, values, row_scales in zip(payload, out, scales, strict=True):
            if self._kernels is not None and self._kernels.take(values, row_scales):
                self._kernels.scaled_decode(row, self.bits, row_scales, values)
            else:
                self._decode_row(row, values, row_scales, workspace)

    def _decode_row(self, payload: Tensor, out: Tensor, scales: Tensor, workspace: Workspace) -> None:
        # The highest bit of a code is its sign; flipping and subtracting it extends the sign to int8.
        sign = 1 << (self.bits - 1)
        for begin, end in chunk_bounds(out.numel()):
            coded = payload[packed_bytes(begin, self.bits) :]
            codes = unpack(coded, end - begin, self.bits, workspace).view(torch.int8)
            if self.bits < 8:
                codes.bitwise_xor_(sign).sub_(sign)
            scale_blocks(codes, scales[begin // INT_BLOCK : -(-end // INT_BLOCK)], INT_BLOCK, out[begin:end])


def pad_to_blocks(x: Tensor, block: int, workspace: Workspace) -> Tensor:
    """Return [n] as float32 [ceil(n / block), block], padded with zeros; a view if nothing has to be
    copied.
    """
    num_values = x.numel()
    num_blocks = -(-num_values // block)
    if num_values == num_blocks * block and x.dtype == torch.float32 and x.is_contiguous():
        return x.view(num_blocks, block)
    out = workspace.take("blocks", (num_blocks * block,), torch.float32, x.device)
    out[:num_values] = x
    out[num_values:].zero_()
    return out.view(num_blocks, block)


def scale_blocks(codes: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Write each block of `codes` [n] times its scale, [ceil(n / block)] of the dtype of `out`, into `out`
    [n].
    """
    out.copy_(codes)
    whole = codes.numel() // block * block
    if whole:
        out[:whole].view(-1, block).mul_(scales[: whole // block].unsqueeze(1))
    if whole < codes.numel():
        out[whole:].mul_(scales[-1:])


def int8(argument: bool | None) -> Codec:
    """Build the codec of the word `int8`."""
    return BlockIntCodec(8, stochastic=bool(argument), kernels=load_kernels())


def int4(argument: bool | None) -> Codec:
    """Build the codec of the word `int4`."""
    return BlockIntCodec(4, stochastic=bool(argument), kernels=load_kernels())


def int2(argument: bool | None) -> Codec:
    """Build the codec of the word `int2`."""
    return BlockIntCodec(2, stochastic=bool(argument), kernels=load_kernels())
