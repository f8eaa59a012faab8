"""Tensor plans: which modules are cut how, by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from paceline.errors import StrategyError, TaskError
from paceline.layout.tensor.linear import dims_of_linear
from paceline.models import KeyedDropout
from paceline.recipe.spell import nearest

WORDS = ("column", "row", "gathered", "split", "heads", "vocabulary", "sequence", "whole")
Plan = Mapping[str, str]


@dataclass(frozen=True)
class PlanEntry:
    """What becomes of one module.

    Args:
        word: "column" or "row" of a linear layer; "gathered": a column by itself, whose outputs are put
            together; "split": a dropout between the two, on a part of the
            features of the column before it; "heads": an attention, with all its projections;
            "vocabulary": an embedding or an output layer, by tokens;
            "sequence": a block, by positions wherever it is not cut by features.
    """

    name: str
    module: nn.Module
    word: str


def entries_of(plan: Plan, model: nn.Module) -> list[PlanEntry]:
    """The modules that a plan names, in the order of the model.

    Args:
        plan: words by pattern; a pattern fits a whole name, or the end of one after a dot. Where several fit,
            the last one counts.
    Raises:
        StrategyError: there is no plan.
        TaskError: a pattern fits nothing, or a module that cannot be cut so, or leaves out what it must cut.
    """
    if not plan:
        raise StrategyError(
            f"tensor cuts large layers, and nothing says which of {type(model).__name__}'s",
            next_step='write tensor = { "*.up" = "column", "*.down" = "row" } into the recipe, or pass'
            " Task(tensor=...), or leave out tensor",
        )
    modules = dict(model.named_modules())
    words: dict[str, str] = {}
    for pattern, word in plan.items():
        fitting = [name for name in modules if _fits(name, pattern)]
        if word not in WORDS:
            raise _wrong(pattern, word, f"is none of {', '.join(WORDS)}{_meant(word, WORDS)}")
        if not fitting:
            raise _wrong(pattern, word, f"fits no module of {type(model).__name__}{_near(pattern, modules)}")
        words |= dict.fromkeys(fitting, word)
    found = [PlanEntry(n, m, words[n]) for n, m in modules.items() if words.get(n, "whole") != "whole"]
    for entry in found:
        _require_kind(entry)
    for children in _pairs(model, words):
        _require_pairs(children)
    return found


def _fits(name: str, pattern: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    if not name or len(wanted) > len(parts):
        return False
    return all(map(fnmatchcase, parts[-len(wanted) :], wanted))


def _wrong(pattern: str, word: str, reason: str) -> TaskError:
    return TaskError(
        f"the tensor plan's '{pattern}' = '{word}' {reason}",
        next_step="name modules as model.named_modules() does; * stands for anything between two dots, and a"
        " pattern may begin after a dot",
    )


def _meant(word: str, words: tuple[str, ...]) -> str:
    found = nearest(word, words)
    return f"; did you mean '{found}'?" if found else ""


def _near(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    """The module that a pattern may have meant: names and patterns are compared without their numbers."""
    spelled = {".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in modules}
    depth = pattern.count(".") + 1
    ends = {".".join(name.split(".")[-depth:]) for name in spelled if name}
    found = nearest(pattern, sorted(ends | spelled))
    return f"; the nearest is '{found}'" if found else ""


def _require_kind(entry: PlanEntry) -> None:
    """Raises: TaskError: the module is not of the kind that its word is for."""
    linear = dims_of_linear(entry.module) is not None
    tokens = linear or isinstance(entry.module, nn.Embedding)
    keyed = isinstance(entry.module, KeyedDropout)
    fits = {"column": linear, "row": linear, "gathered": linear, "split": keyed, "vocabulary": tokens}
    if not fits.get(entry.word, True):
        raise TaskError(
            f"the tensor plan calls '{entry.name}' {entry.word}, and it is a {type(entry.module).__name__}",
            next_step="column, row and gathered are for linear layers, split is for KeyedDropout, heads for"
            " attention, vocabulary for embeddings and output layers",
        )


def _pairs(model: nn.Module, words: Mapping[str, str]) -> Iterator[list[PlanEntry]]:
    """Linear layers that have a parent in common, with their words, in order, but those of attention."""
    by_parent: dict[str, list[PlanEntry]] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        apart = words.get(parent) == "heads" or words.get(name) in ("vocabulary", "gathered")
        if dims_of_linear(module) is not None and not apart:
            by_parent.setdefault(parent, []).append(PlanEntry(name, module, words.get(name, "whole")))
    for parent, children in by_parent.items():
        if any(child.word != "whole" for child in children):
            in_turn = isinstance(model.get_submodule(parent), nn.Sequential | nn.ModuleList)
            yield children if in_turn else sorted(children, key=lambda child: child.word == "row")


def _require_pairs(children: list[PlanEntry]) -> None:
    """Raises: TaskError: between a column and its row a layer is not cut, or one of the two is missing."""
    column = ""
    for child in children:
        if child.word == "whole" and column:
            raise TaskError(
                f"the linear layer '{child.name}' is not cut, and stands behind '{column}', of whose outputs"
                " a rank has a part",
                next_step=f'add "{child.name}" = "row" to the tensor plan, or leave out "{column}"',
            )
        if child.word == "row" and not column:
            raise TaskError(
                f"the tensor plan calls '{child.name}' row, and no column stands before it",
                next_step="a row takes the part of the features that a column gives: plan both",
            )
        if child.word != "whole":
            column = child.name if child.word == "column" else ""
    if column:
        raise TaskError(
            f"the tensor plan calls '{column}' column, and no row takes its part of the features",
            next_step="plan the layer behind it as row",
        )
