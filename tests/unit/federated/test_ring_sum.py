"""Sums in a ring, Shamir's shares and the source of entropy."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch

from paceline.errors import NumericError, RecipeError
from paceline.federated.ring_sum import Ring, RingLayout
from paceline.federated.shamir import PRIME, SECRET_BITS, rebuild, split
from paceline.privacy.entropy import Entropy
from paceline.state.slot import TensorSlot

RINGS = [Ring(), Ring(32, 12, 8.0)]
VALUES = {
    f"site-{number}": torch.randn(50, generator=torch.Generator().manual_seed(number)) for number in range(10)
}
WEIGHTS = {name: float(3 * number + 1) for number, name in enumerate(VALUES)}


def layout(ring: Ring, num_numbers: int = 2, dtype: torch.dtype = torch.float64) -> RingLayout:
    like = torch.zeros(50, dtype=dtype)
    return RingLayout(ring, {TensorSlot.whole("w", like): like}, num_numbers)


@pytest.mark.parametrize("ring", RINGS)
def test_the_weighted_mean_of_ten_clients_is_exact_to_half_a_unit_of_each(ring: Ring) -> None:
    """In any order the same bits; under 64 bits within 1e-9."""
    plan = layout(ring)
    (slot,) = plan.tensors
    words = [
        plan.encode({slot: VALUES[name].double() * w}, [w, -0.5 * w], client=name, weight=w)
        for name, w in WEIGHTS.items()
    ]
    forwards, backwards = plan.zeros(), plan.zeros()
    for one, other in zip(words, reversed(words), strict=True):
        forwards.add(one)
        backwards.add(other)
    assert forwards.to_bytes() == backwards.to_bytes() and len(forwards.to_bytes()) == plan.num_bytes
    sums, numbers = plan.decode(forwards)
    total = math.fsum(WEIGHTS.values())
    mean = sum(VALUES[name].double() * w for name, w in WEIGHTS.items()) / total
    error = float((sums[slot] / numbers[0] - mean).abs().max())
    assert numbers == [total, -0.5 * total]
    assert error <= 10 * 2.0 ** -(ring.fraction_bits + 1) / total and (ring.bits == 32 or error <= 1e-9)
    assert plan.from_bytes(forwards.to_bytes()).to_bytes() == forwards.to_bytes()


@pytest.mark.parametrize("bad", [8.001, -9.0, math.nan, math.inf])
def test_a_value_beyond_the_largest_is_an_error_that_names_client_and_tensor(bad: float) -> None:
    plan = layout(Ring())
    (slot,) = plan.tensors
    values = torch.zeros(50, dtype=torch.float64)
    values[7] = 8.0 * 5
    plan.encode({slot: values}, [1.0, 1.0], client="site-3", weight=5.0)
    values[7] = bad * 5
    with pytest.raises(NumericError, match=r"client site-3 has a value .* in w, and the largest .* is 8"):
        plan.encode({slot: values}, [1.0, 1.0], client="site-3", weight=5.0)
    with pytest.raises(NumericError, match="client site-3 has a count"):
        plan.encode({}, [1.0, bad * 1e12], client="site-3", weight=5.0)


@pytest.mark.parametrize("ring", [Ring(32, 16, 8.0), Ring(64, 32, 8.0), Ring(64, 40, 100.0)])
def test_the_check_before_the_first_round_is_where_sums_begin_to_overflow(ring: Ring) -> None:
    """Clients that all have the largest value: the last total weight that passes sums correctly."""
    room = int(2.0 ** (ring.bits - 1) / (ring.largest * 2.0**ring.fraction_bits + 1))
    ring.check(room)
    top = torch.full((50,), ring.largest * room, dtype=torch.float64)
    words = ring.encode(top, client="a", tensor="w", weight=room)
    assert torch.equal(ring.decode(words), top)
    for weight, margin in ((room + 2, 0.0), (room, 2 * ring.largest)):
        with pytest.raises(RecipeError, match="does not fit") as raised:
            ring.check(weight, margin)
        assert "fraction_bits" in str(raised.value)
    assert not torch.equal(ring.decode(words + words), 2 * top)


def test_complex_values_are_pairs_of_words() -> None:
    plan = layout(Ring(), 0, torch.complex128)
    (slot,) = plan.tensors
    values = torch.randn(50, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    assert plan.num_bytes == 50 * 16
    back = plan.decode(plan.encode({slot: values}, [], client="a", weight=1.0))[0][slot]
    assert float((back - values).abs().max()) <= 2.0**-32


@pytest.mark.capability("R2")
def test_any_t_shares_rebuild_a_secret_and_fewer_are_independent_of_it() -> None:
    """All subsets of t of 7; over the field of 11 elements t - 1 = 2 shares together are uniform, whatever
    the secret, and those of a twin whose coefficients have one bit are not.
    """
    entropy = Entropy(1)
    for secret in (0, 5, PRIME - 1, entropy.integer(SECRET_BITS)):
        shares = split(secret, range(1, 8), 4, entropy)
        assert all(rebuild({p: shares[p] for p in chosen}) == secret for chosen in combinations(shares, 4))
        assert rebuild({p: shares[p] for p in (1, 2, 3)}) != secret

    def chi_squared(secret: int, source: Entropy) -> float:
        pairs = Counter(
            (shares[1], shares[2])
            for shares in (split(secret, (1, 2, 3), 3, source, 11) for _ in range(12100))
        )
        return sum((pairs[a, b] - 100) ** 2 / 100 for a in range(11) for b in range(11))

    class NoEntropy(Entropy):
        def integer(self, bits: int) -> int:
            return super().integer(bits) % 2

    assert all(chi_squared(secret, entropy) < 185 for secret in (0, 7))  # 120 degrees, p < 0.0001
    assert chi_squared(7, NoEntropy(1)) > 1000
    for bad in ((PRIME, (1, 2), 1), (1, (1, 1), 1), (1, (0, 1), 1), (1, (1, 2), 3)):
        with pytest.raises(ValueError):
            split(*bad, entropy)


def test_entropy_is_that_of_the_system_unless_a_seed_is_set() -> None:
    first, second = Entropy(), Entropy()
    assert not first.is_known and first.bytes(32) != second.bytes(32)
    assert not np.array_equal(first.words(64), first.words(64))
    one, other = Entropy(3).of("client", "a"), Entropy(3).of("client", "b")
    drawn = [one.bytes(32), one.bytes(32), other.bytes(32)]
    assert one.is_known and len({*drawn}) == 3
    other_order = Entropy(3)
    other_order.bytes(8)
    assert other_order.of("client", "a").bytes(32) == drawn[0]
    words = Entropy(4).words(200_000)
    ones = sum(
        int(np.bitwise_count(words[:, None] >> np.uint64(bit) & np.uint64(1)).sum()) for bit in (0, 31, 63)
    )
    assert abs(ones - 300_000) < 4 * math.sqrt(600_000 / 4)
