"""fp16: all ranks of a replica that trains alone leave a step out, or none does; how tensor shards round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.checkpoint.storage import StorageFolder
from paceline.comm import GradientSink
from paceline.comm.reduction import joint_norm
from paceline.data import LoadedBatch
from paceline.job.cluster import Cluster
from paceline.parallel import LossSums, ModelRunner
from paceline.parallel.state_hash import find_divergence
from paceline.recipe import Recipe
from paceline.session import Session, checkpointing
from paceline.state.slot import TensorSlot
from paceline.sync import update
from paceline.sync.update import PendingUpdate
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, make_task, whole_trajectory
from tests.marks import soak_param
from tests.parity.test_local_sgd_sharded_replicas import digits, gpt
from tests.parity.training_runs import train_whole

SCALE = 2.0**12
FP16 = {"compute": "fp16", "init_scale": SCALE, "growth_steps": 4}
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "clip_norm": 0.5}


# -- an overflow on one rank -------------------------------------------------------------------------------


class Overflowing:
    """A layout in which a gradient of this rank overflows in one step."""

    def __init__(self, inner: ModelRunner, at_run: int, axes: Collection[str]) -> None:
        self._inner, self._left, self._axes = inner, at_run, axes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(
        self, micro_batches: Iterable[LoadedBatch], num_micro_batches: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """As the inner layout."""
        self._left -= 1
        sink = _Spoilt(sink, self._axes) if self._left == -1 else sink
        return self._inner.run(micro_batches, num_micro_batches, sink, scale)


class _Spoilt:
    """The first gradient is not finite; where tensors are cut, the first of a part.

    Copies of what is not cut have equal gradients on all tensor peers, and overflow on all of them.
    """

    def __init__(self, sink: GradientSink, axes: Collection[str]) -> None:
        self._sink, self._axes, self._is_done = sink, {*axes}, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        spoils = grad is not None and not self._is_done and self._axes <= {*slot.axes}
        self._is_done = self._is_done or spoils
        self._sink.ready(slot, torch.full_like(grad, float("inf")) if spoils and grad is not None else grad)


def overflow(session: Session, step: int) -> None:
    """Let a gradient of this rank overflow in a step."""
    cut = ["tensor"] if session.mesh.axes["tensor"].size > 1 else []
    session.runner = Overflowing(session.runner, step, cut)


class Step(NamedTuple):
    """What a rank did in a step."""

    number: int
    applied: bool
    scale: float
    updates: int


def run(
    cluster: Cluster, recipes: Sequence[Recipe], overflows: dict[int, int], *, compares: bool = True
) -> list[tuple[Trajectory, list[Step], float]]:
    """Where each ends, and all steps of this rank; `overflows`: by rank, in which step."""
    found = []
    for recipe in recipes:
        session, seen = build_test_session(cluster, recipe), list[Step]()
        if cluster.global_rank in overflows:
            overflow(session, overflows[cluster.global_rank])

        def see(record: PendingUpdate, seen: list[Step] = seen) -> None:
            assert record.update is not None
            state = record.state
            seen.append(Step(state.step, record.update.applied, state.scale.value, state.num_updates))

        session.update_step.observers.append(see)
        losses = [stats.loss for stats in session.rounds()]
        assert not compares or find_divergence(session.state, session.mesh, session.net) is None
        found.append((whole_trajectory(losses, session), seen, session.state.scale.value))
        session.close()
    return found


STREAMED = {"fragments": 2, "delay_steps": 1}
FURTHER = ("local", "diloco")
CASES = {
    "local": (digits, "local:4", ("shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "pipeline=2"), {}),
    "tensor": (digits, "local:4", ("tensor=2",), {}),
    "diloco": (digits, "diloco:4", ("shard=2 zero=3", "pipeline=2 schedule=1f1b"), {}),
    "streamed": (digits, "diloco:4", ("shard=2 zero=2", "pipeline=2"), {"outer": STREAMED}),
    "positions": (gpt, "local:4", ("context=2", "tensor=2", "pipeline=2"), {}),
    "every-step": (digits, "every-step", ("shard=2 zero=2", "pipeline=2", "tensor=2"), {}),
}
SAME, ROUNDED = 2e-5, 5e-3  # sums in another order; halves of other sums


@pytest.mark.capability("K1", "I6")
@pytest.mark.parametrize(
    ("name", "rank", "step"),
    [
        pytest.param(name, rank, step, marks=[pytest.mark.soak] * (number % 2 != which or name in FURTHER))
        for number, name in enumerate(CASES)
        for which, (rank, step) in enumerate([(1, 5), (2, 2)])
    ],
)
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all_of_its_replica(
    name: str, rank: int, step: int
) -> None:
    """Ranks 0 and 1 are a replica, 2 and 3 the other; whole ones with that overflow end where these do."""
    make, sync, spreads, changes = CASES[name]
    recipes = [
        make(f"replicas=2 {spread} sync={sync}", precision=FP16, optimizer=SGD, **changes)
        for spread in ("", *spreads)
    ]
    right = run_ranks(run, 2, recipes[:1], {rank // 2: step})
    ranks = run_ranks(run, 4, recipes[1:], {rank: step}, deadline=400)
    for here, found in enumerate(ranks):
        for spread, (end, steps, scale) in zip(spreads, found, strict=True):
            same, plain, plain_scale = right[here // 2][0]
            assert steps == plain and scale == plain_scale, (spread, here, steps, plain)
            left_out = [one.number for one in steps if not one.applied]
            assert left_out == ([step] if here // 2 == rank // 2 or sync == "every-step" else [])
            bound = ROUNDED if spread in ("tensor=2", "context=2") else SAME
            assert end.distance(same) <= bound, (spread, end.distance(same))


def of_own(take: Any) -> Any:
    """Each rank takes the norm of what it has, and not of its replica."""
    return lambda norm: take(lambda grads: joint_norm(grads.norms))


@pytest.mark.capability("K1", "I6")
def test_a_rank_that_looks_at_its_own_part_only_would_be_seen() -> None:
    """The twin: who has not overflowed itself goes on, and scales differ in a replica."""

    def broken(cluster: Cluster) -> list[Step]:
        recipe = digits("replicas=2 pipeline=2 sync=local:4", precision=FP16, optimizer=SGD)
        with patch.object(update, "measure_norm", of_own(update.measure_norm)):
            return run(cluster, [recipe], {1: 2}, compares=False)[0][1]

    first, second, *_ = run_ranks(broken, 4)
    assert first != second


# -- a checkpoint after it ---------------------------------------------------------------------------------


def goes_on(cluster: Cluster, spread: str, run_dir: Path) -> tuple[float, list[float]]:
    """How far a run that went on from a checkpoint ends from one that did not stop; and the scales there."""
    recipe = digits(f"replicas=2 {spread} sync=local:4", precision=FP16, optimizer=SGD)
    first = build_test_session(cluster, recipe)
    if cluster.global_rank == 2:
        overflow(first, 2)
    saver, rounds = checkpointing.build_saver(first, run_dir, print), first.rounds()
    next(rounds)
    saver.wait_published(name := saver.save())
    again = build_test_session(cluster, recipe)
    scales = [first.state.scale.value]
    checkpointing.restore_checkpoint(again, StorageFolder(str(run_dir / "checkpoints")), name)
    scales.append(again.state.scale.value)
    list(rounds)
    list(again.rounds())
    return whole_trajectory([], first).distance(whole_trajectory([], again)), scales


@pytest.mark.capability("K1", "I6")
@pytest.mark.parametrize("spread", ["tensor=2", "shard=2 zero=3", "pipeline=2"])
def test_a_checkpoint_has_the_scale_of_every_replica(spread: str, tmp_path: Path) -> None:
    """One replica has left out a step, so its scale is a half, and has clean steps of its own."""
    for rank, (off, scales) in enumerate(run_ranks(goes_on, 4, spread, tmp_path)):
        right = SCALE / 2 if rank >= 2 else 2 * SCALE
        assert off == 0.0 and scales == [right] * 2


class InTwo(nn.Linear):
    """A linear layer as two tensor ranks compute it: each rounds its product, and their sum is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        k = self.in_features // 2
        y = F.linear(x[..., :k], self.weight[:, :k]) + F.linear(x[..., k:], self.weight[:, k:])
        return y + self.bias.to(y.dtype)


