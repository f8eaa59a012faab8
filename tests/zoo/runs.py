"""The same kinds, trained by Paceline under its strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from paceline import Loss, Task
from paceline.errors import CommunicationError, PacelineError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import Session
from paceline.testing.parity import build_test_session
from tests.recipes import recipe_of
from tests.zoo.kind import Kind, Made
from tests.zoo.kinds import KINDS
from tests.zoo.plain import End, Plan, train

SHARDS = 6


@dataclass(frozen=True)
class Way:
    """A strategy on a number of processes.

    Args:
        changes: further settings of the recipe.
        chain: only for a model that is a chain.
        alone: replicas update by themselves: without momentum and clip this is every-step.
    """

    strategy: str
    processes: int
    changes: dict[str, Any] = field(default_factory=dict)
    chain: bool = False
    alone: bool = False


SAME_BITS = {"reproducible": True}
SMALL_BUCKETS = {"runtime": {"bucket_bytes": 1}}
WAYS: dict[str, Way] = {
    "one": Way("replicas=1", 1),
    "replicas-2": Way("replicas=2", 2),
    "replicas-3": Way("replicas=3", 3),
    "replicas-5": Way("replicas=5", 5),
    "tree-3": Way("replicas=3 route=tree", 3),
    "small-buckets-2": Way("replicas=2 route=native", 2, SMALL_BUCKETS),
    "native-2": Way("replicas=2 route=native", 2),
    "zero1-2": Way("replicas=1 shard=2 zero=1", 2),
    "zero1-3": Way("replicas=1 shard=3 zero=1", 3),
    "zero2-3": Way("replicas=1 shard=3 zero=2", 3),
    "zero3-2": Way("replicas=1 shard=2 zero=3", 2),
    "zero3-replicas-4": Way("replicas=2 shard=2 zero=3", 4),
    "lanes-1": Way("replicas=1 lanes=2", 1),
    "lanes-2": Way("replicas=2 lanes=2", 2),
    "pipeline-2": Way("replicas=1 pipeline=2", 2, chain=True),
    "pipeline-1f1b-2": Way("replicas=1 pipeline=2 schedule=1f1b", 2, chain=True),
    "pipeline-zero-bubble-2": Way("replicas=1 pipeline=2 schedule=zero-bubble", 2, chain=True),
    "pipeline-zero1-4": Way("replicas=1 shard=2 zero=1 pipeline=2", 4, chain=True),
    "stage-threads-1": Way("replicas=1 pipeline=2 lanes=2", 1, chain=True),
    "local-2": Way("sync=local:1", 2, alone=True),
    "local-3": Way("sync=local:1", 3, alone=True),
    "server-2": Way("servers=1 sync=backup:0", 2),
    "server-3": Way("servers=1 sync=backup:0", 3),
    "same-bits-1": Way("replicas=1", 1, SAME_BITS),
    "same-bits-2": Way("replicas=2", 2, SAME_BITS),
    "same-bits-3": Way("replicas=3", 3, SAME_BITS),
    "same-bits-native-2": Way("replicas=2 route=native", 2, SAME_BITS),
    "same-bits-lanes-1": Way("replicas=1 lanes=2", 1, SAME_BITS),
    "same-bits-zero1-2": Way("replicas=1 shard=2 zero=1", 2, SAME_BITS),
    "same-bits-zero3-2": Way("replicas=1 shard=2 zero=3", 2, SAME_BITS),
    "same-bits-pipeline-2": Way("replicas=1 pipeline=2", 2, SAME_BITS, chain=True),
}


@dataclass(frozen=True)
class Ran:
    """How one rank fared: where it ended, or what was said.

    Args:
        refused: an error of Paceline's, with a next step.
        raised: any other.
    """

    end: End | None = None
    refused: str = ""
    raised: str = ""


def plan_of(kind: Kind, way: Way) -> Plan:
    """How the plain loop trains it."""
    if way.alone:
        return Plan(kind.optimizer, lr=0.1, momentum=0.0, shards=SHARDS)
    lr = 0.01 if kind.optimizer == "adamw" else 0.1
    return Plan(kind.optimizer, lr=lr, clip_norm=kind.clip_norm, shards=SHARDS)


def zoo_recipe(plan: Plan, way: Way, *, own_optimizer: bool = False) -> Recipe:
    """How Paceline trains it: with its own optimizers, fused where it takes that."""
    momentum = {"momentum": plan.momentum} if plan.optimizer == "sgd" else {}
    named = {} if own_optimizer else {"name": plan.optimizer, "lr": plan.lr, **momentum}
    clip_norm = {} if plan.clip_norm is None else {"clip_norm": plan.clip_norm}
    return recipe_of(
        way.strategy,
        task="zoo",
        steps=plan.steps,
        seed=plan.seed,
        batch={"size": plan.size, "shards": plan.shards, "shuffle": False},
        optimizer=named | clip_norm,
        **way.changes,
    )


def task_of(kind: Kind, made: Made) -> Task:
    """A kind as a task."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    return Task(
        made.model,
        made.samples,
        lambda model, batch: Loss(*made.loss(model, batch)),
        optimizer=optimizer if kind.fused else None,
    )


