"""Masks of magnitude pruning: schedule, equal bits under every layout, bytes, resumes, export, quality."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.checkpoint.model_weights import export_weights, find_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import Session, evaluate, fit, run_folder
from paceline.sync import magnitude_pruning
from paceline.sync.magnitude_pruning import magnitude_mask
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import VerificationReport, compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.marks import soak_param
from tests.recipes import recipe_of

SPARSITY = {"target": 0.8, "first": 1, "last": 7, "every": 3}
LAYOUTS = (
    "replicas=2",
    "replicas=1 shard=2 zero=1",
    "replicas=1 shard=2 zero=2",
    "replicas=1 shard=2 zero=3",
)


def digits(strategy: str = "replicas=1", steps: int = 10, **settings: Any) -> Recipe:
    values = {
        "options": {"model": "mlp", "hidden": [33]},
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 1.0},
        "sparsity": SPARSITY,
    }
    batch = {"size": 128, "shards": 4}
    return recipe_of(strategy, task="digits", steps=steps, batch=batch, **values | settings)


def whole_state(session: Session) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in session.snapshot().tensors().items()}


def train(cluster: Cluster, recipe: Recipe) -> dict[str, Tensor]:
    """Train to the end; return the whole state."""
    session = build_test_session(cluster, recipe)
    list(session.rounds())
    found = whole_state(session)
    session.close()
    return found


def parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if name.startswith(("model/", "sparsity/"))}


def test_the_share_follows_the_schedule_and_ties_fall_in_order() -> None:
    sparsity = digits(sparsity={"target": 0.5, "first": 10, "last": 20, "every": 4}, steps=30).sparsity
    assert [update for update in range(30) if sparsity.is_due(update)] == [10, 14, 18, 20]
    assert sparsity.share(10) == 0.0 and sparsity.share(25) == 0.5
    assert sparsity.share(15) == pytest.approx(0.5 - 0.5 * 0.5**3)
    values = torch.tensor([[3.0, -1.0, 1.0], [0.5, -4.0, 1.0]])
    mask = magnitude_mask(values, 0.5, torch.ones(2, 3, dtype=torch.bool))
    assert mask.tolist() == [[True, False, False], [False, True, True]]
    # What is masked stays masked, also if its value has grown.
    values[1, 0] = 9.0
    assert magnitude_mask(values, 0.5, mask).tolist() == mask.tolist()


@pytest.mark.capability("J19")
def test_every_layout_has_the_masks_and_the_bits_of_one_process() -> None:
    recipe = partial(digits, reproducible=True)
    right = parameters(run_ranks(train, 1, recipe())[0])
    masks = {name.removeprefix("sparsity/"): t for name, t in right.items() if t.dtype == torch.bool}
    assert masks.keys() == {"layers.0.weight", "layers.3.weight"}
    for name, mask in masks.items():
        assert int((~mask).sum()) == int(0.8 * mask.numel())
        assert not right[f"model/{name}"][~mask].any() and right[f"model/{name}"][mask].all()

    def ends(cluster: Cluster) -> list[dict[str, Tensor]]:
        return [train(cluster, recipe(layout)) for layout in LAYOUTS]

    for found in run_ranks(ends, 2):
        for layout, state in zip(LAYOUTS, found, strict=True):
            state = parameters(state)
            assert state.keys() == right.keys()
            assert all(torch.equal(state[name], right[name]) for name in right), layout


def step_bytes(cluster: Cluster, recipe: Recipe) -> tuple[list[int], int]:
    """Return the payload bytes of sums in each step, and the values that are masked in the end."""
    session = build_test_session(cluster, recipe)
    sent, before = [], 0
    for _ in session.rounds():
        rows = session.net.ledger.rows
        total = sum(row.payload_bytes for key, row in rows.items() if "reduce" in str(key))
        sent.append(total - before)
        before = total
    masked = sum(int((~t).sum()) for name, t in whole_state(session).items() if name.startswith("sparsity/"))
    session.close()
    return sent, masked


@pytest.mark.capability("J19")
def test_masked_gradients_are_not_sent() -> None:
    """Replicas and ZeRO 1 save 4 bytes for every masked value; ZeRO 2 and 3 send all and say so."""

    def measure(cluster: Cluster) -> list[tuple[list[int], int, list[int]]]:
        return [
            (*step_bytes(cluster, digits(layout)), step_bytes(cluster, digits(layout, sparsity={}))[0])
            for layout in LAYOUTS
        ]

    for found in run_ranks(measure, 2):
        for layout, (sent, masked, dense) in zip(LAYOUTS, found, strict=True):
            assert masked == int(0.8 * 64 * 33) + int(0.8 * 330)
            saved = dense[-1] - sent[-1]
            if layout in LAYOUTS[:1]:
                assert saved == 4 * masked and sent[0] == dense[0]
            elif layout in LAYOUTS[1:2]:
                # A row is as wide as the larger of both parts.
                assert saved == pytest.approx(4 * masked, rel=0.05)
            else:
                assert saved == 0


@pytest.mark.capability("J19")
def test_verify_follows_masks_and_finds_those_of_unsynchronized_values() -> None:
    """The mutation twin: each rank masks by values of its own, and so do the masks of the ranks differ."""

    def own_values(rank: int, values: Tensor, share: float, before: Tensor) -> Tensor:
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(rank))
        return magnitude_mask(noise, share, before)

    def verify(cluster: Cluster) -> list[VerificationReport]:
        found = []
        for layout in LAYOUTS:
            recipe = digits(layout, steps=8)
            found.append(compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 8))
        recipe = digits(steps=8, strategy="replicas=2")
        with patch.object(magnitude_pruning, "magnitude_mask", partial(own_values, cluster.global_rank)):
            found.append(compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 8))
        return found

    for *reports, broken in run_ranks(verify, 2):
        for report in reports:
            assert report.ok and report.steps == 8, conclusion_lines(report)
        assert not broken.ok and broken.steps == 4


@pytest.mark.capability("J19")
@pytest.mark.parametrize("stop", [soak_param(3), 4, soak_param(5)])
def test_a_run_resumes_between_two_masks_to_the_bit(stop: int) -> None:
    """Before, at and after a change of the masks, also under another layout where it is reproducible."""
    recipe = partial(digits, steps=8, reproducible=True)

    def ends(cluster: Cluster) -> list[dict[str, Tensor]]:
        first = build_test_session(cluster, recipe(LAYOUTS[1]))
        for _ in zip(range(stop), first.rounds(), strict=False):
            pass
        snapshot = first.snapshot()
        saved = {name: t.detach().clone() for name, t in snapshot.tensors().items()}
        scalars = snapshot.scalars()
        sessions = [first]
        for layout in (LAYOUTS[1], LAYOUTS[0], LAYOUTS[3]):
            session = build_test_session(cluster, recipe(layout))
            session.restore({**saved}, scalars)
            sessions.append(session)
        found = []
        for session in sessions:
            list(session.rounds())
            found.append(whole_state(session))
        return found

    for right, *resumed in run_ranks(ends, 2):
        for end in resumed:
            assert end.keys() == right.keys()
            assert all(torch.equal(end[name], right[name]) for name in right)


@pytest.mark.capability("J19")
def test_masks_are_in_checkpoint_and_export(tmp_path: Path) -> None:
    session = build_test_session(Cluster.single(), digits(steps=8, run_dir=str(tmp_path / "run")))
    fit(session, run_folder.prepare_folder(session, None))
    session.close()
    checkpoint = find_checkpoint(StorageFolder(str(tmp_path / "run" / "checkpoints")), print)
    written = export_weights(checkpoint, tmp_path / "weights.safetensors")
    assert written.masks == tmp_path / "weights.masks.safetensors"
    masks, weights = load_file(written.masks), load_file(written.path)
    assert masks.keys() == {"layers.0.weight", "layers.3.weight"} and "layers.0.bias" in weights
    assert written.num_masked == sum(int((weights[name] == 0).sum()) for name in masks)
    assert all(torch.equal(weights[name] != 0, mask) for name, mask in masks.items())


class Shift(nn.Module):
    """A model without a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift)[:, :10]


