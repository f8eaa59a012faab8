"""What coding sends and what it still owes is the whole gradient, also where batches have other sizes.

The gradient of a sum of products does not depend on the parameters, so after every step what has been applied
under a codec, with what is owed, is what is applied without one. At the end of an epoch a batch is short: a
mean is of fewer samples then, and losses are multiplied with another power of two.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.cluster import Cluster
from paceline.comm.reduction import GradientUnit
from paceline.recipe import Recipe
from paceline.sync.traffic import Coded
from paceline.testing import run_ranks
from paceline.testing.parity import CPU
from paceline.training import Session, build_session

pytestmark = [pytest.mark.timeout(240), pytest.mark.capability("H4", "H5")]
RATE, STEPS = 0.5, 11  # batches of 7, 7 and 3 samples


def session_of(cluster: Cluster, strategy: str, reduction: str) -> Session:
    torch.manual_seed(5)
    data = list(torch.randn(17, 40, generator=torch.Generator().manual_seed(2)))
    task = Task(nn.Linear(40, 1, bias=False), data, lambda model, x: Loss(model(x).sum(), len(x)))
    recipe = Recipe(
        task="given",
        steps=STEPS,
        strategy=strategy,
        batch={"size": 7, "shards": 4, "reduction": reduction},
        optimizer={"name": "sgd", "lr": RATE},
        runtime={"device": "cpu"},
    )
    return build_session(recipe, task, cluster, CPU, warn=lambda _: None)


def weight_of(session: Session) -> Tensor:
    return session.snapshot().tensors()["model/weight"].double().clone()


def owed_of(session: Session, reduction: str) -> Tensor:
    """In the unit of an update."""
    kept = session.snapshot().tensors()
    rows = [x.sum(0) for name, x in kept.items() if name.startswith("residual/") and x.dim() > 1]
    scale, items = kept["residual/scale"].item(), kept["residual/items"].item()
    return sum(rows).double() / scale / (items if reduction == "mean" else 1.0)


def missing(cluster: Cluster, codec: str, strategy: str, reduction: str, follows: bool) -> list[float]:
    """By step, how much of the gradient was neither applied nor is owed, of all that was applied so far."""
    found: list[float] = []
    with patch.object(GradientUnit, "follow", GradientUnit.follow if follows else GradientUnit.go_on):
        words = strategy, f"{strategy} route=native codec={codec}"
        plain, coded = (session_of(cluster, word, reduction) for word in words)
        first = weight_of(plain)
        for _ in zip(plain.rounds(), coded.rounds(), strict=True):
            right, sent = (first - weight_of(plain)) / RATE, (first - weight_of(coded)) / RATE
            off: Any = (right - sent - owed_of(coded, reduction)).abs().max() / right.abs().max()
            found.append(float(off))
    for session in (plain, coded):
        session.close()
    return found


def missing_at_pauses(cluster: Cluster, sync: str, reduction: str, forgets: bool) -> list[float]:
    """The same of a server, where a run pauses; two workers, each of which codes what it pushes."""
    if forgets:
        push = Coded.push
        Coded.push = lambda self, grads, place, weight=1.0: push(self, grads, place)
    found: list[float] = []
    strategy = f"replicas=2 servers=1 sync={sync}"
    sessions = [session_of(cluster, word, reduction) for word in (strategy, f"{strategy} codec=topk:3")]
    first, applied = weight_of(sessions[0]), dict[int, Tensor]()
    for _ in sessions[0].rounds():
        applied[sessions[0].state.step] = (first - weight_of(sessions[0])) / RATE
    for _ in sessions[1].rounds():
        kept, right = sessions[1].snapshot().tensors(), applied[sessions[1].state.step]
        owed = kept["residual/sent/weight"].double().sum(0)
        owed /= 7.0 / (2 if sync == "server-async" else 1) if reduction == "mean" else 1.0
        sent = (first - kept["model/weight"].double()) / RATE
        found.append(float((right - sent - owed).abs().max() / right.abs().max()))
    for session in sessions:
        session.close()
    return found


SERVED = [("server", "mean"), ("server", "sum"), ("server-async", "mean")]


@pytest.mark.parametrize(("sync", "reduction"), SERVED)
def test_what_a_server_has_not_applied_is_owed_by_its_workers(sync: str, reduction: str) -> None:
    found = run_ranks(missing_at_pauses, 3, sync, reduction, False)[0]
    assert len(found) >= 3 and max(found) <= 1e-5, found


def test_what_is_owed_of_a_full_batch_in_a_short_one_would_be_seen() -> None:
    """The twin."""
    assert max(run_ranks(missing_at_pauses, 3, "server", "mean", True)[0]) >= 1e-2


CASES = [
    ("topk:3", "replicas=2", "mean"),
    ("topk:3", "replicas=2", "sum"),
    ("int2", "replicas=1 shard=2 zero=2", "mean"),
    ("lowrank:1", "replicas=2", "sum"),
]


@pytest.mark.parametrize(("codec", "strategy", "reduction"), CASES)
def test_what_was_not_applied_is_owed(codec: str, strategy: str, reduction: str) -> None:
    for found in run_ranks(missing, 2, codec, strategy, reduction, True):
        assert len(found) == STEPS and max(found) <= 1e-5, found


@pytest.mark.parametrize(("codec", "strategy", "reduction"), CASES[:2])
def test_what_is_lost_in_another_unit_would_be_seen(codec: str, strategy: str, reduction: str) -> None:
    """The twin: nothing is missing until the batches change."""
    for found in run_ranks(missing, 2, codec, strategy, reduction, False):
        assert max(found[:2]) <= 1e-5 and max(found[2:]) >= 1e-2, found
