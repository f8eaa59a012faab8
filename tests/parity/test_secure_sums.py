"""Federated rounds under masks: the bits of the sum without them, whoever is lost, on any number of ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Task, train
from paceline.errors import NumericError, RecipeError, StrategyError
from paceline.federated import secure_rounds
from paceline.federated.cohort_table import COHORT_COLUMNS, CohortTable
from paceline.federated.secure_masks import MaskClient, SecureSumError
from paceline.federated.secure_rounds import RingReduction, SecureRounds, protocol_bytes
from paceline.job.cluster import Cluster
from paceline.privacy.entropy import KNOWN_ENTROPY
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, trajectory_of
from tests.marks import soak_param
from tests.parity.test_client_keeper import Scaffold
from tests.parity.test_federated import squared_error
from tests.recipes import recipe_of
from tests.unit.federated.test_secure_masks import TWINS

SGD = {"name": "sgd", "lr": 0.1}
COHORT = {"clients": 8, "cohort": 6, "partition": "quantity:0.5", "batch": 20, "threshold": 0.51}
CASES: dict[str, dict[str, Any]] = {
    "samples": {},
    "dropout and a clip among six neighbours of eight in 32 bits": {
        "options": {"model": "mlp", "hidden": [8], "dropout": 0.2},
        "federated": {"cohort": 8, "neighbours": 6, "clip_norm": 0.5, "ring": 32, "fraction_bits": 14},
    },
    "BatchNorm and dropout": {"options": {"model": "convnet", "channels": 2, "dropout": 0.2}},
    "equal clients by chance with FedAdam": {
        "outer": {"name": "adam", "lr": 0.02},
        "federated": {"cohort": "poisson:0.8", "weights": "equal"},
    },
    "clients as one batched computation": {"federated": {"vectorize": 3}},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of one thread, in this process as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recipe(secure: str, **settings: Any) -> Recipe:
    federated = {**COHORT, **settings.pop("federated", {}), "secure": secure}
    for key in ("threshold", "neighbours") if secure != "masks" else ():
        federated.pop(key, None)
    for key in ("ring", "fraction_bits") if secure == "none" else ():
        federated.pop(key, None)
    defaults: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [8]},
        "steps": 3,
        "batch": {},
        "optimizer": SGD,
        "federated": federated,
    }
    return recipe_of("sync=federated:1", **(defaults | settings))


def loses(seed: int, share: float, number: int, name: str) -> int:
    """Return the message before which a client is lost; 0: it is not."""
    draws = random.Random(f"{seed} {number} {name}")
    return draws.randint(1, 4) if draws.random() < share else 0


def run(cluster: Cluster, settings: Recipe, seed: int = 0, share: float = 0.0) -> Trajectory:
    session = build_test_session(cluster, settings)
    assert isinstance(session.rule, SecureRounds)
    session.rule.reduction.lost_at = partial(loses, seed, share)
    return trajectory_of([stats.loss for stats in session.rounds()], session)


def same(one: Trajectory, other: Trajectory) -> bool:
    return one.losses == other.losses and one.distance(other) == 0.0


@pytest.mark.capability("R3")
@pytest.mark.parametrize("case", [soak_param(c) if "BatchNorm" in c else c for c in CASES])
def test_a_whole_training_under_masks_has_the_bits_of_the_same_sum_without(case: str) -> None:
    """Clients are lost before each of the four messages; a sum of floats is as near as the rounding."""
    settings = CASES[case]
    plain, masked = (run(Cluster.single(), recipe(secure, **settings)) for secure in ("ring", "masks"))
    assert same(plain, masked)
    floats = build_test_session(Cluster.single(), recipe("none", **settings))
    floats = trajectory_of([stats.loss for stats in floats.rounds()], floats)
    # BatchNorm moves counters by the mean of their changes, and not by the largest.
    bits = settings.get("federated", {}).get("fraction_bits", 32)
    if "BatchNorm" not in case:
        assert floats.distance(masked) <= 3 * 2.0 ** -(bits - 4)
    seed = next(seed for seed in range(100) if loses_each_message(seed))
    lossy = [run(Cluster.single(), recipe(secure, **settings), seed, 0.3) for secure in ("ring", "masks")]
    assert same(*lossy) and not same(lossy[0], plain)


def loses_each_message(seed: int) -> bool:
    """Return whether clients are lost before each of the messages, and never three of a round."""
    lost = [[loses(seed, 0.3, number, f"client-{k}") for k in range(8)] for number in range(3)]
    return {message for row in lost for message in row} == {0, 1, 2, 3, 4} and all(
        sum(map(bool, row)) <= 2 for row in lost
    )


@pytest.mark.parametrize("twin", [*TWINS])
def test_a_training_with_wrong_masks_is_another_one(twin: str) -> None:
    plain = run(Cluster.single(), recipe("ring", steps=1))
    with patch("paceline.federated.secure_masks.add_mask", TWINS[twin]):
        assert not same(plain, run(Cluster.single(), recipe("masks", steps=1)))


@pytest.mark.capability("R3")
@pytest.mark.parametrize("world", [soak_param(2), 3])
def test_ranks_share_the_clients_of_a_round_with_the_same_bits(world: int) -> None:
    seed = next(seed for seed in range(100) if loses_each_message(seed))
    alone = run(Cluster.single(), recipe("ring"), seed, 0.3)
    for trajectory in run_ranks(run, world, recipe("masks"), seed, 0.3, deadline=240):
        assert same(alone, trajectory)


# -- what the server sees


@pytest.mark.capability("R3")
def test_the_server_sees_sums_and_no_number_of_one_client() -> None:
    """Recorded are the words that arrive, and the table of the cohort before and after the sum."""
    words, tables = list[bytes](), list[list[list[float]]]()
    receive, set_sums = RingReduction.receive, CohortTable.set_sums

    def record_words(self: RingReduction, position: int, sent: Any) -> None:
        words.append(sent.to_bytes())
        receive(self, position, sent)

    def record_table(self: CohortTable, *arguments: Any) -> None:
        tables.append(self.rows.tolist())
        set_sums(self, *arguments)
        tables.append(self.rows.tolist())

    settings = recipe("masks", steps=1)
    with (
        patch.object(RingReduction, "receive", record_words),
        patch.object(CohortTable, "set_sums", record_table),
    ):
        session = build_test_session(Cluster.single(), settings)
        stats = next(session.rounds())
    before, after = tables
    known = {COHORT_COLUMNS.index("status"), COHORT_COLUMNS.index("bytes")}
    assert all(not value for row in before for index, value in enumerate(row) if index not in known)
    assert sum(any(v for index, v in enumerate(row) if index not in known) for row in after) == 1
    assert stats.num_items > 0 and len({*words}) == 6
    # Each is as long as the closed form says, and the same client never sends the same words again.
    layout = session.rule.reduction.layout
    num_values = sum(p.numel() for p in session.runner.sharded_model.computes.values())
    assert {len(sent) for sent in words} == {layout.num_bytes} == {8 * num_values + 8 * layout.num_numbers}
    record = next(r for name, r in session.events.take() if name == "cohort")
    assert record["up_bytes"] == 6 * (layout.num_bytes + protocol_bytes(settings.federated, 6))


@pytest.mark.parametrize("neighbours", [0, 4])
def test_the_bytes_of_the_protocol_are_the_closed_form(neighbours: int) -> None:
    counted, gather = list[int](), secure_rounds.SimulatedMasks._gather

    def count(self: Any, own: dict[int, bytes]) -> dict[int, bytes]:
        counted.append(sum(map(len, own.values())))
        return gather(self, own)

    settings = recipe("masks", steps=1, federated={"neighbours": neighbours})
    with patch.object(secure_rounds.SimulatedMasks, "_gather", count):
        build_and_train(settings)
    assert sum(counted) == 6 * protocol_bytes(settings.federated, 6)


def build_and_train(settings: Recipe, task: Any = None) -> None:
    for _ in build_test_session(Cluster.single(), settings, task).rounds():
        pass


def test_no_secret_is_in_a_file_of_a_run_and_known_entropy_is_reported(tmp_path: Path) -> None:
    """A run with a seed says so in its result, report, metrics and manifest, and a resumed one too."""
    secrets, init = list[bytes](), MaskClient.__init__

    def record(self: MaskClient, *arguments: Any) -> None:
        init(self, *arguments)
        for secret in (self._seed, self._mask_secret):
            secrets.extend([secret.to_bytes(16, "little"), str(secret).encode(), f"{secret:x}".encode()])

    folders = {}
    with patch.object(MaskClient, "__init__", record):
        for seed in (None, 7):
            folders[seed] = tmp_path / str(seed)
            result = train(recipe("masks", debug={"entropy_seed": seed}, run_dir=str(folders[seed])))
            assert result.privacy["warning"] == ("" if seed is None else KNOWN_ENTROPY)
            assert any("sum" in text for text in result.privacy["released"])
    assert len(secrets) == 2 * 3 * 6 * 6
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert files and not any(secret in data for secret in secrets for data in files.values())
    for name in ("report.html", "metrics.jsonl", "manifest.json"):
        says = {
            seed: KNOWN_ENTROPY.encode() in b"".join(path.read_bytes() for path in folder.rglob(name))
            for seed, folder in folders.items()
        }
        assert says == {None: False, 7: True}, name
    # Draws from a seed repeat, and those of the system do not, so the sums are equal and the words are not.
    events = [json.loads(line) for line in (folders[7] / "metrics.jsonl").read_text().splitlines()]
    assert any(event.get("warning") == KNOWN_ENTROPY for event in events)


# -- errors


def test_what_ends_a_run_says_what_and_whom(tmp_path: Path) -> None:
    with pytest.raises(SecureSumError, match="too few clients are left in round 0"):
        run(Cluster.single(), recipe("masks"), 0, 1.0)
    with pytest.raises(NumericError, match=r"the update of client client-\d has a value of .* in updates/0"):
        build_and_train(recipe("masks", federated={"largest": 1e-6}))
    with pytest.raises(RecipeError, match=r"a sum of weights \d+ with values up to 8 and 32 fraction bits"):
        build_and_train(recipe("masks", federated={"ring": 32}))
    with pytest.raises(SecureSumError, match="has a cohort of 1, and the sum over one client"):
        build_and_train(recipe("masks", federated={"cohort": 1}))

    def kept() -> Task:
        x = torch.zeros(4, 2)
        clients = {f"site-{k}": TensorDataset(x, x) for k in range(8)}
        return Task(nn.Linear(2, 2), loss=squared_error, clients=clients, keeper=Scaffold())

    with pytest.raises(StrategyError, match="the server of a secure sum sees no client alone"):
        build_and_train(recipe("masks", federated={"partition": "natural"}), kept)
