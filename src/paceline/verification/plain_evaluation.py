"""Evaluation in one process, block by block, implemented independently of `paceline.session.evaluation`.

Shared with it are the blocks (of `evaluate.batch` samples, in order), since a loss can depend on what else is
in its batch, and `finish_metrics`, which computes the metrics of the task from sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.loader import to_device
from paceline.data.task_data import collate_of, read_held_out
from paceline.data.work import MicroBatch
from paceline.recipe.recipe import Recipe
from paceline.session.evaluation import Evaluation
from paceline.task import Loss, Task, finish_metrics, held_out_sets
from paceline.verification.error_bounds import KernelAgreement
from paceline.verification.oracle import Oracle, loss_without_gradients, read_micro_batch


class PlainEvaluation:
    """The evaluation of a recipe, in one process.

    Args:
        oracle: its autocast and device are used.
        task: with its own loss, even if the oracle trains on that of an own loop.
    """

    def __init__(self, oracle: Oracle, task: Task, recipe: Recipe) -> None:
        self._oracle, self._task, self._recipe = oracle, task, recipe

    def __call__(self, model: nn.Module, step: int, source: Any = None) -> Evaluation | None:
        """Evaluate on the held-out data or on other samples; every module has its mode again afterwards.

        Args:
            step: training steps taken before.
            source: samples, or several sets of them by name; None: the held-out data.
        Returns:
            The evaluation; of several sets the first, with the metrics of all. None without samples.
        """
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        sets = held_out_sets(self._task.held_out if source is None else source)
        results = {
            name: self._evaluate_set(model, step, read_held_out(name, samples, self._recipe, self._task))
            for name, samples in sets.items()
        }
        for module, training in modes:
            module.training = training
        metrics = {
            f"{name}.{key}": value
            for name, result in results.items()
            if name
            for key, value in _metrics_by_name(result).items()
        }
        return next(
            (
                replace(evaluation, metrics=metrics) if name else evaluation
                for name, evaluation in results.items()
            ),
            None,
        )

    def _evaluate_set(self, model: nn.Module, step: int, held_out: Any) -> Evaluation:
        options = self._recipe.evaluate
        num_samples = min(len(held_out), options.max_samples or len(held_out))
        sums: dict[str, float] = {}
        for first in range(0, num_samples, options.batch):
            block = range(first, min(first + options.batch, num_samples))
            for name, value in _loss_sums(self._loss(model, held_out, block)).items():
                sums[name] = sums.get(name, 0.0) + value
        total, count = sums.pop(_TOTAL, 0.0), sums.pop(_COUNT, 0.0)
        means = {name: value / (count or 1.0) for name, value in sums.items()}
        loss = total / (count or 1.0)
        return Evaluation(step, loss, finish_metrics(self._task, loss, count, means), num_samples, count)

    def _loss(self, model: nn.Module, held_out: Any, block: Sequence[int]) -> Loss:
        task = replace(self._task, data=held_out, collate=collate_of(self._task, held_out))
        batch = read_micro_batch(task, MicroBatch(0, 0, np.array(block, dtype=np.int64), 0))
        with self._oracle.autocast():
            return loss_without_gradients(task, model, to_device(batch, self._oracle.device))


_TOTAL, _COUNT = "#total", "#count"


def _loss_sums(loss: Loss) -> dict[str, float]:
    metrics = {name: float(value) for name, value in loss.metrics.items()}
    return {_TOTAL: float(loss.total), _COUNT: float(loss.count), **metrics}


class EvaluationValues(NamedTuple):
    """The values of an evaluation that are compared.

    Args:
        step: the last step before it.
        mine: loss and metrics of the run by name, each float64 [1]; only losses if kernels differ, since one
            rounding can change a prediction.
        theirs, bounds: those of one process, and their bounds; None on ranks without the oracle.
    """

    step: int
    mine: Mapping[str, Tensor]
    theirs: Mapping[str, Tensor] | None
    bounds: Mapping[str, float] | None


def evaluation_values(
    evaluation: Evaluation, reference: Evaluation | None, kernels: KernelAgreement
) -> EvaluationValues:
    """Return the values of an evaluation of the run, with those of one process and their bounds."""
    same = kernels.same and not kernels.in_parts
    mine = {name: x for name, x in _metrics_by_name(evaluation).items() if same or name.endswith("loss")}
    if reference is None:
        return EvaluationValues(evaluation.step - 1, _scalar_tensors(mine), None, None)
    theirs = {name: x for name, x in _metrics_by_name(reference).items() if name in mine}
    bounds = {name: (1e-6 if same else 1e-2) * abs(x) for name, x in theirs.items()}
    return EvaluationValues(evaluation.step - 1, _scalar_tensors(mine), _scalar_tensors(theirs), bounds)


def _metrics_by_name(evaluation: Evaluation) -> Mapping[str, float]:
    return {"loss": evaluation.loss, **evaluation.metrics}


def _scalar_tensors(values: Mapping[str, float]) -> Mapping[str, Tensor]:
    return {name: torch.tensor([x], dtype=torch.float64) for name, x in values.items()}
