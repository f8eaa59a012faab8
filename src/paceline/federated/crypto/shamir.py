"""Shamir's secret sharing over the prime field of 2^127 - 1: any t of n shares rebuild, fewer show nothing.

Shares of sums are the sums of shares. A share has its threshold, so that too few are an error and not another
number; a wrong share is not noticed.

Source: Shamir 1979, How to share a secret, CACM 22(11).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import DataError

PRIME = (1 << 127) - 1


@dataclass(frozen=True)
class ShamirShare:
    """One share of some secrets.

    Args:
        point: x of the polynomials, 1 to n.
        threshold: shares that rebuild.
        values: the polynomials at `point`.
    """

    point: int
    threshold: int
    values: tuple[int, ...]

    def __add__(self, other: ShamirShare) -> ShamirShare:
        if (self.point, self.threshold) != (other.point, other.threshold):
            raise DataError("shares of different points cannot be added", next_step="add shares of one party")
        values = zip(self.values, other.values, strict=True)
        return ShamirShare(self.point, self.threshold, tuple((a + b) % PRIME for a, b in values))


def split_shamir(
    values: Sequence[int],
    threshold: int,
    num_shares: int,
    random_below: Callable[[int], int] = secrets.randbelow,
    prime: int = PRIME,
) -> list[ShamirShare]:
    """Split secrets into shares, of which `threshold` rebuild them.

    Args:
        values: signed, of magnitude below prime / 2.
        random_below: the operating system's, except in tests.
        prime: smaller only in tests.
    Raises:
        DataError: the threshold is not in 1 to `num_shares`, or a value is too large.
    """
    if not 1 <= threshold <= num_shares < prime:
        raise DataError(f"{threshold} of {num_shares} shares cannot rebuild", next_step="use 1 <= t <= n")
    if any(2 * abs(value) >= prime for value in values):
        raise DataError("a value does not fit the field", next_step="use fewer slots")
    polynomials = [[value, *(random_below(prime) for _ in range(threshold - 1))] for value in values]

    def evaluate(coefficients: Sequence[int], x: int) -> int:
        result = 0
        for coefficient in reversed(coefficients):
            result = (result * x + coefficient) % prime
        return result

    return [
        ShamirShare(x, threshold, tuple(evaluate(coefficients, x) for coefficients in polynomials))
        for x in range(1, num_shares + 1)
    ]


def rebuild_shamir(shares: Sequence[ShamirShare], prime: int = PRIME) -> list[int]:
    """Return the signed secrets.

    Raises:
        DataError: there are fewer shares than their threshold, or they do not belong together.
    """
    points = {share.point for share in shares}
    thresholds = {share.threshold for share in shares}
    if len(points) != len(shares) or len(thresholds) != 1:
        raise DataError("these shares do not belong together", next_step="take one share of each party")
    (threshold,) = thresholds
    if len(shares) < threshold:
        raise DataError(
            f"{len(shares)} shares cannot rebuild a secret of threshold {threshold}",
            next_step="wait for more parties; nothing can be said from fewer",
        )
    weights = []
    for point in points:
        weight = 1
        for other in points - {point}:
            weight = weight * other * pow(other - point, -1, prime) % prime
        weights.append((point, weight))
    values = {share.point: share.values for share in shares}
    sums = [
        sum(weight * values[point][i] for point, weight in weights) % prime
        for i in range(len(shares[0].values))
    ]
    return [value - prime if 2 * value > prime else value for value in sums]
