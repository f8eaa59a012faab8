"""docs/errors.md: every row has a test that exists, and the codes are those of the classes."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from paceline import errors

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "errors.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the rows of the table under a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def functions_in(path: Path) -> set[str]:
    return {
        node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)
    }


VARIES = r"\.\.\.|[\w.=-]*\d+|SIG\w+|\w+\.json|[;:] | while |\(|\)"
SYSTEM = "No space left|Read-only|Not a directory|No such file|Address already|is killed|Killed|out of memory"
"""Words of the system and of PyTorch."""


def said_in(folder: Path) -> str:
    """All texts in the sources of a folder, what varies in them left out."""
    trees = (ast.walk(ast.parse(path.read_text("utf-8"))) for path in folder.rglob("*.py"))
    nodes = (node for tree in trees for node in tree)
    return "\n".join(
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def parts_of(message: str) -> list[str]:
    """What a message says word by word: without what varies, and what is told about it in italics."""
    plain = re.sub(r"\*[^*]*\*|`[^`]*`|'[^']*'|HOST(:PORT)?", "...", message)
    parts = (part.strip(" ;:,()?") for part in re.split(VARIES, plain))
    return [part for part in parts if len(part) > 3 and not re.match(SYSTEM, part)]


def test_every_message_is_said_word_by_word() -> None:
    said = said_in(ROOT / "src")
    messages = [row[2] for row in rows("What goes wrong")]
    assert [part for message in messages for part in parts_of(message) if part not in said] == []
    assert parts_of("rank 2 has forgotten 'x': why so ...") == ["rank", "has forgotten", "why so"]
    assert "has forgotten its name" not in said


@pytest.mark.parametrize("row", rows("What goes wrong"), ids=lambda row: row[0])
def test_every_row_has_a_test(row: list[str]) -> None:
    what, code, _, _, test = row
    path, _, name = test.strip("`").partition("::")
    assert what and re.fullmatch(r"\d+", code)
    assert name in functions_in(ROOT / path), f"{what}: there is no {test}"


def test_a_missing_test_would_be_noticed() -> None:
    assert "test_that_nobody_wrote" not in functions_in(Path(__file__))
    assert len(rows("What goes wrong")) > 20


def test_the_codes_are_those_of_the_classes() -> None:
    classes = {c.__name__: c.exit_code for _, c in inspect.getmembers(errors, inspect.isclass)}
    table = [row for row in rows("Exit codes") if row[0].isdigit()]
    documented = {name: int(row[0]) for row in table for name in re.findall(r"`(\w+)`", row[1])}
    assert documented == classes


def test_the_readme_leads_here() -> None:
    assert "(docs/errors.md)" in (ROOT / "README.md").read_text("utf-8")
