"""Noise of a sum: its variance and what it depends on; the list of releases, and the budget."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import CheckpointError, RecipeError
from paceline.privacy.accountant import NoisyRelease
from paceline.privacy.entropy import Entropy
from paceline.privacy.noise import PrivateDraws
from paceline.privacy.privacy_ledger import LEDGER, PrivacyLedger, read_releases
from paceline.privacy.private_sum import PrivateSum

pytest.importorskip("dp_accounting", reason="needs paceline[private]")
FIXED = NoisyRelease(2.0, "fixed", size=5, num_units=20)
NUM_RUNS = 2000
INTERVAL = 3.29 * math.sqrt(2.0 / NUM_RUNS)
"""Half of the 99.9 % interval of the variance of so many draws, as a share of it."""


def ledger_of(budget: float = 0.0, unit: str = "client") -> PrivacyLedger:
    return PrivacyLedger(delta=1e-5, budget=budget, unit=unit, clip_norm=0.5)


def private_sum(secret: bytes, release: NoisyRelease = FIXED) -> PrivateSum:
    return PrivateSum(ledger_of(), PrivateDraws(secret), clip_norm=0.5, release=release, expected=5.0)


def variance_over_runs(num_ranks: int = 1, *, from_seed: bool = False) -> float:
    """The variance of one value of the noise of the first round, over runs, as a share of (noise x clip)^2.

    Args:
        num_ranks: that add noise of their own.
        from_seed: every run has the secret of one seed.
    """
    values = []
    for run in range(NUM_RUNS):
        total = torch.full((3,), 7.0, dtype=torch.float64)
        for rank in range(num_ranks):
            secret = Entropy(11).bytes(32) if from_seed else Entropy(11, (run, rank)).bytes(32)
            private_sum(secret).add_noise([total], step=0)
        values.append(float(total[2]) - 7.0)
    return float(np.var(values)) / (2.0 * 0.5) ** 2


def test_over_two_thousand_runs_a_sum_has_the_claimed_variance() -> None:
    assert abs(variance_over_runs() - 1.0) < INTERVAL


def test_noise_of_every_rank_and_noise_of_the_seed_have_another_variance() -> None:
    assert variance_over_runs(num_ranks=2) == pytest.approx(2.0, abs=2 * INTERVAL)
    assert variance_over_runs(from_seed=True) == 0.0


def test_noise_is_on_the_grid_and_no_release_repeats_another() -> None:
    one, total = private_sum(bytes(32)), torch.tensor([1 / 3, 2 / 3, 1e-12], dtype=torch.float64)
    other, like = total.clone(), torch.tensor([1 / 3 + 1j], dtype=torch.complex128)
    one.add_noise([total, like], step=4)
    one.add_noise([other], step=4)
    steps = torch.cat([total, other, torch.view_as_real(like).view(-1)]) * 2.0**32
    assert torch.equal(steps, steps.round()) and len({*steps.tolist()}) == len(steps)
    drawn = PrivateDraws(bytes(32)).noise(200_001, 1.0, 20, "a")
    assert drawn.dtype == np.int64 and abs(np.corrcoef(drawn[:100_000], drawn[100_000:200_000])[0, 1]) < 0.02


def test_poisson_draws_have_their_rate_and_subsets_their_size() -> None:
    draws = PrivateDraws(Entropy(5).bytes(32))
    sizes = [len(draws.poisson(1000, 0.1, "batch", step)) for step in range(300)]
    assert np.mean(sizes) == pytest.approx(100.0, abs=3.0) and np.var(sizes) == pytest.approx(90.0, rel=0.4)
    subset = draws.subset(20, 5, "cohort", 0)
    assert len({*subset.tolist()}) == 5 and sorted(subset.tolist()) == subset.tolist()
    counts = np.bincount(np.concatenate([draws.subset(20, 5, "cohort", n) for n in range(2000)]))
    assert counts.min() > 400 and counts.max() < 600


def test_the_secret_cannot_be_pickled_or_printed() -> None:
    draws = PrivateDraws(b"s" * 32)
    assert "ssss" not in repr(draws)
    with pytest.raises(TypeError, match="not written"):
        pickle.dumps(draws)


def test_releases_are_listed_before_their_noise_and_survive_a_crash_and_a_cut_line(tmp_path: Path) -> None:
    ledger = ledger_of()
    ledger.open(tmp_path)
    assert [ledger.charge(FIXED, step) for step in range(3)] == [0, 1, 2]
    saved = ledger.state_dict()
    assert ledger.charge(FIXED, 3) == 3
    ledger.close()
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"step": 4, "noi')  # killed while it wrote
    resumed = ledger_of()
    resumed.load_state_dict(saved)
    text = resumed.open(tmp_path)
    other_rank = ledger_of()
    other_rank.merge(text)
    assert resumed.releases == other_rank.releases == {FIXED: 5}
    assert resumed.charge(FIXED, 3) == 5 and read_releases(tmp_path / LEDGER) == {FIXED: 6}
    with pytest.raises(CheckpointError, match="protects each client, and this run each sample"):
        ledger_of(unit="sample").load_state_dict(saved)


def test_a_release_beyond_the_budget_is_refused_before_it_is_made() -> None:
    ledger = ledger_of(budget=6.0)
    while not ledger.refuse(FIXED, 100 - ledger.num_releases):
        ledger.charge(FIXED, 0)
    assert 0 < ledger.num_releases < 100 and ledger.epsilon() <= 6.0
    assert "the privacy budget is spent" in ledger.refuse(FIXED, 1)
    with pytest.raises(RecipeError, match=r"above private.budget = 6"):
        ledger.charge(FIXED, 0)
    more = ledger_of(budget=7.0)
    more.load_state_dict(ledger.state_dict())
    assert not more.refuse(FIXED, 1)
