"""What `plan_memory` says before a start, beside the bytes that are allocated in the steps of a run.

Allocated: the most that PyTorch's allocator had given out at a time in the steps, of all that was allocated
since before the task was built (the memory events of its profiler). What Gloo takes for itself is not in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from paceline import Loss, Task
from paceline.cluster import Cluster
from paceline.comm.routes import host_mail, shared_memory
from paceline.models import GPT, GPTConfig, gpt_chain, initialize_gpt, without_memory
from paceline.plan import plan_memory
from paceline.recipe import Recipe, Strategy
from paceline.tasks.byte_gpt import next_token_loss
from paceline.testing import run_ranks
from paceline.testing.parity import session_of
from tests.peak import bytes_now

STEPS = "all steps"
SMALL_BYTES = 2**16  # numbers, one batch, tallies
SAMPLES = 32


def small_gpt() -> Task:
    """A GPT whose activations weigh about as much as its parameters."""
    with without_memory():
        model = GPT(GPTConfig(vocab=257, context=32, layers=4, heads=4, width=128))
    return Task(
        model,
        list(torch.arange(SAMPLES * 33).remainder(257).view(SAMPLES, 33)),
        next_token_loss,
        stages=gpt_chain,
        initialize=initialize_gpt,
        tensor={"blocks.*.feed_forward.expand": "column", "blocks.*.feed_forward.project": "row"},
    )


def wide_chain() -> Task:
    """Layers of different widths, built whole; parameters weigh more than activations."""
    torch.manual_seed(1)  # tensor ranks see the same samples
    layers: list[nn.Module] = []
    widths = (64, 512, 512, 128, 640, 64)
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return Task(
        nn.Sequential(*layers),
        list(torch.rand(SAMPLES, 64)),
        lambda model, x: Loss((model(x) - x).square().sum(), len(x)),
        tensor={"0": "column", "2": "row", "4": "column", "6": "row"},
    )


TASKS: dict[str, Callable[[], Task]] = {"gpt": small_gpt, "chain": wide_chain}


class Case(NamedTuple):
    """A recipe, and the task that it trains."""

    recipe: Recipe
    task: str


def case(
    strategy: str, task: str = "gpt", *, shards: int = 4, optimizer: str = "adamw", **more: object
) -> Case:
    recipe = {
        "task": "sum",
        "steps": 3,
        "batch": {"size": 16, "shards": shards},
        "optimizer": {"name": optimizer, "lr": 1e-3},
        "precision": {"compute": "fp32"},
        "runtime": {"bucket_bytes": 2**17},
        "strategy": Strategy.parse(strategy),
    }
    return Case(Recipe.model_validate(recipe | more), task)


def most_allocated(record: profile, first: int) -> int:
    """The most bytes that were in use at a time in the steps.

    Args:
        first: how many before the steps. A profile does not see what another thread frees, such as Gloo's
            with the weights that were sent.
    """
    assert record.profiler is not None
    events = record.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == STEPS)
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.start_ns() < begin:
            most = total = first
        elif event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most


class Mapped:
    """Counts what a module maps of memory that ranks of a host have in common."""

    def __init__(self, module: ModuleType) -> None:
        self.num_bytes, self._plain = 0, module.mapped
        self.counting = patch.object(module, "mapped", self)

    def __call__(self, file: int, num_values: int, dtype: torch.dtype) -> Tensor:
        found: Tensor = self._plain(file, num_values, dtype)
        self.num_bytes += found.nbytes
        return found


def allocated(cluster: Cluster, cases: list[Case]) -> list[int]:
    """By case, the most bytes of this rank in a step."""
    torch.set_num_threads(1)
    found = []
    for one in cases:
        sums, read, before = Mapped(shared_memory), Mapped(host_mail), bytes_now()
        recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with sums.counting, read.counting, recording as record:
            session = session_of(cluster, one.recipe, TASKS[one.task])
            first = bytes_now() - before
            with record_function(STEPS):
                for _ in session.rounds():
                    pass
        others = (cluster.world_size - 1) * sums.num_bytes // cluster.world_size  # each has a share of all
        others += read.num_bytes
        found.append(most_allocated(record, first) - others)
        session.close()
        del session
        gc.collect()
    return found


def planned(one: Case, ranks: int) -> list[int]:
    """By rank of the first replica, the most bytes in a step."""
    plan = plan_memory(one.recipe, TASKS[one.task](), ranks)
    return [
        max(parts.total for when, parts in rank.moments.items() if when != "building") for rank in plan.ranks
    ]


ALONE = [
    case("replicas=1"),
    case("replicas=1", shards=1),
    case("replicas=1", optimizer="sgd"),
    case("replicas=1", memory={"recompute": "blocks"}, shards=1),
    case("replicas=1", memory={"recompute": "segments"}, shards=1),
    case("replicas=1", precision={"compute": "bf16"}, shards=2),
    case("replicas=1", "chain", shards=1),
    case("replicas=1 ", "chain", optimizer="rmsprop"),
    case("replicas=1", reproducible=True),
]
TWO = [
    case("replicas=2"),
    case("replicas=2 route=native"),
    case("replicas=2 route=native", "chain", shards=2),
    case("replicas=2 route=native", reproducible=True),
    case("replicas=1 shard=2 zero=1"),
    case("replicas=1 shard=2 zero=1", "chain"),
    case("replicas=1 shard=2 zero=2"),
    case("replicas=1 shard=2 zero=3"),
    case("replicas=1 shard=2 zero=3", memory={"recompute": "blocks"}, shards=2),
    case("replicas=1 tensor=2"),
    case("replicas=1 tensor=2", "chain", shards=2),
    case("replicas=1 pipeline=2"),
    case("replicas=1 pipeline=2 route=native"),
    case("replicas=1 pipeline=2 schedule=1f1b", shards=8),
    case("replicas=1 pipeline=2 schedule=1f1b rechunk=1,4", shards=2),
    case("replicas=1 pipeline=2 schedule=1f1b rechunk=2,1", "chain", shards=2),
    case("replicas=1 pipeline=2 schedule=interleaved:2", "chain"),
    case("replicas=1 pipeline=2", memory={"recompute": "blocks"}),
    case("replicas=2 sync=local:1"),
    case("replicas=2 sync=diloco:1", "chain", shards=2),
]


def named(one: Case) -> str:
    recipe = one.recipe
    words = (one.task, recipe.strategy, recipe.optimizer.name, recipe.memory.recompute, recipe.batch.shards)
    return " ".join(map(str, words))


FEW = {
    "gpt replicas=2 sync=local:1 adamw auto 4",
    "chain replicas=2 sync=diloco:1 adamw auto 2",
    "chain replicas=2 sync=every-step route=native adamw auto 2",
    "chain replicas=1 shard=2 zero=1 sync=every-step adamw auto 4",
    "gpt replicas=1 shard=2 zero=3 sync=every-step adamw auto 4",
    "chain replicas=1 tensor=2 sync=every-step adamw auto 2",
    "gpt replicas=1 pipeline=2 sync=every-step adamw blocks 4",
    "gpt replicas=1 pipeline=2 schedule=1f1b rechunk=1,4 sync=every-step adamw auto 2",
}


def require_close(cases: list[Case], ranks: int, found: list[list[int]]) -> None:
    """Never less than was allocated, and at most a tenth more."""
    wrong = []
    for number, one in enumerate(cases):
        for rank, plan in enumerate(planned(one, ranks)):
            real = found[rank][number]
            if not real - SMALL_BYTES <= plan <= 1.1 * real + SMALL_BYTES:
                wrong.append(f"{named(one)}, rank {rank}: planned {plan}, allocated {real}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.capability("L3", "D9")
def test_ranks_allocate_what_was_planned() -> None:
    few = [one for one in TWO if named(one) in FEW]
    assert len(few) == len(FEW)
    require_close(few, 2, run_ranks(allocated, 2, few))


@pytest.mark.soak
@pytest.mark.capability("L3")
def test_every_configuration_allocates_what_was_planned() -> None:
    require_close(ALONE, 1, run_ranks(allocated, 1, ALONE))
    require_close(TWO, 2, run_ranks(allocated, 2, TWO))
