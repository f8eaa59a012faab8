"""Returns and advantages are exact on trajectories that were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.rl.returns import gae, next_values, normalized, vtrace

NO, YES = False, True
VALUES = np.array([[1.0], [2.0], [4.0], [8.0]])
LAST = np.array([16.0])
FINAL = np.array([[100.0], [100.0], [32.0], [100.0]])  # read only where a truncation is
REWARD = np.array([[1.0], [1.0], [1.0], [1.0]])
GAMMA, DECAY = 0.5, 0.5
CASES = {
    # delta_t = 1 + 0.5 V(s_t+1) - V(s_t), and A_t = delta_t + 0.25 A_t+1 within an episode.
    "goes on": ([NO] * 4, [NO] * 4, [1.25, 1.0, 1.0, 1.0]),
    "terminated": ([NO, NO, YES, NO], [NO] * 4, [1.0625, 0.25, -3.0, 1.0]),
    "truncated": ([NO] * 4, [NO, NO, YES, NO], [1.25 + 0.0625 * 12, 1.0 + 0.25 * 12, 13.0, 1.0]),
    "both": ([NO, NO, YES, NO], [NO, NO, YES, NO], [1.0625, 0.25, -3.0, 1.0]),
}


def advantages(terminated: NDArray[np.bool_], truncated: NDArray[np.bool_], final: NDArray) -> NDArray:
    after = next_values(VALUES, LAST, final, terminated, truncated)
    return gae(REWARD, VALUES, after, terminated | truncated, GAMMA, DECAY)


def worked_out(terminated: list[bool], truncated: list[bool]) -> NDArray:
    """By the definition, with a sum over the rest of each episode."""
    result = []
    for begin in range(4):
        total, weight = 0.0, 1.0
        for step in range(begin, 4):
            after = VALUES[step + 1, 0] if step < 3 else LAST[0]
            after = 0.0 if terminated[step] else FINAL[step, 0] if truncated[step] else after
            total += weight * (1.0 + GAMMA * after - VALUES[step, 0])
            weight *= GAMMA * DECAY
            if terminated[step] or truncated[step]:
                break
        result.append([total])
    return np.array(result)


@pytest.mark.capability("T4")
@pytest.mark.parametrize("name", CASES)
def test_advantages_are_exact_at_every_kind_of_end(name: str) -> None:
    terminated, truncated, _ = CASES[name]
    ends = [np.array(flags)[:, None] for flags in (terminated, truncated)]
    assert np.array_equal(advantages(*ends, FINAL), worked_out(terminated, truncated))


@pytest.mark.capability("T4")
@pytest.mark.parametrize("mistake", ["truncation is termination", "termination is truncation", "next row"])
def test_the_three_mistakes_of_published_code_are_noticed(mistake: str) -> None:
    terminated, truncated = np.array([NO, YES, NO, NO])[:, None], np.array([NO, NO, YES, NO])[:, None]
    right = worked_out([NO, YES, NO, NO], [NO, NO, YES, NO])
    assert np.array_equal(advantages(terminated, truncated, FINAL), right)
    both, none = terminated | truncated, np.zeros_like(truncated)
    wrong = {
        "truncation is termination": (both, none, FINAL),
        "termination is truncation": (none, both, FINAL),
        # The row after a reset is of another episode.
        "next row": (terminated, truncated, np.concatenate([VALUES[1:], LAST[None]])),
    }[mistake]
    assert not np.array_equal(advantages(*wrong), right)


@pytest.mark.capability("T4")
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_with_lambda_one_the_target_is_the_return(gamma: float) -> None:
    """Discounted and not, of an episode that ends and of one that goes on after the iteration."""
    reward = np.arange(1.0, 9.0).reshape(4, 2)
    terminated = np.array([[NO, NO], [YES, NO], [NO, NO], [NO, NO]])
    values, last = np.zeros((4, 2)), np.array([10.0, 20.0])
    after = next_values(values, last, values, terminated, np.zeros_like(terminated))
    targets = gae(reward, values, after, terminated, gamma, 1.0)
    assert targets[0, 0] == 1.0 + gamma * 3.0
    assert targets[2, 0] == 5.0 + gamma * (7.0 + gamma * 10.0)
    assert targets[0, 1] == 2.0 + gamma * (4.0 + gamma * (6.0 + gamma * (8.0 + gamma * 20.0)))


def test_normalized_advantages_have_mean_zero_and_deviation_one() -> None:
    values = normalized(np.arange(12.0).reshape(3, 4))
    assert abs(values.mean()) < 1e-12 and values.std() == pytest.approx(1.0)


def vtrace_by_definition(
    importance: NDArray, terminated: list[bool], truncated: list[bool], decay: float, clip: float = 1.0
) -> NDArray:
    """Equation 1 of Espeholt et al. with lambda: v_s - V(s) as a sum over t of products of c."""
    rho = np.minimum(importance[:, 0], clip)
    result = []
    for begin in range(4):
        total, weight = 0.0, 1.0
        for step in range(begin, 4):
            after = VALUES[step + 1, 0] if step < 3 else LAST[0]
            after = 0.0 if terminated[step] else FINAL[step, 0] if truncated[step] else after
            total += weight * rho[step] * (1.0 + GAMMA * after - VALUES[step, 0])
            if terminated[step] or truncated[step]:
                break
            weight *= GAMMA * decay * rho[step]
        result.append([total])
    return np.array(result)


IMPORTANCE = np.array([[0.5], [2.0], [0.25], [4.0]])  # of which two are clipped


@pytest.mark.capability("T2", "T4")
@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_targets_of_vtrace_are_exact_at_every_kind_of_end_and_two_mistakes_are_noticed(
    name: str, decay: float
) -> None:
    terminated, truncated, _ = CASES[name]
    ends = [np.array(flags)[:, None] for flags in (terminated, truncated)]
    after = next_values(VALUES, LAST, FINAL, *ends)
    inputs = REWARD, VALUES, after, ends[0] | ends[1]
    found = vtrace(*inputs, IMPORTANCE, GAMMA, decay)
    assert found.dtype == np.float64
    assert np.array_equal(found, vtrace_by_definition(IMPORTANCE, terminated, truncated, decay))
    # Where the policies are equal, they are those of an actor that is no older.
    assert np.array_equal(vtrace(*inputs, np.ones((4, 1)), GAMMA, decay), gae(*inputs, GAMMA, decay))
    # Twins: an importance that is not clipped; the bootstrap with the value of the row itself.
    unclipped = vtrace_by_definition(IMPORTANCE, terminated, truncated, decay, clip=np.inf)
    assert not np.array_equal(found, unclipped)
    off_by_one = next_values(np.concatenate([VALUES[:1], VALUES[:-1]]), VALUES[-1], FINAL, *ends)
    wrong = vtrace(REWARD, VALUES, off_by_one, ends[0] | ends[1], IMPORTANCE, GAMMA, decay)
    assert not np.array_equal(found, wrong)


@pytest.mark.capability("T2", "T4")
def test_with_lambda_one_the_advantage_of_vtrace_is_that_of_the_paper() -> None:
    """rho (r + gamma v' - V), with the target v' of the next state."""
    none = np.zeros((4, 1), dtype=bool)
    after = next_values(VALUES, LAST, FINAL, none, none)
    advantage = vtrace(REWARD, VALUES, after, none, IMPORTANCE, GAMMA, 1.0)
    targets = np.concatenate([(VALUES + advantage)[1:], LAST[None]])
    expected = np.minimum(IMPORTANCE, 1.0) * (REWARD + GAMMA * targets - VALUES)
    np.testing.assert_allclose(advantage, expected, rtol=1e-15)
