"""Shamir shares of vectors, which add up to shares of the sum.

A share has its point and its threshold, so that too few, or shares of different parties, are an error and
not another number. A wrong share is not noticed. The polynomials are those of `paceline.federated.shamir`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import DataError
from paceline.federated.shamir import PRIME, rebuild, split
from paceline.privacy.entropy import Entropy


@dataclass(frozen=True)
class ShamirVector:
    """One party's share of a vector.

    Args:
        point: of the party, from 1.
        threshold: how many shares rebuild the vector.
        values: in the field.
    """

    point: int
    threshold: int
    values: tuple[int, ...]

    def __add__(self, other: ShamirVector) -> ShamirVector:
        if (self.point, self.threshold, len(self.values)) != (
            other.point,
            other.threshold,
            len(other.values),
        ):
            raise DataError("these shares cannot be added", next_step="add the shares that one party holds")
        values = zip(self.values, other.values, strict=True)
        return ShamirVector(self.point, self.threshold, tuple((a + b) % PRIME for a, b in values))


def split_vector(
    values: Sequence[int], threshold: int, num_shares: int, entropy: Entropy | None = None
) -> list[ShamirVector]:
    """Split signed integers below 2^126 into shares of points 1 to `num_shares`.

    Args:
        threshold: how many of them rebuild the vector.
        entropy: of the coefficients; None: the operating system's.
    Raises:
        DataError: the threshold is not in 1 to `num_shares`, or a value is too large.
    """
    if not 1 <= threshold <= num_shares:
        raise DataError(f"{threshold} of {num_shares} shares cannot rebuild", next_step="use 1 <= t <= n")
    if any(2 * abs(value) >= PRIME for value in values):
        raise DataError("a value does not fit the field", next_step="use fewer slots")
    source, points = entropy or Entropy(), range(1, num_shares + 1)
    split_values = [split(value % PRIME, points, threshold, source) for value in values]
    return [ShamirVector(p, threshold, tuple(shares[p] for shares in split_values)) for p in points]


def rebuild_vector(shares: Sequence[ShamirVector]) -> list[int]:
    """Return the signed integers.

    Raises:
        DataError: there are fewer shares than their threshold, or they do not belong together.
    """
    forms = {(share.threshold, len(share.values)) for share in shares}
    if len(forms) != 1 or len({share.point for share in shares}) != len(shares):
        raise DataError("these shares do not belong together", next_step="take one share of each party")
    ((threshold, count),) = forms
    if len(shares) < threshold:
        raise DataError(
            f"{len(shares)} shares cannot rebuild a secret of threshold {threshold}",
            next_step="wait for more parties: nothing can be said from fewer",
        )
    values = (rebuild({share.point: share.values[i] for share in shares}) for i in range(count))
    return [value - PRIME if 2 * value > PRIME else value for value in values]
