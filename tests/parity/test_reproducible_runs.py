"""Reproducible runs: hashes over ranks, verification and resumes; what would break the promise is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.comm.reduction import bucket_reducer
from paceline.errors import DeviceError, DivergenceError, RecipeError, StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.models import KeyedDropout
from paceline.parallel.state_hash import StateDivergence, find_divergence, state_sha256
from paceline.recipe import OptimizerRecipe, Recipe
from paceline.session import Session, build_session, fit, reproducibility, run_folder
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import certificate
from tests.marks import soak_param
from tests.parity.reproducible import reproducible_recipe


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
    recipe = reproducible_recipe(strategy, hash_every=2, steps=8)
    names = [piece.slot.name for piece in run_ranks(pieces_of, 1, reproducible_recipe("replicas=1"))[0]]
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
    recipe = reproducible_recipe("replicas=2", hash_every=2, on_divergence="warn")
    said, step, events = run_ranks(flipped_run, 2, recipe, 1, "model/features.0.weight", 2)[0]
    assert (said, step) == ("", 8)
    found = next(record for name, record in events if name == "divergence")
    assert found == {"step": 3, "tensor": "model/features.0.weight", "ranks": [0, 1]}
    hashes = [record["equal"] for name, record in events if name == "hash"]
    assert hashes[0] is True and not any(hashes[1:]), "a flipped bit does not heal"


def test_without_a_flip_nobody_is_blamed() -> None:
    def clean(cluster: Cluster, strategy: str) -> StateDivergence | None:
        session = build_test_session(cluster, reproducible_recipe(strategy, steps=2))
        list(session.rounds())
        return find_divergence(session.state, session.mesh, session.net)

    for strategy in ("replicas=4", "replicas=2 shard=2 zero=1", "replicas=2 pipeline=2"):
        assert run_ranks(clean, 4, strategy) == [None] * 4


@pytest.mark.capability("A2", "I10")
@pytest.mark.parametrize(
    "strategy",
    [
        soak_param("replicas=3"),
        "replicas=1 lanes=2",
        soak_param("replicas=1 shard=2 zero=1"),
        "replicas=1 pipeline=2",
    ],
)
def test_verify_says_equal_bits_with_the_hash(strategy: str) -> None:
    recipe = reproducible_recipe(strategy)

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
    recipe = reproducible_recipe("replicas=2")

    def verified(cluster: Cluster) -> tuple[bool, str]:
        plain = bucket_reducer.clear_negative_zeros

        def one_bit_off(flats: Any) -> Any:
            flip(flats[0])
            return plain(flats)

        with patch.object(bucket_reducer, "clear_negative_zeros", one_bit_off):
            report = compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 6)
        return report.ok, report.failure.quantity if report.failure else ""

    assert run_ranks(verified, 2)[0] == (False, "gradient")


@pytest.mark.capability("N2", "Z10", "I10")
def test_a_run_goes_on_under_other_numbers_of_processes_with_the_same_bits(tmp_path: Path) -> None:
    """1 process without a stop; against 3, then 2 x ZeRO-1, then 2 lanes, each from the last checkpoint."""
    whole = run_ranks(
        trained_to, 1, reproducible_recipe("replicas=1", steps=9), str(tmp_path / "whole"), None
    )[0]
    parts = [("replicas=3", 3, 3), ("replicas=1 shard=2 zero=1", 2, 6), ("replicas=1 lanes=2", 1, 9)]
    folder, sha256 = tmp_path / "parts", ""
    for strategy, num_ranks, end in parts:
        recipe = reproducible_recipe(strategy, steps=9)
        resume = str(folder) if sha256 else None
        sha256 = run_ranks(trained_to, num_ranks, recipe, str(folder), resume, end)[0]
    assert sha256 == whole
    assert run_folder.run_folder_of(folder) == folder


def trained_to(
    cluster: Cluster, recipe: Recipe, folder: str, resume: str | None, end: int | None = None
) -> str:
    """Train up to a step as if a signal came, save, and hash."""
    session: Session
    recipe = recipe.replace(run_dir=folder)
    task = make_task(recipe)

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


@pytest.mark.capability("I10")
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"strategy": "replicas=2 sync=local:4"}, "sync=every-step"),
        ({"strategy": "replicas=2 codec=int8"}, "codec=fp32"),
        ({"runtime": {"threads": 2}}, "lanes=2"),
        ({"runtime": {"compile": True}}, "compile = false"),
    ],
    ids=["local", "int8", "threads", "compile"],
)
def test_a_recipe_that_cannot_keep_its_bits_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        reproducible_recipe(**({"strategy": "replicas=1"} | changes))


def fused_task() -> Task:
    """A task may bring its own optimizer."""
    built = make_task(reproducible_recipe("replicas=1"))
    return replace(built, optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True))


def broken_promises(cluster: Cluster) -> None:
    """Rank 1 is of another kind, then treats small numbers in another way; two threads; own optimizers."""
    recipe, is_second = reproducible_recipe("replicas=2"), cluster.global_rank == 1
    build_test_session(cluster, recipe).close()
    cpu_model = (lambda: "Another 9000") if is_second else reproducibility._cpu_model
    says = r"processor is .* on ranks \[0\], Another 9000 on ranks \[1\]"
    with patch.object(reproducibility, "_cpu_model", cpu_model), pytest.raises(DeviceError, match=says):
        build_test_session(cluster, recipe)
    assert torch.set_flush_denormal(is_second)
    with pytest.raises(DeviceError, match=r"denormal numbers is kept on ranks \[0\], flushed"):
        build_test_session(cluster, recipe)
    torch.set_flush_denormal(False)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.raises(StrategyError, match="2 threads"):
        build_test_session(cluster, recipe)
    torch.set_num_threads(num_threads)
    with pytest.raises(StrategyError, match="fused optimizer"):
        build_test_session(cluster, recipe.replace(optimizer=OptimizerRecipe()), fused_task)


@pytest.mark.capability("I10")
def test_what_breaks_the_promise_is_named_before_training() -> None:
    run_ranks(broken_promises, 2)


class Drops(nn.Module):
    """Two layers with a dropout of either kind."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), dropout, nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    return Loss((model(x).squeeze(-1) - y).square().sum(), len(y))


