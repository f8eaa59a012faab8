"""The comparison of the recipe of a run with the recipe that it is resumed with; pure.

Invariant: every key has one answer. A change is refused if the checkpoint would have another meaning under
it: other samples in a step, other random numbers, other tensors. All other changes are allowed and reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import RecipeError
from paceline.recipe.recipe import Recipe
from paceline.recipe.toml_text import KeyPath, dotted_key, toml_value

_REFUSED: Mapping[KeyPath, str] = {
    ("task",): "it names the model and the data",
    ("options",): "they shape the model or the data",
    ("seed",): "every random number is keyed by it",
    ("batch", "size"): "a step would mean other samples",
    ("batch", "shards"): "random numbers are keyed by the shard",
    ("batch", "shuffle"): "a step would mean other samples",
    ("batch", "drop_last"): "a step would mean other samples",
    ("optimizer", "name"): "the moments are those of the other one",
    ("evaluate", "validation"): "a step would mean other samples",
    ("checkpoint", "folder"): "that is where the checkpoints are",
    ("federated", "clients"): "the data would be divided anew",
    ("federated", "partition"): "the data would be divided anew",
    ("federated", "batch"): "a step would mean other samples",
    ("federated", "held_out"): "a step would mean other samples",
    ("federated", "local_steps"): "a step would mean other samples",
    ("federated", "full"): "a step would mean other samples",
    ("private", "unit"): "releases of clients and of samples have no common epsilon",
    ("outer", "name"): "the moments are those of the other one",
    ("rl", "env"): "it is what the policy has learned to act in",
    ("rl", "envs"): "an iteration would have other rows",
    ("rl", "shards"): "the groups would have another size",
    ("rl", "steps"): "an iteration would have other rows",
    ("rl", "ppo", "epochs"): "a step would mean other rows",
    ("rl", "ppo", "minibatches"): "a step would mean other rows",
    ("init_from",): "the weights are those of the checkpoint",
}
_HARMLESS = (
    "run_dir",
    "hash_every",
    "on_divergence",
    "evaluate",
    "checkpoint",
    "loader",
    "runtime",
    "memory",
    "elastic",
    "health",
    "log",
    "serve",
)


class RecipeChange(NamedTuple):
    """A key that differs.

    Args:
        key: dotted.
        before, after: values as TOML; "left out" if there is none.
        refusal: why it must not change; empty if it may.
        matters: the rest of the run computes other values.
    """

    key: str
    before: str
    after: str
    refusal: str
    matters: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def compare_recipes(before: Recipe, after: Recipe) -> list[RecipeChange]:
    """Return the keys that differ, in the order of the recipe."""
    return [
        RecipeChange(
            dotted_key(path),
            _spell(old),
            _spell(new),
            next((why for key, why in _REFUSED.items() if path[: len(key)] == key), ""),
            path[0] not in _HARMLESS or (path[0] == "evaluate" and after.schedule.follows_evaluations),
        )
        for path, old, new in _differences(before.model_dump(), after.model_dump(), ())
    ]


def refuse_changes(before: Recipe, after: Recipe, run: str) -> list[str]:
    """Return a line for each change that has an effect on the rest of the run.

    Args:
        run: the run folder, or a checkpoint inside it.
    Raises:
        RecipeError: keys differ that must stay the same; names all of them, and the keys that may change.
    """
    changes = compare_recipes(before, after)
    wrong = [change for change in changes if change.refusal]
    if after.run_dir is not None and not _lies_in(after.run_dir, run):
        wrong.append(
            RecipeChange(
                "run_dir", toml_value(run), toml_value(after.run_dir), "a run goes on in its folder", False
            )
        )
    if wrong:
        lines = "".join(f"\n  {change} ({change.refusal})" for change in wrong)
        raise RecipeError(
            f"the recipe differs from the run's in what must stay:{lines}",
            where=run,
            next_step="leave these as they were, or start a new run; steps, epochs, rates, strategy,"
            " precision, and how it saves, evaluates and loads may change",
        )
    return [f"from here on {change}" for change in changes if change.matters]


def _lies_in(folder: str, path: str) -> bool:
    """Return whether a path is this folder or inside it."""
    return Path(path).resolve().is_relative_to(Path(folder).resolve())


def _differences(before: Any, after: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from _differences(before.get(key), after.get(key), (*path, key))
    elif before != after:
        yield path, before, after


def _spell(value: Any) -> str:
    return "left out" if value is None else toml_value(value)
