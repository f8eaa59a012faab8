"""What a server recovers from updates of digits."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from paceline.studies.gradient_inversion import (
    InversionCase,
    count_recovered,
    measure_curve,
    render_inversion,
)
from paceline.tasks.digits import load_digits


@pytest.mark.capability("Q10")
def test_a_sum_hides_little_and_noise_hides_all() -> None:
    images, targets = load_digits()[0].tensors
    first = [(images[i : i + 1], targets[i : i + 1]) for i in range(10)]

    def recovered(case: InversionCase) -> int:
        return sum(count_recovered(x, y, case, seed=i) for i, (x, y) in enumerate(first))

    assert recovered(InversionCase()) == 10
    assert recovered(InversionCase(local_steps=5)) == 10
    assert recovered(InversionCase(clip_norm=1.0)) == 10
    assert recovered(InversionCase(clip_norm=1.0, noise=0.1)) == 0
    # The server that sees the sum over ten clients alone; with noise, nothing.
    ten = images[:10], targets[:10]
    assert count_recovered(*ten, InversionCase(clients=10), seed=0) >= 7
    assert count_recovered(*ten, InversionCase(clients=10, clip_norm=1.0, noise=0.1), seed=0) == 0


@pytest.mark.capability("Q10")
def test_the_curve_falls_with_clients_and_noise() -> None:
    points = measure_curve(4)
    fractions = {axis: [p.fraction for p in points if p.axis == axis] for axis in ("clients", "noise")}
    assert fractions["clients"][0] == 1.0 and fractions["clients"][-1] < 0.5
    assert fractions["noise"][0] == 1.0 and fractions["noise"][-1] == 0.0
    lines = render_inversion(points)
    assert lines[2].startswith("| clients | 1: 100%, 2: ") and lines[6].startswith("| noise | 0: 100%")
    if find_spec("dp_accounting"):  # of a Gaussian sum with noise 1: 4.3772 (Balle and Wang 2018, equation 6)
        assert [p.epsilon for p in points if p.case.noise == 1.0] == pytest.approx([4.3772], rel=1e-3)
        assert lines[7].startswith("| epsilon of one sum") and lines[7].endswith(", 0.1: 96.1, 1: 4.38 |")
