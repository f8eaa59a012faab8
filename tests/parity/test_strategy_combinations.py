"""Products of cuts on a tiny GPT with tied weights and dropout: every step is that of the oracle.

Each has mutation twins: an exchange that is forgotten, a norm that counts twice, a plan that is not whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from paceline.comm import Gradients, Handle
from paceline.comm.reduction import ScatterReducer, joint_norm
from paceline.job.cluster import Cluster
from paceline.parallel import zero
from paceline.parallel.state_hash import state_sha256
from paceline.recipe import Recipe, Strategy
from paceline.session import Components
from paceline.sync.update import GradientNorm
from paceline.testing import RanksFailed, run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import VerificationReport, compare_with_oracle
from tests.dist.comm.nodes import on_nodes
from tests.marks import soak_param
from tests.parity.training_runs import each_case
from tests.recipes import recipe_of
from tests.texts import SMALL_TEXT

STEPS = 4
PRODUCTS = {
    "replicas=1 shard=2 zero=2": 2,
    "replicas=1 shard=2 zero=3": 2,
    "replicas=1 shard=2 zero=3 route=native": 2,
    "replicas=1 shard=3 zero=2 route=native": 3,
    "replicas=1 tensor=2": 2,
    "replicas=1 pipeline=2 schedule=1f1b": 2,
    "replicas=1 shard=2 zero=1 pipeline=2": 4,
    "replicas=1 shard=2 zero=3 pipeline=2 schedule=1f1b": 4,
    "replicas=1 shard=2 zero=2 pipeline=2 schedule=1f1b": 4,
    "replicas=1 shard=2 zero=3 pipeline=2 route=native": 4,
    "replicas=1 shard=2 zero=2 tensor=2": 4,
    "replicas=2 shard=2 zero=2": 4,
    "replicas=1 tensor=2 pipeline=2": 4,
    "replicas=1 shard=2 zero=1 tensor=2": 4,
    "replicas=1 shard=2 zero=3 tensor=2": 4,
    "replicas=2 shard=2 zero=3": 4,
    "replicas=2 tensor=2": 4,
    "replicas=1 shard=2 zero=3 tensor=2 pipeline=2": 8,
}
SHORT = tuple(PRODUCTS)[:3] + tuple(PRODUCTS)[4:7]
IN_ONE_JOB = {n: [text for text in PRODUCTS if text in SHORT and PRODUCTS[text] == n] for n in (2, 4)}


# Most of its parameters are built without memory; the embedding is the output layer too.
gpt = partial(
    recipe_of,
    task="byte-gpt",
    options={
        "layers": 2,
        "width": 48,
        "heads": 2,
        "context": 16,
        "dropout": 0.1,
        "text": SMALL_TEXT,
        "sample_tokens": 0,
        "train_tokens": 20_000,
        "held_out_tokens": 200,
    },
    steps=12,
    batch={"size": 21, "shards": 4},
    optimizer={"name": "adamw", "lr": 3e-3, "clip_norm": 0.1, "weight_decay": 0.1},
)


def digits(strategy: str) -> Recipe:
    """A dropout lies between the column and the row."""
    return gpt(strategy, task="digits", options={"model": "mlp", "hidden": [48], "dropout": 0.3})


def verify(
    cluster: Cluster, recipe: Recipe, components: Components | None = None, plan: dict[str, str] | None = None
) -> VerificationReport:
    task = make_task(recipe)
    if plan is not None:
        task = replace(task, tensor=plan)
    return compare_with_oracle(recipe, task, cluster, CPU, STEPS, components=components)


def require_ok(ranks: list[list[VerificationReport]], cases: Sequence[Any]) -> None:
    for rank in ranks:
        for case, report in zip(cases, rank, strict=True):
            assert report.ok and report.steps == STEPS, (case, report.failure, report.diagnosis)


@pytest.mark.capability("Z1", "Z2")
@pytest.mark.parametrize("num_ranks", IN_ONE_JOB)
def test_every_step_of_a_gpt_is_that_of_the_oracle(num_ranks: int) -> None:
    strategies = IN_ONE_JOB[num_ranks]
    require_ok(run_ranks(each_case, num_ranks, verify, [[gpt(text)] for text in strategies]), strategies)


@pytest.mark.soak
@pytest.mark.capability("Z1", "Z2")
@pytest.mark.parametrize("strategy", [text for text in PRODUCTS if text not in SHORT])
def test_every_step_is_that_of_the_oracle_under_other_products(strategy: str) -> None:
    require_ok(run_ranks(each_case, PRODUCTS[strategy], verify, [[gpt(strategy)]]), [strategy])


NODES = {
    "replicas=4 route=hierarchical": 4,
    "replicas=2 shard=2 zero=3 route=hierarchical": 4,
    "replicas=2 pipeline=2 route=hierarchical": 4,
    "replicas=2 tensor=2 route=hierarchical": 4,
    "replicas=1 shard=4 zero=3 route=hierarchical": 4,
    "replicas=1 shard=4 zero=1 route=hierarchical": 4,
    "replicas=1 tensor=4 route=hierarchical": 4,
    "replicas=3 route=tree": 3,
    "replicas=1 shard=3 zero=3 route=tree": 3,
    "replicas=1 tensor=3 route=tree": 3,
}


@pytest.mark.capability("Z1", "Z2")
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(text, marks=[pytest.mark.soak] * ("shard=4 zero=3" not in text)) for text in NODES],
)
def test_on_other_routes_it_is_the_same(strategy: str) -> None:
    """Four ranks as if on two nodes, so that the hierarchical route has two levels."""

    def runner(cluster: Cluster) -> VerificationReport:
        there = on_nodes(cluster, 2) if cluster.world_size == 4 else cluster
        return verify(there, gpt(strategy))

    for report in run_ranks(runner, NODES[strategy]):
        assert report.ok, (report.failure, report.diagnosis)


UNEVEN = [
    (f"{two} route=hierarchical", n)
    for two in ("replicas=1 shard=4 zero=3", "replicas=2 shard=2 zero=3")
    for n in (5, 6, 7)
]


@pytest.mark.capability("A11", "Z2")
@pytest.mark.parametrize("cases", [UNEVEN[2:4], soak_param(UNEVEN)], ids=["one of each", "all"])
def test_blocks_are_gathered_along_two_levels_also_by_ranks_with_fewer_micro_batches(
    cases: list[tuple[str, int]],
) -> None:
    """Memory of a host is mapped at first use, which all its ranks come to."""

    def uneven(cluster: Cluster, strategy: str, shards: int) -> VerificationReport:
        return verify(on_nodes(cluster, 2), gpt(strategy, batch={"size": 21, "shards": shards}))

    require_ok(run_ranks(each_case, 4, uneven, cases, deadline=300.0), cases)


CODED = (
    "replicas=4 route=hierarchical codec=topk:0.3",
    "replicas=4 route=hierarchical codec=int8",
    "replicas=2 shard=2 zero=3 route=hierarchical codec=int8",
    "replicas=2 pipeline=2 route=hierarchical codec=topk:0.3",
)


@pytest.mark.soak
@pytest.mark.capability("H8", "Z1")
@pytest.mark.parametrize("strategy", CODED)
def test_coding_between_nodes_learns_and_goes_on_from_a_snapshot(strategy: str) -> None:
    recipe = gpt(strategy, steps=30, optimizer={"name": "adamw", "lr": 1e-2})

    def learn(cluster: Cluster, stops: bool) -> tuple[list[float], str]:
        there = on_nodes(cluster, 2)
        session = build_test_session(there, recipe)
        losses = []
        for stats in session.rounds():
            losses.append(stats.loss)
            if stops and len(losses) == 10:
                break
        if stops:
            found = session.snapshot()
            kept = {name: t.detach().clone() for name, t in found.tensors().items()}
            session = build_test_session(there, recipe)
            session.restore(kept, found.scalars())
            losses += [stats.loss for stats in session.rounds()]
        return losses, state_sha256(session.snapshot().tensors())

    plain, stopped = run_ranks(learn, 4, False), run_ranks(learn, 4, True)
    losses, _ = plain[0]
    assert len(losses) == 30 and sum(losses[-5:]) / 5 < 0.85 * losses[0]
    assert all(found == plain[0] for found in (*plain, *stopped))


@pytest.mark.capability("H8", "N2")
@pytest.mark.parametrize(
    "strategy", ["replicas=2 pipeline=2 codec=topk:0.3", "replicas=2 tensor=2 codec=int8"]
)
def test_what_coding_has_lost_is_all_there_after_a_restore(strategy: str) -> None:
    """Tensors that are summed over other ranks, or counted by others, have reducers of their own."""
    recipe = gpt(strategy)

    def changed(cluster: Cluster) -> tuple[list[str], int]:
        first = build_test_session(cluster, recipe)
        for _, _ in zip(range(3), first.rounds(), strict=False):
            pass
        found = first.snapshot()
        kept = {name: t.detach().clone() for name, t in found.tensors().items()}
        second = build_test_session(cluster, recipe)
        second.restore(kept, found.scalars())
        now = second.snapshot().tensors()
        differing = [name for name in kept if name not in now or not torch.equal(kept[name], now[name])]
        return differing, sum(name.startswith("residual/") for name in kept)

    for differing, num_residuals in run_ranks(changed, 4):
        assert num_residuals and not differing


@pytest.mark.capability("A3", "C4")
@pytest.mark.parametrize(
    "strategy",
    [
        "replicas=2 tensor=2 codec=int8",
        pytest.param("replicas=3 tensor=2 route=native", marks=pytest.mark.soak),
    ],
)
def test_what_tensor_ranks_hold_in_common_has_the_same_bits(strategy: str) -> None:
    """Equal gradients are summed, and coded, in the same buckets on each of them."""
    recipe = gpt(strategy, steps=6)

    def in_common(cluster: Cluster) -> dict[str, torch.Tensor]:
        session = build_test_session(cluster, recipe)
        list(session.rounds())
        held = session.runner.sharded_model.computes.items()
        return {slot.name: p.detach().clone() for slot, p in held if "tensor" not in slot.axes}

    first, *others = run_ranks(in_common, 2 * (recipe.strategy.replicas or 1))
    for other in others:
        assert [name for name, value in first.items() if not torch.equal(value, other[name])] == []


def forgotten(gather: Callable[[], None]) -> Callable[[], None]:
    return lambda: None


def own_norm(norm: GradientNorm) -> GradientNorm:
    return lambda grads: joint_norm(grads.norms)


def counted_on_every_holder(norm: GradientNorm) -> GradientNorm:
    """What several ranks of a replica hold is in the norm of each."""

    def broken(grads: Gradients) -> float:
        return norm(replace(grads, norms=[g.norm() for g in grads.tensors.values() if g is not None]))

    return broken


class Forgetful(ScatterReducer):
    """Of several micro-batches it keeps the last."""

    def _on_complete(self, scatter: Any, row: Any) -> None:
        scatter.bucket.is_fresh = True
        super()._on_complete(scatter, row)


class Padded(ScatterReducer):
    """What lies behind a short part is counted."""

    def _over_replicas(self, bucket: Any) -> Handle:
        bucket.total[bucket.num_own_values :] = 1.0
        return self._paths.replica.all_reduce(bucket.total, f"{bucket.number}.own")


TWINS = {
    "zero=2, not gathered": ("replicas=1 shard=2 zero=2", Components(gather=forgotten)),
    "zero=2, the last micro-batch only": ("replicas=1 shard=2 zero=2", Components(scatterer=Forgetful)),
    "zero=2, padding counted": ("replicas=1 shard=3 zero=2 route=native", Components(scatterer=Padded)),
    "zero=3, the own norm": ("replicas=1 shard=2 zero=3", Components(norm=own_norm)),
    "tensor, counted twice": ("replicas=1 tensor=2", Components(norm=counted_on_every_holder)),
    "1f1b, counted twice": ("replicas=1 pipeline=2 schedule=1f1b", Components(norm=counted_on_every_holder)),
    "zero=1 of stages, not gathered": ("replicas=1 shard=2 zero=1 pipeline=2", Components(gather=forgotten)),
    "zero=1 of stages, counted twice": (
        "replicas=1 shard=2 zero=1 pipeline=2",
        Components(norm=counted_on_every_holder),
    ),
    "zero=3 of tensor, counted twice": (
        "replicas=1 shard=2 zero=3 tensor=2",
        Components(norm=counted_on_every_holder),
    ),
}


@pytest.mark.capability("Z2")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_broken_product_is_found(num_ranks: int) -> None:
    """The mutation twins."""
    twins = {name: twin for name, twin in TWINS.items() if PRODUCTS[twin[0]] == num_ranks}
    cases = [(gpt(strategy), components) for strategy, components in twins.values()]
    for rank in run_ranks(each_case, num_ranks, verify, cases):
        assert [name for name, report in zip(twins, rank, strict=True) if report.ok] == []


@pytest.mark.capability("A11", "Z2")
def test_parameters_of_the_step_before_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that stay here over an update."""

    def stale(cluster: Cluster) -> VerificationReport:
        release = zero.GatheredBlock.release

        def stay(block: Any) -> None:
            if not all(p.untyped_storage().size() for p in block.tensors.values()):
                release(block)

        monkeypatch.setattr(zero.GatheredBlock, "release", stay)
        return verify(cluster, gpt("replicas=1 shard=2 zero=3 route=native"))

    for report in run_ranks(stale, 2):
        assert not report.ok