def test_a_model_without_a_tensor_to_mask_is_an_error() -> None:
    task = replace(make_task(digits()), model=Shift(), stages=None, tensor=None, initialize=None)
    with pytest.raises(TaskError, match="no tensor of the model can be masked"):
        build_test_session(Cluster.single(), digits(), lambda: task)


def accuracy(seed: int, sparsity: dict[str, Any]) -> float:
    optimizer = {"name": "adamw", "lr": 3e-3}
    options = {"model": "mlp", "hidden": [256]}
    recipe = digits(steps=360, seed=seed, options=options, optimizer=optimizer, sparsity=sparsity)
    session = build_test_session(Cluster.single(), recipe)
    list(session.rounds())
    evaluation = evaluate(session)
    session.close()
    assert evaluation is not None
    return evaluation.metrics["accuracy"]


@pytest.mark.soak
@pytest.mark.capability("J19")
def test_at_80_percent_the_accuracy_falls_by_at_most_one_percent_on_digits() -> None:
    """Means over five seeds of the same 360 steps."""
    sparsity = {"target": 0.8, "first": 60, "last": 240, "every": 20}
    dense = sum(accuracy(seed, {}) for seed in range(1, 6)) / 5
    sparse = sum(accuracy(seed, sparsity) for seed in range(1, 6)) / 5
    assert dense > 0.95 and sparse >= dense - 0.01
