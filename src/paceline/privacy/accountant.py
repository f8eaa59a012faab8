"""Epsilon of noisy sums, by the accountants of dp-accounting (Google).

A release is one sum of clipped vectors with Gaussian noise. How its units (clients or samples) were drawn
decides what is known about it:

- "poisson": each takes part by itself, with a probability. Neighbours differ by one unit that is added or
  removed, and one unit changes the sum by at most the clip norm.
- "fixed": a number of them, drawn without replacement. It is never accounted as Poisson: the number of units
  is public, neighbours differ by one unit that is replaced, and that changes the sum by up to two clip norms.
- "all": every unit takes part in every release; neighbours as under "poisson".

Invariant: every epsilon is that of dp-accounting for these events; nothing is computed here but the ratio of
noise and sensitivity.
Sources: Koskela et al. 2020, arXiv:1906.03049, and Doroshenko et al. 2022, arXiv:2207.04380 (PLD); Mironov
2017, arXiv:1702.07476 (RDP); Wang et al. 2019, arXiv:1808.00087, Theorem 27 (without replacement).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any, Literal, NamedTuple

from paceline.errors import MissingExtraError, RecipeError

Sampling = Literal["poisson", "fixed", "all"]

ADD_OR_REMOVE, REPLACE = "add or remove one", "replace one"
_LARGEST_PLD_LOSS = 100.0
"""Of the sum of (rate / noise)^2: beyond it epsilon is above 50, and its distribution takes gigabytes."""
_SMALLEST_PLD_NOISE = 0.3


class NoisyRelease(NamedTuple):
    """A sum of clipped vectors with Gaussian noise.

    Args:
        noise: standard deviation of the noise of each value, in clip norms.
        sampling: how units were drawn, see the module.
        rate: probability of each unit; only of "poisson".
        size: units of the sum; only of "fixed".
        num_units: from which they were drawn; only of "fixed".
    """

    noise: float
    sampling: Sampling
    rate: float = 1.0
    size: int = 0
    num_units: int = 0

    def __str__(self) -> str:
        return f"{self.describe_sampling()}; noise {self.noise:g}"

    def describe_sampling(self) -> str:
        """Return how units were drawn, in words."""
        drawn = {
            "poisson": f"Poisson, each with probability {self.rate:g}",
            "fixed": f"{self.size} of {self.num_units}, without replacement",
            "all": "all",
        }
        return drawn[self.sampling]

    @property
    def relation(self) -> str:
        """Return which data sets are neighbours."""
        return REPLACE if self.sampling == "fixed" else ADD_OR_REMOVE

    def record(self) -> dict[str, Any]:
        """Return the fields that its sampling has, as JSON values."""
        record: dict[str, Any] = {"noise": self.noise, "sampling": self.sampling}
        if self.sampling == "poisson":
            record["rate"] = self.rate
        if self.sampling == "fixed":
            record |= {"size": self.size, "num_units": self.num_units}
        return record


Releases = Mapping[NoisyRelease, int]
"""How often each kind of release was made."""


def relation_of(releases: Releases) -> str:
    """Return the neighbouring relation of some releases.

    Raises:
        RecipeError: no relation has an accountant for all of them.
    """
    kinds = {release.sampling for release in releases}
    if kinds >= {"poisson", "fixed"}:
        raise RecipeError(
            "rounds of a fixed number of clients and Poisson rounds have different neighbours, so no epsilon"
            " of both is known",
            where="federated.cohort",
            next_step="keep the kind of cohort during a run",
        )
    return REPLACE if "fixed" in kinds else ADD_OR_REMOVE


def require_accountant() -> Any:
    """Return the module dp_accounting.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise MissingExtraError(
            "epsilon is computed by dp-accounting, which is not installed",
            where="private.noise",
            next_step="pip install 'paceline[private]'",
        ) from error
    return dp_accounting


def name_accountant(releases: Releases) -> str:
    """Return which accountant computes epsilon of some releases, with its version."""
    kind = "PLD" if _has_known_distribution(releases) else "RDP"
    return f"dp-accounting {metadata.version('dp-accounting')}, {kind}"


def _has_known_distribution(releases: Releases) -> bool:
    """Return whether the distribution of the privacy loss is known, and small enough to be computed."""
    if relation_of(releases) != ADD_OR_REMOVE:
        return False
    loss = sum(count * (release.rate / release.noise) ** 2 for release, count in releases.items())
    return loss <= _LARGEST_PLD_LOSS and all(r.noise >= _SMALLEST_PLD_NOISE for r in releases)


def to_event(release: NoisyRelease, relation: str) -> Any:
    """Return a release as an event of dp-accounting.

    Args:
        relation: of all releases. Under `REPLACE` a unit changes the sum by up to two clip norms, and
            dp-accounting expects noise in units of the largest change.
    """
    dp = require_accountant()
    gaussian = dp.GaussianDpEvent(release.noise / (2.0 if relation == REPLACE else 1.0))
    if release.sampling == "poisson":
        return dp.PoissonSampledDpEvent(release.rate, gaussian)
    if release.sampling == "fixed":
        return dp.SampledWithoutReplacementDpEvent(release.num_units, release.size, gaussian)
    return gaussian


