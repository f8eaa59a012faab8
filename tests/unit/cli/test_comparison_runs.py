"""The file of strategies that has all that there are, each of which can be trained as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.comparison_runs import plan_comparison
from paceline.recipe import Strategy
from paceline.recipe.registry import SyncSpec, known_specs
from paceline.recipe.strategy_text import PRESETS, phases_of
from paceline.studies.comparison_trials import parse_comparison_entries

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.capability("B7", "Z18")
def test_every_preset_and_every_rule_that_is_built_is_among_them(tmp_path: Path) -> None:
    path = RECIPES / "strategies" / "every-strategy.toml"
    entries = parse_comparison_entries(path.read_text(encoding="utf-8"), str(path))
    assert {*PRESETS} <= {word for one in entries for word in one.strategy.split()}
    syncs = [Strategy.parse(one.strategy).sync for one in entries]
    rules = {*syncs, *(phase.rule for sync in syncs for phase in phases_of(sync))}
    specs = known_specs(SyncSpec).items()
    # Actors play environments, and digits has none.
    built = {word for word, spec in specs if spec.is_built and not spec.learns_alone}
    assert len(built) > 5 and built <= {rule.partition(":")[0] for rule in rules}
    for one in plan_comparison(RECIPES / "digits.toml", ["epochs=3"], entries, 1, tmp_path):
        assert one.strategy and not one.runs[0].refusal, one.name
