"""What both sides share is seen by `verify --strict`: a gradient that does not arrive, a second step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.task import Task
from paceline.testing.parity import CPU
from paceline.verification import build_oracle, compare_with_oracle
from paceline.verification.strict_checks import check_user_code
from tests.parity.correct_tasks import CORRECT_TASKS, loss, samples, seeded, small


class Stopped(nn.Module):
    """Two layers, and something between them that lets no gradient through, or some of it."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(6, 8), between, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x).tanh()))


def halfway(y: Tensor) -> Tensor:
    return y * y.norm(dim=1, keepdim=True).detach()


class StepsTwice(torch.optim.AdamW):
    """Makes its step again."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        super().step(closure)


def steps_again(model: nn.Module) -> torch.optim.Optimizer:
    """A hook makes the step again."""
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made.again = False

    def again(own: Any, *_: Any) -> None:
        own.again = not own.again
        if own.again:
            own.step()

    made.register_step_post_hook(again)
    return made


COUPLED = {"rarely-used"}  # the batch chooses the expert: a loss of two samples is not that of each

SHARED: dict[str, tuple[Callable[[], Task], str]] = {  # what a comparison with an oracle cannot see
    "a detach": (
        lambda: Task(seeded(lambda: Stopped(Tensor.detach)), samples(), loss),
        "a gradient does not arrive",
    ),
    "a detach of a part": (
        lambda: Task(seeded(lambda: Stopped(halfway)), samples(), loss),
        "a gradient does not arrive",
    ),
    "a step that steps twice": (
        lambda: Task(seeded(small), samples(), loss, optimizer=lambda m: StepsTwice(m.parameters(), lr=0.01)),
        "stepped twice",
    ),
    "a hook that steps": (
        lambda: Task(seeded(small), samples(), loss, optimizer=steps_again),
        "stepped twice",
    ),
}


@pytest.mark.capability("Z2")
@pytest.mark.parametrize("name", SHARED)
def test_strict_sees_what_both_sides_share(name: str) -> None:
    build, cause = SHARED[name]
    recipe = Recipe(task="given", steps=20, batch={"size": 13, "shards": 4})
    report = compare_with_oracle(recipe, build(), Cluster.single(), CPU, 2, strict=True)
    assert not report.ok and report.diagnosis.cause == cause
    assert compare_with_oracle(recipe, build(), Cluster.single(), CPU, 2).ok


def test_strict_leaves_model_and_optimizer_as_they_were() -> None:
    recipe = Recipe(task="given", steps=20, batch={"size": 13, "shards": 4})
    for name in CORRECT_TASKS.keys() - COUPLED:
        oracle = build_oracle(recipe, CORRECT_TASKS[name][0](), CPU)
        before = {n: t.clone() for n, t in oracle.model.state_dict().items()}
        assert check_user_code(oracle, "fp32", 1) is None, name
        assert all(torch.equal(t, before[n]) for n, t in oracle.model.state_dict().items()), name
        assert not oracle.optimizer.state, name
