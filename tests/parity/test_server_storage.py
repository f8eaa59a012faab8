"""Each parameter is on one of several servers: what they have in memory, and all that needs a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import load_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.parallel.state_hash import find_divergence, whole_sha256
from paceline.recipe import Recipe, Strategy
from paceline.session import Session, checkpointing, evaluate, fit
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.marks import soak_param

WORDS, WIDTH = 20_000, 16


class Bag(nn.Module):
    """A large embedding, a frozen layer, a norm with buffers, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm, self.out = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.norm(self.fixed(self.words(words)))) * self.scale


def build() -> Task:
    words = torch.randint(0, WORDS, (64, 3), generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Bag()

    def loss(model: nn.Module, batch: Any) -> Loss:
        found = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return Loss(found, len(batch[0]))

    data = TensorDataset(words, words.sum(1) % 2)
    return Task(model, data, loss, held_out=TensorDataset(words[:23], words[:23].sum(1) % 2))


def recipe(strategy: str, steps: int = 6, **changes: Any) -> Recipe:
    return Recipe(
        task="own",
        steps=steps,
        batch={"size": 16, "shards": 4},
        optimizer={"name": "adamw", "lr": 0.01},
        evaluate={"batch": 5},
        strategy=Strategy.parse(strategy),
        **changes,
    )


def parameter_bytes(session: Session) -> int:
    """The memory of all parameters of this rank, those of the model and those that it updates."""
    sharded_model = session.runner.sharded_model
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [*sharded_model.model.parameters(), *sharded_model.updates.values()]
        storages = [t.untyped_storage() for t in tensors if not t.is_meta]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held_out_loss(model: nn.Module) -> float:
    """The plain mean over the held-out samples."""
    task, was_training = build(), model.training
    model.eval()
    with torch.no_grad():
        loss = task.loss(model, torch.utils.data.default_collate([*task.held_out]))
    model.train(was_training)
    return float(loss.total) / float(loss.count)


def refusal(session: Session) -> str:
    """Use the embedding of the model of this rank."""
    try:
        session.runner.sharded_model.model.words.weight.sum()
    except TaskError as error:
        return error.what
    return ""


def stored(cluster: Cluster, strategy: str, folder: Path) -> dict[str, Any]:
    session = build_test_session(cluster, recipe(strategy), build)
    found: dict[str, Any] = {"notes": dict(session.events.take())}
    fit(session, folder)
    found["bytes"] = parameter_bytes(session)
    whole, evaluation = session.complete(), evaluate(session)
    assert evaluation is not None
    found["losses"] = (held_out_loss(whole), evaluation.loss)
    found["sha"] = whole_sha256(session.state, session.mesh, session.net)
    found["state"] = {n: t.clone() for n, t in session.snapshot().tensors().items()}
    found["copy"] = {n: t.detach().clone() for n, t in whole.state_dict().items()}
    found["same"] = find_divergence(session.state, session.mesh, session.net)
    if cluster.global_rank == cluster.world_size - 1:
        with torch.no_grad():
            session.runner.sharded_model.model.words.weight[WORDS - 1] += 1.0
    found["changed"] = find_divergence(session.state, session.mesh, session.net)
    found["use"] = refusal(session)
    session.close()
    return found


def loaded(cluster: Cluster, strategy: str, folder: Path) -> tuple[dict[str, Tensor], int, dict[str, Tensor]]:
    session = build_test_session(cluster, recipe(strategy, 8), build)
    checkpointing.restore_checkpoint(session, StorageFolder(str(folder / "checkpoints")))
    found = {n: t.clone() for n, t in session.snapshot().tensors().items()}
    held = parameter_bytes(session)
    list(session.rounds())
    return found, held, {n: t.clone() for n, t in session.snapshot().tensors().items()}


def values_by_name(folder: Path) -> dict[str, tuple[int, int]]:
    """The values that a checkpoint has of each tensor, and how many the tensor has."""
    files = StorageFolder(str(folder / "checkpoints"))
    manifest = load_checkpoint(files, CheckpointCatalog.read(files).whole[-1].name).manifest
    found: dict[str, tuple[int, int]] = {}
    for chunk in (chunk for file in manifest.files for chunk in file.chunks):
        size = torch.Size(chunk.sizes).numel()
        found[chunk.name] = found.get(chunk.name, (0, 0))[0] + size, torch.Size(chunk.shape).numel()
    return found


@pytest.mark.capability("B4", clause="each variable on one server only")
@pytest.mark.parametrize("partition", ["fixed", soak_param("max-size:300000")])
def test_servers_hold_one_model_together_and_a_run_saves_evaluates_and_resumes_it(
    partition: str, tmp_path: Path
) -> None:
    strategy = f"servers=2 sync=server partition={partition}"
    ranks = run_ranks(stored, 4, strategy, tmp_path)
    first, second, *workers = ranks
    model = sum(p.numel() * p.element_size() for p in build().model.parameters())
    assert first["bytes"] + second["bytes"] == model and all(one["bytes"] == model for one in workers)
    assert first["notes"]["servers"]["bytes"] == [first["bytes"], second["bytes"]]
    if partition == "fixed":
        assert abs(first["bytes"] - second["bytes"]) <= 0.1 * model / 2
    for rank in ranks:
        assert rank["losses"] == pytest.approx((first["losses"][0],) * 2, rel=1e-6)
        assert rank["sha"] == first["sha"] and rank["same"] is None
        assert rank["changed"] is not None and rank["changed"].tensor == "model/words.weight"
        for name, t in rank["copy"].items():
            assert torch.equal(t, first["state"][f"model/{name}"])
    assert ["used on a server" in rank["use"] for rank in ranks] == [True, True, False, False]
    values = values_by_name(tmp_path)
    assert values.keys() == first["state"].keys()
    assert all(saved == size for saved, size in values.values()), "each value is written once"
    after = {
        then: run_ranks(loaded, 4, then, tmp_path)
        for then in (strategy, "servers=3 sync=server", "replicas=4")
    }
    for found, _, end in (rank for ranks in after.values() for rank in ranks):
        model_names = [name for name in found if name.startswith(("model/", "optimizer/"))]
        assert all(torch.equal(found[name], first["state"][name]) for name in model_names)
        for name in model_names:
            assert torch.allclose(end[name], after[strategy][0][2][name], rtol=1e-5, atol=1e-7), name
    assert sum(held for _, held, _ in after["servers=3 sync=server"][:3]) == model
