"""Epsilon of releases: cases by hand, dp-accounting's own numbers, and searches for counts and noise."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from paceline.errors import MissingExtraError, RecipeError
from paceline.privacy.accountant import (
    NoisyRelease,
    compute_epsilon,
    count_within,
    find_noise,
    name_accountant,
    relation_of,
)

dp = pytest.importorskip("dp_accounting", reason="needs paceline[private]")
DELTA = 1e-5
POISSON = NoisyRelease(1.1, "poisson", rate=0.2)
FIXED = NoisyRelease(4.0, "fixed", size=5, num_units=50)
ALL = NoisyRelease(3.0, "all")


def normal_tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2.0))


def test_epsilon_of_all_units_is_that_of_the_gaussian_mechanism() -> None:
    """Balle and Wang 2018, arXiv:1805.06530, Theorem 8, for four sums of noise 3: one of noise 1.5."""
    epsilon, noise = compute_epsilon({ALL: 4}, DELTA), 3.0 / math.sqrt(4)
    delta = normal_tail(epsilon * noise - 0.5 / noise) - math.exp(epsilon) * normal_tail(
        epsilon * noise + 0.5 / noise
    )
    assert delta == pytest.approx(DELTA, rel=1e-2)


def test_epsilon_of_a_poisson_sum_is_that_of_the_integral_over_both_directions() -> None:
    epsilon, x = compute_epsilon({POISSON: 1}, DELTA), np.linspace(-15.0, 25.0, 400_001)
    density = np.exp(-0.5 * (x / 1.1) ** 2) / (1.1 * math.sqrt(2 * math.pi))
    shifted = np.exp(-0.5 * ((x - 1.0) / 1.1) ** 2) / (1.1 * math.sqrt(2 * math.pi))
    mixed, step = 0.8 * density + 0.2 * shifted, x[1] - x[0]
    deltas = [
        float(np.maximum(one - math.exp(epsilon) * other, 0.0).sum() * step)
        for one, other in ((mixed, density), (density, mixed))
    ]
    assert max(deltas) == pytest.approx(DELTA, rel=1e-2)


def test_a_fixed_cohort_has_the_bound_without_replacement_at_twice_the_change() -> None:
    """Order 2 of Wang et al. 2019, Theorem 27, by hand: replaced units change the sum by two clip norms."""
    from paceline.privacy.accountant import REPLACE, _renyi_moments

    orders, moments = _renyi_moments(FIXED, REPLACE)
    rate, full = 5 / 50, 2 / (2 * (4.0 / 2.0) ** 2)
    expected = math.log(1 + rate**2 * min(4 * math.expm1(full), 2 * math.exp(full)))
    assert moments[list(orders).index(2)] == pytest.approx(expected, rel=1e-9)
    as_poisson = compute_epsilon({NoisyRelease(4.0, "poisson", rate=0.1): 30}, DELTA)
    assert compute_epsilon({FIXED: 30}, DELTA) > 1.5 * as_poisson
    assert relation_of({FIXED: 1, ALL: 2}) == "replace one" and "RDP" in name_accountant({FIXED: 1})


def test_epsilon_equals_that_of_dp_accounting_for_the_same_events() -> None:
    def gaussian(noise: float) -> object:
        return dp.GaussianDpEvent(noise)

    pld = dp.pld.PLDAccountant()
    pld.compose(dp.PoissonSampledDpEvent(0.2, gaussian(1.1)), 7)
    pld.compose(gaussian(3.0), 2)
    assert compute_epsilon({POISSON: 7, ALL: 2}, DELTA) == pytest.approx(pld.get_epsilon(DELTA), abs=1e-6)
    rdp = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    rdp.compose(dp.SampledWithoutReplacementDpEvent(50, 5, gaussian(2.0)), 9)
    rdp.compose(gaussian(1.5), 2)
    assert compute_epsilon({FIXED: 9, ALL: 2}, DELTA) == pytest.approx(rdp.get_epsilon(DELTA), abs=1e-6)
    weak = dp.rdp.RdpAccountant()
    weak.compose(gaussian(0.1), 3)
    assert compute_epsilon({NoisyRelease(0.1, "all"): 3}, DELTA) == pytest.approx(
        weak.get_epsilon(DELTA), abs=1e-6
    )
    assert compute_epsilon({}, DELTA) == 0.0


def test_counts_and_noise_are_the_last_that_stay_within_an_epsilon() -> None:
    spent, limit = {FIXED: 3}, 4.0
    count = count_within(spent, FIXED, DELTA, limit, 10_000)
    assert compute_epsilon({FIXED: 3 + count}, DELTA) <= limit < compute_epsilon({FIXED: 4 + count}, DELTA)
    assert count_within(spent, FIXED, DELTA, limit, 2) == 2
    assert count_within(spent, FIXED, DELTA, 0.01, 10) == 0
    noise = find_noise(FIXED, 30, DELTA, limit)
    nearly, enough = (compute_epsilon({FIXED._replace(noise=n): 30}, DELTA) for n in (noise - 0.001, noise))
    assert enough <= limit < nearly


def test_kinds_of_cohorts_without_a_common_relation_are_refused() -> None:
    with pytest.raises(RecipeError, match="different neighbours"):
        compute_epsilon({POISSON: 1, FIXED: 1}, DELTA)


def test_without_dp_accounting_the_error_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'paceline\[private\]'"):
        compute_epsilon({NoisyRelease(1.3, "all"): 1}, DELTA)