@cache
def fits(kind: str, way: str) -> bool:
    """Whether the two go together at all."""
    if WAYS[way].alone and (KINDS[kind].optimizer != "sgd" or KINDS[kind].fused):
        return False
    return not WAYS[way].chain or isinstance(KINDS[kind].make().model, nn.Sequential)


def run_many(cluster: Cluster, kinds: Sequence[str], way: str) -> dict[str, Ran]:
    """Train some kinds, one after another, as one rank."""
    torch.set_num_threads(1)
    return {kind: run(cluster, kind, way) for kind in kinds}


def run(cluster: Cluster, kind: str, way: str) -> Ran:
    """Train as one rank; what it raises is an answer too."""
    made, plan = KINDS[kind].make(), plan_of(KINDS[kind], WAYS[way])
    recipe = zoo_recipe(plan, WAYS[way], own_optimizer=KINDS[kind].fused)
    session = None
    try:
        session = build_test_session(cluster, recipe, lambda: task_of(KINDS[kind], made))
        return Ran(ended(session, [stats.loss for stats in session.rounds()]))
    except PacelineError as error:
        if isinstance(error, CommunicationError):
            raise
        return Ran(refused=str(error)) if error.next_step else Ran(raised=str(error))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return Ran(raised=f"{type(error).__name__}: {error}")
    finally:
        if session is not None:
            session.close()


def ended(session: Session, losses: list[float]) -> End:
    """Parameters and buffers of this replica, put together where its ranks hold parts of them."""
    found = session.snapshot().tensors().items()
    model = {name.removeprefix("model/"): t for name, t in found if name.startswith("model/")}
    return End(losses, {name: t.detach().clone() for name, t in model.items()})


def verdict(kind: str, way: str, rans: Sequence[Ran]) -> str:
    """Empty if all ranks ended where the plain loop does, else what is wrong, in short."""
    said = next((f"refused: {r.refused}" for r in rans if r.refused), "")
    said = said or next((f"raised: {r.raised}" for r in rans if r.raised), "")
    if said:
        return said
    right = train(KINDS[kind].make(), plan_of(KINDS[kind], WAYS[way]))
    distance = max(distance_from(right, ran.end) for ran in rans if ran.end is not None)
    return "" if distance <= KINDS[kind].tolerance else f"differs by {distance:.1e}"


def distance_from(right: End, found: End) -> float:
    """Of what a rank holds; tied weights have one name there, and a server counts many steps as one."""
    tensors = {name: t for name, t in right.tensors.items() if name in found.tensors}
    losses = right.losses if len(found.losses) == len(right.losses) else found.losses
    return found.distance(End(losses, tensors))
