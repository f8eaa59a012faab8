"""Shards of files: a stream over files is read by the ranks that need them, file by file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from paceline.data import build_order, prepare_data, split_evenly
from paceline.recipe import Recipe
from paceline.task import Loss, Task

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


def loss(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(model(batch).sum(), len(batch))


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
