"""Count what should not grow: `python tools/ratchets.py` fails when a number rose, and says where.

Invariant: the numbers in tools/ratchets.json only fall. `--update` stores lower ones and never a higher one;
a number that has to rise is edited there by hand, in the change that needs it, where a reviewer sees it.
A count is a list of places, `file:line: what`, so that a failure can be acted on. The code is parsed, never
imported. Most counts look at one file at a time; the counts of duplicate names and of modules with one user
look at the whole package.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")
SHIPPED = ("src",)
BODIES = ("src", "tools")  # a test may list cases at length, so only its file counts

Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[int, str]  # line number, what is there


@dataclass(frozen=True)
class Module:
    """One parsed file; `path` is relative to the root, with forward slashes."""

    path: str
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


FindInModule = Callable[[Module], Iterator[Place]]
FindInTree = Callable[[Sequence[Module]], Iterator[tuple[Module, int, str]]]


@dataclass(frozen=True)
class Ratchet:
    """A count that may only fall: its name, how to find the places, and the folders it looks at.

    Exactly one of `in_module` (called for each file) and `in_tree` (called once with all files) is given.
    """

    name: str
    in_module: FindInModule | None = None
    folders: tuple[str, ...] = FOLDERS
    in_tree: FindInTree | None = None

    def find(self, modules: Sequence[Module]) -> Iterator[str]:
        """Return the places in the folders of this ratchet, as `file:line: what`."""
        counted = [module for module in modules if module.path.split("/", 1)[0] in self.folders]
        if self.in_tree is not None:
            yield from (f"{module.path}:{line}: {what}" for module, line, what in self.in_tree(counted))
        if self.in_module is not None:
            for module in counted:
                yield from (f"{module.path}:{line}: {what}" for line, what in self.in_module(module))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the tree with the stored numbers; 1 if one rose, else 0."""
    parser = argparse.ArgumentParser(description="counts that may only fall")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--update", action="store_true", help="store the numbers that fell")
    chosen = parser.parse_args(arguments)
    store = chosen.root / "tools" / "ratchets.json"
    stored: dict[str, int] = json.loads(store.read_text("utf-8")) if store.exists() else {}
    found = find_places(read_modules(chosen.root))
    if chosen.update:
        store.write_text(json.dumps(lower(stored, found), indent=2) + "\n", "utf-8")
    lines = render_rises(stored, found, first_time=chosen.update)
    lines += [] if chosen.update else render_falls(stored, found)
    print("\n".join(lines or ["ratchets: nothing rose"]))
    return 1 if any(line.startswith("rose") for line in lines) else 0


def read_modules(root: Path) -> list[Module]:
    """Every Python file of the folders that are counted, in the order of their names."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    texts = [(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in paths]
    return [Module(name, text, ast.parse(text, name)) for name, text in texts]


def find_places(modules: Sequence[Module]) -> dict[str, list[str]]:
    """Return the places of every ratchet, as `file:line: what`."""
    return {ratchet.name: list(ratchet.find(modules)) for ratchet in RATCHETS}


def lower(stored: Mapping[str, int], found: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The numbers to store: the smaller of stored and found; a new ratchet starts at what is found."""
    return {name: min(stored.get(name, len(places)), len(places)) for name, places in found.items()}


def render_rises(
    stored: Mapping[str, int], found: Mapping[str, Sequence[str]], *, first_time: bool
) -> list[str]:
    """What rose, with every place; a ratchet that was never stored counts from 0 unless `first_time`."""
    lines: list[str] = []
    for name, places in found.items():
        allowed = stored.get(name, len(places) if first_time else 0)
        if len(places) > allowed:
            lines += [f"rose: {name}, from {allowed} to {len(places)}"]
            lines += [f"  {place}" for place in places]
    return lines


def render_falls(stored: Mapping[str, int], found: Mapping[str, Sequence[str]]) -> list[str]:
    """What fell, as an invitation to store it."""
    fallen = [name for name, places in found.items() if len(places) < stored.get(name, 0)]
    return [f"fell: {', '.join(fallen)}; `python tools/ratchets.py --update` keeps it"] if fallen else []


# What is counted


def long_file(limit: int) -> Callable[[Module], Iterator[Place]]:
    """Files of more than `limit` lines."""

    def find(module: Module) -> Iterator[Place]:
        if module.num_lines > limit:
            yield 1, f"{module.num_lines} lines"

    return find


def long_function(limit: int) -> Callable[[Module], Iterator[Place]]:
    """Functions of more than `limit` lines, from `def` to the end, without their docstring."""

    def find(module: Module) -> Iterator[Place]:
        for function in _functions(module.tree):
            if (length := _length(function)) > limit:
                yield function.lineno, f"{function.name}, {length} lines"

    return find


def comments(pattern: str) -> Callable[[Module], Iterator[Place]]:
    """Comments (never strings) that match."""

    def find(module: Module) -> Iterator[Place]:
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            if token.type == tokenize.COMMENT and re.search(pattern, token.string):
                yield token.start[0], token.string

    return find


def environment_reads(module: Module) -> Iterator[Place]:
    """Uses of the environment outside of cluster.py."""
    if module.path.endswith("paceline/job/cluster.py"):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in _ENVIRONMENT:
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from ((node.lineno, a.name) for a in node.names if f"os.{a.name}" in _ENVIRONMENT)