def of_seed(seed: int, strategy: str, compute: str) -> Recipe:
    return digits(strategy, seed=seed, precision={"compute": compute}, optimizer=SGD)


def ends(cluster: Cluster, recipes: Sequence[Recipe], in_two: bool) -> list[Trajectory]:
    def task(recipe: Recipe) -> Task:
        made = make_task(recipe)
        if in_two:
            made.model.layers[3].__class__ = InTwo
        return made

    return [train_whole(cluster, recipe, partial(task, recipe)) for recipe in recipes]


@pytest.mark.capability("K1", "K2")
@pytest.mark.parametrize(
    ("sync", "compute"),
    [
        ("local:4", "fp16"),
        soak_param("local:4", "bf16"),
        soak_param("every-step", "fp16"),
        soak_param("every-step", "bf16"),
    ],
)
def test_tensor_shards_of_halves_are_off_by_how_one_layer_is_rounded(compute: str, sync: str) -> None:
    """A layer that is cut by inputs adds products that are halves; a whole one rounds once.

    Runs lie up to 8e-3 apart by that, over three seeds, where halves and floats do by as much. Whole replicas
    that round as two tensor ranks do end where these end. Parts of other axes are halves of the same sums.
    """
    seeds = range(3)
    plain = [of_seed(seed, f"replicas=2 sync={sync}", compute) for seed in seeds]
    right, rounded = (run_ranks(ends, 2, plain, in_two)[0] for in_two in (False, True))
    cut = [of_seed(seed, f"replicas=2 tensor=2 sync={sync}", compute) for seed in seeds]
    others = [
        of_seed(0, f"replicas=2 {own} sync={sync}", compute) for own in ("pipeline=2", "shard=2 zero=3")
    ]
    found = run_ranks(ends, 4, [*cut, *others], False)[0]
    assert all(found[seed].distance(rounded[seed]) <= SAME for seed in seeds)
    assert max(found[seed].distance(right[seed]) for seed in seeds) > 10 * SAME
    assert all(end.distance(right[0]) <= SAME for end in found[3:])


@pytest.mark.capability("K1", "K2")
def test_a_layer_that_is_cut_gives_halves_where_a_whole_one_does() -> None:
    """The bias of one that is cut by inputs is added after the sum."""

    def kinds(cluster: Cluster) -> list[torch.dtype]:
        recipe = of_seed(0, "replicas=1 tensor=2", "fp16").replace(steps=1)
        session, found = build_test_session(cluster, recipe), list[torch.dtype]()
        for k in (0, 3, 6):
            layer = session.runner.sharded_model.model.layers[k]
            layer.register_forward_hook(lambda module, given, y: found.append(y.dtype))
        list(session.rounds())
        return found[:3]

    assert run_ranks(kinds, 2) == [[torch.float16] * 3] * 2
