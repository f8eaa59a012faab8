"""Write docs/capabilities.md: the rows of the capability list, and the tests that prove them.

Invariant: a row is listed as proven only if a test under tests/ carries `@pytest.mark.capability("<its id>")`
(on the function, on its class, on a parameter set, or in the module's `pytestmark`). The marks are read from
the source, so nothing is imported and the page is the same on every machine. Whether the tests pass is not
said here; a test run says that.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HEADER = """\
# Capabilities

`make docs` writes this page from the rows in [capabilities.txt](capabilities.txt) and from the
`@pytest.mark.capability` marks under `tests/`. Rows without a test come last.
"""


class MarkError(Exception):
    """A mark that cannot be used; the message begins with file and line."""


@dataclass(frozen=True)
class Row:
    """One row of the capability list."""

    id: str
    name: str
    group: str


@dataclass(frozen=True)
class Mark:
    """One id in one mark, and the test that carries it; `path` is relative to the root."""

    row_id: str
    path: str
    line: int
    test: str
    needs: str = ""  # "gpu" or "soak" where the test does not run in every suite


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with --check compare it; 1 if it is stale or a mark is wrong, else 0."""
    parser = argparse.ArgumentParser(description="join capability rows with the tests that prove them")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    chosen = parser.parse_args(arguments)
    page = chosen.root / "docs" / "capabilities.md"
    try:
        rows = read_rows(chosen.root / "docs" / "capabilities.txt")
        text = render_page(rows, find_marks(chosen.root, {row.id for row in rows}))
    except MarkError as error:
        print(error, file=sys.stderr)
        return 1
    if not chosen.check:
        page.write_text(text, "utf-8")
    elif not page.exists() or page.read_text("utf-8") != text:
        print("docs/capabilities.md is stale; run `make docs`", file=sys.stderr)
        return 1
    return 0


def read_rows(path: Path) -> list[Row]:
    """Rows in the order of the file: id, name and group, tab-separated; lines with # are comments."""
    lines = path.read_text("utf-8").splitlines()
    return [Row(*line.split("\t")) for line in lines if line and not line.startswith("#")]


def find_marks(root: Path, known: set[str]) -> list[Mark]:
    """Every capability mark under tests/; a mark of an id that is not `known` is a MarkError."""
    marks: list[Mark] = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        marks += marks_of(ast.parse(path.read_text("utf-8"), name), name)
    for mark in marks:
        if mark.row_id not in known:
            raise MarkError(f"{mark.path}:{mark.line}: {mark.row_id!r} is no row of docs/capabilities.txt")
    return marks


def marks_of(tree: ast.Module, path: str) -> list[Mark]:
    """The marks of one test file, each with the test function that carries or inherits it."""
    return list(_walk(tree, path, prefix="", inherited=[]))


def _walk(
    scope: ast.Module | ast.ClassDef, path: str, prefix: str, inherited: Sequence[ast.expr]
) -> Iterator[Mark]:
    inherited = [*inherited, *_pytestmark(scope)]
    for node in scope.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _walk(node, path, f"{prefix}{node.name}.", [*inherited, *node.decorator_list])
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield from _read(path, prefix + node.name, [*inherited, *node.decorator_list])


def _pytestmark(scope: ast.Module | ast.ClassDef) -> Iterator[ast.expr]:
    for node in scope.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield node.value


def _read(path: str, test: str, expressions: Sequence[ast.expr]) -> Iterator[Mark]:
    nodes = [node for expression in expressions for node in ast.walk(expression)]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    needs = " ".join(sorted(names & {"gpu", "soak"}))
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.capability"):
            for row_id in _literal_ids(node, path):
                yield Mark(row_id, path, node.lineno, test, needs)


def _literal_ids(call: ast.Call, path: str) -> list[str]:
    ids = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    if len(ids) != len(call.args) or call.keywords or not ids:
        raise MarkError(f"{path}:{call.lineno}: a capability mark takes one or more row ids as plain strings")
    return [str(row_id) for row_id in ids]


def render_page(rows: Sequence[Row], marks: Sequence[Mark]) -> str:
    """The text of docs/capabilities.md."""
    proven = {mark.row_id for mark in marks}
    done = [row for row in rows if row.id in proven]
    open_ = [row for row in rows if row.id not in proven]
    parts = [HEADER, f"{len(done)} of {len(rows)} rows have a test.\n"]
    parts += [_render_group(group, members, marks) for group, members in _by_group(done)]
    parts += ["## Rows without a test yet\n"] if open_ else []
    parts += [_render_open_group(group, members) for group, members in _by_group(open_)]
    return "\n".join(parts)


def _render_group(group: str, rows: Sequence[Row], marks: Sequence[Mark]) -> str:
    lines = [f"## {group}", ""]
    for row in rows:
        lines.append(f"- **{row.id}** {row.name}")
        own = sorted({(mark.path, mark.test, mark.needs) for mark in marks if mark.row_id == row.id})
        for path, tests in itertools.groupby(own, key=lambda item: item[0]):
            spelled = [f"`{test}`" + (f" ({needs})" if needs else "") for _, test, needs in tests]
            lines.append(f"  - [{path}](../{path}): {', '.join(spelled)}")
    return "\n".join(lines) + "\n"


def _render_open_group(group: str, rows: Sequence[Row]) -> str:
    return "\n".join([f"### {group}", "", *(f"- {row.id} {row.name}" for row in rows)]) + "\n"


def _by_group(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [(group, list(members)) for group, members in itertools.groupby(rows, key=lambda row: row.group)]


if __name__ == "__main__":
    sys.exit(main())
