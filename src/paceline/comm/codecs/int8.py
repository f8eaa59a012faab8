"""Eight bits a value, with a scale for every block."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor


class Int8:
    """One byte a value and one float32 scale a block of 256: round(127 x / max|block|).

    The error of a value is at most max|block| / 254.
    Source: Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning, arXiv:1511.04561,
    section 2 (linear quantisation), with a scale for every block.
    """

    block = 256

    def num_bytes(self, num_values: int) -> int:
        """n + 4 ceil(n / 256)."""
        return num_values + 4 * ceil(num_values / self.block)

    def encode(self, x: Tensor) -> Tensor:
        """See `Codec`."""
        rows, num_values = x.shape
        blocks = torch.zeros(rows, ceil(num_values / self.block) * self.block, device=x.device)
        blocks[:, :num_values] = x
        blocks = blocks.view(rows, -1, self.block)
        scales = blocks.abs().amax(2, keepdim=True) / 127
        steps = torch.where(scales > 0, blocks / scales, 0.0).nan_to_num_(0.0, 127.0, -127.0)
        values = steps.round_().to(torch.int8).view(rows, -1)[:, :num_values]
        return torch.cat([values.contiguous().view(torch.uint8), scales.view(rows, -1).view(torch.uint8)], 1)

    def decode(self, payload: Tensor, num_values: int, dtype: torch.dtype) -> Tensor:
        """See `Codec`."""
        rows = payload.shape[0]
        coded_scales = payload[:, num_values:].reshape(-1).clone()  # in memory of its own, so aligned
        scales = coded_scales.view(torch.float32).view(rows, -1)
        values = payload[:, :num_values].contiguous().view(torch.int8).to(dtype)
        out = torch.zeros(rows, scales.shape[1] * self.block, dtype=dtype, device=payload.device)
        out[:, :num_values] = values
        blocks = out.view(rows, -1, self.block).mul_(scales.to(dtype).unsqueeze(2))
        return blocks.view(rows, -1)[:, :num_values]