@pytest.mark.capability("Z1", "Z2")
def test_a_plan_that_forgets_the_dropout_is_found() -> None:
    whole = {"layers.0": "column", "layers.2": "split", "layers.3": "row"}
    without = {"layers.0": "column", "layers.3": "row"}
    recipe = digits("replicas=1 tensor=2")
    assert run_ranks(verify, 2, recipe, None, whole)[0].ok
    with pytest.raises(RanksFailed, match="would train something else"):
        run_ranks(verify, 2, recipe, None, without)
    unchecked = recipe.replace(debug=recipe.debug.replace(check=False))
    assert not run_ranks(verify, 2, unchecked, None, without)[0].ok


@pytest.mark.capability("I10")
@pytest.mark.parametrize(
    "strategy",
    [
        soak_param("replicas=1 shard=2 zero=2"),
        "replicas=1 shard=2 zero=3",
        "replicas=1 shard=2 zero=1 pipeline=2",
        pytest.param("replicas=1 shard=2 zero=3 route=native", marks=pytest.mark.soak),
        pytest.param("replicas=2 shard=2 zero=2", marks=pytest.mark.soak),
        pytest.param("replicas=1 shard=2 zero=2 pipeline=2", marks=pytest.mark.soak),
        pytest.param("replicas=1 shard=2 zero=3 pipeline=2", marks=pytest.mark.soak),
        pytest.param("replicas=1 shard=2 zero=3 pipeline=2 schedule=1f1b", marks=pytest.mark.soak),
        pytest.param("replicas=2 shard=2 zero=3", marks=pytest.mark.soak),
        pytest.param("replicas=1 pipeline=2 schedule=1f1b", marks=pytest.mark.soak),
    ],
)
def test_a_reproducible_product_has_the_bits_of_one_process(strategy: str) -> None:
    def bits(cluster: Cluster, recipe: Recipe) -> list[tuple[str, float]]:
        session = build_test_session(cluster, recipe)
        found = [(state_sha256(session.snapshot().tensors()), stats.loss) for stats in session.rounds()]
        session.close()
        return found

    recipe = gpt(strategy, steps=8, reproducible=True)
    (right,) = run_ranks(bits, 1, recipe.replace(strategy=Strategy.parse("replicas=1")))
    assert len({sha256 for sha256, _ in right}) == 8
    num_ranks = (recipe.strategy.replicas or 1) * recipe.strategy.ranks_per_replica
    for found in run_ranks(bits, num_ranks, recipe):
        assert found == right
