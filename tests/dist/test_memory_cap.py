"""A model that does not fit one process trains when it is split; the system caps the memory of each."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Task
from paceline.job.cluster import Cluster
from paceline.models import GPT, GPTConfig, gpt_chain, initialize_gpt, without_memory
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

STEPS = 20
CAP_BYTES = 230 * 2**20  # 4 x 75 MB of state do not fit, half of that does
OUT_OF_MEMORY = "out of memory"


def large_gpt() -> Task:
    """19 million parameters, whose activations weigh little."""
    with without_memory():
        model = GPT(GPTConfig(vocab=64, context=8, layers=6, heads=4, width=512))

    def loss(model: nn.Module, tokens: Tensor) -> Loss:
        targets = tokens[:, 1:].flatten()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return Loss(F.cross_entropy(logits, targets, reduction="sum"), targets.numel())

    tokens = list(torch.arange(8 * 9).remainder(61).view(8, 9))
    return Task(model, tokens, loss, stages=gpt_chain, initialize=initialize_gpt)


def recipe(strategy: str) -> Recipe:
    return Recipe.model_validate(
        {
            "task": "sum",
            "steps": STEPS,
            "batch": {"size": 4, "shards": 2},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "precision": {"compute": "fp32"},
            "strategy": strategy,
        }
    )


@contextmanager
def capped(num_bytes: int) -> Iterator[None]:
    """No more than so many further bytes of memory of this process."""
    (now,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(now) + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def losses(cluster: Cluster, strategy: str) -> list[float]:
    session = build_test_session(cluster, recipe(strategy), large_gpt)
    found = [stats.loss for stats in session.rounds()]
    session.close()
    return found


def losses_under_the_cap(cluster: Cluster, strategy: str) -> list[float] | str:
    torch.set_num_threads(1)
    try:
        with capped(CAP_BYTES):
            return losses(cluster, strategy)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return OUT_OF_MEMORY


@pytest.mark.soak
@pytest.mark.capability("C7")
@pytest.mark.parametrize("split", ["replicas=1 pipeline=2", "replicas=1 shard=2 zero=3"])
def test_a_model_that_fails_under_a_cap_trains_when_it_is_split(split: str) -> None:
    assert run_ranks(losses_under_the_cap, 1, "replicas=1") == [OUT_OF_MEMORY]
    (whole,) = run_ranks(losses, 1, "replicas=1")
    found = run_ranks(losses_under_the_cap, 2, split)
    assert len(whole) == STEPS and whole[-1] < whole[0]
    for one in found:
        assert one == pytest.approx(whole, rel=1e-4)
