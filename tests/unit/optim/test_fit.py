"""Optimizers that the training step cannot drive are refused in one sentence, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.optim import require_one_gradient
from paceline.recipe import Recipe
from paceline.task import Loss, SampleSource, Task
from paceline.testing.parity import build_test_session

DRIVEN = [
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
]


def loss(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(model(batch).square().sum(), len(batch))


def train(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], data: SampleSource | None = None
) -> Tensor:
    task = Task(nn.Linear(3, 2, bias=False), data or torch.ones(6, 3), loss, optimizer=optimizer)
    recipe = Recipe(task="own", steps=2, batch={"size": 3, "shards": 1})
    list(build_test_session(Cluster.single(), recipe, lambda: task).rounds())
    return task.model.weight.detach()


class Sharpness(torch.optim.Optimizer):
    """Needs the loss at two points, as SAM does."""

    def step(self, closure: Callable[[], Any]) -> Any:
        return closure()


@pytest.mark.capability("J13")
@pytest.mark.parametrize(
    "optimizer",
    [lambda m: torch.optim.LBFGS(m.parameters()), lambda m: Sharpness(m.parameters(), {})],
    ids=["LBFGS", "SAM"],
)
def test_one_that_computes_the_loss_again_is_refused(optimizer: Any) -> None:
    with pytest.raises(TaskError, match="recomputes the loss within a step") as found:
        train(optimizer)
    assert "AdamW" in str(found.value)


@pytest.mark.capability("J13")
def test_one_of_sparse_gradients_is_refused() -> None:
    """The reason is true: PyTorch's own takes no dense gradient."""
    with pytest.raises(TaskError, match="takes only sparse gradients"):
        train(lambda m: torch.optim.SparseAdam(m.parameters()))
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        torch.optim.SparseAdam([p]).step()


@pytest.mark.capability("J13")
@pytest.mark.parametrize("name", DRIVEN)
def test_all_others_of_pytorch_train(name: str) -> None:
    kind = getattr(torch.optim, name)
    optimizer = kind([nn.Parameter(torch.ones(2, 2))])
    assert require_one_gradient(optimizer) is optimizer
    torch.manual_seed(0)
    start = nn.Linear(3, 2, bias=False).weight.detach()
    torch.manual_seed(0)
    assert not torch.equal(train(lambda m: kind(m.parameters())), start)


def test_fused_sgd_over_two_bytes_on_the_processor_is_refused_and_is_wrong() -> None:
    """The second half says why; where PyTorch is right again, the refusal may go."""
    torch.manual_seed(0)
    start, grads = torch.randn(37), [torch.randn(37) for _ in range(6)]
    ends = []
    for fused in (False, True):
        p = nn.Parameter(start.to(torch.bfloat16))
        optimizer = torch.optim.SGD([p], lr=0.05, momentum=0.9, fused=fused)
        for grad in grads:
            p.grad = grad.to(torch.bfloat16)
            optimizer.step()
        ends.append(p.detach().float())
    assert float((ends[0] - ends[1]).abs().max()) > 0.1
    with pytest.raises(TaskError, match="inaccurate for bfloat16 and float16"):
        require_one_gradient(optimizer)
    assert require_one_gradient(torch.optim.SGD([nn.Parameter(start)], lr=0.1, fused=True))
    assert require_one_gradient(torch.optim.SGD([p], lr=0.1))
