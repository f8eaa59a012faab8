"""Streams by position, samplers epoch by epoch, and loaders of which every argument is taken or refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import paceline
from paceline.data import build_order, prepare_data, split_evenly
from paceline.errors import DataError, PacelineError, RecipeError, TaskError
from paceline.recipe import Recipe
from paceline.task import Loss, Task
from tests.recipes import recipe_of

DATA = list(torch.arange(20.0).reshape(10, 2))


def loss(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(model(batch).square().sum(), len(batch))


class Stream(IterableDataset[Tensor]):
    """Seven samples that draw, in an order that follows from the pass."""

    def __init__(self, rows: range = range(7)) -> None:
        self.rows, self.epoch, self.opened = rows, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(self.rows[index::num_shards])

    def __iter__(self) -> Iterator[Tensor]:
        self.opened += 1
        for row in self.rows:
            yield torch.tensor([float(row + 100 * self.epoch), float(torch.rand(()))])


class Forgets(Stream):
    """Its own generator goes on from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.rand(7, 2, generator=self.generator))


own_recipe = partial(recipe_of, steps=6, batch={"size": 4})


def task_of(data: Any, **more: Any) -> Task:
    return Task(nn.Linear(2, 1), data, loss, **more)


def ready(data: Any, recipe: Recipe | None = None, **more: Any) -> Any:
    return prepare_data(task_of(data, **more), recipe or own_recipe())


def rows(source: Any, indices: Any) -> list[list[float]]:
    return [source[int(i)].tolist() for i in indices]


@pytest.mark.capability("M1")
@pytest.mark.parametrize("shards, first", [(None, [0, 1, 2, 3]), (2, [0, 2, 1, 3])])
def test_a_stream_is_read_by_position_from_anywhere(shards: int | None, first: list[int]) -> None:
    """In parts, the first half of a batch is of the first part, whose own end is its own."""
    recipe = own_recipe(batch={"size": 4} | ({"shards": shards} if shards else {}))
    task = ready(Stream(), recipe)
    order = build_order(recipe, task)
    whole = [rows(task.data, order.batch(step)) for step in range(6)]
    assert [row[0] for row in whole[0]] == first
    assert {row[0] % 100 for step in whole for row in step} == set(range(7)), "every sample came"
    assert max(row[0] for step in whole for row in step) >= 300, "and passes know their number"
    for step in (4, 1, 3, 0, 5):
        other = ready(Stream(), recipe)
        assert rows(other.data, order.batch(step, range(2, 4))) == whole[step][2:]
        assert rows(task.data, order.batch(step)) == whole[step], "also where the reader has to go back"


@pytest.mark.capability("M1")
def test_a_reader_of_one_part_opens_that_part_only_and_none_twice() -> None:
    opened: list[int] = []

    class Told(Stream):
        def shard(self, num_shards: int, index: int) -> Stream:
            opened.append(index)
            return super().shard(num_shards, index)

    task = ready(Told(), own_recipe(batch={"size": 4, "shards": 2}))
    for step in range(3):
        rows(task.data, build_order(own_recipe(), task).batch(step, range(2, 4)))
    assert opened == [1]
    whole = Stream()
    task = ready(whole)
    rows(task.data, range(7))
    assert whole.opened == 2, "seven samples are a batch of four and one that begins the second pass"


