"""What coding sends and what it still owes is the whole gradient, also where batches have other sizes.

The gradient of a sum of products does not depend on the parameters, so after every step what has been applied
under a codec, with what is owed, is what is applied without one. At the end of an epoch a batch is short: a
mean is of fewer samples then, and losses are multiplied with another power of two."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.comm.reduction import GradientUnit, PendingResidual
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import Session, build_session
from paceline.sync.outer_optimizer import ParameterDelta
from paceline.sync.server.parameter_transfer import CodedTransfer
from paceline.sync.update import PendingUpdate, UpdateResult, insert_part_before
from paceline.testing import run_ranks
from paceline.testing.parity import CPU

RATE, STEPS = 0.5, 11  # batches of 7, 7 and 3 samples


def session_of(cluster: Cluster, strategy: str, reduction: str, **outer: Any) -> Session:
    torch.manual_seed(5)
    data = list(torch.randn(17, 40, generator=torch.Generator().manual_seed(2)))
    task = Task(nn.Linear(40, 1, bias=False), data, lambda model, x: Loss(model(x).sum(), len(x)))
    recipe = Recipe(
        task="given",
        steps=STEPS,
        strategy=strategy,
        batch={"size": 7, "shards": 4, "reduction": reduction},
        optimizer={"name": "sgd", "lr": RATE},
        outer=outer,
        runtime={"device": "cpu"},
    )
    return build_session(recipe, task, cluster, CPU, warn=lambda _: None)


def weight_of(session: Session) -> Tensor:
    return session.snapshot().tensors()["model/weight"].double().clone()


def owed_of(session: Session, reduction: str) -> Tensor:
    """In the unit of an update: of gradients, and of movements."""
    kept = session.snapshot().tensors()
    owed = torch.zeros(1, 40, dtype=torch.float64)
    for word in ("residual", "moved"):
        rows = [x.sum(0) for name, x in kept.items() if name.startswith(f"{word}/") and x.dim() > 2]
        unit = kept.get(f"{word}/scale", torch.ones(1)).item()
        if word == "moved":
            unit *= RATE / kept.get("moved/share/weight", torch.ones(1)).item()
        elif reduction == "mean":
            unit *= kept.get("residual/items", torch.ones(1)).item()
        owed += sum(rows, torch.zeros(1, 40)).double() / unit
    return owed


def missing(cluster: Cluster, codec: str, strategy: str, reduction: str, follows: bool) -> list[float]:
    """By step, how much of the gradient was neither applied nor is owed, of all that was applied so far."""
    found: list[float] = []
    with patch.object(GradientUnit, "follow", GradientUnit.follow if follows else GradientUnit.resume):
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
        push = CodedTransfer.encode_push
        CodedTransfer.encode_push = lambda self, grads, place, weight=1.0: push(self, grads, place)
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


@pytest.mark.capability("H4", "H5")
@pytest.mark.parametrize(("sync", "reduction"), SERVED)
def test_what_a_server_has_not_applied_is_owed_by_its_workers(sync: str, reduction: str) -> None:
    found = run_ranks(missing_at_pauses, 3, sync, reduction, False)[0]
    assert len(found) >= 3 and max(found) <= 1e-5, found


@pytest.mark.capability("H4", "H5")
def test_what_is_owed_of_a_full_batch_in_a_short_one_would_be_seen() -> None:
    """The twin."""
    assert max(run_ranks(missing_at_pauses, 3, "server", "mean", True)[0]) >= 1e-2


PLAIN = {"lr": 0.7, "momentum": 0.0}
ALONE = [
    ("sync=local:4", "mean", {}),  # rounds of 24, 24 and 17 samples
    ("sync=local:2", "sum", {}),
    ("sync=diloco:4", "mean", {**PLAIN}),
    ("sync=diloco:4", "mean", {**PLAIN, "fragments": 2, "delay_steps": 1}),
    ("sync=every-step@2,local:3", "mean", {}),  # taken over before a short batch
    ("sync=every-step@3,local:3", "mean", {}),  # and after it
    ("sync=every-step@2,local:3", "sum", {}),
    ("sync=every-step@3,diloco:4", "mean", {**PLAIN, "lr": 1.0, "delay_steps": 1}),
    ("sync=local:3@3,every-step", "mean", {}),
]


def missing_of_replicas(
    cluster: Cluster, sync: str, reduction: str, outer: dict[str, Any], fault: str
) -> list[float]:
    """The same of replicas that train alone, by round."""
    if fault == "rounds":
        leave = ParameterDelta.start_sum
        ParameterDelta.start_sum = lambda self, count, whole: leave(self, count, 24.0)
    elif fault == "owed":
        added = PendingResidual.add_to
        PendingResidual.add_to = lambda self, grads, count: added(self, grads, self._items)
    found: list[float] = []
    sessions = [
        session_of(cluster, f"replicas=2 route=native codec={codec} {sync}", reduction, **outer)
        for codec in ("fp32", "topk:3")
    ]
    plain, coded = sessions
    first, applied = weight_of(plain), dict[int, Tensor]()
    for _ in plain.rounds():
        applied[plain.state.step] = (first - weight_of(plain)) / RATE
    for _ in coded.rounds():
        right, sent = applied[coded.state.step], (first - weight_of(coded)) / RATE
        found.append(float((right - sent - owed_of(coded, reduction)).abs().max() / right.abs().max()))
    for session in sessions:
        session.close()
    return found


@pytest.mark.capability("H4", "H5")
@pytest.mark.parametrize(("sync", "reduction", "outer"), ALONE)
def test_what_replicas_alone_have_not_applied_is_owed(sync: str, reduction: str, outer: Any) -> None:
    for found in run_ranks(missing_of_replicas, 2, sync, reduction, outer, ""):
        assert len(found) >= 3 and max(found) <= 1e-5, found


@pytest.mark.capability("H4", "H5")
@pytest.mark.parametrize(("case", "fault"), [(ALONE[0], "rounds"), (ALONE[4], "owed")])
def test_what_is_owed_of_another_round_or_batch_would_be_seen(case: Any, fault: str) -> None:
    """The twins: rounds as if they were all full, and what is owed as if the batch that comes were."""
    assert max(run_ranks(missing_of_replicas, 2, *case, fault)[0]) >= 1e-2


CASES = [
    ("topk:3", "replicas=2", "mean"),
    ("topk:3", "replicas=2", "sum"),
    ("int2", "replicas=1 shard=2 zero=2", "mean"),
    ("lowrank:1", "replicas=2", "sum"),
]


@pytest.mark.capability("H4", "H5")
@pytest.mark.parametrize(("codec", "strategy", "reduction"), CASES)
def test_what_was_not_applied_is_owed(codec: str, strategy: str, reduction: str) -> None:
    for found in run_ranks(missing, 2, codec, strategy, reduction, True):
        assert len(found) == STEPS and max(found) <= 1e-5, found


@pytest.mark.capability("H4", "H5")
@pytest.mark.parametrize(("codec", "strategy", "reduction"), CASES[:2])
def test_what_is_lost_in_another_unit_would_be_seen(codec: str, strategy: str, reduction: str) -> None:
    """The twin: nothing is missing until the batches change."""
    for found in run_ranks(missing, 2, codec, strategy, reduction, False):
        assert max(found[:2]) <= 1e-5 and max(found[2:]) >= 1e-2, found


RATE_SKIPPING, SIZE, SWITCH = 0.5, 8, 2
PLAIN_SKIPPING = {"lr": 1.0, "momentum": 0.0}
STREAMED = {**PLAIN_SKIPPING, "fragments": 2}


class Sums(nn.Module):
    """Two tensors, so that there may be two fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(40)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a + x @ self.b


