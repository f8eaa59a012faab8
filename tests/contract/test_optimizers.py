"""Optimizers that need whole tensors keep their contract: a scalar reference, under every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from paceline.job.cluster import Cluster
from paceline.optim import SlotOptimizer, slot_norms
from paceline.testing import run_ranks
from paceline.testing.contracts import OptimizerContract
from paceline.testing.contracts.optimizer_contract import norm_of, rows_of
from paceline.testing.planted_faults import PLANTED_FAULTS

Matrix = list[list[float]]


@pytest.mark.capability("J4", "Z1", "Z2")
class TestLamb(OptimizerContract):
    options: ClassVar[Mapping[str, Any]] = {"name": "lamb", "lr": 0.05, "weight_decay": 0.1}

    def reference(self, name: str, shape: Any, weights: Any, grads: Any, state: Any, update: int) -> Any:
        """Algorithm 2 of the paper, value by value."""
        m, v = state.setdefault("m", [0.0] * len(grads)), state.setdefault("v", [0.0] * len(grads))
        is_matrix = len(shape) > 1
        u = []
        for i, g in enumerate(grads):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            mean, square = m[i] / (1 - 0.9**update), v[i] / (1 - 0.999**update)
            u.append(mean / (square**0.5 + 1e-6) + (0.1 * weights[i] if is_matrix else 0.0))
        ratio = norm_of(weights) / norm_of(u) if is_matrix else 1.0
        return [w - 0.05 * ratio * x for w, x in zip(weights, u, strict=True)]

    def test_the_norm_of_each_part_fails(self, right: dict[str, Tensor]) -> None:
        """The mutation twin: the form of libraries that are not aware of shards."""
        components = PLANTED_FAULTS["norm-per-shard"].components(2)

        def ends(cluster: Cluster) -> list[Any]:
            layouts = ("replicas=1 shard=2 zero=1", "replicas=1 tensor=2")
            return [self.train(cluster, layout, components) for layout in layouts]

        for found in run_ranks(ends, 2):
            assert all(self.distance(end, right) > 1e-3 for end in found)


@pytest.mark.capability("J5", "Z1", "Z2")
class TestLars(OptimizerContract):
    options: ClassVar[Mapping[str, Any]] = {
        "name": "lars",
        "lr": 0.5,
        "momentum": 0.8,
        "weight_decay": 0.1,
        "trust_coefficient": 0.02,
        "exclude": ["one-dimensional"],
    }

    def reference(self, name: str, shape: Any, weights: Any, grads: Any, state: Any, update: int) -> Any:
        """Algorithm 1 of the paper, value by value."""
        v = state.setdefault("v", [0.0] * len(grads))
        decay, ratio = 0.0, 1.0
        if len(shape) > 1:
            decay = 0.1
            ratio = 0.02 * norm_of(weights) / (norm_of(grads) + decay * norm_of(weights))
        for i, (g, w) in enumerate(zip(grads, weights, strict=True)):
            v[i] = 0.8 * v[i] + 0.5 * ratio * (g + decay * w)
        return [w - x for w, x in zip(weights, v, strict=True)]


@pytest.mark.capability("A11", "J13", "Z1", "Z2")
class TestAdafactor(OptimizerContract):
    options: ClassVar[Mapping[str, Any]] = {"name": "adafactor", "lr": 0.05, "weight_decay": 0.1}
    reproducible: ClassVar[bool] = False

    def reference(self, name: str, shape: Any, weights: Any, grads: Any, state: Any, update: int) -> Any:
        """Algorithms 4 and 5, with means instead of sums and epsilons where PyTorch has them."""
        eps, share = torch.finfo(torch.float64).eps, update**-0.8
        if len(shape) > 1:
            squares = [[g * g for g in row] for row in rows_of(shape, grads)]
            rows = [sum(row) / len(row) for row in squares]
            columns = [sum(column) / len(column) for column in zip(*squares, strict=True)]
            r, c = state.setdefault("r", [0.0] * len(rows)), state.setdefault("c", [0.0] * len(columns))
            r[:] = [old + share * (new - old) for old, new in zip(r, rows, strict=True)]
            c[:] = [old + share * (new - old) for old, new in zip(c, columns, strict=True)]
            mean = max(eps, sum(r) / len(r))
            estimate = [a * b / mean for a in r for b in c]
        else:
            v = state.setdefault("v", [0.0] * len(grads))
            v[:] = [old + share * (g * g - old) for old, g in zip(v, grads, strict=True)]
            estimate = v
        u = [g / max(eps * eps, e) ** 0.5 for g, e in zip(grads, estimate, strict=True)]
        size = len(grads) ** 0.5
        rate = min(0.05, update**-0.5) * max(1e-3, norm_of(weights) / size)
        clip = max(1.0, norm_of(u) / size)
        decay = 1 - 0.05 * 0.1 if len(shape) > 1 else 1.0
        return [w * decay - rate / clip * x for w, x in zip(weights, u, strict=True)]


@pytest.mark.capability("A11", "J13", "Z1", "Z2")
class TestMuon(OptimizerContract):
    options: ClassVar[Mapping[str, Any]] = {"name": "muon", "lr": 0.05, "weight_decay": 0.1}

    def reference(self, name: str, shape: Any, weights: Any, grads: Any, state: Any, update: int) -> Any:
        """Newton-Schulz on lists of lists for matrices, and AdamW for the rest."""
        m, v = state.setdefault("m", [0.0] * len(grads)), state.setdefault("v", [0.0] * len(grads))
        if len(shape) == 1:
            for i, g in enumerate(grads):
                m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            means = [x / (1 - 0.9**update) for x in m]
            roots = [(x / (1 - 0.999**update)) ** 0.5 + 1e-8 for x in v]
            return [w - 0.05 * a / b for w, a, b in zip(weights, means, roots, strict=True)]
        m[:] = [0.95 * old + 0.05 * g for old, g in zip(m, grads, strict=True)]
        ahead = [0.05 * g + 0.95 * x for g, x in zip(grads, m, strict=True)]
        orthogonal = [x for row in newton_schulz(rows_of(shape, ahead)) for x in row]
        rate = 0.05 * 0.2 * max(shape) ** 0.5
        return [w * (1 - 0.05 * 0.1) - rate * x for w, x in zip(weights, orthogonal, strict=True)]


def product(a: Matrix, b: Matrix) -> Matrix:
    return [
        [sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a
    ]


def transposed(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def newton_schulz(a: Matrix) -> Matrix:
    is_tall = len(a) > len(a[0])
    x = transposed(a) if is_tall else a
    length = max(1e-7, norm_of([value for row in x for value in row]))
    x = [[value / length for value in row] for row in x]
    for _ in range(5):
        gram = product(x, transposed(x))
        square = product(gram, gram)
        inner = [
            [-4.775 * g + 2.0315 * s for g, s in zip(*rows, strict=True)]
            for rows in zip(gram, square, strict=True)
        ]
        change = product(inner, x)
        x = [[3.4445 * p + q for p, q in zip(*rows, strict=True)] for rows in zip(x, change, strict=True)]
    return transposed(x) if is_tall else x


class NormalisedSGD(SlotOptimizer):
    """A user's own optimizer: the gradient of a tensor by its norm."""

    is_ordered = True

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def update_tensors(self) -> None:
        group = self.slot_group
        grads = {
            group.slots[p]: p.grad
            for options in self.param_groups
            for p in options["params"]
            if p.grad is not None
        }
        (norms,) = slot_norms([grads], group)
        for options in self.param_groups:
            for p in options["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norms[group.slots[p]], alpha=options["lr"])


@pytest.mark.capability("J13", "Z1", "Z2")
class TestOptimizerOfAUser(OptimizerContract):
    build = staticmethod(lambda model: NormalisedSGD(model.parameters()))

    def reference(
        self,
        name: str,
        shape: Any,
        weights: Sequence[float],
        grads: Sequence[float],
        state: Any,
        update: int,
    ) -> list[float]:
        length = norm_of(grads)
        return [w - 0.05 * g / length for w, g in zip(weights, grads, strict=True)]


@pytest.mark.capability("J18", "Z1", "Z2")
class TestAdamToSGD(OptimizerContract):
    """The tests of resuming stop after three updates, so that the switch is the first update after it."""

    options: ClassVar[Mapping[str, Any]] = {
        "name": "adam_to_sgd",
        "lr": 0.05,
        "l2": 0.1,
        "switch_update": 3,
    }

    def reference(self, name: str, shape: Any, weights: Any, grads: Any, state: Any, update: int) -> Any:
        """Adam for three updates, then SGD with the momentum and the length of the step of Adam."""
        m, v = state.setdefault("m", [0.0] * len(grads)), state.setdefault("v", [0.0] * len(grads))
        if len(shape) > 1:
            grads = [g + 0.1 * w for g, w in zip(grads, weights, strict=True)]
        if update == 4:
            b = state["b"] = [x / (1 - 0.9) for x in m]
            inner = sum(x * y for x, y in zip(state["p"], b, strict=True))
            state["r"] = sum(x * x for x in state["p"]) / inner
        if update > 3:
            b = state["b"] = [0.9 * x + g for x, g in zip(state["b"], grads, strict=True)]
            return [w - 0.05 * state["r"] * x for w, x in zip(weights, b, strict=True)]
        p = state["p"] = []
        for i, g in enumerate(grads):
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            p.append(m[i] / (1 - 0.9**update) / ((v[i] / (1 - 0.999**update)) ** 0.5 + 1e-8))
        return [w - 0.05 * x for w, x in zip(weights, p, strict=True)]
