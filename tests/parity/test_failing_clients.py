"""Clients that fail at random moments: every sample is accounted for, and accuracy stays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any, cast

import numpy as np
import pytest
import torch

from paceline.federated.rounds import FederatedRounds
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import Components
from paceline.session import evaluate
from paceline.state.keys import key
from paceline.testing.parity import build_test_session
from tests.recipes import recipe_of

SHARE = 0.3


class FailingRounds(FederatedRounds):
    """Rounds in which three of ten clients lose their loss in one of their local steps."""

    def begin_client(self, optimizer: Any) -> None:
        super().begin_client(optimizer)
        self._draws = np.random.default_rng(key("failure", self._net.step, getattr(self, "_num_begun", 0)))
        self._num_begun = getattr(self, "_num_begun", 0) + 1
        self._fails_in = int(self._draws.integers(1, 7)) if self._draws.random() < SHARE else 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fails_in, inner = 0, cast("Any", self.inner)
        plain_step = inner.step

        def step(*arguments: Any) -> Any:
            tally, update = plain_step(*arguments)
            self._fails_in -= 1
            return (replace(tally, total=math.nan) if self._fails_in == 0 else tally), update

        inner.step = step


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than these small steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def accuracy(seed: int, components: Components | None) -> tuple[float, int]:
    """Train; return the accuracy on held-out digits, and how many clients failed."""
    recipe = recipe_of(
        "sync=federated:2",
        task="digits",
        options={"model": "mlp", "hidden": [64]},
        steps=40,
        seed=seed,
        batch={},
        optimizer={"name": "sgd", "lr": 0.5},
        federated={"clients": 20, "cohort": 10, "batch": 25},
    )
    session = build_test_session(Cluster.single(), recipe, components=components)
    num_failed, order = 0, cast("Any", session.feed.work).order
    sizes = dict(zip(order.clients.names, map(len, order.clients.indices), strict=True))
    for _ in session.rounds():
        (record,) = [dict(record) for name, record in session.events.take() if name == "cohort"]
        lost = sum(sizes[client] for client in record["left_out"])
        assert record["samples"] + lost == sum(sizes[client] for client in record["clients"])
        num_failed += len(record["left_out"])
    evaluation = evaluate(session)
    assert evaluation is not None
    return evaluation.metrics["accuracy"], num_failed


@pytest.mark.soak
@pytest.mark.capability("Q6")
@pytest.mark.timeout(300)
def test_with_three_of_ten_clients_failing_accuracy_stays_within_a_point_over_three_seeds() -> None:
    undisturbed = [accuracy(seed, None) for seed in (1, 2, 3)]
    disturbed = [accuracy(seed, Components(federated=FailingRounds)) for seed in (1, 2, 3)]
    assert all(not failed for _, failed in undisturbed)
    assert sum(failed for _, failed in disturbed) == pytest.approx(3 * 40 * 10 * SHARE, rel=0.15)
    difference = fmean(a for a, _ in disturbed) - fmean(a for a, _ in undisturbed)
    assert abs(difference) <= 0.01 and fmean(a for a, _ in undisturbed) > 0.93
