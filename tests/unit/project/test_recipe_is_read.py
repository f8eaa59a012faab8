"""Every field of a recipe is read by the code that it is about: an option that does nothing is a defect."""

import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from paceline.cli.common_options import processes_for
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.recipe.validation import RecipeTable
from paceline.session import fit, run_folder
from paceline.session.sink_setup import build_sinks
from paceline.testing.parity import build_test_session

DIGITS = {"task": "digits", "steps": 1, "options": {"model": "mlp", "hidden": [8]}}
SMALL = {"size": 8, "shards": 2}
RUNS = (
    {"optimizer": {"name": "adamw", "weight_decay": 0.1, "clip_norm": 1.0}, "memory": {"budget": "1GiB"}},
    {"optimizer": {"name": "adam", "l2": 0.1}, "precision": {"compute": "fp16"}},
    {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}, "steps": None, "epochs": 0.01},
    {"optimizer": {"name": "rmsprop"}, "schedule": {"decay": "exponential", "rate": 0.1}},
    {
        "schedule": {
            "decay": "cosine",
            "cycle_steps": 2,
            "cycle_factor": 2,
            "warmup_steps": 1,
            "warmup_from": 0.1,
        },
        "steps": 3,
    },
    {"optimizer": {"name": "adabound", "lr": 0.01}, "steps": 2},
    {"optimizer": {"name": "adadelta", "clip_value": 0.1}, "schedule": {"decay": "one_cycle"}, "steps": 3},
    {"optimizer": {"name": "nadam"}},
    {"optimizer": {"name": "asgd"}},
    {"optimizer": {"name": "rprop"}},
    {"optimizer": {"name": "adam_to_sgd", "switch_update": 1}, "steps": 2},
    {"optimizer": {"name": "lamb"}},
    {"optimizer": {"name": "lars"}},
    {"optimizer": {"name": "adafactor"}},
    {"optimizer": {"name": "muon"}},
    {"optimizer": {"name": "kfac", "lr": 0.01}},
    {"optimizer": {"name": "newton_cg"}},
    {"sparsity": {"target": 0.5, "last": 2}, "steps": 2},
    {
        "schedule": {"decay": "plateau", "patience": 0, "threshold": 10.0, "threshold_mode": "abs"},
        "evaluate": {"every_steps": 1},
        "steps": 4,
    },
    {"schedule": {"decay": "linear", "final": 0.1, "batch_scaling": "linear", "base_batch": 4}},
    {
        "batch": {},
        "strategy": "sync=federated:1",
        "federated": {"clients": 20, "cohort": 2, "proximal": 0.1, "clip_norm": 1.0},
    },
    {
        "batch": {},
        "strategy": "sync=federated:1",
        "federated": {
            "clients": 20,
            "cohort": "poisson:0.5",
            "secure": "masks",
            "neighbours": 4,
            "weights": "equal",
        },
        "private": {"noise": 1.0, "clip_norm": 0.1, "budget": 100.0},
    },
)


