"""Gaussian noise and Poisson draws that nobody can compute again, equal on all ranks of a run.

At the start of a run rank 0 takes a secret from the operating system and sends it to the other ranks; it is
in their memory and nowhere else. Each draw has a key of its own, an HMAC of the secret and of what the draw
is for, and reads the stream of AES-256 in counter mode. So all ranks can add the same noise to a sum that all
of them hold, which adds it once, and a resumed run, which has another secret, draws other noise.

Noise is made of whole steps of a grid (2^-fraction_bits), and so is the sum to which it is added: a sum with
noise shows nothing of how floats were rounded. Not promised: a proof for rounded Gaussian noise. The accounts
are those of the Gaussian distribution over real numbers, from which these draws differ by the grid, by 53-bit
uniform numbers, and by the largest value, 8.6 standard deviations (docs/howto/private.md).

Invariant: a name is drawn from once; the caller numbers its draws and never uses a number again.
Sources: Mironov 2012, On significance of the least significant bits for differential privacy; Box and Muller
1958 (normal numbers from uniform ones).
"""

from __future__ import annotations

import hashlib
import hmac
import math
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline.privacy.entropy import key_stream

_UNIFORM_BITS = 53
_BLOCK_VALUES = 1 << 18
LARGEST_DEVIATIONS = math.sqrt(2.0 * _UNIFORM_BITS * math.log(2.0))
"""The largest magnitude of noise, in standard deviations: 8.6."""


class PrivateDraws:
    """Secret random numbers by name, equal on all ranks.

    Args:
        secret: 32 bytes of the operating system, equal on all ranks; in tests of a seed.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "PrivateDraws(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("secret random numbers are not written to files")

    def uniforms(self, count: int, *name: int | str) -> NDArray[np.float64]:
        """Return uniform numbers in (0, 1], float64 [count]."""
        key = hmac.digest(self._secret, repr(name).encode(), hashlib.sha256)
        words = np.frombuffer(key_stream(key, 8 * count), dtype="<u8")
        whole = (words >> np.uint64(64 - _UNIFORM_BITS)) + np.uint64(1)
        return whole.astype(np.float64) * 2.0**-_UNIFORM_BITS

    def poisson(self, num_units: int, rate: float, *name: int | str) -> NDArray[np.int64]:
        """Return the units of a Poisson sample: each takes part with a probability, by itself."""
        return np.flatnonzero(self.uniforms(num_units, *name) <= rate)

    def subset(self, num_units: int, size: int, *name: int | str) -> NDArray[np.int64]:
        """Return some of the units, sorted; all subsets of the size are equally likely."""
        return np.sort(np.argsort(self.uniforms(num_units, *name), kind="stable")[:size])

    def noise(self, count: int, deviation: float, fraction_bits: int, *name: int | str) -> NDArray[np.int64]:
        """Return Gaussian noise, rounded to the grid, as numbers of its steps.

        Args:
            count: of values.
            deviation: standard deviation, as a value.
            fraction_bits: of the grid.
        Returns:
            int64 [count]; in a ring they are added with wraparound.
        """
        steps = np.empty(count, dtype=np.int64)
        for block, start in enumerate(range(0, count, _BLOCK_VALUES)):
            part = steps[start : start + _BLOCK_VALUES]
            half = (len(part) + 1) // 2
            uniform = self.uniforms(2 * half, *name, block)
            radius = np.sqrt(-2.0 * np.log(uniform[:half])) * (deviation * 2.0**fraction_bits)
            angle = 2.0 * math.pi * uniform[half:]
            normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
            part[:] = np.rint(normal[: len(part)])
        return steps
