"""What coding sends and what it still owes is the whole gradient, also where batches have other sizes.

The gradient of a sum of products does not depend on the parameters, so after every step what has been applied
under a codec, with what is owed, is what is applied without one. At the end of an epoch a batch is short: a
mean is of fewer samples then, and losses are multiplied with another power of two."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple
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
from tests.parity.training_runs import each_case

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


class Case(NamedTuple):
    """A coded run beside a plain one, with a mistake or without."""

    strategy: str
    reduction: str = "mean"
    codec: str = "topk:3"
    outer: dict[str, Any] = {}  # noqa: RUF012
    fault: str = ""


def owed_by_workers(session: Session, case: Case) -> Tensor:
    """Each of two workers codes what it pushes; at a pause of the server."""
    owed = session.snapshot().tensors()["residual/sent/weight"].double().sum(0)
    return owed / (7.0 / (2 if "async" in case.strategy else 1) if case.reduction == "mean" else 1.0)


def planted(fault: str) -> Any:
    """Another unit; pushes and rounds as if all were full; what is owed as if the next batch were."""
    push, leave, added = CodedTransfer.encode_push, ParameterDelta.start_sum, PendingResidual.add_to
    faults: dict[str, tuple[type, str, Any]] = {
        "unit": (GradientUnit, "follow", GradientUnit.resume),
        "push": (
            CodedTransfer,
            "encode_push",
            lambda self, grads, place, weight=1.0: push(self, grads, place),
        ),
        "round": (ParameterDelta, "start_sum", lambda self, count, whole: leave(self, count, 24.0)),
        "batch": (PendingResidual, "add_to", lambda self, grads, count: added(self, grads, self._items)),
    }
    return patch.object(*faults[fault]) if fault else nullcontext()


def missing(cluster: Cluster, *of: Any) -> list[float]:
    """By round, how much of the gradient was neither applied nor is owed, of all that was applied so far."""
    case, found, applied = Case(*of), list[float](), dict[int, Tensor]()
    with planted(case.fault):
        plain, coded = (
            session_of(cluster, f"{case.strategy} codec={codec}", case.reduction, **case.outer)
            for codec in ("fp32", case.codec)
        )
        first = weight_of(plain)
        for _ in plain.rounds():
            applied[plain.state.step] = (first - weight_of(plain)) / RATE
        for _ in coded.rounds():
            right, sent = applied[coded.state.step], (first - weight_of(coded)) / RATE
            served = "servers" in case.strategy
            owed = owed_by_workers(coded, case) if served else owed_of(coded, case.reduction)
            found.append(float((right - sent - owed).abs().max() / right.abs().max()))
    plain.close()
    coded.close()
    return found


PLAIN, NATIVE = {"lr": 0.7, "momentum": 0.0}, "replicas=2 route=native"
OF_TWO = [
    Case(NATIVE),
    Case(NATIVE, "sum"),
    Case("replicas=1 shard=2 zero=2 route=native", codec="int2"),
    Case(NATIVE, "sum", "lowrank:1"),
    Case(f"{NATIVE} sync=local:4"),  # rounds of 24, 24 and 17 samples
    Case(f"{NATIVE} sync=local:2", "sum"),
    Case(f"{NATIVE} sync=diloco:4", outer=PLAIN),
    Case(f"{NATIVE} sync=diloco:4", outer={**PLAIN, "fragments": 2, "delay_steps": 1}),
    Case(f"{NATIVE} sync=every-step@2,local:3"),  # taken over before a short batch
    Case(f"{NATIVE} sync=every-step@3,local:3"),  # and after it
    Case(f"{NATIVE} sync=every-step@2,local:3", "sum"),
    Case(f"{NATIVE} sync=every-step@3,diloco:4", outer={**PLAIN, "lr": 1.0, "delay_steps": 1}),
    Case(f"{NATIVE} sync=local:3@3,every-step"),
]
SERVED = [
    Case("replicas=2 servers=1 sync=server"),
    Case("replicas=2 servers=1 sync=server", "sum"),
    Case("replicas=2 servers=1 sync=server-async"),
]


@pytest.mark.capability("H4", "H5")
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, OF_TWO), (3, SERVED)])
def test_what_was_not_applied_is_owed(num_ranks: int, cases: list[Case]) -> None:
    """By ranks in every step, by replicas that train alone in every round, and by the workers of a server."""
    for rank in run_ranks(each_case, num_ranks, missing, cases):
        for case, found in zip(cases, rank, strict=True):
            assert len(found) >= 3 and max(found) <= 1e-5, (case, found)


TWINS = [Case(*OF_TWO[k][:4], fault) for k, fault in ((0, "unit"), (1, "unit"), (4, "round"), (8, "batch"))]


@pytest.mark.capability("H4", "H5")
def test_what_is_owed_of_another_batch_or_round_would_be_seen() -> None:
    """The twins; nothing is missing until the batches change."""
    in_unit, sums, rounds, batches = run_ranks(each_case, 2, missing, TWINS)[0]
    assert all(max(found[:2]) <= 1e-5 and max(found[2:]) >= 1e-2 for found in (in_unit, sums))
    assert max(rounds) >= 1e-2 and max(batches) >= 1e-2
    assert max(run_ranks(missing, 3, *SERVED[0][:4], "push")[0]) >= 1e-2


SIZE, SWITCH = 8, 2
FLAT = {"lr": 1.0, "momentum": 0.0}
STREAMED = {**FLAT, "fragments": 2}


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
        optimizer={"name": "sgd", "lr": RATE},
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
    return [float((without[name] - with_it[name]).mean()) * SIZE / RATE for name in "ab"]


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
def test_what_is_owed_is_applied_once() -> None:
    """Where replicas take over that do not all apply their first steps.

    A vector of ones is owed then, so the run without it ends as far away as one step of the whole batch would
    have moved it. In the twin one pays for both.
    """
    cases = [*((*case, False) for case in CASES_SKIPPING), (*CASES_SKIPPING[3], True)]
    ranks = run_ranks(each_case, 2, times, cases)
    for rank in ranks:
        for case, found in zip(CASES_SKIPPING, rank[:-1], strict=True):
            assert found == pytest.approx([1.0, 1.0], abs=1e-4), case
    assert max(ranks[0][-1]) >= 1.1
