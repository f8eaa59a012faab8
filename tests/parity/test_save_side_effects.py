"""A save changes nothing that a run or its user can see, and holds the state of one step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.staging import StagingBuffer
from paceline.checkpoint.storage import StorageFolder
from paceline.comm import BucketReducer
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import Session, checkpointing
from paceline.session.fit_loop import hash_and_compare
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.marks import soak_param
from tests.recipes import recipe_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.capability("N1", "H4")]
OF_TWO = (
    "replicas=2 codec=lowrank:2",
    "replicas=1 shard=2 zero=1 codec=sign",
    "replicas=1 shard=2 zero=2 codec=topk:0.01",
    "replicas=1 shard=2 zero=3 codec=int4:stochastic route=native",
    "replicas=2 sync=local:2 codec=int8",
)
MORE_OF_TWO = (
    "replicas=2",
    "replicas=2 codec=int8",
    "replicas=2 codec=topk:0.01",
    "replicas=2 codec=sign",
    "replicas=1 shard=2 zero=1 codec=int8",
    "replicas=1 shard=2 zero=3 codec=lowrank:2",
)
OF_FOUR = ("replicas=2 pipeline=2 codec=int8", "replicas=2 tensor=2 codec=int4:stochastic")
MORE_OF_FOUR = (
    "replicas=2 shard=2 zero=1 codec=topk:0.01 route=native",
    "replicas=2 shard=2 zero=2 codec=sign",
)
MIDDLE = 4


# Odd widths: buffers do not divide evenly among ranks.
digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [24, 15], "dropout": 0.1},
    steps=8,
    batch={"size": 46, "shards": 6},
    optimizer={"name": "adamw", "lr": 2e-3, "clip_norm": 0.5},
    checkpoint={"keep": 20},
)


class Seen(NamedTuple):
    """Losses and norms of a run, hashes after its rounds, its last one, and where a gradient changed."""

    numbers: list[str]
    hashes: list[str]
    last: str
    changed: list[int]


def gradients(session: Session) -> list[Tensor]:
    """As somebody reads them between two steps; their bits, as NaN is not equal to itself."""
    found = {**session.runner.sharded_model.computes, **session.runner.sharded_model.updates}
    return [p.grad.clone().view(torch.int32) for p in found.values() if p.grad is not None]


def run(cluster: Cluster, recipe: Recipe, run_dir: Path, saves: bool, hashes: bool) -> Seen:
    session = build_test_session(cluster, recipe)
    saver = checkpointing.build_saver(session, run_dir, print) if saves else None
    seen = Seen([], [], "", [])
    for stats in session.rounds():
        seen.numbers.append(f"{stats.loss!r} {stats.grad_norm!r}")
        before = gradients(session)
        if saver is not None:
            saver.wait_published(saver.save())
        if hashes:
            seen.hashes.append(hash_and_compare(session, []))
        if not all(torch.equal(a, b) for a, b in zip(before, gradients(session), strict=True)):
            seen.changed.append(session.state.step)
    last = hash_and_compare(session, [])
    session.close()
    return seen._replace(last=last)


def go_on(cluster: Cluster, recipe: Recipe, run_dir: Path) -> str:
    """The hash of the end, from a checkpoint of the middle."""
    session = build_test_session(cluster, recipe)
    name = f"step-{MIDDLE:08d}"
    assert (
        checkpointing.restore_checkpoint(session, StorageFolder(str(run_dir / "checkpoints")), name) == name
    )
    list(session.rounds())
    last = hash_and_compare(session, [])
    session.close()
    return last


def compared(cluster: Cluster, recipes: Sequence[Recipe], folder: Path) -> dict[str, list[str]]:
    """What is wrong, by strategy."""
    found = {}
    for number, recipe in enumerate(recipes):
        run_dir = folder / str(number)
        plain = run(cluster, recipe, run_dir, saves=False, hashes=False)
        hashed = run(cluster, recipe, run_dir, saves=False, hashes=True)
        saved = run(cluster, recipe, run_dir, saves=True, hashes=True)
        checks = {
            "a hash changed a gradient": not hashed.changed,
            "a save changed a gradient": not saved.changed,
            "losses or norms": plain.numbers == hashed.numbers == saved.numbers,
            "hashes": hashed.hashes == saved.hashes,
            "the end": plain.last == hashed.last == saved.last,
            "the end of a run that went on": go_on(cluster, recipe, run_dir) == plain.last,
        }
        found[f"{recipe.precision.compute} {recipe.strategy}"] = [
            what for what, holds in checks.items() if not holds
        ]
    return found


@pytest.mark.parametrize(
    "strategies, num_ranks",
    [(OF_TWO, 2), (OF_FOUR, 4), soak_param(MORE_OF_TWO, 2), soak_param(MORE_OF_FOUR, 4)],
)
def test_a_save_changes_nothing(strategies: Sequence[str], num_ranks: int, tmp_path: Path) -> None:
    """Neither gradients, losses and hashes, nor where a run ends; and what goes on from it ends there."""
    recipes = [digits(strategy) for strategy in strategies]
    for found in run_ranks(compared, num_ranks, recipes, tmp_path, deadline=500):
        assert not any(found.values()), found


@pytest.mark.parametrize(
    "strategies",
    [
        ("replicas=2 codec=lowrank:2", "replicas=1 shard=2 zero=3 codec=topk:0.1"),
        soak_param(("replicas=2 codec=int8", "replicas=2 codec=topk:0.1")),
    ],
)
def test_a_save_changes_nothing_while_the_loss_scale_moves(strategies: Sequence[str], tmp_path: Path) -> None:
    """Residuals are multiples of it; the first step overflows."""
    fp16 = {"compute": "fp16", "init_scale": 2.0**24, "growth_steps": 2}
    recipes = [digits(strategy, precision=fp16) for strategy in strategies]
    for found in run_ranks(compared, 2, recipes, tmp_path):
        assert not any(found.values()), found


def test_residuals_in_the_buffer_of_the_gradients_would_be_seen(tmp_path: Path) -> None:
    """The twin: what was lost is laid where the sums of the last step are, to be cut into tensors there."""

    def broken(cluster: Cluster) -> list[int]:
        def over(self: Any, buffer: Any, word: str, flat: Tensor) -> Any:
            buffer.flat.zero_()
            self._span(buffer, word).copy_(flat)
            return buffer

        with patch.object(BucketReducer, "_over", over):
            return run(cluster, digits("replicas=2 codec=int8"), tmp_path, saves=True, hashes=False).changed

    assert all(run_ranks(broken, 2))


# -- a save in the background is of one step ---------------------------------------------------------------

IMAGES = 1498


def saved_slowly(cluster: Cluster, run_dir: Path, waits: bool) -> list[str]:
    """What differs in a checkpoint that is still being copied when replicas meet; this one had no sample."""
    recipe = digits("replicas=2 sync=local:1", steps=None, epochs=1, batch={"size": IMAGES - 1, "shards": 4})
    session = build_test_session(cluster, recipe)
    saver, may_copy = checkpointing.build_saver(session, run_dir, print), threading.Event()
    complete = StagingBuffer.complete

    def slowly(self: StagingBuffer) -> None:
        may_copy.wait(60)
        complete(self)

    StagingBuffer.complete = slowly
    if not waits:
        session.update_step.parts.pop("settle")
    rounds = session.rounds()
    next(rounds)
    right = session.snapshot().copied().tensors()
    name = saver.save()
    assert next(rounds).num_items == 1
    moved = session.snapshot().tensors()
    assert any(not torch.equal(moved[n], t) for n, t in right.items() if n.startswith("model/"))
    may_copy.set()
    saver.wait_published(name)
    again = build_test_session(cluster, recipe)
    checkpointing.restore_checkpoint(again, StorageFolder(str(run_dir / "checkpoints")), name)
    found = again.snapshot().tensors()
    return [n for n, t in right.items() if n.startswith("model/") and not torch.equal(found[n], t)]


@pytest.mark.parametrize("waits", [True, False])
def test_replicas_that_meet_wait_for_what_a_save_still_reads(waits: bool, tmp_path: Path) -> None:
    """The last step of an epoch has one sample, and the first replica none; the twin does not wait."""
    for found in run_ranks(saved_slowly, 2, tmp_path, waits):
        assert (found == []) == waits