def session_of_skipping(cluster: Cluster, sync: str, outer: dict[str, Any]) -> Session:
    data = list(torch.randn(32, 40, generator=torch.Generator().manual_seed(2)))
    task = Task(Sums(), data, lambda model, x: Loss(model(x).sum(), len(x)))
    recipe = Recipe(
        task="given",
        steps=10,
        strategy=f"replicas=2 route=native codec=topk:1.0 sync=every-step@{SWITCH},{sync}",
        batch={"size": SIZE, "shards": 4},
        optimizer={"name": "sgd", "lr": RATE_SKIPPING},
        outer=outer,
        runtime={"device": "cpu"},
    )
    return build_session(recipe, task, cluster, CPU, warn=lambda _: None)


def leave_out(session: Session, steps: list[int]) -> None:
    """Let this rank apply no update in these steps."""

    def part(record: PendingUpdate) -> None:
        if record.state.step in steps:
            record.update = UpdateResult(float("inf"), 0.0, applied=False)

    session.update_step.parts = insert_part_before(session.update_step.parts, "step", "leave out", part)


def end(
    cluster: Cluster, sync: str, outer: dict[str, Any], skipped: list[int], owes: bool
) -> dict[str, Tensor]:
    plain = PendingResidual.set_residuals

    def ones(owed: PendingResidual, residuals: Any) -> None:
        plain(owed, {("sent", slot.name): torch.ones(slot.shape) for slot in owed._tensors})

    with patch.object(PendingResidual, "set_residuals", ones if owes else plain):
        session = session_of_skipping(cluster, sync, outer)
        for _ in session.rounds():
            if session.state.step == SWITCH and cluster.global_rank == 1:
                session.enter_rule(SWITCH)
                leave_out(session, skipped)
        found = {name: session.snapshot().tensors()[f"model/{name}"].clone() for name in "ab"}
    session.close()
    return found


def times(cluster: Cluster, sync: str, outer: dict[str, Any], skipped: list[int], fault: bool) -> list[float]:
    """How many times what was owed has been applied, by tensor."""

    def kept(owed: PendingResidual, slots: Any, **more: Any) -> None:
        """It is owed still by who has not paid."""

    with patch.object(PendingResidual, "settle_mean", kept if fault else PendingResidual.settle_mean):
        without, with_it = (end(cluster, sync, outer, skipped, owes) for owes in (False, True))
    return [float((without[name] - with_it[name]).mean()) * SIZE / RATE_SKIPPING for name in "ab"]


CASES_SKIPPING = [
    ("local:2", {}, [2]),
    ("local:2", {}, [2, 3]),
    ("diloco:2", STREAMED, []),
    ("diloco:2", STREAMED, [2]),
    ("diloco:2", STREAMED, [2, 3]),
    ("diloco:4", {**STREAMED, "delay_steps": 1}, [2, 3]),
    ("diloco:4", {**STREAMED, "delay_steps": 2, "mixing": 0.5}, [2, 3]),
    ("diloco:4", {**STREAMED, "delay_steps": 2, "mixing": 0.5}, [2, 3, 4]),
]


@pytest.mark.capability("Z1", "H4")
@pytest.mark.parametrize(("sync", "outer", "skipped"), CASES_SKIPPING)
def test_what_is_owed_is_applied_once(sync: str, outer: dict[str, Any], skipped: list[int]) -> None:
    for found in run_ranks(times, 2, sync, outer, skipped, False):
        assert found == pytest.approx([1.0, 1.0], abs=1e-4)


@pytest.mark.capability("Z1", "H4")
def test_a_replica_that_pays_after_the_first_mean_would_be_seen() -> None:
    """The twin: the other one has paid for both."""
    assert max(run_ranks(times, 2, *CASES_SKIPPING[3], True)[0]) >= 1.1
