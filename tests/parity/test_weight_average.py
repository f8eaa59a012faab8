"""The average of the weights: the same function of the parameters under every strategy; saved, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoint.model_weights import export_weights, find_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import CheckpointError
from paceline.job.cluster import Cluster
from paceline.parallel.sharded_model import unsharded_model
from paceline.recipe import Recipe, Strategy
from paceline.session import Session, evaluate, fit, run_folder
from paceline.sync.weight_average import WeightAverage
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session, make_task
from paceline.verification import verify

DECAY = 0.75
BY_UPDATES = (
    "replicas=2",
    "replicas=1 shard=2 zero=1",
    "replicas=1 shard=2 zero=3",
    "replicas=1 pipeline=2",
    "replicas=1 tensor=2",
    "replicas=1 pipeline=2 sync=pipedream",
    "replicas=1 servers=1 sync=server-async",
)
BY_ROUNDS = ("replicas=2 sync=local:2", "replicas=2 sync=diloco:2")


def digits(strategy: str, steps: int = 6, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [24, 16]},
        "steps": steps,
        "batch": {"size": 16, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "average": {"decay": DECAY},
        "evaluate": {"max_samples": 64},
        "runtime": {"threads": 1},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def shares(n: int) -> float:
    return min(DECAY, (1 + n) / (10 + n))


def averaged(states: list[dict[str, Tensor]], steps: int = 1) -> dict[str, Tensor]:
    """By the closed form: the first state, then every other one, `steps` updates further on."""
    found, n = dict(states[0]), 0
    for state in states[1:]:
        keep = 1.0
        for _ in range(steps):
            keep, n = keep * shares(n), n + 1
        found = {name: value * keep + state[name] * (1 - keep) for name, value in found.items()}
    return found


def watch(session: Session) -> list[dict[str, Tensor]]:
    """What this rank updates, after every update."""
    states = [_copies(session)]
    session.update_step.observers.append(lambda record: states.append(_copies(session)))
    return states


def _copies(session: Session) -> dict[str, Tensor]:
    return {slot.name: p.detach().double() for slot, p in session.runner.sharded_model.updates.items()}


def follow(cluster: Cluster, strategy: str) -> dict[str, Any]:
    """Train, and hold the average against one that the test makes of what it has seen."""
    torch.set_num_threads(1)
    recipe = digits(strategy)
    session, task = build_test_session(cluster, recipe), make_task(recipe)
    average = session.average
    assert average is not None
    by_rounds = strategy in BY_ROUNDS
    states = [_copies(session)] if by_rounds else watch(session)
    for _ in session.rounds():
        if by_rounds:
            states.append(_copies(session))
    right = averaged(states, 2 if by_rounds else 1)
    off = max((_off(value, right[slot.name]) for slot, value in average.values.items()), default=0.0)
    twin = max((_off(value, states[-1][slot.name]) for slot, value in average.values.items()), default=1.0)
    before = _copies(session)
    found = evaluate(session)
    same = all(torch.equal(value, before[name]) for name, value in _copies(session).items())
    whole = session.snapshot().tensors()
    assert found is not None
    plain = _plain_loss(
        task, {n.removeprefix("average/values/"): t for n, t in whole.items() if "values/" in n}
    )
    session.parts.average = None
    last = evaluate(session)
    assert last is not None
    session.close()
    return {"off": off, "twin": twin, "same": same, "loss": found.loss, "plain": plain, "last": last.loss}


def _off(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).abs().max()) if a.numel() else 0.0


def _plain_loss(task: Any, values: dict[str, Tensor]) -> float:
    if not values:
        return 0.0
    task.model.load_state_dict(values, strict=False)
    task.model.eval()
    batch = torch.utils.data.default_collate([task.held_out[i] for i in range(64)])
    with torch.no_grad():
        loss = task.loss(task.model, batch)
    return float(loss.total) / float(loss.count)


def follow_all(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {strategy: follow(cluster, strategy) for strategy in (*BY_UPDATES, *BY_ROUNDS)}


TWO_SERVERS = "replicas=1 servers=2 sync=server-async"


def test_two_servers_and_their_worker_evaluate_the_average() -> None:
    ranks = run_ranks(follow, 3, TWO_SERVERS)
    for found in ranks:
        assert found["off"] <= 1e-6 and found["same"]
        assert found["loss"] == pytest.approx(ranks[0]["plain"], rel=1e-5)
        assert abs(found["loss"] - found["last"]) > 1e-4


@pytest.fixture(scope="module")
def followed() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(follow_all, 2)


@pytest.mark.parametrize("strategy", [*BY_UPDATES, *BY_ROUNDS])
def test_it_is_the_closed_form_of_the_parameters_and_is_what_is_evaluated(
    strategy: str, followed: list[dict[str, dict[str, Any]]]
) -> None:
    for rank, ranks in enumerate(followed):
        found = ranks[strategy]
        assert found["off"] <= 1e-6 and found["same"], rank
        assert found["twin"] > 1e-4, "the twin: the parameters themselves are elsewhere"
        assert abs(found["loss"] - found["last"]) > 1e-4
    assert followed[0][strategy]["loss"] == pytest.approx(followed[0][strategy]["plain"], rel=1e-5)


def resumed(cluster: Cluster, folder: Path) -> list[dict[str, Tensor]]:
    torch.set_num_threads(1)
    found = []
    for name, first, second in (
        ("straight", "", "replicas=2"),
        ("cut", "replicas=1 shard=2 zero=1", "replicas=2"),
        ("gathered", "replicas=2", "replicas=1 shard=2 zero=3"),
    ):
        run_dir = str(folder / name)
        if first:
            session = build_test_session(cluster, digits(first, 3, run_dir=run_dir))
            fit(session, run_folder.prepare_folder(session, None))
            session.close()
        session = build_test_session(cluster, digits(second, run_dir=run_dir))
        path = run_folder.prepare_folder(session, Path(run_dir) if first else None)
        if first:
            run_folder.restore_run(session, path)
        fit(session, path)
        found.append({n: t for n, t in session.snapshot().tensors().items() if n.startswith("average/")})
        session.close()
    return found


def test_it_goes_on_after_a_resume_under_another_layout_and_is_exported(tmp_path: Path) -> None:
    straight, *others = run_ranks(resumed, 2, tmp_path)[0]
    assert int(straight["average/count"]) == 6
    for other in others:
        assert straight.keys() == other.keys()
        assert max(_off(value, other[name].double()) for name, value in straight.items()) <= 1e-5
    checkpoint = find_checkpoint(StorageFolder(str(tmp_path / "cut" / "checkpoints")), print)
    export_weights(checkpoint, tmp_path / "average.safetensors")
    export_weights(checkpoint, tmp_path / "last.safetensors", "last")
    average, last = (load_file(tmp_path / f"{which}.safetensors") for which in ("average", "last"))
    assert all(torch.equal(value, others[0][f"average/values/{name}"]) for name, value in average.items())
    assert any(not torch.equal(value, last[name]) for name, value in average.items())


def test_without_an_average_none_is_exported(tmp_path: Path) -> None:
    recipe = digits("replicas=1", 1, average={}, run_dir=str(tmp_path / "run"))
    session = build_test_session(Cluster.single(), recipe)
    fit(session, run_folder.prepare_folder(session, None))
    session.close()
    checkpoint = find_checkpoint(StorageFolder(str(tmp_path / "run" / "checkpoints")), print)
    with pytest.raises(CheckpointError, match="no average of the weights"):
        export_weights(checkpoint, tmp_path / "a.safetensors", "average")


def test_an_average_of_half_precision_has_the_digits_of_float32() -> None:
    sharded_model = unsharded_model(torch.nn.Linear(2, 1, bias=False).to(torch.bfloat16))
    (p,) = sharded_model.updates.values()
    with torch.no_grad():
        p.fill_(1.0)
        average = WeightAverage(sharded_model.updates, 0.999, lambda world: None, keeps=True)
        average.count.fill_(10**5)
        p.fill_(2.0)
    average.follow(1)
    (value,) = average.values.values()
    assert value.dtype == torch.float32 and value[0, 0] == pytest.approx(1.001, abs=1e-6)


def test_a_recipe_with_an_average_is_verified() -> None:
    report = verify(digits("replicas=1", precision={"compute": "fp32"}), steps=2, cluster=Cluster.single())
    assert report.ok and report.steps == 2
