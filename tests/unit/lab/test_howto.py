"""What the guide names exists."""

import re
from pathlib import Path

from typer.testing import CliRunner

from paceline.cli.main import build_app
from paceline.lab.fault_plan import FAULT_KINDS, FaultPlan

GUIDE = (Path(__file__).parents[3] / "docs" / "howto" / "lab.md").read_text(encoding="utf-8")


def test_every_fault_of_the_guide_can_be_parsed_and_none_is_missing() -> None:
    rows = re.findall(r"^\| `([^-`][^`]*)` \| `(\w+)` \|", GUIDE, re.MULTILINE)
    kinds = [FaultPlan.parse([words]).faults[0].kind for words, method in rows if method in FAULT_KINDS]
    assert kinds == [method for _, method in rows if method in FAULT_KINDS] and set(kinds) == set(FAULT_KINDS)


def test_every_option_of_the_guide_exists() -> None:
    named = set(re.findall(r"`(--[a-z]+)", GUIDE)) - {"--nodes"}
    shown = CliRunner().invoke(build_app(), ["lab", "run", "--help"], env={"COLUMNS": "200"}).output
    assert named >= {"--rate", "--events", "--disk"}
    assert named - set(re.findall(r"--[a-z]+", shown)) == set()