def dropping(kind: type[nn.Module]) -> Task:
    torch.manual_seed(1)
    x = torch.randn(64, 6)
    return Task(Drops(kind(0.5)), TensorDataset(x, x.sum(1)), loss, stages=lambda model: list(model.layers))


@pytest.mark.capability("J10", "A9")
def test_random_numbers_that_would_be_shared_are_an_error() -> None:
    def trained(cluster: Cluster, kind: type[nn.Module]) -> str:
        try:
            recipe = reproducible_recipe("replicas=1 lanes=2", steps=2)
            session = build_test_session(cluster, recipe, lambda: dropping(kind))
            list(session.rounds())
        except TaskError as error:
            return str(error)
        return state_sha256(session.snapshot().tensors())

    for said in run_ranks(trained, 1, nn.Dropout):
        assert "draws from PyTorch's" in said and "KeyedDropout" in said
    for sha256 in run_ranks(trained, 1, KeyedDropout):
        assert len(sha256) == 64


@pytest.mark.capability("J10")
def test_random_numbers_go_on_from_stage_to_stage() -> None:
    """What a stage draws from PyTorch's own stream, the next goes on with: the bits of one process."""

    def trained(cluster: Cluster, strategy: str) -> str:
        session = build_test_session(
            cluster, reproducible_recipe(strategy, steps=2), lambda: dropping(nn.Dropout)
        )
        list(session.rounds())
        return state_sha256(session.snapshot().tensors())

    assert run_ranks(trained, 2, "replicas=1 pipeline=2") == run_ranks(trained, 1, "replicas=1") * 2


@pytest.mark.capability("A7", "A9")
def test_an_error_in_one_lane_ends_the_step_and_the_other_lanes() -> None:
    def failing(cluster: Cluster) -> list[str]:
        def task() -> Task:
            built = dropping(KeyedDropout)

            def raises(model: nn.Module, batch: Any) -> Loss:
                if model is not built.model and model.training:
                    raise ValueError("in the second lane")
                return loss(model, batch)

            return replace(built, loss=raises)

        session = build_test_session(cluster, reproducible_recipe("replicas=1 lanes=2"), task)
        said = []
        for _ in range(2):  # and the lanes are there for the next try
            try:
                list(session.rounds())
            except ValueError as error:
                said.append(str(error))
            session.abort()
        session.close()
        return said

    assert run_ranks(failing, 1)[0] == ["in the second lane"] * 2
