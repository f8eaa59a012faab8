"""K-FAC: a reference on Python floats, on 1 to 4 ranks; forms without sums over ranks fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.optim import KFac
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.contracts import OptimizerContract
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import VerificationReport, compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.marks import soak_param
from tests.recipes import recipe_of

STEPS, SIZE = 6, 12
LR, MOMENTUM, DECAY, DAMPING, KEPT, KL_CLIP = 0.05, 0.8, 0.1, 0.01, 0.9, 0.02
UNEVEN = {"size": SIZE, "shards": 5, "shuffle": False}
SUM_OF_CLASS = KFac.sum_over_ranks
Matrix = list[list[float]]


def mean_of_products(rows: Matrix) -> Matrix:
    return [
        [sum(r[i] * r[j] for r in rows) / len(rows) for j in range(len(rows[0]))] for i in range(len(rows[0]))
    ]


def inverse(matrix: Matrix) -> Matrix:
    """Gauss and Jordan, with the largest pivot of a column."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for i in range(size):
        best = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[best] = rows[best], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for k in range(size):
            if k != i:
                rows[k] = [x - rows[k][i] * y for x, y in zip(rows[k], rows[i], strict=True)]
    return [row[size:] for row in rows]


def product(a: Matrix, b: Matrix) -> Matrix:
    return [
        [sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a
    ]


def damped_inverses(a: Matrix, g: Matrix) -> tuple[Matrix, Matrix]:
    means = [sum(m[i][i] for i in range(len(m))) / len(m) for m in (a, g)]
    ratio = (means[0] / means[1]) ** 0.5
    shares = (DAMPING**0.5 * ratio, DAMPING**0.5 / ratio)
    damped = [
        [[x + share * (i == j) for j, x in enumerate(row)] for i, row in enumerate(m)]
        for m, share in zip((a, g), shares, strict=True)
    ]
    return inverse(damped[0]), inverse(damped[1])


@pytest.mark.capability("J6", "Z1", "Z2")
class TestKFac(OptimizerContract):
    options: ClassVar[Mapping[str, Any]] = {
        "name": "kfac",
        "lr": LR,
        "momentum": MOMENTUM,
        "weight_decay": DECAY,
        "damping": DAMPING,
        "factor_decay": KEPT,
        "factor_interval": 2,
        "inverse_interval": 3,
        "kl_clip": KL_CLIP,
    }
    layouts: ClassVar[Mapping[int, Sequence[str]]] = {
        1: ("replicas=1",),
        2: (
            "replicas=2",
            "replicas=1 shard=2 zero=1",
            "replicas=1 shard=2 zero=3",
            "replicas=1 tensor=2",
            "replicas=1 pipeline=2",
        ),
        3: ("replicas=3", "replicas=1 shard=3 zero=2"),
        4: ("replicas=4", "replicas=2 shard=2 zero=1", "replicas=1 tensor=2 pipeline=2"),
    }
    refused: ClassVar[Sequence[str]] = (
        "replicas=1 tensor=2",
        "replicas=1 pipeline=2",
        "replicas=1 tensor=2 pipeline=2",
    )
    reproducible: ClassVar[bool] = False

    def reference(self, *arguments: Any) -> list[float]:
        raise AssertionError("a layer needs more than the gradient of a tensor; see reference_end")

    def reference_end(self) -> dict[str, Tensor]:
        """Sample by sample: inputs and output gradients of each layer, and then arithmetic on floats."""
        made, factors, inverses = self.task(), dict[str, list[Matrix]](), dict[str, tuple[Matrix, Matrix]]()
        momenta: dict[str, list[float]] = {}
        clipped = []
        for update in range(STEPS):
            made.model.zero_grad()
            rows = self.rows_of_samples(made, made.data[SIZE * update : SIZE * (update + 1)])
            for name, pair in rows.items():
                if update % 2 == 0:
                    new = [mean_of_products(side) for side in pair]
                    old = factors.get(name)
                    factors[name] = (
                        new if old is None else [mixed(*two) for two in zip(old, new, strict=True)]
                    )
                if update % 3 == 0:
                    inverses[name] = damped_inverses(*factors[name])
            directions: dict[str, Matrix] = {}
            change = 0.0
            for name, (a, g) in inverses.items():
                v = gradient_of(made.model.get_submodule(name))
                directions[name] = product(product(g, v), a)
                change += LR**2 * sum(
                    x * y
                    for pair in zip(directions[name], v, strict=True)
                    for x, y in zip(*pair, strict=True)
                )
            factor = min(1.0, (KL_CLIP / change) ** 0.5)
            clipped.append(factor < 1)
            for name, p in made.model.named_parameters():
                layer, _, kind = name.rpartition(".")
                if layer in directions:
                    d = directions[layer]
                    flat = [x for row in d for x in row[:-1]] if kind == "weight" else [row[-1] for row in d]
                    flat = [factor * x for x in flat]
                else:
                    assert p.grad is not None
                    flat = (p.grad / SIZE).reshape(-1).tolist()
                weights = p.detach().reshape(-1).tolist()
                decay = DECAY if p.dim() > 1 else 0.0
                before = momenta.get(name, [0.0] * len(flat))
                after = [MOMENTUM * m + x + decay * w for m, x, w in zip(before, flat, weights, strict=True)]
                momenta[name] = after
                moved = [w - LR * m for w, m in zip(weights, after, strict=True)]
                with torch.no_grad():
                    p.copy_(torch.tensor(moved, dtype=torch.float64).view(p.shape))
        assert {*clipped} == {True, False}, clipped
        return {f"model/{name}": p.detach() for name, p in made.model.named_parameters()}

    def rows_of_samples(self, made: Task, samples: Sequence[Any]) -> dict[str, tuple[Matrix, Matrix]]:
        """Return inputs and output gradients of each linear layer; gradients add up in the parameters."""
        rows: dict[str, tuple[Matrix, Matrix]] = {}
        for x in samples:
            h, outputs = x[None], dict[str, Tensor]()
            for name, module in made.model.named_children():
                if isinstance(module, nn.Linear):
                    rows.setdefault(name, ([], []))[0].append([*h.detach()[0].tolist(), 1.0])
                    h = outputs[name] = module(h)
                    h.retain_grad()
                else:
                    h = module(h)
            made.loss(lambda batch, end=h: end, x[None]).total.backward()
            for name, output in outputs.items():
                assert output.grad is not None
                rows[name][1].append(output.grad[0].tolist())
        return rows

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_micro_batches_of_unequal_sizes_change_nothing(
        self, num_ranks: int, right: dict[str, Tensor]
    ) -> None:
        def ends(cluster: Cluster) -> dict[str, Tensor] | str:
            return self.train(cluster, f"replicas={num_ranks}", batch=UNEVEN)

        for end in run_ranks(ends, num_ranks):
            assert self.distance(end, right) <= self.tolerance

    def test_means_of_each_rank_and_factors_without_a_sum_fail(self, right: dict[str, Tensor]) -> None:
        """The mutation twins: the mean over ranks of unequal numbers of samples, and own factors."""

        def ends(cluster: Cluster) -> list[float]:
            distances = []
            for twin in (mean_of_ranks, own_factors):
                with patch.object(KFac, "sum_over_ranks", twin):
                    distances.append(self.distance(self.train(cluster, "replicas=3", batch=UNEVEN), right))
            return distances

        for distances in run_ranks(ends, 3):
            assert min(distances) > 1e-4, distances

    @pytest.mark.parametrize("strategy", ["replicas=2", "replicas=1 shard=2 zero=1"])
    @pytest.mark.parametrize("stop", [soak_param(2), 3])
    def test_a_run_resumes_to_the_bit(self, strategy: str, stop: int) -> None:
        """Between updates of the factors, and between inversions; factors and inverses are in the state."""

        def ends(cluster: Cluster) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            first = build_test_session(cluster, self.recipe(strategy), self.task)
            for _ in zip(range(stop), first.rounds(), strict=False):
                pass
            snapshot = first.snapshot()
            saved, scalars = (
                {n: t.detach().clone() for n, t in snapshot.tensors().items()},
                snapshot.scalars(),
            )
            second = build_test_session(cluster, self.recipe(strategy), self.task)
            second.restore(saved, scalars)
            found = []
            for session in (first, second):
                list(session.rounds())
                found.append({n: t.detach().clone() for n, t in session.snapshot().tensors().items()})
                session.close()
            return found[0], found[1]

        for right, resumed in run_ranks(ends, 2):
            assert sum(name.startswith("optimizer//kfac") for name in right) == 3 * 4
            assert right.keys() == resumed.keys()
            assert all(torch.equal(right[name], resumed[name]) for name in right)

    def test_a_refusal_gives_the_reason(self) -> None:
        def refusal(cluster: Cluster) -> str:
            with pytest.raises(StrategyError) as error:
                build_test_session(cluster, self.recipe("replicas=1 tensor=2"), self.task)
            return str(error.value)

        text = run_ranks(refusal, 2)[0]
        assert "KFac needs whole layers" in text and "tensor: a rank has parts of the layers" in text


def mixed(old: Matrix, new: Matrix) -> Matrix:
    return [
        [KEPT * x + (1 - KEPT) * y for x, y in zip(*rows, strict=True)] for rows in zip(old, new, strict=True)
    ]


def gradient_of(layer: nn.Module) -> Matrix:
    """The mean gradient of a layer, with that of its bias as the last column."""
    weight, bias = layer.weight.grad, layer.bias.grad
    assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
    return [[*row, b] for row, b in zip((weight / SIZE).tolist(), (bias / SIZE).tolist(), strict=True)]


def mean_of_ranks(optimizer: KFac, x: Tensor) -> Tensor:
    num_layers, head = len(optimizer._layers), 2 * len(optimizer._layers)
    if not is_factors(optimizer, x):
        return SUM_OF_CLASS(optimizer, x)
    x = x.clone()
    x[head:] /= float(x[0])
    x[:num_layers] = 1.0
    return SUM_OF_CLASS(optimizer, x)


def own_factors(optimizer: KFac, x: Tensor) -> Tensor:
    return x if is_factors(optimizer, x) else SUM_OF_CLASS(optimizer, x)


def is_factors(optimizer: KFac, x: Tensor) -> bool:
    """Tell sums of factors from inverses, which have no head."""
    triangles = sum(size * (size + 1) // 2 for layer in optimizer._layers for size in layer.sizes)
    return len(x) == triangles + 2 * len(optimizer._layers)


def digits(strategy: str, **settings: Any) -> Recipe:
    values = {"options": {"model": "convnet"}, "optimizer": {"name": "kfac"}} | settings
    return recipe_of(strategy, task="digits", steps=4, batch={"size": 64, "shards": 4}, **values)


@pytest.mark.capability("J6")
@pytest.mark.parametrize("optimizer", [soak_param({"name": "kfac"}), {"name": "kfac", "clip_norm": 0.1}])
def test_verify_confirms_convolutions_in_float32(optimizer: dict[str, Any]) -> None:
    def verify(cluster: Cluster) -> list[VerificationReport]:
        recipes = [
            digits(strategy, optimizer=optimizer) for strategy in ("replicas=2", "replicas=1 shard=2 zero=1")
        ]
        return [compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 4) for recipe in recipes]

    for reports in run_ranks(verify, 2):
        for report in reports:
            assert report.ok and report.steps == 4, conclusion_lines(report)


def steps_to(optimizer: dict[str, Any], seed: int) -> int:
    """Return the number of steps after which the mean loss of 8 steps is below 0.05."""
    recipe = recipe_of(
        task="digits",
        steps=200,
        seed=seed,
        options={"model": "mlp", "hidden": [64, 64]},
        batch={"size": 128, "shards": 1},
        optimizer=optimizer,
    )
    session, losses = build_test_session(Cluster.single(), recipe), list[float]()
    for stats in session.rounds():
        losses.append(stats.loss)
        if len(losses) >= 8 and sum(losses[-8:]) / 8 < 0.05:
            break
    session.close()
    return len(losses)


@pytest.mark.soak
@pytest.mark.capability("J6")
def test_it_takes_fewer_steps_than_sgd_on_digits_over_5_seeds() -> None:
    """SGD at the best of 8 settings of rate and momentum; docs/howto/optimizers.md has the times."""
    sgd = [steps_to({"name": "sgd", "lr": 0.2, "momentum": 0.9}, seed) for seed in range(5)]
    kfac = [steps_to({"name": "kfac"}, seed) for seed in range(5)]
    assert all(ours < 0.7 * theirs for ours, theirs in zip(kfac, sgd, strict=True)), (kfac, sgd)
    assert sum(kfac) < 0.5 * sum(sgd)


def test_recomputed_blocks_and_fp16_scales_change_nothing() -> None:
    """A block that runs again in backward is no second use, and factors do not have the scale of the loss."""

    def build() -> Task:
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

        def loss(model: Any, batch: Tensor) -> Loss:
            x = batch
            for block in model:
                x = block(x)
            return Loss((x - batch.square()).square().sum(), len(batch))

        return Task(blocks, list(torch.randn(48, 6)), loss)

    def end(**settings: Any) -> dict[str, Tensor]:
        optimizer = {"name": "kfac", "inverse_interval": 2}
        session = build_test_session(
            Cluster.single(), recipe_of(steps=6, optimizer=optimizer, **settings), build
        )
        list(session.rounds())
        assert not session.state.optimizer.fallbacks
        return {n: t.clone() for n, t in session.snapshot().tensors().items() if n.startswith("model/")}

    right = end()
    for recompute in ("blocks", "segments"):
        found = end(memory={"recompute": recompute})
        assert all(torch.allclose(found[n], right[n], rtol=0, atol=1e-6) for n in right), recompute
    half = end(precision={"compute": "fp16", "init_scale": 1024.0})
    assert all(torch.allclose(half[n], right[n], rtol=0, atol=0.02) for n in right)
    start = build().model.state_dict()
    assert min(float((right[f"model/{n}"] - start[n]).abs().max()) for n in start) > 0.01
