"""Two nodes of two, summed level by level, are at parity with the oracle; broken levels are not."""

from typing import Any

import pytest

from paceline.comm import Collective, NativeCollective
from paceline.comm.routes import HierarchicalCollective
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import Components, build_session
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task, run_oracle, run_strategy
from paceline.verification import VerificationReport, compare_with_oracle
from tests.dist.comm.nodes import on_nodes
from tests.dist.comm.test_hierarchical import BETWEEN, ForgetsTheOtherNodes, PadsInFront
from tests.marks import soak_param
from tests.texts import SMALL_TEXT

STEPS = 6
MLP = {"task": "digits", "options": {"model": "mlp", "hidden": [33]}}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": MLP,
    "convnet": {"task": "digits", "options": {"model": "convnet"}},
    "gpt": {
        "task": "byte-gpt",
        "options": {"text": SMALL_TEXT, "context": 16, "width": 20, "layers": 1, "heads": 2},
    },
}


def recipe(strategy: str = "replicas=4 route=hierarchical", **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "steps": STEPS,
        "batch": {"size": 26, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0},
        "runtime": {"device": "cpu", "bucket_bytes": 2000, "deadline_seconds": 30.0},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | MLP | changes))


def verified(found: Recipe, world: int = 4, components: Components | None = None) -> VerificationReport:
    def run(cluster: Cluster) -> VerificationReport:
        runner = on_nodes(cluster, 2)
        return compare_with_oracle(found, make_task(found), runner, CPU, STEPS, components=components)

    return run_ranks(run, world)[0]


@pytest.mark.capability("G8", "A8", "Z2")
@pytest.mark.parametrize("model", [soak_param("mlp"), soak_param("convnet"), "gpt"])
def test_every_step_is_that_of_one_process(model: str) -> None:
    report = verified(recipe(**MODELS[model]))
    assert report.ok, (report.failure, report.diagnosis)
    assert report.steps == STEPS


@pytest.mark.capability("G8", "A8")
@pytest.mark.parametrize("kind", [ForgetsTheOtherNodes, PadsInFront])
def test_a_broken_level_is_found_in_the_first_step(kind: type[HierarchicalCollective]) -> None:
    def faulty(path: Collective) -> Collective:
        if not isinstance(path, HierarchicalCollective):  # of a group of one
            return path
        between = NativeCollective(path.net, path.levels.between)
        return kind(path.net, path.group, path.levels, between)

    odd = {"options": {"model": "mlp", "hidden": [31]}}  # buffers that do not divide by two
    report = verified(recipe(**odd), components=Components(collective=faulty))
    assert not report.ok and report.failure is not None and report.failure.step == 0
    assert report.failure.quantity == "gradient"
    assert verified(recipe(**odd)).ok


@pytest.mark.capability("G8", "A11")
@pytest.mark.parametrize(
    ("strategy", "world", "group"),
    [
        soak_param("replicas=1 shard=4 zero=1 route=hierarchical", 4, "shard"),
        ("replicas=4 pipeline=2 route=hierarchical", 8, "replica"),
    ],
)
def test_sharded_state_and_stages_are_summed_level_by_level(strategy: str, world: int, group: str) -> None:
    found = recipe(strategy)
    report = verified(found, world)
    assert report.ok, (report.failure, report.diagnosis)

    def rows(cluster: Cluster) -> set[str]:
        session = build_test_session(on_nodes(cluster, 2), found)
        list(session.rounds())
        return {name for _, name in session.net.ledger.rows}

    assert all(f"{group}-between-nodes" in names for names in run_ranks(rows, world))


@pytest.mark.capability("G8")
def test_replicas_that_train_alone_are_averaged_level_by_level() -> None:
    def run(cluster: Cluster, route: str) -> Any:
        return run_strategy(on_nodes(cluster, 2), recipe(f"replicas=4 sync=local:2 route={route}"))

    native, hierarchical = (run_ranks(run, 4, route)[0] for route in ("native", "hierarchical"))
    assert native.distance(hierarchical) <= 1e-6


@pytest.mark.capability("G8", "G10")
def test_bytes_between_nodes_are_the_closed_form_over_a_run_and_the_end_is_the_oracles() -> None:
    found = recipe(runtime={"device": "cpu", "bucket_bytes": 1 << 20})

    def run(cluster: Cluster) -> tuple[float, int, Any]:
        session = build_test_session(on_nodes(cluster, 2), found)
        list(session.rounds())
        num_values = sum(p.numel() for p in session.runner.sharded_model.computes.values())
        end = {name: p.detach().clone() for name, p in session.runner.sharded_model.model.named_parameters()}
        return session.net.ledger.rows["all_reduce", BETWEEN].sent_bytes, num_values, end

    right = run_oracle(found, STEPS).parameters
    for sent, num_values, end in run_ranks(run, 4):
        slice_bytes = 4 * -(-num_values // 2)
        assert sent == pytest.approx(STEPS * 2 * (1 / 2) * slice_bytes)
        assert max(float((p - right[name]).abs().max()) for name, p in end.items()) <= 1e-5


@pytest.mark.capability("G8", "B1")
def test_with_one_level_it_is_native_and_says_so() -> None:
    def run(cluster: Cluster, num_nodes: int) -> tuple[list[str], set[str]]:
        said: list[str] = []
        found = recipe("replicas=2 route=hierarchical")
        session = build_session(found, make_task(found), on_nodes(cluster, num_nodes), CPU, warn=said.append)
        list(session.rounds())
        return said, {name for _, name in session.net.ledger.rows}

    for num_nodes, why in ((1, "lies on one node"), (2, "has one rank on every node")):
        for said, names in run_ranks(run, 2, num_nodes):
            assert len([text for text in said if why in text]) == 1
            assert names == {"world", "replica"}
