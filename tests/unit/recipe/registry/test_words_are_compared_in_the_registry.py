"""Only `recipe.registry` and `recipe.strategy_text` split the words of a strategy, or compare their names.

Everything else gets a `ParsedWord` and reads its specification, so that a word can be added in one line. The
search reads the syntax tree of every module: calls such as `strategy.sync.partition(":")`, comparisons such
as `spec.word == "dgc"` or `strategy.balance == "speed"`, and tables with words as keys.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.recipe.registry import ChannelSpec, CodecSpec, RouteSpec, ScheduleSpec, SyncSpec, builtin_specs

SOURCE = Path(paceline.__file__).parent
ALLOWED = ("search/", "recipe/registry/", "recipe/strategy_text.py")
TERMS = {"sync", "codec", "route", "channel", "schedule", "stages", "balance", "partition"}
KINDS = (SyncSpec, CodecSpec, RouteSpec, ChannelSpec, ScheduleSpec)
WORDS = {word for kind in KINDS for word in builtin_specs(kind)}
OTHER_MEANINGS = {  # values of other keys (precision, device, TLS), engines, files and module kinds
    "auto",
    "bf16",
    "file",
    "fixed",
    "fp16",
    "fp32",
    "local",
    "mpi",
    "server",
    "tree",
}
TEXT_OF_WORDS = re.compile(r"\b(sync|codec|route|channel|schedule|rule|strategy)\b")
SPLITS = {"partition", "rpartition", "split", "rsplit", "removeprefix", "startswith", "endswith"}


def offences(text: str) -> Iterator[str]:
    """The lines of a module that split or compare words."""
    for node in ast.walk(ast.parse(text)):
        compares = isinstance(node, ast.Compare) and is_comparison_of_words(node)
        splits = isinstance(node, ast.Call) and is_split_of_words(node)
        if compares or splits:
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Dict) and len(names_in(node.keys) & CLEAR) > 1:
            yield f"{node.lineno}: a table of {sorted(names_in(node.keys))}"


CLEAR = WORDS - OTHER_MEANINGS


def is_comparison_of_words(node: ast.Compare) -> bool:
    """Whether one side is text, and the other an attribute of a strategy; or the text is a word."""
    sides = [node.left, *node.comparators]
    names = {name for side in sides for name in names_in([side])}
    attributes = {side.attr for side in sides if isinstance(side, ast.Attribute)}
    of_strategy = any(
        isinstance(side, ast.Attribute) and side.attr in TERMS and "strategy" in ast.unparse(side.value)
        for side in sides
    )
    return bool(names and (of_strategy or ("word" in attributes and names & WORDS) or names & CLEAR))


def is_split_of_words(node: ast.Call) -> bool:
    """Whether text about words is split at a mark of theirs."""
    function = node.func
    if not (isinstance(function, ast.Attribute) and function.attr in SPLITS and node.args):
        return False
    mark = node.args[0]
    is_mark = isinstance(mark, ast.Constant) and isinstance(mark.value, str) and set(mark.value) & set(":+@,")
    return bool(is_mark and TEXT_OF_WORDS.search(ast.unparse(function.value)))


def names_in(nodes: list[ast.expr] | list[ast.expr | None]) -> set[str]:
    """Constant text in these expressions, and in tuples, lists and sets among them."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            found |= names_in(node.elts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_words_are_split_and_compared_in_the_registry_only() -> None:
    wrong = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(ALLOWED):
            wrong |= {f"{name}:{line}": True for line in offences(path.read_text(encoding="utf-8"))}
    assert list(wrong) == []


@pytest.mark.parametrize(
    "offender",
    [
        'steps = int(strategy.sync.partition(":")[2])',
        'first, *others = strategy.codec.split("+")',
        'ends = self.codec.endswith(":stochastic")',
        'if spec.word == "dgc": pass',
        'if spec.word in ("fp32", "auto"): pass',
        'if strategy.balance == "speed": pass',
        'if strategy.stages != "parameters": pass',
        'if rule == "every-step": pass',
        'if word in {"bf16", "int8", "topk"}: pass',
        'seconds = {"every-step": 1.0, "gossip": 2.0}[word]',
    ],
)
def test_the_search_finds_a_planted_offender(offender: str) -> None:
    """The twin."""
    assert len(list(offences(offender))) == 1


@pytest.mark.parametrize(
    "text",
    [
        'if recipe.precision.compute == "fp32": pass',
        'host, _, port = address.partition(":")',
        "if strategy.codec == other.codec: pass",
        'if choice.spec.has_momentum and strategy.is_set("sync"): pass',
        'strategy = strategy.replace(codec="fp32")',
    ],
)
def test_the_search_passes_what_is_no_comparison_of_words(text: str) -> None:
    assert list(offences(text)) == []
