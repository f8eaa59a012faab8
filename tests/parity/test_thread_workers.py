"""Stages that are threads of one process: no interleaving changes a bit, and no wait outlives a failure."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.errors import PacelineError
from paceline.job.cluster import Cluster
from paceline.parallel.pipeline import InFlightMicroBatch
from paceline.parallel.pipeline.forward_backward import ChunkExecutor
from paceline.parallel.pipeline.p2p import ThreadTransport
from paceline.parallel.state_hash import state_sha256
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.recipes import recipe_of

pytestmark = pytest.mark.capability("C8")

STEPS, RATE, BATCH = 1000, 0.05, 12
STAGES = "replicas=1 pipeline=2 lanes=2"


threads_recipe = partial(
    recipe_of,
    steps=STEPS,
    batch={"size": BATCH, "shards": 4},
    optimizer={"name": "sgd", "lr": RATE},
    reproducible=True,
)


def two_layers() -> Task:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(120, 10, generator=draw)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(10, 16), nn.Sigmoid(), nn.Linear(16, 3))
    return Task(model, TensorDataset(x, x[:, :3].argmax(1)), cross_entropy)


def cross_entropy(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def hashes(cluster: Cluster, strategy: str, steps: int) -> list[str]:
    session = build_test_session(cluster, threads_recipe(strategy, steps=steps), two_layers)
    found = [state_sha256(session.snapshot().tensors()) for _ in session.rounds()]
    session.close()
    return found


def shaken(cluster: Cluster, steps: int) -> list[str]:
    """Threads take turns as often as Python lets them, and stages pause at random."""
    rng, plain, interval = random.Random(5), ThreadTransport.send, sys.getswitchinterval()

    def send(self: ThreadTransport, *args: Any, **kwargs: Any) -> None:
        time.sleep(rng.choice([0.0, 0.0, 0.0, 1e-4, 5e-4]))
        plain(self, *args, **kwargs)

    sys.setswitchinterval(1e-6)
    try:
        with patch.object(ThreadTransport, "send", send):
            return hashes(cluster, STAGES, steps)
    finally:
        sys.setswitchinterval(interval)


def updated_inside_backward(cluster: Cluster) -> list[str]:
    """The trap: a layer is updated while another thread's backward still needs what it was."""
    plain = ChunkExecutor.backward

    def backward(self: ChunkExecutor, in_flight_batch: InFlightMicroBatch, *args: Any) -> Any:
        found = plain(self, in_flight_batch, *args)
        if self._cut.is_last:
            for p in self.chunks[0].parameters():
                p.data.sub_(p.grad, alpha=RATE / BATCH)  # by `.data`, or autograd itself would refuse
                p.grad = torch.zeros_like(p)
        return found

    with patch.object(ChunkExecutor, "backward", backward):
        return hashes(cluster, STAGES, 1)


@pytest.mark.timeout(800)
@pytest.mark.parametrize("steps", [STEPS // 10, pytest.param(STEPS, marks=pytest.mark.soak)])
def test_interleavings_have_the_bits_of_one_thread(steps: int) -> None:
    right = run_ranks(hashes, 1, "replicas=1", steps)[0]
    assert len(set(right)) == steps
    assert run_ranks(shaken, 1, steps, deadline=480.0)[0] == right


def test_an_update_inside_the_backward_would_be_seen() -> None:
    assert run_ranks(updated_inside_backward, 1) != run_ranks(hashes, 1, "replicas=1", 1)


def test_the_update_is_the_mean_gradient_of_autograd() -> None:
    def moved(cluster: Cluster) -> list[Tensor]:
        recipe = threads_recipe(STAGES, steps=1, batch={"size": 120, "shards": 4})
        session = build_test_session(cluster, recipe, two_layers)
        next(session.rounds())
        session.close()
        return [p.detach().clone() for p in session.state.model.parameters()]

    found = run_ranks(moved, 1)[0]
    task = two_layers()
    start = run_ranks(initial, 1)[0]
    torch.nn.utils.vector_to_parameters(torch.cat([p.reshape(-1) for p in start]), task.model.parameters())
    x, y = task.data.tensors
    F.cross_entropy(task.model(x), y).backward()
    for p, after in zip(task.model.parameters(), found, strict=True):
        assert float(((p - RATE * p.grad) - after).detach().abs().max()) <= 1e-6


def initial(cluster: Cluster) -> list[Tensor]:
    session = build_test_session(cluster, threads_recipe(STAGES), two_layers)
    session.close()
    return [p.detach().clone() for p in session.state.model.parameters()]


class Fails(nn.Module):
    """Passes on what it gets, or raises, or never returns in time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.factor = how, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.how == "raises" and x.requires_grad:
            raise ValueError("in a stage")
        if self.training and self.how == "hangs" and x.requires_grad:
            time.sleep(1.2)
        return x * self.factor


@pytest.mark.parametrize("last", [False, True], ids=["first stage", "last stage"])
@pytest.mark.parametrize(
    ("how", "deadline", "kind", "words"),
    [("raises", 60.0, ValueError, "in a stage"), ("hangs", 0.5, PacelineError, "within 0.5 s")],
)
def test_a_stage_that_fails_ends_the_others(
    last: bool, how: str, deadline: float, kind: type[Exception], words: str
) -> None:
    def run(cluster: Cluster) -> list[str]:
        def task() -> Task:
            first, second = ("", how) if last else (how, "")
            links = nn.Sequential(nn.Linear(10, 16), Fails(first), nn.Linear(16, 3), Fails(second))
            return replace(two_layers(), model=links, stages=lambda m: [m[0:2], m[2:4]])

        changed = threads_recipe(STAGES, runtime={"deadline_seconds": deadline})
        session, said = build_test_session(cluster, changed, task), []
        for _ in range(2):  # and the stages are there for the next try
            try:
                list(session.rounds())
            except kind as error:
                said.append(str(error))
            session.abort()
        session.close()
        return said

    found = run_ranks(run, 1)[0]
    assert len(found) == 2 and all(words in said or "still run 0.5 s" in said for said in found), found
