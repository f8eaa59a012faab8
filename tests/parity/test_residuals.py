"""What coding has lost is not forgotten, nor counted more than once, where a step is not like the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.comm import CodedCollective, Collective, NativeCollective, Net, StepTally
from paceline.comm.codecs.int8_int4_int2 import BlockIntCodec
from paceline.comm.codecs.top_k import TopKCodec, make_keep_count
from paceline.comm.collectives.error_feedback import ErrorFeedbackBuffers
from paceline.comm.collectives.power_sgd import PowerSGDCollective
from paceline.comm.reduction import (
    BucketReducer,
    CombinedReduction,
    GradientReduction,
    GradientUnit,
    UnorderedSum,
)
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.recipe import Recipe, Strategy
from paceline.session import build_session
from paceline.state.slot import TensorSlot
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, whole_trajectory
from tests.parity.training_runs import each_case
from tests.recipes import recipe_of

A, B = TensorSlot("a", (8, 6), ((0, 8), (0, 6))), TensorSlot("b", (7, 9), ((0, 7), (0, 9)))
CODERS: dict[str, Callable[[Collective], Any]] = {
    "int4": lambda path: CodedCollective(path, BlockIntCodec(4)),
    "topk": lambda path: CodedCollective(path, TopKCodec(make_keep_count(0.2))),
    "lowrank": lambda path: PowerSGDCollective(path, 1),
}


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [24, 16]},
    steps=8,
    batch={"size": 46, "shards": 6},
    optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
)


# -- groups of tensors that share a path -------------------------------------------------------------------


def lost_of(reduction: GradientReduction, slot: TensorSlot) -> dict[str, Tensor]:
    """By side; factors are no loss."""
    return {s: x.clone() for s, own, x in reduction.residuals() if own == slot and not s.endswith("factor")}


def one_path(cluster: Cluster, coder: str) -> bool:
    """Whether what was lost of a tensor that nobody uses is lost still: it is the second group's."""
    mesh, net = Mesh.build(cluster, {"replica": cluster.world_size}), Net(60.0)
    sums = UnorderedSum(
        NativeCollective(net, mesh.group_over(())), CODERS[coder](NativeCollective(net, mesh.replica))
    )
    both = [
        BucketReducer({slot: torch.zeros(slot.sizes)}, {slot: (slot,)}, sums, 64, name=f"{slot.name}/")
        for slot in (A, B)
    ]
    reduction, g = CombinedReduction(dict(zip((A, B), both, strict=True)), both), torch.Generator()
    g.manual_seed(cluster.global_rank)
    before: dict[str, Tensor] = {}
    for used in ((A, B), (A, B), (A,)):
        before = lost_of(reduction, B)
        reduction.begin()
        for slot in (B, A):
            reduction.ready(slot, torch.randn(slot.sizes, generator=g) if slot in used else None)
        reduction.close()
        reduction.finish()
        reduction.commit({slot.name for slot in used})
    after = lost_of(reduction, B)
    return before.keys() == after.keys() and all(torch.equal(x, after[side]) for side, x in before.items())


@pytest.mark.capability("H4")
def test_groups_on_one_path_keep_what_nobody_used() -> None:
    """As tied weights do beside the others of their stage, and parts beside copies among tensor shards.

    The twin: whoever is first says for the whole path that all was applied.
    """

    def keep(cluster: Cluster) -> tuple[list[str], bool]:
        commit = ErrorFeedbackBuffers.commit
        kept = [coder for coder in CODERS if one_path(cluster, coder)]
        with patch.object(ErrorFeedbackBuffers, "commit", lambda self, keys=None: commit(self)):
            return kept, one_path(cluster, "int4")

    assert run_ranks(keep, 2) == [([*CODERS], False)] * 2


@pytest.mark.capability("H4")
@pytest.mark.parametrize("coder", CODERS)
def test_what_was_lost_comes_back_to_the_bit(coder: str) -> None:
    """Also a zero with a sign: the hash of a state that was loaded is that of the one that was saved."""
    mesh = Mesh.build(Cluster.single(), {})
    path = CODERS[coder](NativeCollective(Net(60.0), mesh.replica))
    lost = torch.tensor([-0.0, 1.5, 0.0, -2.0])
    path.feedback.set_residuals("0", {"sent": lost})
    found = path.feedback.residuals("0", 4)["sent"]
    path.close()
    assert torch.equal(found.view(torch.int32), lost.view(torch.int32))


# -- a round that moves nothing ----------------------------------------------------------------------------


def nothing_moved(cluster: Cluster, forgets: bool) -> bool:
    """Whether movements have lost as much after a round without an update as before it."""
    session = build_test_session(cluster, digits("replicas=2 sync=local:2 codec=topk:0.1"))
    rounds = session.rounds()
    for _ in range(2):
        next(rounds)
    (delta,), rule = session.rule.deltas, session.rule
    before = [value.clone() for _, _, value in rule.reducer.residuals()]
    if forgets:
        rule.reducer.abort = rule.reducer.commit
    nothing = torch.zeros(0, dtype=torch.float64)
    delta.begin()
    delta.start_sum(0.0, 0.0)
    delta.finish_sum(StepTally(0.0, 0.0, 0.0, {}, 0.0, (), nothing))
    delta.mix(0.0)
    after = [value for _, _, value in rule.reducer.residuals()]
    assert any(bool(value.any()) for value in before)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.capability("H4")