@pytest.mark.capability("M1")
@pytest.mark.parametrize(
    "data, changes, more, says",
    [
        (Stream(), {"steps": None, "epochs": 1}, {}, "nobody knows the length"),
        (Stream(), {"loader": {"workers": 1}}, {}, "loader.workers does not go"),
        (Stream(), {"loader": {"cache_bytes": 9}}, {}, "no position comes twice"),
        (Stream(), {}, {"sampler": SequentialSampler(DATA)}, "keeps its own order"),
        (DATA, {}, {"held_out": Stream()}, "evaluate.max_samples"),
        ((row for row in DATA), {}, {}, "read only once"),
        (7, {}, {}, "lacks __iter__"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_by_name(data: Any, changes: Any, more: Any, says: str) -> None:
    with pytest.raises(PacelineError, match=says) as found:
        ready(data, own_recipe(**changes), **more)
    assert isinstance(found.value, (DataError, RecipeError, TaskError)) and found.value.next_step


@pytest.mark.capability("M1")
def test_a_stream_that_forgets_or_is_empty_is_refused() -> None:
    assert ready(Stream()).order.fingerprint() == ready(Stream()).order.fingerprint()
    with pytest.raises(DataError, match="another first sample"):
        ready(Forgets()).order.fingerprint()
    with pytest.raises(DataError, match="empty"):
        ready(Stream(range(0))).data[0]


def test_a_held_out_stream_is_kept_in_memory_as_far_as_the_recipe_says() -> None:
    task = ready(DATA, own_recipe(evaluate={"max_samples": 5}), held_out={"a": Stream(), "b": DATA})
    assert len(task.held_out["a"]) == 5 and task.held_out["b"] is DATA


class Halves(Sampler[int]):
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter((torch.randperm(5) * 2).tolist())


class Counting(Halves):
    calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter([self.calls % 5] * 5)


@pytest.mark.capability("M1")
def test_a_sampler_orders_epochs_and_any_step_can_be_asked_for() -> None:
    recipe = own_recipe(batch={"size": 2})
    order = build_order(recipe, ready(DATA, recipe, sampler=Halves()))
    assert order.steps_per_epoch == 3 and [order.batch_size(step) for step in range(3)] == [2, 2, 1]
    epochs = [np.concatenate([order.batch(3 * e + k) for k in range(3)]).tolist() for e in range(3)]
    assert all(sorted(epoch) == [0, 2, 4, 6, 8] for epoch in epochs) and epochs[0] != epochs[1]
    again = build_order(recipe, ready(DATA, recipe, sampler=Halves()))
    assert again.batch(7, range(1, 2)).tolist() == epochs[2][3:4], "from the middle of the third epoch"
    other = own_recipe(batch={"size": 2}, seed=2)
    assert build_order(other, ready(DATA, other, sampler=Halves())).fingerprint() != order.fingerprint()
    assert "Halves" in order.about


@pytest.mark.capability("M1")
@pytest.mark.parametrize(
    "sampler, says",
    [
        (DistributedSampler(DATA, 2, 0), "divides samples among ranks"),
        (BatchSampler(Halves(), 2, False), "yields batches"),
        (RandomSampler(DATA, generator=torch.Generator()), "generator of its own"),
        (Counting(), "another order"),
        (SubsetRandomSampler(range(5, 15)), "index 14"),
        (iter([1]), "lacks __len__"),
    ],
)
def test_a_sampler_that_has_no_meaning_here_is_refused_by_name(sampler: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as found:
        ready(DATA, sampler=sampler)
    assert found.value.next_step


@pytest.mark.capability("M1")
def test_a_loader_gives_its_data_its_collate_function_and_its_sampler() -> None:
    def stack(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) * 2

    task = ready(DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=stack, pin_memory=False))
    assert task.data is DATA and task.collate is stack and task.order is None
    weighted = WeightedRandomSampler([1.0] * 9 + [0.0], 8)
    task = ready(DataLoader(DATA, batch_size=4, sampler=weighted))
    assert build_order(own_recipe(), task).steps_per_epoch == 2 and task.collate is None
    keeps = own_recipe(batch={"size": 4, "shuffle": False})
    assert ready(DataLoader(DATA, batch_size=4), keeps).order is None
    assert len(ready(DataLoader(Stream(), batch_size=4)).data) == 4


@pytest.mark.capability("M1")
@pytest.mark.parametrize(
    "changes, says",
    [
        ({"batch_size": 8}, "batch_size is 8, and batch.size = 4"),
        ({"shuffle": False}, "shuffle is False, and batch.shuffle = True"),
        ({"drop_last": True}, "drop_last is True"),
        ({"num_workers": 2}, "num_workers is 2, and loader.workers = 0"),
        ({"generator": torch.Generator()}, "generator: the run's seed"),
        ({"worker_init_fn": print}, "worker_init_fn"),
        ({"num_workers": 1, "multiprocessing_context": "fork"}, "multiprocessing_context"),
        ({"num_workers": 1, "timeout": 3}, "timeout: a batch may take"),
        ({"num_workers": 1, "prefetch_factor": 5}, "prefetch_factor is 5"),
    ],
)
def test_what_a_loader_says_otherwise_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError) as found:
        ready(DataLoader(DATA, **({"batch_size": 4, "shuffle": True} | changes)))
    assert says in str(found.value)


SHARDS, STEPS = 4, 5


class FromFiles(IterableDataset[Tensor]):
    """A number a line; `shard` deals whole files."""

    def __init__(self, paths: list[Path], opened: set[str]) -> None:
        self.paths, self.opened = paths, opened

    def shard(self, num_shards: int, index: int) -> FromFiles:
        return FromFiles(self.paths[index::num_shards], self.opened)

    def __iter__(self) -> Iterator[Tensor]:
        for path in self.paths:
            self.opened.add(path.name)
            yield from (torch.tensor([float(line)]) for line in path.read_text().split())


@pytest.mark.capability("M1")
def test_ranks_read_files_of_their_own_and_every_number_of_ranks_sees_the_same_samples(
    tmp_path: Path,
) -> None:
    paths = [tmp_path / f"{k}.txt" for k in range(8)]
    for k, path in enumerate(paths):
        path.write_text("\n".join(str(100 * k + i) for i in range(5)))
    recipe = Recipe(task="own", steps=STEPS, batch={"size": 8, "shards": SHARDS})
    seen = {}
    for ranks in (1, 2, 4):
        steps: list[list[float]] = [[] for _ in range(STEPS)]
        opened: list[set[str]] = []
        for rank in range(ranks):
            opened.append(set())
            task = prepare_data(Task(nn.Linear(1, 1), FromFiles(paths, opened[-1]), loss), recipe)
            shards = split_evenly(SHARDS, ranks, rank)
            places = range(2 * shards.start, 2 * shards.stop)
            for step in range(STEPS):
                indices = build_order(recipe, task).batch(step, places)
                steps[step] += [float(task.data[int(i)]) for i in indices]
        assert set.union(*opened) == {path.name for path in paths}, "complete"
        assert sum(map(len, opened)) == len(paths), "disjoint"
        seen[ranks] = steps
    assert seen[1] == seen[2] == seen[4]
    assert len({value for step in seen[1] for value in step}) == 40, (
        "five steps of eight are all samples, once"
    )


def evaluated_loss(held_out: Any, **changes: Any) -> float:
    recipe = recipe_of(steps=1, batch={"size": 4, "shuffle": False}, **changes)
    result = paceline.train(recipe, lambda: task_of(DATA, held_out=held_out))
    assert result.evaluation is not None and result.evaluation.num_samples == 10
    return result.evaluation.loss


@pytest.mark.capability("M1")
def test_a_held_out_loader_is_unpacked_as_that_of_the_training_data_is() -> None:
    """Batches used to count as samples: the held-out loss was as many times too large."""

    def doubled(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) * 2

    plain = evaluated_loss(DATA)
    batches_of_five = {"batch": 5}
    assert evaluated_loss(DataLoader(DATA, batch_size=5), evaluate=batches_of_five) == pytest.approx(plain)
    loaders = {"a": DataLoader(DATA, batch_size=5, shuffle=True, collate_fn=doubled), "b": DATA}
    assert evaluated_loss(loaders, evaluate=batches_of_five) > 2 * plain, "with its own collate function"
    subset = DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler([7, 2]))
    samples = ready(DATA, recipe_of(evaluate={"batch": 4}), held_out=subset).held_out
    assert rows(samples, range(2)) == rows(DATA, [7, 2])
    stream = DataLoader(Stream(), batch_size=4)
    assert len(ready(DATA, recipe_of(evaluate={"batch": 4, "max_samples": 3}), held_out=stream).held_out) == 3


@pytest.mark.capability("M1")
@pytest.mark.parametrize(
    "loader, says",
    [
        (DataLoader(DATA, batch_size=8), "batch_size is 8, and evaluate.batch = 4"),
        (DataLoader(DATA, batch_size=4, drop_last=True), "drop_last is True"),
        (DataLoader(DATA, batch_size=4, num_workers=2), "num_workers is 2, and loader.workers = 0"),
        (DataLoader(DATA, batch_size=4, shuffle=True), "takes the first samples"),
        (DataLoader(DATA, batch_size=4, sampler=Halves()), "sampler (Halves): every held-out sample"),
        (DataLoader(Stream(), batch_size=4), "is a stream"),
    ],
)
def test_a_held_out_loader_that_contradicts_the_recipe_is_refused_by_name(loader: Any, says: str) -> None:
    kept = {} if "stream" in says else {"max_samples": 3}
    with pytest.raises((DataError, RecipeError)) as found:
        ready(DATA, recipe_of(evaluate={"batch": 4} | kept), held_out=loader)
    assert says in str(found.value) and found.value.next_step
