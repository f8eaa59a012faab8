"""What the README shows is what lies in the repository."""

import re
from pathlib import Path

import pytest

from paceline.cli.main import COMMANDS
from paceline.recipe import load_recipe

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["quickstart.py", "quickstart.toml"])
def test_the_example_is_the_file_that_the_tests_run(name: str) -> None:
    assert (ROOT / "examples" / name).read_text().strip() in README


def test_the_recipe_behind_the_first_screen_is_the_one_that_was_run() -> None:
    recipe = load_recipe(ROOT / "recipes" / "byte-gpt.toml")
    assert f"step {recipe.steps}/{recipe.steps}" in README
    assert recipe.strategy.replicas == 2


def test_every_command_exists() -> None:
    commands = {command.words.partition(" ")[0] for command in COMMANDS}
    shown = set(re.findall(r"^(?:\$ )?paceline (\w+)", README, re.MULTILINE))
    assert shown and shown <= commands