def compute_epsilon(releases: Releases, delta: float) -> float:
    """Return epsilon of some releases at a delta; 0 without releases.

    Raises:
        MissingExtraError: dp-accounting is not installed.
        RecipeError: the releases have different neighbours.
    """
    made = {release: count for release, count in releases.items() if count}
    if not made:
        return 0.0
    dp, relation = require_accountant(), relation_of(made)
    if _has_known_distribution(made):
        first, *others = (_distribution(release, count) for release, count in made.items())
        for other in others:
            first = first.compose(other)
        return float(first.get_epsilon_for_delta(delta))
    moments = [(_renyi_moments(release, relation), count) for release, count in made.items()]
    orders = moments[0][0][0]
    total = sum(divergences * count for (_, divergences), count in moments)
    return float(dp.rdp.compute_epsilon(orders, total, delta)[0])


@lru_cache(maxsize=16)
def _renyi_moments(release: NoisyRelease, relation: str) -> tuple[Any, Any]:
    """Return orders and Renyi divergences of a release, as the RdpAccountant computes them."""
    dp = require_accountant()
    neighbours = dp.NeighboringRelation
    accountant = dp.rdp.RdpAccountant(
        neighboring_relation=neighbours.REPLACE_ONE if relation == REPLACE else neighbours.ADD_OR_REMOVE_ONE
    )
    accountant.compose(to_event(release, relation))
    return accountant.orders, accountant.rdp


def _distribution(release: NoisyRelease, count: int) -> Any:
    """Return the distribution of the privacy loss of several releases, as the PLDAccountant computes it."""
    if release.sampling == "all":
        # Several Gaussian sums of one vector are one with less noise.
        return _single_distribution(release._replace(noise=release.noise / math.sqrt(count)))
    return _single_distribution(release).self_compose(count)


@lru_cache(maxsize=16)
def _single_distribution(release: NoisyRelease) -> Any:
    # Most of the time of an epsilon, and the same for any number of releases.
    distributions = require_accountant().pld.privacy_loss_distribution
    return distributions.from_gaussian_mechanism(release.noise, sampling_prob=release.rate)


def count_within(spent: Releases, release: NoisyRelease, delta: float, budget: float, limit: int) -> int:
    """Return how many more releases, at most `limit`, leave epsilon within a budget.

    Args:
        spent: releases that were made.
        release: the kind of the next ones.
    """

    def epsilon(number: int) -> float:
        return compute_epsilon({**spent, release: spent.get(release, 0) + number}, delta)

    if limit <= 0 or epsilon(limit) <= budget:
        return max(0, limit)
    return _last_within(epsilon, budget, 0, limit)


def find_noise(release: NoisyRelease, count: int, delta: float, epsilon: float) -> float:
    """Return the smallest noise with which some releases stay within an epsilon, rounded up to 0.001.

    Args:
        release: of any noise.
    Raises:
        RecipeError: no noise up to 10,000 clip norms is enough.
    """

    def epsilon_of(thousandths: int) -> float:
        return compute_epsilon({release._replace(noise=thousandths / 1000): count}, delta)

    enough = 1000
    while epsilon_of(enough) > epsilon:
        enough *= 2
        if enough > 10_000_000:
            raise RecipeError(
                f"no noise up to 10,000 clip norms gives epsilon {epsilon:g} at delta {delta:g}",
                where="--epsilon",
                next_step="allow a larger epsilon, or train fewer rounds on fewer clients or samples",
            )
    # Less noise is less private: the search goes down from what is enough.
    least = enough // 2 if enough > 1000 else 0
    steps = _last_within(lambda step: epsilon_of(enough - step), epsilon, 0, enough - least)
    return (enough - steps) / 1000


def _last_within(value: Callable[[int], float], limit: float, within: int, beyond: int) -> int:
    """Return the last number whose value is at most a limit; values grow, and each takes long.

    Args:
        within, beyond: numbers with a value on either side of the limit; neither is computed.
    """
    points: dict[int, float] = {}
    while beyond - within > 1:
        middle = (within + beyond) // 2
        # Every second time along the line through the last values, which is nearly straight.
        if len(points) % 2 and within in points and beyond in points:
            share = (limit - points[within]) / (points[beyond] - points[within])
            middle = min(beyond - 1, max(within + 1, within + round(share * (beyond - within))))
        points[middle] = value(middle)
        within, beyond = (middle, beyond) if points[middle] <= limit else (within, middle)
    return within


def check_delta(delta: float, num_units: int) -> str:
    """Return a warning if a mechanism that publishes one unit at random would satisfy delta; else nothing."""
    if num_units and delta > 1.0 / num_units:
        return (
            f"warning: private.delta = {delta:g} is above 1 / {num_units}: a mechanism that publishes one of"
            " the units at random would satisfy it."
        )
    return ""
