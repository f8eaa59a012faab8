"""A cache would keep the first draw of a random sample: such a source is refused, whatever it draws with."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from paceline.data import KeyedOrder, LockstepWork, SampleLoader
from paceline.errors import DataError
from paceline.job.cluster import Cluster
from paceline.parallel.state_hash import state_sha256
from paceline.recipe import LoaderRecipe, Recipe, Strategy
from paceline.task import Loss, SampleSource, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": np.random.rand,
    "normal": np.random.randn,
    "torch": lambda: float(torch.rand(())),
}


class Noisy:
    """Sample i is i and some noise, of four values."""

    def __init__(self, draw: Callable[[], float] | None) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 24) + (self.draw() if self.draw else 0.0)


def read(source: SampleSource, workers: int = 0, cache_bytes: int = 1 << 20) -> list[torch.Tensor]:
    loader = LoaderRecipe(workers=workers, cache_bytes=cache_bytes)
    work = LockstepWork(KeyedOrder(len(source), 6, seed=0), shards=2, seed=0)
    wanted = [micro_batch for step in range(8) for micro_batch in work.micro_batches(step)]
    with SampleLoader(source, None, loader, torch.device("cpu")).open(wanted) as stream:
        return [loaded.batch for loaded in stream]


@pytest.mark.capability("M3", "N2")
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_draws_is_not_cached(name: str, workers: int) -> None:
    with pytest.raises(DataError, match=r"draw random numbers, and a cache would keep the first") as found:
        read(Noisy(DRAWS[name]), workers)
    assert "set loader.cache_bytes = 0" in str(found.value) and "Noisy" in str(found.value)
    assert len(read(Noisy(DRAWS[name]), workers, cache_bytes=0)) == 16


@pytest.mark.capability("M3")
def test_a_source_that_draws_nothing_is_cached_as_ever() -> None:
    for cached, plain in zip(read(Noisy(None)), read(Noisy(None), cache_bytes=0), strict=True):
        assert torch.equal(cached, plain)


def noise_in_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + random.random() + float(np.random.rand()) + torch.rand(())


def hashes(cluster: Cluster) -> str:
    torch.set_num_threads(1)
    recipe = Recipe(
        task="noisy",
        steps=12,
        batch={"size": 6, "shards": 6},
        loader={"cache_bytes": 1 << 20},
        reproducible=True,
        strategy=Strategy(),
    )

    def task() -> Task:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
        return Task(
            model, Noisy(None), lambda m, x: Loss(m(x).square().sum(), len(x)), collate=noise_in_collate
        )

    session = build_test_session(cluster, recipe, task)
    assert len(list(session.rounds())) == 12
    return state_sha256(session.snapshot().tensors())


@pytest.mark.capability("N2")
def test_draws_in_the_collate_function_have_their_bits_with_a_cache_on_any_number_of_ranks() -> None:
    assert len({sha for world in (1, 2, 3) for sha in run_ranks(hashes, world)}) == 1
