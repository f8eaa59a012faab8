"""The task `sum`: learn y = x_1 + ... + x_n from examples. Small enough to follow every number of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.models.initialize import fan_in_rule, initialize_by_name
from paceline.models.mlp import MLP
from paceline.recipe.validation import RecipeTable
from paceline.state.keys import key
from paceline.task import Loss, Task
from paceline.tasks.task_options import Widths, read_options


class SumOptions(RecipeTable):
    """Options of the task `sum`: the shape of the network and how many samples there are."""

    inputs: int = Field(default=10, ge=1)
    hidden: Widths = (64,)
    activation: Literal["relu", "tanh"] = "relu"
    samples: int = Field(default=4096, ge=1)
    held_out_samples: int = Field(default=1024, ge=1)


def build(**options: Any) -> Task:
    """Build the task from `SumOptions`; samples do not depend on the seed of the run."""
    chosen = read_options(SumOptions, options)
    return Task(
        model=MLP(chosen.inputs, chosen.hidden, 1, activation=chosen.activation),
        data=make_samples("training", chosen.samples, chosen.inputs),
        held_out=make_samples("held out", chosen.held_out_samples, chosen.inputs),
        loss=squared_error,
        stages=lambda model: model.chain() if isinstance(model, MLP) else [model],
        initialize=lambda model, seed: initialize_by_name(model, seed, fan_in_rule),
        predict=lambda model, batch: model(batch if isinstance(batch, Tensor) else batch[0]),
    )


def make_samples(split: str, num_samples: int, num_inputs: int) -> TensorDataset:
    """Draw x uniformly from [-1, 1]: float32 [N, num_inputs], and y = sum of x: float32 [N, 1]."""
    generator = torch.Generator().manual_seed(key("sum", split))
    x = torch.rand(num_samples, num_inputs, generator=generator) * 2.0 - 1.0
    return TensorDataset(x, x.sum(1, keepdim=True))


def squared_error(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
    """Sum the squared errors of a batch (x, y)."""
    x, y = batch
    return Loss(F.mse_loss(model(x), y, reduction="sum"), len(x))
