"""Adam that becomes SGD: no jump of the loss, a plateau that switches, resumes around it."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.optim import AdamToSGD
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import VerificationReport, compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.marks import soak_param
from tests.recipes import recipe_of

SWITCH, STEPS = 60, 90
SWITCH_OF_CLASS = AdamToSGD._switch


def digits(strategy: str = "replicas=1", steps: int = STEPS, **settings: Any) -> Recipe:
    optimizer = {"name": "adam_to_sgd", "lr": 3e-3, "switch_update": SWITCH}
    values = {"options": {"model": "mlp", "hidden": [32]}, "optimizer": optimizer} | settings
    return recipe_of(strategy, task="digits", steps=steps, batch={"size": 128, "shards": 4}, **values)


def losses_and_moves(optimizer: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the loss of every step, and how far each moved all parameters together."""
    session = build_test_session(Cluster.single(), digits(optimizer=optimizer))
    losses, moves = [], []
    before = _flat(session)
    for stats in session.rounds():
        after = _flat(session)
        losses.append(stats.loss)
        moves.append(float((after - before).norm()))
        before = after
    session.close()
    return losses, moves


def _flat(session: Any) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in session.state.model.parameters()])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.capability("J18")
def test_the_loss_goes_on_without_a_jump_on_digits() -> None:
    """Around the switch, the loss keeps falling and a step keeps its length within a factor of 2.

    The twin hands over Adam's rate and no momentum: the steps of SGD are then a hundredth as long.
    """
    chosen = {"name": "adam_to_sgd", "lr": 3e-3, "switch_update": SWITCH}
    losses, moves = losses_and_moves(chosen)
    assert 0.5 < mean(moves[SWITCH : SWITCH + 3]) / mean(moves[SWITCH - 3 : SWITCH]) < 2.0
    before, after = mean(losses[SWITCH - 10 : SWITCH]), losses[SWITCH + 1 : SWITCH + 11]
    assert max(after) < 1.3 * before and mean(after) < before
    assert mean(losses[-5:]) < 0.9 * before


def test_a_hand_over_of_the_rate_alone_is_seen() -> None:
    """The mutation twin: SGD that starts at rest with the rate of Adam."""
    with patch.object(AdamToSGD, "_switch", _forget):
        _, moves = losses_and_moves({"name": "adam_to_sgd", "lr": 3e-3, "switch_update": SWITCH})
    assert mean(moves[SWITCH : SWITCH + 3]) < 0.1 * mean(moves[SWITCH - 3 : SWITCH])


def _forget(optimizer: Any) -> None:
    for options in optimizer.param_groups:
        options["is_sgd"] = True
        for p in options["params"]:
            rate = torch.ones((), dtype=torch.float64)
            optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p), "rate": rate}


PLATEAU = {"decay": "plateau", "patience": 0, "threshold": 10.0, "threshold_mode": "abs", "factor": 0.9}
ON_PLATEAU = {
    "optimizer": {"name": "adam_to_sgd", "lr": 3e-3},
    "schedule": PLATEAU,
    "evaluate": {"every_steps": 2},
}


@pytest.mark.capability("J18")
def test_a_plateau_switches_and_verify_follows_it() -> None:
    """The second evaluation is the first without an improvement, so the fifth update is one of SGD."""

    def verify(cluster: Cluster) -> list[tuple[VerificationReport, set[int]]]:
        found = []
        for strategy in ("replicas=2", "replicas=1 shard=2 zero=1", "replicas=1 pipeline=2"):
            recipe, at = digits(strategy, steps=6, **ON_PLATEAU), set[int]()

            def counted(optimizer: Any, at: set[int] = at) -> None:
                at.add(optimizer.param_groups[0]["updates"])
                SWITCH_OF_CLASS(optimizer)

            with patch.object(AdamToSGD, "_switch", counted):
                report = compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 6)
            found.append((report, at))
        return found

    for reports in run_ranks(verify, 2):
        for report, at in reports:
            assert report.ok and report.steps == 6, conclusion_lines(report)
            assert at == {4}


@pytest.mark.capability("J18")
@pytest.mark.parametrize("stop", [soak_param(3), 4, soak_param(5)])
def test_a_run_resumes_across_the_switch_to_the_bit(stop: int) -> None:
    """Before it, at it and after it, also from ZeRO to replicas where the run is reproducible."""
    optimizer = {"name": "adam_to_sgd", "lr": 3e-3, "switch_update": 4}
    recipe = partial(digits, steps=8, optimizer=optimizer, reproducible=True)

    def ends(cluster: Cluster) -> list[dict[str, Tensor]]:
        first = build_test_session(cluster, recipe("replicas=1 shard=2 zero=1"))
        for _ in zip(range(stop), first.rounds(), strict=False):
            pass
        snapshot = first.snapshot()
        saved = {name: t.detach().clone() for name, t in snapshot.tensors().items()}
        scalars = snapshot.scalars()
        sessions = [first]
        for strategy in ("replicas=1 shard=2 zero=1", "replicas=2"):
            session = build_test_session(cluster, recipe(strategy))
            session.restore({**saved}, scalars)
            sessions.append(session)
        found = []
        for session in sessions:
            list(session.rounds())
            found.append({name: t.detach().clone() for name, t in session.snapshot().tensors().items()})
        return found

    for right, *resumed in run_ranks(ends, 2):
        assert any(name.endswith("/momentum_buffer") for name in right)
        for end in resumed:
            assert end.keys() == right.keys()
            assert all(torch.equal(end[name], right[name]) for name in right)


def test_a_switch_before_the_first_update_is_an_error() -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(TaskError, match="before its first update"):
        AdamToSGD([p], switch_update=0)
    optimizer = AdamToSGD([p])
    optimizer.switch_at_next_update()
    p.grad = torch.ones(2)
    with pytest.raises(TaskError, match="before its first update"):
        optimizer.step()


def test_a_tensor_of_later_gradients_stays_with_adam_and_zeros_move_nothing() -> None:
    late, still, moving = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = AdamToSGD([late, still, moving], lr=0.1, switch_update=2)
    for update in range(4):
        late.grad = torch.ones(2) if update > 1 else None
        still.grad, moving.grad = torch.zeros(2), torch.tensor([1.0, -2.0])
        optimizer.step()
    assert torch.equal(still, torch.ones(2)) and torch.isfinite(moving).all()
    assert "exp_avg" in optimizer.state[late] and "momentum_buffer" in optimizer.state[moving]
    assert float(late.detach()[0]) == pytest.approx(0.8, abs=1e-4)
