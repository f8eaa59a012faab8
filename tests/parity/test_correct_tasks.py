"""Right code is found right: foreign models that verification once took for wrong."""

import pytest

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import CPU
from paceline.verification import VerificationReport, compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.marks import soak_param
from tests.parity.correct_tasks import CORRECT_TASKS
from tests.recipes import recipe_of

STEPS = 4


def recipe_for(name: str, **changes: object) -> Recipe:
    settings: dict[str, object] = {
        "steps": 20,
        "batch": {"size": 13, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 0.01, "clip_norm": 0.5},
        "runtime": {"bucket_bytes": 64},
    }
    return recipe_of(**(settings | CORRECT_TASKS[name][1] | changes))


def verified(cluster: Cluster, name: str, **changes: object) -> VerificationReport:
    recipe = recipe_for(name, **changes)
    return compare_with_oracle(recipe, CORRECT_TASKS[name][0](), cluster, CPU, STEPS)


@pytest.mark.capability("Z2")
@pytest.mark.parametrize("world", [soak_param(1), soak_param(2), 3])
def test_right_code_of_users_raises_no_alarm(world: int) -> None:
    def all_of_them(cluster: Cluster) -> dict[str, list[str]]:
        reports = {name: verified(cluster, name) for name in CORRECT_TASKS}
        return {name: conclusion_lines(r) for name, r in reports.items() if not (r.ok and r.steps == STEPS)}

    assert run_ranks(all_of_them, world)[0] == {}


@pytest.mark.capability("Z2")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("cancelling", {"strategy": "pipeline=2"}),
        ("cancelling-adamw", {"strategy": "pipeline=2"}),
        ("scalar-gates", {"strategy": "shard=2 zero=1"}),
        ("tiny-clip", {"strategy": "shard=2 zero=1"}),
    ],
    ids=lambda x: x if isinstance(x, str) else x["strategy"],
)
def test_layouts_raise_no_alarm(name: str, changes: dict[str, object]) -> None:
    def one(cluster: Cluster) -> VerificationReport:
        return verified(cluster, name, **changes)

    report = run_ranks(one, 2)[0]
    assert report.ok, conclusion_lines(report)
