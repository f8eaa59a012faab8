"""The runs of a comparison: one for each strategy and seed, and one more in which a worker is killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cli import options
from paceline.cli.sweep_runs import Run, often_enough, refuse_others
from paceline.errors import RecipeError
from paceline.recipe import Strategy, most_sharers, support
from paceline.recipe.support import fill, num_ranks
from paceline.studies import Cell
from paceline.studies.entries import Entry

FURTHER = (
    *("codec=int8", "route=tree", "lanes=2", "balance=speed", "shard=2 zero=1", "shard=2 zero=3"),
    *("tensor=2", "pipeline=2"),
)
"""Terms of which every strategy is asked whether it goes with them."""


@dataclass(frozen=True)
class Planned:
    """One strategy of the file.

    Args:
        strategy: in full; empty where it cannot be.
        runs: one for each seed.
        goes_with: those of `FURTHER` that it accepts.
    """

    name: str
    strategy: str
    runs: Sequence[Run]
    goes_with: Sequence[str]


def plan_comparison(
    path: Path,
    settings: Sequence[str],
    entries: Sequence[Entry],
    seeds: int,
    folder: Path,
    lab: tuple[str, ...] = (),
) -> list[Planned]:
    """Resolve every run before any is trained; a strategy that cannot be is told, and the rest goes on.

    Raises:
        RecipeError: the recipe is wrong, no strategy is possible, or the folder holds runs of other recipes.
    """
    usual = options.read_recipe(path, list(settings), None).batch.size
    runs = [
        [_resolve(path, settings, entry, seed, usual, folder, lab) for seed in range(1, seeds + 1)]
        for entry in entries
    ]
    if not any(run.recipe for members in runs for run in members):
        raise RecipeError(f"no strategy can run; the first: {runs[0][0].refusal}", where="--strategies")
    for members in runs:
        refuse_others(members)
    return [_planned(entry.name, members) for entry, members in zip(entries, runs, strict=True)]


def _resolve(
    path: Path,
    settings: Sequence[str],
    entry: Entry,
    seed: int,
    usual: int,
    folder: Path,
    lab: tuple[str, ...],
) -> Run:
    cell = Cell({"strategy": entry.name, "seed": str(seed)})
    place = folder / f"{entry.name}_seed={seed}"
    try:
        recipe = options.read_recipe(path, [*settings, *entry.settings, f"seed={seed}"], entry.strategy)
        options.processes_for(recipe, None, 1)
    except RecipeError as error:
        return Run(cell, place, None, error.what)
    recipe = often_enough(recipe, usual).replace(run_dir=str(place.resolve()))
    return Run(cell, place, recipe, lab=lab)


def _planned(name: str, runs: Sequence[Run]) -> Planned:
    recipes = [run.recipe for run in runs if run.recipe is not None]
    if not recipes:
        return Planned(name, "", runs, ())
    strategy = recipes[0].strategy
    return Planned(name, str(strategy), runs, _goes_with(strategy, *most_sharers(recipes[0])))


def _goes_with(strategy: Strategy, shards: int, called: str) -> list[str]:
    """The terms that it accepts beside its own."""
    found = []
    for terms in FURTHER:
        changes = dict(term.split("=") for term in terms.split())
        more = strategy.replace(**{k: int(v) if v.isdigit() else v for k, v in changes.items()})
        filled = fill(more, num_ranks(more))
        if support(filled, processes=num_ranks(filled), shards=shards, called=called).ok:
            found.append(terms)
    return found


def lab_options(text: str) -> tuple[str, ...]:
    """`hosts=4 rate=100mbit` as the options of `paceline lab run`.

    Raises:
        RecipeError: a word is no NAME=VALUE.
    """
    found: list[str] = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if not (name.isalpha() and equals and value):
            raise RecipeError(
                f"expected NAME=VALUE, found '{word}'",
                where="--lab",
                next_step='options of `paceline lab run`, as in --lab "hosts=4 rate=100mbit latency=2ms"',
            )
        found += [f"--{name}", value]
    return tuple(found)
