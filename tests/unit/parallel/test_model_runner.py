"""Sums of loss, count and metrics: in float64, by name, and what a loss function may return."""

import math

import pytest
import torch

from paceline.errors import TaskError
from paceline.parallel import LossSums
from paceline.parallel.model_runner import MetricNames, check_loss
from paceline.task import Loss


def test_totals_counts_and_metrics_are_summed_each_for_itself() -> None:
    sums = LossSums(MetricNames(("correct", "tokens")))
    sums.add(Loss(torch.tensor(2.5), 3, {"tokens": 10, "correct": torch.tensor(1)}))
    sums.add(Loss(torch.tensor([4.0]), torch.tensor(5), {"correct": 2.0, "tokens": torch.tensor([20.0])}))
    assert sums.micro_batches == 2
    assert sums.read() == (6.5, 8.0, {"correct": 3.0, "tokens": 30.0})
    assert sums.per_micro_batch().tolist() == [[2.5, 3.0, 1.0, 10.0], [4.0, 5.0, 2.0, 20.0]]


def test_the_sum_is_float64_whatever_the_losses_are() -> None:
    sums = LossSums(MetricNames(()))
    for value in (2.0**24, 1.0, 1.0):  # in float32 the ones would be lost
        sums.add(Loss(torch.tensor(value), 1))
    assert sums.read()[0] == 2.0**24 + 2.0
    half = LossSums(MetricNames(()))
    half.add(Loss(torch.tensor(1.5, dtype=torch.bfloat16), 1))
    assert half.per_micro_batch().dtype == torch.float64


def test_no_graph_is_kept_and_the_mean_is_taken_back_to_a_sum() -> None:
    x = torch.ones(3, requires_grad=True)
    sums = LossSums(MetricNames(()))
    sums.add(Loss.mean(x.mean() * 2.0, 3))
    assert not sums.per_micro_batch().requires_grad
    assert sums.read()[:2] == (6.0, 3.0)


def test_without_micro_batches_all_sums_are_zero() -> None:
    sums = LossSums(MetricNames(("correct",)))
    assert sums.read() == (0.0, 0.0, {"correct": 0.0})
    assert sums.per_micro_batch().shape == (0, 3)


def test_a_loss_that_is_not_a_number_is_not_hidden() -> None:
    sums = LossSums(MetricNames(()))
    sums.add(Loss(torch.tensor(math.nan), 1))
    sums.add(Loss(torch.tensor(1.0), 1))
    assert math.isnan(sums.read()[0])


def test_other_metrics_than_before_are_an_error_that_shows_both() -> None:
    sums = LossSums(MetricNames(("correct",)))
    with pytest.raises(TaskError, match=r"\['wrong'\], earlier \['correct'\]"):
        sums.add(Loss(torch.tensor(1.0), 1, {"wrong": 1.0}))
    assert sums.micro_batches == 0


@pytest.mark.parametrize(
    "returned, complaint",
    [
        (torch.tensor(1.0), "returned Tensor, not paceline.Loss"),
        ((torch.tensor(1.0), 2), "returned tuple"),
        (Loss(torch.ones(3), 3), "must be a scalar"),
        (Loss(1.0, 3), "must be a scalar tensor"),
    ],
)
def test_a_broken_contract_says_what_came_and_what_to_return(returned: object, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint) as caught:
        check_loss(returned)
    assert caught.value.next_step
