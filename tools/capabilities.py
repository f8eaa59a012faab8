"""Write docs/capabilities.md: the rows of the capability list, and the tests that prove them.

Invariant: a row is listed only if a test under tests/ has the mark `capability("<its id>")`: on the function,
on its class (whose tests may be a contract's), on a parameter set or by a function that makes those, in the
module's `pytestmark`. It is whole if docs/open-clauses.txt names nothing that is missing. Marks are read from
the source, nothing is imported. Whether the tests pass is not said here; a test run says that.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

HEADER = """\
# Capabilities

`make docs` writes this page from the rows in [capabilities.txt](capabilities.txt) and from the
`@pytest.mark.capability` marks under `tests/`. What is missing: [open-clauses.txt](open-clauses.txt).
Rows without a test come last.
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
    clause: str = ""  # what of the row it proves, where it says so

    @property
    def spelled(self) -> str:
        """The test with what there is to say about it."""
        said = "; ".join(text for text in (self.clause, self.needs) if text)
        return f"`{self.test}`" + (f" ({said})" if said else "")


@dataclass(frozen=True)
class Shared:
    """What the test files of a project have in common.

    Args:
        contracts: the tests of each contract that ships, by the name of its class.
        helpers: the ids that a function of this module puts on parameter sets, by its name.
    """

    contracts: Mapping[str, Sequence[ast.FunctionDef]]
    helpers: Mapping[str, Sequence[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with --check compare it; 1 if it is stale or a mark is wrong, else 0."""
    parser = argparse.ArgumentParser(description="join capability rows with the tests that prove them")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    chosen = parser.parse_args(arguments)
    page = chosen.root / "docs" / "capabilities.md"
    try:
        rows = read_rows(chosen.root / "docs" / "capabilities.txt")
        known = {row.id for row in rows}
        missing = read_missing(chosen.root / "docs" / "open-clauses.txt", known)
        text = render_page(rows, find_marks(chosen.root, known), missing)
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


def read_missing(path: Path, known: set[str]) -> dict[str, list[str]]:
    """What is missing of each row: id and a sentence, tab-separated; none where there is no such file."""
    found: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines() if path.exists() else (), 1):
        row_id, _, text = line.partition("\t")
        if line.startswith("#") or not line:
            continue
        if row_id not in known or not text:
            raise MarkError(f"docs/{path.name}:{number}: expected a row's id, a tab, and what is missing")
        found.setdefault(row_id, []).append(text)
    return found


def read_contracts(root: Path) -> dict[str, list[ast.FunctionDef]]:
    """The tests of every class of src/paceline/testing/contracts."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for path in sorted((root / "src" / "paceline" / "testing" / "contracts").glob("*.py")):
        for node in ast.parse(path.read_text("utf-8"), path.name).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = [part for part in node.body if _is_test(part)]
    return found


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def read_helpers(tree: ast.Module) -> dict[str, list[str]]:
    """The ids that each function of a module marks with, also by a table of the module."""
    values = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not _is_test(node):
            parts = [part for call in _mark_calls(ast.walk(node)) for part in ast.walk(call)]
            tables = [values[part.id] for part in parts if isinstance(part, ast.Name) and part.id in values]
            texts = [text for part in [*parts, *tables] for text in _texts(part)]
            found[node.name] = sorted({text for text in texts if re.fullmatch(r"[A-Z]\d+", text)})
    return found


def _texts(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _mark_calls(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    return [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("mark.capability")]


def find_marks(root: Path, known: set[str]) -> list[Mark]:
    """Every capability mark under tests/; a mark of an id that is not `known` is a MarkError."""
    marks: list[Mark] = []
    contracts = read_contracts(root)
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text("utf-8"), name)
        marks += _walk(tree, name, "", [], Shared(contracts, read_helpers(tree)))
    for mark in marks:
        if mark.row_id not in known:
            raise MarkError(f"{mark.path}:{mark.line}: {mark.row_id!r} is no row of docs/capabilities.txt")
    return marks


def _walk(
    scope: ast.Module | ast.ClassDef, path: str, prefix: str, inherited: Sequence[ast.expr], shared: Shared
) -> Iterator[Mark]:
    inherited = [*inherited, *_pytestmark(scope)]
    for node in scope.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            inside = [*inherited, *node.decorator_list]
            yield from _walk(node, path, f"{prefix}{node.name}.", inside, shared)
            yield from _walk_contract(node, path, inside, shared)
        elif _is_test(node):
            yield from _read(path, prefix + node.name, [*inherited, *node.decorator_list], shared)


def _walk_contract(
    node: ast.ClassDef, path: str, inherited: Sequence[ast.expr], shared: Shared
) -> Iterator[Mark]:
    """The tests that a class has from a contract: together where its own marks count, else each."""
    for base in (ast.unparse(base) for base in node.bases):
        tests = shared.contracts.get(base, ())
        for mark in _read(path, node.name, [*inherited, *_pytestmark(node)], shared) if tests else ():
            yield replace(mark, clause=mark.clause or f"{len(tests)} tests of {base}")
        for test in tests:
            yield from _read(path, f"{node.name}.{test.name}", test.decorator_list, shared)


def _pytestmark(scope: ast.Module | ast.ClassDef) -> Iterator[ast.expr]:
    for node in scope.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield node.value


def _read(path: str, test: str, expressions: Sequence[ast.expr], shared: Shared) -> Iterator[Mark]:
    nodes = [node for expression in expressions for node in ast.walk(expression)]
    # A mark of a parameter set is not one of the test, whose other sets run in every suite.
    sets = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("param")]
    set_of = {id(node): call for call in sets for node in ast.walk(call)}
    needs = _needs(node for node in nodes if id(node) not in set_of)
    for call in _mark_calls(nodes):
        ids, clause = _literal_ids(call, path)
        own = needs or (_needs(ast.walk(set_of[id(call)])) if id(call) in set_of else "")
        yield from (Mark(row_id, path, call.lineno, test, own, clause) for row_id in ids)
    called = [node.id for node in nodes if isinstance(node, ast.Name) and node.id in shared.helpers]
    yield from (Mark(row_id, path, 0, test, needs) for name in called for row_id in shared.helpers[name])


def _needs(nodes: Iterable[ast.AST]) -> str:
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return " ".join(sorted(names & {"gpu", "soak"}))


def _literal_ids(call: ast.Call, path: str) -> tuple[list[str], str]:
    ids = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    clauses = [text for word in call.keywords if word.arg == "clause" for text in _texts(word.value)]
    if len(ids) != len(call.args) or len(clauses) != len(call.keywords) or not ids:
        raise MarkError(f"{path}:{call.lineno}: a capability mark takes ids as plain strings, and clause=")
    return [str(row_id) for row_id in ids], "".join(clauses)


def render_page(rows: Sequence[Row], marks: Sequence[Mark], missing: Mapping[str, Sequence[str]]) -> str:
    """The text of docs/capabilities.md."""
    proven = {mark.row_id for mark in marks}
    done = [row for row in rows if row.id in proven]
    open_ = [row for row in rows if row.id not in proven]
    whole = sum(row.id not in missing for row in done)
    counts = f"{whole} of {len(rows)} rows are whole, {len(done) - whole} are proven in part.\n"
    parts = [HEADER, counts, *(_render_group(*part, marks, missing) for part in _by_group(done))]
    parts += ["## Rows without a test yet\n"] if open_ else []
    parts += [_render_open_group(group, members) for group, members in _by_group(open_)]
    return "\n".join(parts)


def _render_group(
    group: str, rows: Sequence[Row], marks: Sequence[Mark], missing: Mapping[str, Sequence[str]]
) -> str:
    lines = [f"## {group}", ""]
    for row in rows:
        lines.append(f"- **{row.id}** {row.name}" + (" (in part)" if row.id in missing else ""))
        own = sorted({(mark.path, mark.spelled) for mark in marks if mark.row_id == row.id})
        for path, tests in itertools.groupby(own, key=lambda item: item[0]):
            lines.append(f"  - [{path}](../{path}): {', '.join(spelled for _, spelled in tests)}")
        lines += [f"  - missing: {text}" for text in missing.get(row.id, ())]
    return "\n".join(lines) + "\n"


def _render_open_group(group: str, rows: Sequence[Row]) -> str:
    return "\n".join([f"### {group}", "", *(f"- {row.id} {row.name}" for row in rows)]) + "\n"


def _by_group(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [(group, list(members)) for group, members in itertools.groupby(rows, key=lambda row: row.group)]


if __name__ == "__main__":
    sys.exit(main())
