"""Going back to a checkpoint when the numbers go wrong, and on behind the step that did."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import NumericError
from paceline.job.cluster import Cluster
from paceline.session import checkpointing, fit
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.parity.bad_value_job import BAD_STEP, STEPS, Trained, build, distance, recipe, run_without, train

pytestmark = pytest.mark.capability("K8")
bad = partial(build, math.nan)
STRATEGIES = [
    (1, "replicas=all"),
    (2, "replicas=all"),
    (2, "replicas=1 shard=2 zero=1"),
    (2, "replicas=1 pipeline=2"),
]


def going_back(cluster: Cluster, strategy: str, mode: str, run_dir: Path) -> Trained:
    checkpoint = {"every_steps": 4, "keep": 9, "mode": mode}
    chosen = recipe(strategy, non_finite="roll-back", more={"checkpoint": checkpoint})
    return train(cluster, chosen, bad, run_dir)


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "mode"),
    [
        pytest.param(*one, mode, marks=[pytest.mark.soak] * (number % 2 != which))
        for number, one in enumerate(STRATEGIES)
        for which, mode in enumerate(["background", "blocking"])
    ],
)
def test_what_led_to_the_trouble_is_left_out(
    num_ranks: int, strategy: str, mode: str, tmp_path: Path
) -> None:
    """As if the steps from the checkpoint to the bad one had never been; with saves under way as well."""
    right = run_without([4, 5, 6])
    for found in run_ranks(going_back, num_ranks, strategy, mode, tmp_path):
        assert found.said == ""
        assert [step for step, _ in found.seen] == [0, 1, 2, 3, 4, 5, *range(BAD_STEP + 1, STEPS)]
        assert all(applied for _, applied in found.seen)
        (event,) = [record for name, record in found.events if name == "roll-back"]
        assert (event["step"], event["checkpoint"]) == (BAD_STEP, "step-00000004")
        assert event["left_out"] == [4, BAD_STEP] and "the loss is nan" in event["reason"]
        assert distance(found.end, right) <= 1e-5
    kept = CheckpointCatalog.read(StorageFolder(str(tmp_path / "checkpoints"))).whole
    assert [one.step for one in kept] == [0, 4, 8, 12]


def test_before_the_first_checkpoint_it_goes_back_to_the_beginning(tmp_path: Path) -> None:
    found = train(Cluster.single(), recipe(non_finite="roll-back"), lambda: bad([2]), tmp_path)
    assert [step for step, _ in found.seen] == [0, 1, *range(3, STEPS)]
    assert distance(found.end, run_without([0, 1, 2])) <= 1e-6


def test_a_checkpoint_that_leads_to_trouble_again_is_not_used_twice(tmp_path: Path) -> None:
    """Steps 6 and 7 are bad, and nothing is saved between them: the second time it goes back further."""
    found = train(Cluster.single(), recipe(non_finite="roll-back"), lambda: bad([6, 7]), tmp_path)
    back = [record for name, record in found.events if name == "roll-back"]
    assert [one["checkpoint"] for one in back] == ["step-00000004", "step-00000000"]
    assert [one["left_out"] for one in back] == [[4, 6], [0, 7]]
    assert distance(found.end, run_without(range(8))) <= 1e-6


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    session = build_test_session(Cluster.single(), recipe(non_finite="roll-back"), lambda: bad([6]))
    chosen = session.recipe.replace(steps=6)
    fit(build_test_session(Cluster.single(), chosen, lambda: bad([])), tmp_path)
    (tmp_path / "checkpoints" / "step-00000006" / "rank-00000.safetensors").write_bytes(b"not this")
    checkpointing.restore_checkpoint(session, StorageFolder(str(tmp_path / "checkpoints")))
    assert session.state.step == 4
    fit(session, tmp_path)
    assert session.state.step == STEPS and session.state.num_updates == STEPS - 3


def test_it_does_not_go_back_for_ever(tmp_path: Path) -> None:
    chosen = recipe(non_finite="roll-back", max_roll_backs=2, more={"checkpoint": {"every_steps": 1}})
    found = train(Cluster.single(), chosen, lambda: bad([2, 5, 8]), tmp_path)
    assert "the loss is nan in step 8" in found.said and "rolled back 2 times" in found.said
    assert "health.max_roll_backs" in found.said


def test_when_no_checkpoint_is_left_it_ends_with_the_cause(tmp_path: Path) -> None:
    found = train(Cluster.single(), recipe(non_finite="roll-back"), lambda: bad([1, 2]), tmp_path)
    assert "the loss is nan in step 2" in found.said and "no earlier checkpoint to roll back to" in found.said


def test_without_a_run_folder_there_is_nothing_to_go_back_to() -> None:
    session = build_test_session(Cluster.single(), recipe(non_finite="roll-back"), bad)
    with pytest.raises(NumericError, match=f"step {BAD_STEP}.*without a run folder"):
        fit(session)


def test_a_run_that_was_resumed_from_an_older_checkpoint_goes_back_to_that(tmp_path: Path) -> None:
    """Not to a later one, which the folder still holds and this run has never seen."""
    chosen = recipe(non_finite="roll-back")
    fit(build_test_session(Cluster.single(), chosen.replace(steps=8), lambda: bad([])), tmp_path)
    session = build_test_session(Cluster.single(), chosen, lambda: bad([5]))
    checkpointing.restore_checkpoint(session, StorageFolder(str(tmp_path / "checkpoints")), "step-00000004")
    fit(session, tmp_path)
    assert session.state.num_updates == STEPS - 2


def test_a_resumed_run_goes_on_behind_what_was_left_out(tmp_path: Path) -> None:
    """Where it went on is the step of the state, so the next checkpoint holds it: the same bits."""
    whole = train(Cluster.single(), recipe(non_finite="roll-back"), bad, tmp_path / "whole")
    first, again = tmp_path / "whole" / "checkpoints", tmp_path / "again" / "checkpoints"
    shutil.copytree(first, again)
    session = build_test_session(Cluster.single(), recipe(non_finite="roll-back"), bad)
    checkpointing.restore_checkpoint(session, StorageFolder(str(again)), "step-00000008")
    list(session.rounds())
    mine = session.snapshot().tensors()
    assert session.state.step == STEPS and all(torch.equal(mine[n], t) for n, t in whole.end.items())


def test_what_is_known_of_earlier_losses_is_state(tmp_path: Path) -> None:
    """A run that is resumed one step before a spike sees it as the first run would have."""
    spikes = recipe(spike_factor=50.0, spike_window=4)
    fit(build_test_session(Cluster.single(), spikes.replace(steps=BAD_STEP), lambda: build(0.5)), tmp_path)
    session = build_test_session(Cluster.single(), spikes, lambda: build(3000.0))
    checkpointing.restore_checkpoint(session, StorageFolder(str(tmp_path / "checkpoints")))
    with pytest.raises(NumericError, match="the median of the last 4"):
        fit(session)
    fresh = build_test_session(Cluster.single(), spikes, lambda: build(3000.0))
    fresh.state.step = BAD_STEP  # the twin: with nothing known it is no spike
    fit(fresh)