def broad_excepts(module: Module) -> Iterator[Place]:
    """`except:`, `except Exception` and `except BaseException`, alone or in a tuple."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            if re.search(r"\b(everything|Exception|BaseException)\b", caught):
                yield node.lineno, f"except {caught}"


def isinstance_ladders(module: Module) -> Iterator[Place]:
    """Functions that call `isinstance` three times or more; nested functions count for themselves."""
    for function in _functions(module.tree):
        calls = [node for node in _own_nodes(function) if _is_call_of(node, "isinstance")]
        if len(calls) >= 3:
            yield function.lineno, f"{function.name}, {len(calls)} isinstance"


def undocumented(modules: Sequence[Module]) -> Iterator[tuple[Module, int, str]]:
    """Yield public functions and methods of more than 8 lines without a docstring.

    A method that implements a documented contract needs none: another class has a docstring for this name.
    The name of a test says what it shows.
    """
    functions = [(module, function) for module in modules for function in _public_functions(module.tree)]
    documented = {function.name for _, function in functions if ast.get_docstring(function) is not None}
    for module, function in functions:
        is_method = [argument.arg for argument in function.args.args[:1]] == ["self"]
        named = function.name.startswith("test_") or (is_method and function.name in documented)
        if _length(function) > 8 and not named and ast.get_docstring(function) is None:
            yield module, function.lineno, function.name


def prints(module: Module) -> Iterator[Place]:
    """Calls of `print`."""
    yield from ((node.lineno, ast.unparse(node)) for node in _calls(module.tree, "print"))


def fragments(module: Module) -> Iterator[Place]:
    """Yield docstrings of functions that begin like a subordinate clause, or that only point elsewhere."""
    for function in _functions(module.tree):
        first = (ast.get_docstring(function) or "").split("\n", 1)[0]
        if re.match(r"(What|Whether|Of|By|Where|How|As|Those|That|Who|Whose|With|Under|For|See)\b", first):
            yield function.lineno, f"{function.name}: {first}"


# What is counted over the whole package


def modules_with_one_user(modules: Sequence[Module]) -> Iterator[tuple[Module, int, str]]:
    """Yield modules that exactly one other module of the package imports."""
    users: dict[str, set[str]] = {}
    for module in modules:
        for name in _imported_names(module.tree):
            users.setdefault(name, set()).add(module.path)
    for module in modules:
        others = users.get(_dotted(module), set()) - {module.path}
        if not module.path.endswith(_NAMELESS) and len(others) == 1:
            yield module, 1, f"only {next(iter(others))} imports it"


def shared_class_names(modules: Sequence[Module]) -> Iterator[tuple[Module, int, str]]:
    """Yield public classes whose name another class of the package has too."""
    places: dict[str, list[tuple[Module, int]]] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append((module, node.lineno))
    for name, classes in places.items():
        if len(classes) > 1:
            yield from ((module, line, f"class {name}") for module, line in classes)


def shared_file_names(modules: Sequence[Module]) -> Iterator[tuple[Module, int, str]]:
    """Yield files whose name another file of the package has too."""
    counts = Counter(module.path.rsplit("/", 1)[-1] for module in modules)
    for module in modules:
        if counts[module.path.rsplit("/", 1)[-1]] > 1 and not module.path.endswith(_NAMELESS):
            yield module, 1, "another file has this name"


RATCHETS = (
    Ratchet("files over 600 lines", long_file(600)),
    Ratchet("functions over 60 lines", long_function(60), BODIES),
    Ratchet("modules with one user", folders=SHIPPED, in_tree=modules_with_one_user),
    Ratchet("class names that occur twice", folders=SHIPPED, in_tree=shared_class_names),
    Ratchet("file names that occur twice", folders=SHIPPED, in_tree=shared_file_names),
    Ratchet("docstrings that begin with a fragment", fragments, SHIPPED),
    Ratchet("type: ignore", comments(r"type:\s*ignore")),
    Ratchet("TODO or FIXME", comments(r"\b(TODO|FIXME|XXX)\b")),
    Ratchet("environment reads outside cluster.py", environment_reads, SHIPPED),
    Ratchet("bare or broad excepts", broad_excepts),
    Ratchet("isinstance ladders", isinstance_ladders, SHIPPED),
    Ratchet("public functions without docstring", folders=SHIPPED, in_tree=undocumented),
    Ratchet("print in src", prints, SHIPPED),
)

_NAMELESS = ("/__init__.py", "/__main__.py")
_ENVIRONMENT = frozenset({"os.environ", "os.environb", "os.getenv", "os.getenvb"})


# Walking the tree


def _dotted(module: Module) -> str:
    """Return the dotted name of a module below src."""
    return module.path.removeprefix("src/").removesuffix(".py").replace("/", ".")


def _imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a module imports; of `from a import b` both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _public_functions(scope: ast.Module | ast.ClassDef) -> Iterator[Function]:
    for node in scope.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function):
            waiting.extend(ast.iter_child_nodes(node))


def _length(function: Function) -> int:
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return length
    docstring = function.body[0]
    return length - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_call_of(node, name):
            yield node


def _is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


if __name__ == "__main__":
    sys.exit(main())
