"""Two buckets are scattered at a time, and their sums lie in the buckets."""

from __future__ import annotations

import weakref
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paceline.comm import Collective, Handle
from paceline.comm.reduction import ScatterWindow
from paceline.comm.workspace import Workspace
from paceline.job.mesh import RankGroup

pytestmark = pytest.mark.capability("L4", "A11")


class Path:
    """Of rank 0 of two, of which the other has the same; what a sum needs is there once somebody waits."""

    def __init__(self, *, takes_own: bool = False) -> None:
        self.group, self.waited, self._takes_own = RankGroup("shard", (0, 1), 0), list[str](), takes_own
        self.found: list[weakref.ref[Tensor]] = []

    def reduce_scatter(self, x: Tensor, key: str, arriving: Any = None) -> Handle:
        out = torch.empty(x.shape[1]) if self._takes_own else arriving()[0]

        def resolve(deadline_seconds: float | None, exposed: bool) -> Tensor:
            self.waited.append(key)
            found = torch.mul(x[0], 2.0, out=out)
            self.found.append(weakref.ref(found))
            return found

        return Handle(resolve)


def scattered(path: Path, turns: ScatterWindow, number: int) -> tuple[Tensor, Handle]:
    rows = torch.full((2, 3), float(number + 1))
    return rows, turns.scatter(cast(Collective, path), rows, f"{number}")


def test_a_third_waits_for_the_first_and_all_sums_lie_in_their_buckets() -> None:
    path, memory = Path(), Workspace()
    turns = ScatterWindow(memory)
    for _ in range(3):
        turns.expect(6, torch.zeros(1), cast(Collective, path))
    assert memory.num_bytes == 2 * 3 * 4
    launched = []
    for number in range(4):
        launched.append(scattered(path, turns, number))
        assert path.waited == [str(k) for k in range(number - 1)]
    for number, (rows, handle) in enumerate(launched):
        own = handle.wait()
        assert own.data_ptr() == rows[0].data_ptr() and rows[0].tolist() == [2.0 * (number + 1)] * 3
    assert path.waited == ["0", "1", "2", "3"] and memory.num_bytes == 2 * 3 * 4


def test_who_aborts_first_takes_nothing_from_others() -> None:
    """Several reductions have the same turns."""
    path, turns = Path(), ScatterWindow(Workspace())
    (_, mine), (rows, other) = scattered(path, turns, 0), scattered(path, turns, 1)
    mine.wait()
    turns.abort()
    assert other.wait().tolist() == rows[0].tolist() == [4.0] * 3
    for number in range(2, 5):
        scattered(path, turns, number)
    assert path.waited == ["0", "1", "2"]


def test_what_a_path_has_taken_for_itself_goes_once_the_sum_lies_in_the_bucket() -> None:
    path, turns = Path(takes_own=True), ScatterWindow(Workspace())
    handles = [scattered(path, turns, number)[1].then(lambda own: own) for number in range(5)]
    assert len(path.found) == 3 and not any(found() is not None for found in path.found)
    assert [float(handle.wait()[0]) for handle in handles] == [2.0, 4.0, 6.0, 8.0, 10.0]
