"""Shamir's secret sharing, t of n, over the field of integers modulo the prime 2^127 - 1.

`split(secret, points, threshold, entropy)` gives each point its share, and `rebuild({point: share, ...})`
returns the secret from any `threshold` of them. A secret is an integer below `PRIME`, a point one from 1 on.

Invariant: fewer than `threshold` shares are uniform and independent of the secret.
Source: Shamir 1979, How to share a secret, Communications of the ACM 22 (11).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.federated.entropy import Entropy

PRIME = (1 << 127) - 1
SHARE_BYTES = 16
SECRET_BITS = 126
"""Bits of a uniform secret: the largest number for which all are below `PRIME`."""


def split(
    secret: int, points: Iterable[int], threshold: int, entropy: Entropy, prime: int = PRIME
) -> dict[int, int]:
    """Split a secret into shares.

    Args:
        secret: from 0 to prime - 1.
        points: of the holders, different and from 1 to prime - 1.
        threshold: how many shares rebuild the secret, from 1.
        entropy: of the coefficients.
        prime: of the field; a small one is for statistics.
    Returns:
        The share of each point.
    Raises:
        ValueError: secret, threshold or points are out of range.
    """
    points = [*points]
    if not 0 <= secret < prime or not 1 <= threshold <= len({*points}) == len(points):
        raise ValueError(f"cannot split: {threshold} of {len(points)} shares, prime {prime}")
    if not all(0 < point < prime for point in points):
        raise ValueError(f"points must be from 1 to {prime - 1}")
    coefficients = [_draw(prime, entropy) for _ in range(threshold - 1)]
    shares = {}
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * point % prime
        shares[point] = (value + secret) % prime
    return shares


def rebuild(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """Return the secret from `threshold` shares by point; from fewer, some other number."""
    secret = 0
    for point, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != point:
                numerator = numerator * other % prime
                denominator = denominator * (other - point) % prime
        secret += share * numerator * pow(denominator, -1, prime)
    return secret % prime


def _draw(prime: int, entropy: Entropy) -> int:
    """Return a uniform integer below the prime."""
    while (drawn := entropy.integer(prime.bit_length())) >= prime:
        pass
    return drawn
