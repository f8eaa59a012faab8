"""Random numbers that are functions of a key and of their place, so that they can be drawn in any order.

The kernels draw the same (`kernels.c`). A place is a row, a block of 256 values in it, and one of these: word
w of counter (64 block + lane, row, 0, 0) is value 64 w + lane of the block.
Source: Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3, SC11, section 3.3 (Philox4x32-10).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.workspace import Workspace

NUM_LANES = 64
_ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85  # of the two halves of the key, after each round
_LOW = 0xFFFFFFFF


def uniform(key: int, row: int, blocks: range, device: torch.device, workspace: Workspace) -> Tensor:
    """Float32 [blocks, 256] in [0, 1), multiples of 2**-24; in the workspace.

    Args:
        key: 64 bits.
        row: 32 bits.
        blocks: which of the row.
    """
    counters = range(blocks.start * NUM_LANES, blocks.stop * NUM_LANES)
    shape = len(blocks), NUM_LANES
    words = workspace.take("philox.words", (4, *shape), torch.int64, device)
    torch.arange(counters.start, counters.stop, device=device, out=words[0].view(-1)).bitwise_and_(_LOW)
    for word, value in zip(words[1:], (row, 0, 0), strict=True):
        word.fill_(value)
    spare = workspace.like("philox.spare", words)
    for number in range(_ROUNDS):
        _round(words, [(key >> 32 * half) + number * step & _LOW for half, step in enumerate(_STEPS)], spare)
        words, spare = spare, words
    out = workspace.take("philox.uniform", (len(blocks), 4, NUM_LANES), torch.float32, device)
    out.copy_(words.bitwise_right_shift_(8).permute(1, 0, 2)).mul_(2.0**-24)
    return out.view(len(blocks), 4 * NUM_LANES)


def _round(words: Tensor, halves: Sequence[int], out: Tensor) -> None:
    """One round of four words [4, ...], each 32 bits of an int64, into `out`.

    Args:
        halves: of the key.
    """
    a, b, c, d = words
    sides = (c, _FACTORS[1], b, halves[0]), (a, _FACTORS[0], d, halves[1])
    for (x, factor, other, half), (high, low) in zip(sides, out.view(2, 2, *a.shape), strict=True):
        torch.mul(x, factor, out=low)  # modulo 2**64, with a sign
        torch.bitwise_right_shift(low, 32, out=high)
        high.bitwise_and_(_LOW).bitwise_xor_(other).bitwise_xor_(half)
        low.bitwise_and_(_LOW)
