"""What keeps the promise of a reproducible run: hashes over ranks, verification, resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paceline.errors import DivergenceError
from paceline.job.cluster import Cluster
from paceline.parallel.state_hash import StateDivergence, find_divergence
from paceline.recipe import Recipe
from paceline.session import Session, fit
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import certificate
from tests.parity.reproducible import recipe_of


class Notes:
    """A sink that keeps events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def step(self, stats: Any) -> None: ...

    def event(self, name: str, record: Any) -> None:
        self.events.append((name, dict(record)))

    def close(self) -> None: ...


def flip(x: Tensor) -> None:
    """The lowest bit of the first value."""
    x.detach().reshape(-1)[:1].view(torch.int32).bitwise_xor_(1)


def flipped_run(
    cluster: Cluster, recipe: Recipe, rank: int, name: str, at: int
) -> tuple[str, int, list[tuple[str, dict[str, Any]]]]:
    """Train; after step `at` one bit of one tensor changes on one rank."""
    session, notes = build_test_session(cluster, recipe), Notes()
    rounds = session.rounds

    def with_flip() -> Any:
        for stats in rounds():
            if stats.step == at and cluster.global_rank == rank:
                flip(next(p.tensor for p in session.state.pieces() if p.slot.name == name))
            yield stats

    cast(Any, session).rounds = with_flip
    said = ""
    try:
        fit(session, None, [notes])
    except DivergenceError as error:
        said = str(error)
    return said, session.state.step, notes.events


@pytest.mark.capability("A3", "P18")
@pytest.mark.parametrize(
    ("strategy", "rank", "name", "at"),
    [
        ("replicas=3", 1, "model/features.0.weight", 4),
        ("replicas=3", 2, "optimizer/head.weight/exp_avg", 5),  # a step later it is in the parameter too
        ("replicas=1 shard=3 zero=1", 0, "model/features.1.running_mean", 5),
    ],
)
def test_a_flipped_bit_is_named_by_rank_tensor_and_step_within_one_interval(
    strategy: str, rank: int, name: str, at: int
) -> None:
    recipe = recipe_of(strategy, hash_every=2, steps=8)
    names = [piece.slot.name for piece in run_ranks(pieces_of, 1, recipe_of("replicas=1"))[0]]
    assert name in names, names
    for said, step, _ in run_ranks(flipped_run, 3, recipe, rank, name, at):
        assert step == 6, "hashes are taken after steps 1, 3 and 5"
        assert f"rank {rank} differs in '{name}' after step 5" in said


def pieces_of(cluster: Cluster, recipe: Recipe) -> list[Any]:
    session = build_test_session(cluster, recipe)
    next(session.rounds())
    return [replace(piece, tensor=torch.zeros(0)) for piece in session.state.pieces()]


@pytest.mark.capability("P18")
def test_of_two_ranks_nobody_knows_which_is_right_and_warn_goes_on() -> None:
    recipe = recipe_of("replicas=2", hash_every=2, on_divergence="warn")
    said, step, events = run_ranks(flipped_run, 2, recipe, 1, "model/features.0.weight", 2)[0]
    assert (said, step) == ("", 8)
    found = next(record for name, record in events if name == "divergence")
    assert found == {"step": 3, "tensor": "model/features.0.weight", "ranks": [0, 1]}
    hashes = [record["equal"] for name, record in events if name == "hash"]
    assert hashes[0] is True and not any(hashes[1:]), "a flipped bit does not heal"


def test_without_a_flip_nobody_is_blamed() -> None:
    def clean(cluster: Cluster, strategy: str) -> StateDivergence | None:
        session = build_test_session(cluster, recipe_of(strategy, steps=2))
        list(session.rounds())
        return find_divergence(session.state, session.mesh, session.net)

    for strategy in ("replicas=4", "replicas=2 shard=2 zero=1", "replicas=2 pipeline=2"):
        assert run_ranks(clean, 4, strategy) == [None] * 4


@pytest.mark.capability("A2", "I10")
@pytest.mark.parametrize(
    "strategy", ["replicas=3", "replicas=1 lanes=2", "replicas=1 shard=2 zero=1", "replicas=1 pipeline=2"]
)
def test_verify_says_equal_bits_with_the_hash(strategy: str) -> None:
    recipe = recipe_of(strategy)

    def verified(cluster: Cluster) -> dict[str, Any]:
        return certificate(compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 6))

    found = run_ranks(verified, (recipe.strategy.replicas or 1) * recipe.strategy.ranks_per_replica)[0]
    assert found["ok"] and "equal bits" in found["conclusion"]
    assert found["sha256"] in found["conclusion"]
    assert {row["class"] for row in found["tensors"]} == {"bitwise"}
    json.dumps(found)


@pytest.mark.capability("A2", "I10")
def test_verify_sees_one_bit() -> None:
    """Twin: within every bound of rounding, and still a difference."""
    recipe = recipe_of("replicas=2")

    def verified(cluster: Cluster) -> tuple[bool, str]:
        import paceline.comm.reduction.bucket_reducer as room

        plain = room.clear_negative_zeros

        def one_bit_off(flats: Any) -> Any:
            flip(flats[0])
            return plain(flats)

        room.clear_negative_zeros = one_bit_off
        report = compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 6)
        return report.ok, report.failure.quantity if report.failure else ""

    assert run_ranks(verified, 2)[0] == (False, "gradient")


@pytest.mark.capability("N2", "Z10", "I10")
def test_a_run_goes_on_under_other_numbers_of_processes_with_the_same_bits(tmp_path: Path) -> None:
    """1 process without a stop; against 3, then 2 x ZeRO-1, then 2 lanes, each from the last checkpoint."""
    from paceline.session import run_folder

    whole = run_ranks(trained_to, 1, recipe_of("replicas=1", steps=9), str(tmp_path / "whole"), None)[0]
    parts = [("replicas=3", 3, 3), ("replicas=1 shard=2 zero=1", 2, 6), ("replicas=1 lanes=2", 1, 9)]
    folder, sha256 = tmp_path / "parts", ""
    for strategy, num_ranks, end in parts:
        recipe = recipe_of(strategy, steps=9)
        resume = str(folder) if sha256 else None
        sha256 = run_ranks(trained_to, num_ranks, recipe, str(folder), resume, end)[0]
    assert sha256 == whole
    assert run_folder.run_folder_of(folder) == folder


def trained_to(
    cluster: Cluster, recipe: Recipe, folder: str, resume: str | None, end: int | None = None
) -> str:
    """Train up to a step as if a signal came, save, and hash."""
    from paceline.session import run_folder

    session: Session
    recipe = recipe.replace(run_dir=folder)
    task = make_task(recipe)
    from paceline.session import build_session

    session = build_session(
        recipe, task, cluster, CPU, stop_requested=lambda: end is not None and session.state.step == end - 1
    )
    run_dir = run_folder.prepare_folder(session, Path(resume) if resume else None)
    if resume:
        run_folder.restore_run(session, Path(resume))
    result = fit(session, run_dir, [])
    session.close()
    assert result.steps == (end or recipe.steps) and result.sha256 is not None
    return result.sha256