def test_a_round_in_which_all_steps_were_left_out_sends_nothing() -> None:
    """As after overflows; the twin takes it as sent, and it would never come."""
    assert run_ranks(each_case, 2, nothing_moved, [(False,), (True,)]) == [[True, False]] * 2


# -- a loss scale that moves -------------------------------------------------------------------------------

FP16 = {"compute": "fp16", "init_scale": 2.0**8}


def scaled(cluster: Cluster, strategy: str) -> tuple[float, float, float]:
    """How far a run ends whose scale doubles after each two updates from one whose scale stays."""
    ends, last = [], 0.0
    for growth_steps in (1000, 2):
        precision = {**FP16, "growth_steps": growth_steps}
        session = build_test_session(cluster, digits(strategy, precision=precision))
        losses = []
        for stats in session.rounds():
            losses.append(stats.loss)
            last = stats.loss_scale
        ends.append(whole_trajectory(losses, session))
        session.close()
    exact = whole_trajectory([], build_test_session(cluster, digits(strategy, precision=precision)))
    return ends[0].distance(ends[1]), ends[0].distance(exact), last


SCALED = ("replicas=2 codec=topk:0.1", "replicas=2 codec=lowrank:2", "replicas=1 shard=2 zero=2 codec=int4")


@pytest.mark.capability("H4")
def test_residuals_are_multiples_of_the_present_loss_scale() -> None:
    """Powers of two change no digit, so both runs are one but for what fp16 cannot hold; and a twin."""

    def all_scaled(cluster: Cluster) -> list[tuple[float, float, float]]:
        found = [scaled(cluster, strategy) for strategy in SCALED]
        with patch.object(GradientUnit, "follow", GradientUnit.resume):
            return [*found, scaled(cluster, SCALED[0])]

    for rank in run_ranks(all_scaled, 2):
        *found, (twin_off, twin_moved, _) = rank
        for strategy, (off, moved, last) in zip(SCALED, found, strict=True):
            assert last == 2.0**12 and off <= 1e-3 * moved, (strategy, off, moved)
        assert twin_off >= 1e-2 * twin_moved, (twin_off, twin_moved)


class Sometimes(nn.Module):
    """`other` has a part in every second forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.other = nn.Linear(6, 3), nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.always(x)
        return found + self.other(x) if self.calls % 2 else found


def squared_error(model: nn.Module, batch: tuple[Tensor, ...]) -> Loss:
    (x,) = batch
    return Loss((model(x) - x[:, :3]).square().sum(), len(x))


def make_task() -> Task:
    torch.manual_seed(3)
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    return Task(Sometimes(), TensorDataset(x), squared_error)


def lost(cluster: Cluster, codec: str) -> list[dict[str, Tensor]]:
    """Of `other`, all sides, after each step."""
    recipe = Recipe(
        task="given",
        steps=4,
        strategy=Strategy.parse(f"replicas=2 codec={codec}"),
        batch={"size": 12, "shards": 2},
        optimizer={"name": "sgd", "lr": 0.05},
        runtime={"device": "cpu"},
    )
    session = build_session(recipe, make_task(), cluster, CPU, warn=lambda _: None)
    found = []
    for _ in session.rounds():
        rows = session.snapshot().tensors()
        own = {name: x.clone() for name, x in rows.items() if "residual" in name and "other" in name}
        found.append({name: x for name, x in own.items() if "/factor/" not in name})
    session.close()
    return found


def kept(cluster: Cluster) -> dict[str, list[bool]]:
    """By codec, whether steps 1 and 3, in which nobody uses `other`, and step 2 leave what was lost."""
    found = {}
    for codec in ("topk:0.1", "sign", "int4", "lowrank:1"):
        steps = lost(cluster, codec)
        assert all(any(bool(x.any()) for x in step.values()) for step in steps)
        found[codec] = [
            all(torch.equal(before, steps[step][name]) for name, before in steps[step - 1].items())
            for step in (1, 2, 3)
        ]
    return found


def forgetful(cluster: Cluster) -> list[bool]:
    with patch.object(ErrorFeedbackBuffers, "restore", lambda self, key, places: None):
        steps = lost(cluster, "topk:0.1")
    return [all(torch.equal(x, steps[1][name]) for name, x in steps[0].items())]


@pytest.mark.timeout(240)
@pytest.mark.capability("H4")
def test_what_was_lost_of_a_parameter_stays_until_it_is_used_again() -> None:
    """And is sent then; the twin forgets it in the step that has dropped its sum."""
    for rank in run_ranks(kept, 2):
        assert all(same == [True, False, True] for same in rank.values()), rank
    assert run_ranks(forgetful, 2) == [[False], [False]]