def fields_of(table: type[BaseModel]) -> set[tuple[str, str]]:
    """All (table, field) pairs below a table, without the tables themselves."""
    found = set()
    for name, field in table.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= fields_of(kind)
        else:
            found.add((table.__name__, name))
    return found


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Fields that any module but those of the recipe room has read."""
    found: set[tuple[str, str]] = set()
    plain = BaseModel.__getattribute__

    def watched(self: RecipeTable, name: str) -> object:
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if name in type(self).model_fields and not reader.startswith(
            ("paceline.recipe", "pydantic", __name__)
        ):
            found.add((type(self).__name__, name))
        return plain(self, name)

    monkeypatch.setattr(RecipeTable, "__getattribute__", watched, raising=False)
    return found


def test_every_field_is_read_outside_the_recipe_room(read: set[tuple[str, str]], tmp_path: Path) -> None:
    for i, changes in enumerate(RUNS):
        recipe = Recipe(**(DIGITS | {"batch": SMALL, "run_dir": str(tmp_path / str(i))} | changes))
        processes_for(recipe, None, 1)
        session = build_test_session(Cluster.single(), recipe)
        run_dir = run_folder.prepare_folder(session, None)
        fit(session, run_dir, build_sinks(session, run_dir, None))
    # Read by `num_micro_batches` inside the recipe room; see tests/unit/recipe/test_micro_batches.py.
    refused = {("BatchRecipe", "shards"), ("BatchRecipe", "accumulation")}
    # Read by `support` inside the recipe room, which refuses every value but one; see test_strategy_refusals.
    refused |= {name for name in fields_of(Recipe) if name[0] == "Strategy"}
    # Read by `OptimizerRecipe.spec` inside the recipe room; see tests/unit/optim/test_build_optimizer.py.
    refused |= {("OptimizerRecipe", "name")}
    # Read by `SparsityRecipe.share` inside the recipe room; see tests/parity/test_magnitude_pruning.py.
    refused |= {("SparsityRecipe", name) for name in ("first", "last", "every")}
    # Read by the rule of strategies with several replicas; see tests/parity/test_local_sgd.py.
    refused |= {name for name in fields_of(Recipe) if name[0] == "OuterRecipe"}
    # Read where a process starts: by `connected`, by `train`, and by the command that launches.
    elsewhere = {("RuntimeRecipe", "device"), ("RuntimeRecipe", "threads")}
    elsewhere |= {("RuntimeRecipe", "setup_deadline_seconds")}  # see tests/hostile/test_stopped_processes.py
    # Read where several processes sum; see tests/dist/comm/test_overlap.py.
    elsewhere |= {("RuntimeRecipe", "bucket_bytes")}
    # Read where several hosts sum; see tests/dist/comm/test_route_choice.py.
    elsewhere |= {("RuntimeRecipe", "link_profile")}
    elsewhere |= {("CheckpointRecipe", "grace_seconds"), ("CheckpointRecipe", "notice")}
    # Read where a server meets its workers; see tests/hostile/test_tls.py.
    elsewhere |= {("SecurityRecipe", "tls")}
    # Read where gRPC encrypts; see tests/hostile/test_grpc_tls.py.
    elsewhere |= {("SecurityRecipe", "certificate")}
    # Read where the strategy has tensor; see tests/parity/test_tensor.py.
    elsewhere |= {("Recipe", "tensor")}
    # Read by a server; see tests/parity/test_bounded_staleness.py.
    elsewhere |= {("DebugRecipe", "replay_arrivals")}
    # Read by `num_positions` inside the recipe room; see tests/unit/federated/test_cohorts.py.
    elsewhere |= {("FederatedRecipe", "cohort")}
    # Read where the job is launched, and by `recovery_of`; see tests/cli/test_elastic.py.
    elastic = ("mode", "max_restarts", "min_processes", "redundancy")
    elsewhere |= {("ElasticRecipe", name) for name in elastic}
    # Read where clients connect over a network; see tests/parity/test_network_clients.py.
    network = ("at_least", "listen", "age", "deadline_seconds", "buffer")
    elsewhere |= {("FederatedRecipe", name) for name in network}
    # Read where a run goes back; see tests/parity/test_rollback.py.
    elsewhere |= {("HealthRecipe", "max_roll_backs")}
    # Read where there are environments; see tests/parity/test_rl.py and test_dqn.py.
    elsewhere |= {name for name in fields_of(Recipe) if name[0] in ("RLRecipe", "PPORecipe", "DQNRecipe")}
    # Read where text is generated; see tests/parity/test_generation.py.
    elsewhere |= {name for name in fields_of(Recipe) if name[0] == "ServeRecipe"}
    # Read where ranks hold different bits; see tests/parity/test_reproducible_runs.py.
    elsewhere |= {("Recipe", "on_divergence")}
    assert fields_of(Recipe) - read - refused - elsewhere == set()


def test_device_and_threads_are_read_where_a_process_starts(read: set[tuple[str, str]]) -> None:
    import torch

    from paceline.session.start_rank import connected

    torch.set_num_threads(2)
    recipe = Recipe(**DIGITS, runtime={"threads": 1, "device": "cpu"})
    with connected(recipe, Cluster.single()) as (_, device):
        assert torch.get_num_threads() == 1 and device.type == "cpu"
    assert torch.get_num_threads() == 2  # the user's own, as before
    assert {("RuntimeRecipe", "device"), ("RuntimeRecipe", "threads")} <= read


def test_the_watch_sees_what_is_not_read(read: set[tuple[str, str]]) -> None:
    """The twin: without a run, almost nothing is read."""
    Recipe(**DIGITS)
    assert len(fields_of(Recipe) - read) > 40
