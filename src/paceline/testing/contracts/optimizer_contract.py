"""The contract of an optimizer: what a scalar reference computes, under every layout and number of ranks.

The reference is arithmetic on Python floats, one tensor at a time, written from the paper and without a
library. The gradients that it gets are those of one process over whole batches, in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import Components
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.task import Loss, Task
from paceline.testing.parity import CPU, build_test_session
from paceline.testing.rank_processes import run_ranks
from paceline.verification.verification_report import VerificationReport, conclusion_lines
from paceline.verification.verify_on_rank import compare_with_oracle

_STEPS, _SIZE = 6, 12
_LAYOUTS: Mapping[int, Sequence[str]] = {
    1: ("replicas=1",),
    2: (
        "replicas=2",
        "replicas=1 shard=2 zero=1",
        "replicas=1 shard=2 zero=3",
        "replicas=1 tensor=2",
        "replicas=1 pipeline=2",
    ),
    3: ("replicas=1 shard=3 zero=2", "replicas=1 tensor=3"),
    4: (
        "replicas=2 shard=2 zero=1",
        "replicas=1 shard=2 zero=3 tensor=2",
        "replicas=1 tensor=2 pipeline=2",
        "replicas=1 shard=2 zero=1 pipeline=2",
    ),
}


class OptimizerContract(ABC):
    """Tests of an optimizer, by name or of a task.

    Attributes:
        options: the table [optimizer] of the recipe; a task's own optimizer has none.
        build: a function of the model that returns the task's own optimizer (a `staticmethod`).
        layouts: strategies by their number of ranks. Rows of odd lengths are split unevenly, and a rank can
            be without a part of a tensor.
        refused: those of them that have to be refused by name instead, a StrategyError.
        tolerance: largest difference of a parameter from the reference at the end.
        reproducible: the optimizer gives the same bits under another layout if the run is reproducible.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    layouts: ClassVar[Mapping[int, Sequence[str]]] = _LAYOUTS
    refused: ClassVar[Sequence[str]] = ()
    tolerance: ClassVar[float] = 1e-9
    reproducible: ClassVar[bool] = True

    build: ClassVar[Callable[[nn.Module], torch.optim.Optimizer] | None] = None

    @abstractmethod
    def reference(
        self,
        name: str,
        shape: tuple[int, ...],
        weights: Sequence[float],
        grads: Sequence[float],
        state: dict[str, Any],
        update: int,
    ) -> list[float]:
        """Return the values of a whole tensor after an update.

        Args:
            name, shape: of the tensor. The model has matrices "0.weight" [9, 7], "3.weight" [10, 9] and
                "4.weight" [1, 10], their biases, and a LayerNorm "1" of width 9.
            weights, grads: its values and its gradient before the update, in the order of memory.
            state: of this tensor, empty at the first update; it may be changed.
            update: number of the update, from 1.
        """

    def task(self) -> Task:
        """Return the task: a small model in float64, split over tensor ranks by column and by row."""
        torch.manual_seed(4)
        model = nn.Sequential(
            nn.Linear(7, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 10), nn.Linear(10, 1), nn.Flatten(0)
        ).double()
        x = torch.randn(_SIZE * _STEPS, 7, dtype=torch.float64)

        def loss(model: nn.Module, batch: Tensor) -> Loss:
            return Loss((model(batch) - batch.square().sum(1)).square().sum(), len(batch))

        return Task(model, list(x), loss, tensor={"3": "column", "4": "row"}, optimizer=type(self).build)

    def recipe(self, strategy: str, **settings: Any) -> Recipe:
        """Return the recipe of a run."""
        values: dict[str, Any] = {
            "task": "own",
            "steps": _STEPS,
            "batch": {"size": _SIZE, "shards": 4, "shuffle": False},
            "optimizer": dict(self.options),
        }
        return Recipe(**values | settings, strategy=Strategy.parse(strategy))

    def train(
        self, cluster: Cluster, strategy: str, components: Components | None = None, **settings: Any
    ) -> dict[str, Tensor] | str:
        """Train as one rank; return the whole state at the end, or the text of a refusal."""
        try:
            session = build_test_session(cluster, self.recipe(strategy, **settings), self.task, components)
        except StrategyError as error:
            return error.what
        list(session.rounds())
        whole = {name: t.clone() for name, t in session.snapshot().tensors().items()}
        session.close()
        return whole

    def reference_end(self) -> dict[str, Tensor]:
        """Return the parameters after all updates of the reference."""
        made, states = self.task(), dict[str, dict[str, Any]]()
        for step in range(_STEPS):
            loss = made.loss(made.model, torch.stack(list(made.data[_SIZE * step : _SIZE * (step + 1)])))
            made.model.zero_grad()
            (loss.total / loss.count).backward()
            for name, p in made.model.named_parameters():
                assert p.grad is not None
                flat = self.reference(
                    name,
                    tuple(p.shape),
                    p.detach().reshape(-1).tolist(),
                    p.grad.reshape(-1).tolist(),
                    states.setdefault(name, {}),
                    step + 1,
                )
                with torch.no_grad():
                    p.copy_(torch.tensor(flat, dtype=torch.float64).view(p.shape))
        return {f"model/{name}": p.detach() for name, p in made.model.named_parameters()}

    def distance(self, end: dict[str, Tensor] | str, right: Mapping[str, Tensor]) -> float:
        """Return the largest difference of a parameter."""
        assert not isinstance(end, str), end
        return max(float((end[name] - value).abs().max()) for name, value in right.items())

    @pytest.fixture(scope="class")
    @classmethod
    def right(cls) -> dict[str, Tensor]:
        """The parameters at the end of the reference, computed once."""
        return cls().reference_end()

    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    def test_it_ends_where_the_scalar_reference_ends(self, num_ranks: int, right: dict[str, Tensor]) -> None:
        def ends(cluster: Cluster) -> dict[str, dict[str, Tensor] | str]:
            return {strategy: self.train(cluster, strategy) for strategy in self.layouts[num_ranks]}

        for found in run_ranks(ends, num_ranks):
            for strategy, end in found.items():
                if strategy in self.refused:
                    assert isinstance(end, str), strategy
                else:
                    assert self.distance(end, right) <= self.tolerance, strategy

    def test_it_moves_every_parameter(self, right: dict[str, Tensor]) -> None:
        before = self.task().model.state_dict()
        assert all(not torch.equal(before[name.removeprefix("model/")], p) for name, p in right.items())

    @pytest.mark.parametrize("num_ranks", [2, 4])
    def test_it_resumes_under_another_layout(self, num_ranks: int) -> None:
        """From every layout to the next one: the state arrives to the bit, and a step ends in the same
        place.
        """
        strategies = [text for text in self.layouts[num_ranks] if text not in self.refused]

        def stopped(cluster: Cluster) -> list[tuple[float, float]]:
            distances = []
            for before, after in zip(strategies, [*strategies[1:], strategies[0]], strict=True):
                first = build_test_session(cluster, self.recipe(before), self.task)
                for _ in zip(range(3), first.rounds(), strict=False):
                    pass
                snapshot = first.snapshot()
                saved = {name: t.detach().clone() for name, t in snapshot.tensors().items()}
                second = build_test_session(cluster, self.recipe(after), self.task)
                second.restore({**saved}, snapshot.scalars())
                loaded = second.snapshot().tensors()
                assert loaded.keys() == saved.keys()
                moved = max(float((loaded[n] - saved[n]).abs().max()) for n in saved if saved[n].numel())
                list(second.rounds())
                end = {n: t.clone() for n, t in second.snapshot().tensors().items()}
                right = self.train(cluster, before)
                assert isinstance(right, dict)
                parameters = {n: t for n, t in right.items() if n.startswith("model/")}
                distances.append((moved, self.distance(end, parameters)))
                first.close()
                second.close()
            return distances

        for distances in run_ranks(stopped, num_ranks):
            assert all(moved == 0.0 and end <= self.tolerance for moved, end in distances), distances

    def test_a_reproducible_run_has_the_same_bits_in_parts(self) -> None:
        strategies = ("replicas=2", "replicas=1 shard=2 zero=1", "replicas=1 shard=2 zero=2")
        runs = [text for text in strategies if text not in self.refused]

        def ends(cluster: Cluster) -> list[dict[str, Tensor] | str]:
            return [self.train(cluster, strategy, reproducible=True) for strategy in runs]

        first, *others = run_ranks(ends, 2)[0]
        if not self.reproducible:
            assert all(str(end).startswith("reproducible = true, but") for end in others)
            return
        for end in (first, *others):
            # A refusal is a text.
            assert isinstance(first, dict) and isinstance(end, dict), (first, end)
            assert all(torch.equal(end[name], value) for name, value in first.items())

    @pytest.mark.parametrize("num_ranks", [2, 4])
    def test_verify_confirms_every_step(self, num_ranks: int) -> None:
        strategies = [text for text in self.layouts[num_ranks] if text not in self.refused]

        def verify(cluster: Cluster) -> list[VerificationReport]:
            return [
                compare_with_oracle(self.recipe(strategy), self.task(), cluster, CPU, 4)
                for strategy in strategies
            ]

        for reports in run_ranks(verify, num_ranks):
            for strategy, report in zip(strategies, reports, strict=True):
                assert report.ok and report.steps == 4, (strategy, conclusion_lines(report))


def norm_of(values: Sequence[float]) -> float:
    """Return the Euclidean norm of Python floats, for references."""
    return sum(value * value for value in values) ** 0.5


def rows_of(shape: tuple[int, ...], values: Sequence[float]) -> list[list[float]]:
    """Return the rows of a matrix, for references."""
    width = prod(shape[1:])
    return [list(values[i * width : (i + 1) * width]) for i in range(shape[0])]
