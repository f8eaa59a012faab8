"""Fault plans as values, damage to real files, and the marks between worker and lab."""

import random
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import build_app
from paceline.errors import LabError, RecipeError
from paceline.lab.fault_injection import flip_bit, newest_match, truncate_file
from paceline.lab.fault_plan import FAULT_KINDS, FaultPlan


def everything() -> FaultPlan:
    plan = FaultPlan(seed=3).kill("h2", step=3).partition(["h0"], ["h1", "h2"], at=5.0, seconds=1.0)
    plan = plan.slow("h3", 3.0, probability=0.25).disk_full("h1", at=0.0).stop("h1", seconds=2, step=1)
    plan = plan.link_down("h0", at=1).rate("h0", "1mbit", at=2).corrupt("h0", "*.bin", step=2)
    plan = plan.delay("h1", "5ms", at=1, seconds=1).drop("h1", "5%", step=1)
    return plan.torn_write("h0", "*.bin", step=2).nan("h1", step=4)


@pytest.mark.capability("N12")
def test_a_plan_survives_json_and_every_kind_can_be_written_as_words() -> None:
    plan = everything()
    assert FaultPlan.from_json(plan.to_json()) == plan
    assert {fault.kind for fault in plan.faults} == set(FAULT_KINDS)
    words = ["kill h2 step=3", "partition h0 h1,h2 at=5 seconds=1", "slow h3 3 probability=0.25"]
    assert FaultPlan.parse(words, seed=3).faults == plan.faults[:3]


@pytest.mark.parametrize(
    "text",
    ["explode h0 at=1", "kill h0", "kill h0 at=1 step=2", "kill at=1", "slow h0 0.5 at=1", "kill h0 at=soon",
     "partition h0 h0 at=1", "kill h0 at=-1", "nan h0 at=1", "kill h0 h1 h2 at=1", "stop h0 at=1",
     "rate h0 fast at=1", "delay h0 5 at=1", "drop h0 200% at=1"],
)  # fmt: skip
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        FaultPlan.parse([text])


def test_a_rack_has_an_uplink_but_no_processes_and_no_steps() -> None:
    plan = FaultPlan().rate("r", "1mbit", at=1).kill("r", at=1).rate("r", "1mbit", step=1).kill("h9", at=1)
    assert plan.invalid_targets(["h0"], ["r"]) == ["r", "r", "h9"]


def hits(seed: int, chance: float, steps: int = 400) -> list[int]:
    plan = FaultPlan(seed).stop("h0", seconds=1, probability=chance)
    return [step for step in range(steps) if plan.due("h0", step)]


def test_a_probability_hits_the_same_steps_with_the_same_seed_only() -> None:
    assert hits(1, 0.25) == hits(1, 0.25) != hits(2, 0.25)
    assert 60 <= len(hits(1, 0.25)) <= 140 and hits(1, 0.0) == [] and len(hits(1, 1.0)) == 400
    assert FaultPlan().kill("h1", step=2).due("h0", 2) == ()


def test_one_bit_flips_and_a_file_is_cut(tmp_path) -> None:
    path = tmp_path / "x.bin"
    before = random.Random(0).randbytes(1000)
    path.write_bytes(before)
    plan = FaultPlan(5)

    def draw(end: int, purpose: str) -> int:
        return plan.draw(0, 1, end, purpose)

    where = flip_bit(path, draw)
    after = path.read_bytes()
    changed = [(i, a ^ b) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == [(where["byte"], 1 << where["bit"])]
    assert truncate_file(path, draw)["kept_bytes"] == len(path.read_bytes()) < 1000
    assert newest_match(tmp_path / "*.bin") == path
    with pytest.raises(LabError, match="no file matches"):
        newest_match(tmp_path / "*.none")


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
