"""Draws of actions: functions of the environment and the step, whichever group or iteration asks."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.rl.policy import keyed_uniforms


@pytest.mark.capability("T1")
def test_a_group_and_an_iteration_draw_their_part_of_all_numbers() -> None:
    whole = keyed_uniforms(3, "action", range(12), range(20), 2)
    assert whole.shape == (20, 12, 2) and len(np.unique(whole)) == whole.size
    for environments in (range(4), range(4, 8), range(8, 12)):
        for steps in (range(5), range(5, 20)):
            found = keyed_uniforms(3, "action", environments, steps, 2)
            expected = whole[steps.start : steps.stop, environments.start : environments.stop]
            assert np.array_equal(found, expected), (environments, steps)
    for other in (
        keyed_uniforms(4, "action", range(12), range(20), 2),
        keyed_uniforms(3, "x", range(12), range(20), 2),
    ):
        assert not np.intersect1d(other, whole).size


def test_the_numbers_are_uniform_over_environments_and_over_steps() -> None:
    """Chi-squared with 15 degrees of freedom; 37.7 is its 99.9 % point."""
    for environments, steps in ((range(2000), range(4)), (range(4), range(2000))):
        counts = np.bincount((keyed_uniforms(1, "action", environments, steps, 1) * 16).astype(int).ravel())
        assert len(counts) == 16 and float(((counts - 500.0) ** 2 / 500.0).sum()) < 37.7
